"""FP8 training as Megatron users write it: the layers alone are JetRL's. Runs on every rank.

A Hugging Face model comes in through Megatron-Bridge and learns to answer school problems with Megatron's data
parallelism, optimizer (BF16 weights, FP32 masters) and pipeline schedules. It goes out as a checkpoint, and to vLLM in
FP8.
"""

# Shape suffixes: B sequences of a microbatch, S token positions.

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import save_file

from jetrl_megatron.convert.export import export_vllm_checkpoint
from jetrl_megatron.demo.data import Microbatch, batches
from jetrl_megatron.demo.options import DemoFolder, layout_label
from jetrl_megatron.demo.scales import write_layers
from jetrl_megatron.integrations.megatron_bridge import build_model, export_hf_weights
from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.verify.model import causal_mask, gpt_model, initialize_groups, make_optimizer, save_checkpoint
from jetrl_megatron.verify.progress import report_progress


def train(folder: DemoFolder) -> None:
    """Trains, saves, exports, and writes down the losses and what the layers compute with at the end."""
    options = folder.options
    initialize_groups(options.tp, options.pp, options.seed)
    model = build_model(
        folder.model,
        tensor_parallel=options.tp,
        pipeline_parallel=options.pp,
        sequence_parallel=options.tp > 1,
        recipe=JETRL_FP8,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
    )
    optimizer = make_optimizer(model, options.learning_rate)
    losses = []
    for step, microbatches in enumerate(batches(folder)):
        losses.append(train_step(model, optimizer, microbatches))
        if dist.get_rank() == 0:
            report_progress(step + 1, options.steps, f"loss {losses[-1]:.3f}")

    label = f"training_{layout_label(options.tp, options.pp)}"
    write_layers(gpt_model(model).decoder.layers, folder.layer_scales(label), dist.get_rank())
    save_checkpoint(model, folder.checkpoint, JETRL_FP8)
    export_vllm_checkpoint(model, folder.fp8, hf_config=folder.model, rollout_tp=2)
    export_bf16_checkpoint(model, folder.bf16, folder.model)
    if dist.get_rank() == 0:
        folder.losses.write_text(json.dumps(losses))


def train_step(model: list[Any], optimizer: Any, microbatches: Sequence[Microbatch]) -> float:
    """One optimizer step; returns the mean loss of the answers' tokens, on every rank."""
    for module in model:
        module.zero_grad_buffer()
    optimizer.zero_grad()
    size, length = microbatches[0].tokens.shape
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=size,
        forward_only=False,
    )
    optimizer.step()
    # The last pipeline stage alone knows the loss.
    loss = torch.stack([output["loss"] for output in outputs]).mean() if outputs else torch.zeros(())
    dist.broadcast(
        loss,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return loss.item()


def forward_step(microbatches: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step function: token losses [B, S], and the function that makes one number of them."""
    batch = next(microbatches)
    length = batch.tokens.shape[1]
    losses_BS = model(batch.tokens, torch.arange(length)[None], causal_mask(length), labels=batch.labels)
    return losses_BS, functools.partial(mean_over_answers, batch.mask)


def mean_over_answers(mask_BS: torch.Tensor, losses_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron's loss function: the mean of the unmasked losses, and the same for the log."""
    loss = (losses_BS.float() * mask_BS).sum() / mask_BS.sum()
    return loss, {"loss": loss.detach()}


def export_bf16_checkpoint(model: list[Any], out: Path, hf_model: Path) -> None:
    """Writes the BF16 weights in Hugging Face format; config and tokenizer stay those of `hf_model`."""
    weights = dict(export_hf_weights(model))
    if dist.get_rank() == 0:
        shutil.copytree(hf_model, out)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
