"""Optimizer steps, a checkpoint and a weight update: `torchrun ... -m jetrl_megatron.verify.training REQUEST.json`.

The request is a `TrainingRequest` with `steps` and `out`. RESULT.json holds the loss of each step.
"""

# Shape suffixes: B sequences, S token positions.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.verify.environment import request_paths
from jetrl_megatron.verify.ranks import device, load_model, operators_of, process_group
from jetrl_megatron.verify.requests import TrainingRequest

CHECKPOINT, EXPORT = "checkpoint", "rollout"
"""What `request.out` holds afterwards: a torch_dist checkpoint, and the block FP8 export of the same weights."""

STEP_TOKENS = {"cuda": 512, "cpu": 64}
STEP_SEQUENCES = {"cuda": 4, "cpu": 1}
"""What one optimizer step sees, by device."""


def take_steps(request: TrainingRequest) -> list[float]:
    """Takes the steps in parity mode, saves and exports. A collective over all ranks.

    Returns:
        the mean loss of each step, on every rank.
    """
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

    from jetrl_megatron.convert.export import export_vllm_checkpoint
    from jetrl_megatron.verify.model import make_optimizer, save_checkpoint

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = load_model(request, "parity", request.checkpoint, ddp=ddp)
    optimizer = make_optimizer(model, request.learning_rate)
    losses = []
    for step in range(request.steps):
        with operators_of("parity"):
            losses.append(_forward_backward(model, _random_tokens(request, step)))
        finalize_model_grads(model)
        optimizer.step()
    out = Path(request.out)
    save_checkpoint(model, out / CHECKPOINT, Fp8BlockRecipe.from_dict(request.recipe))
    export_vllm_checkpoint(model, out / EXPORT, hf_config=request.hf_model)
    return losses


def _random_tokens(request: TrainingRequest, step: int) -> list[torch.Tensor]:
    vocabulary = json.loads((Path(request.hf_model) / "config.json").read_text())["vocab_size"]
    kind = device().type
    # A stream of its own for every step, the same on all ranks.
    generator = torch.Generator().manual_seed(request.seed * 1000 + step)
    tokens_BS = torch.randint(vocabulary, (STEP_SEQUENCES[kind], STEP_TOKENS[kind]), generator=generator)
    return list(tokens_BS)


def _forward_backward(model: list[Any], sequences: list[torch.Tensor]) -> float:
    from jetrl_megatron.verify.forward import forward_arguments
    from jetrl_megatron.verify.model import gpt_model

    for module in model:
        module.zero_grad_buffer()
    arguments = forward_arguments(gpt_model(model), sequences)
    labels = torch.cat([ids_S.roll(-1) for ids_S in sequences]).to(device())[None]
    (outermost,) = model
    loss = outermost(**arguments, labels=labels).float().mean()
    loss.backward()
    return float(loss.detach())


@record
def main() -> None:
    """Command line: REQUEST.json, and the path of the result (default: REQUEST.result.json)."""
    request_path, result_path = request_paths("jetrl_megatron.verify.training")
    request = TrainingRequest.from_dict(json.loads(request_path.read_text()))
    with process_group():
        losses = take_steps(request)
        if dist.get_rank() == 0:
            result_path.write_text(json.dumps({"losses": losses}, indent=1))


if __name__ == "__main__":
    main()
