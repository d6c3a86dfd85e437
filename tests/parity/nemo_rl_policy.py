"""The process of test_nemo_rl_policy.py: NeMo-RL's real Megatron worker, one rank, without a GPU and Ray's actors.

`python -O -m tests.parity.nemo_rl_policy FOLDER`; -O, because the worker asserts that its device is number 0 of CUDA's.
What it sees of torch is that of `megatron_cpu`, as Megatron's own modules do, and what is patched below.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import bench_nemo_rl
from benchmarks.random_models import RandomModel
from jetrl_megatron.integrations import megatron_cpu

ROOT = Path(__file__).parents[2]
MODEL = RandomModel(
    family="qwen3", hidden=256, intermediate=512, heads=2, kv_heads=2, layers=2, vocabulary=512, positions=256
)
OVERRIDES = (
    # Parity operators and packed sequences need a GPU.
    "++policy.jetrl.parity=false",
    "policy.sequence_packing.enabled=false",
)
SAMPLES, TOKENS = 8, 32


def pretend_cuda() -> None:
    """Lets what NeMo-RL and Megatron-Bridge ask of CUDA have answers; before either is imported."""
    megatron_cpu._MEGATRON = (*megatron_cpu._MEGATRON, "nemo_rl")
    megatron_cpu.install()
    to = torch.Tensor.to

    def to_cpu(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        arguments = tuple("cpu" if argument == "cuda" else argument for argument in arguments)
        return to(self, *arguments, **{k: "cpu" if v == "cuda" else v for k, v in options.items()})

    torch.Tensor.to = to_cpu
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self.clone()
    answers = {"device_count": 1, "memory_allocated": 0, "memory_reserved": 0, "is_current_stream_capturing": False}
    for name in ("empty_cache", "synchronize"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.get_device_name = lambda *_: "none"


def make_worker(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The worker as Ray would make it, and the resolved configuration."""
    from transformers import AutoTokenizer

    bench_nemo_rl.MODEL = MODEL
    model = bench_nemo_rl.random_model(folder / "model")
    from jetrl_megatron.integrations.nemo_rl.command import read_config

    config = ROOT / "conf" / "grpo_smoke_1n1g.yaml"
    values = read_config(config, (), [f"policy.model_name={model}", *OVERRIDES]).values
    values["policy"]["megatron_cfg"]["train_iters"] = 3  # set by NeMo-RL's driver
    from jetrl_megatron.integrations.nemo_rl import policy_worker

    theirs = policy_worker.megatron_policy_worker
    theirs.ray.get_gpu_ids = lambda: [0]

    def setup_distributed() -> None:
        torch.distributed.init_process_group("gloo")

    theirs.setup_distributed = setup_distributed
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from nemo_rl.distributed import numa_utils
    from nemo_rl.distributed.named_sharding import NamedSharding

    numa_utils.bind_to_gpu_numa = lambda *_: False
    FusedScaleMaskSoftmax.is_kernel_available = lambda *_: False
    axes = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    sharding = NamedSharding(layout=np.arange(1).reshape(1, 1, 1, 1), names=axes)
    tokenizer = AutoTokenizer.from_pretrained(model)
    worker = policy_worker.JetRLMegatronPolicyWorkerImpl(
        values["policy"], tokenizer, worker_sharding_annotations=sharding
    )
    return worker, values


def main(folder: Path) -> None:
    """Makes the worker, has it score and train a batch, and prints what was seen as JSON."""
    worker, values = make_worker(folder)
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from jetrl_megatron.integrations.nemo_rl.resolution import ENDPOINTS
    from jetrl_megatron.layers import Fp8LinearMixin

    linears = [module for module in worker.model.modules() if isinstance(module, Fp8LinearMixin)]
    endpoints = worker.prepare_refit_info()[ENDPOINTS]
    ids = torch.randint(0, 256, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(SAMPLES, TOKENS)
    batch = {"input_ids": ids, "input_lengths": torch.full((SAMPLES,), TOKENS), "sample_mask": torch.ones(SAMPLES)}
    data = BatchedDataDict(batch | {"token_mask": ones})
    worker.prepare_for_lp_inference()
    before = worker.get_logprobs(data=data)["logprobs"]
    advantages = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(1)) * ones
    names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data.update({name: before.clone() for name in names} | {"advantages": advantages})
    worker.prepare_for_training()
    loss = ClippedPGLossFn(ClippedPGLossConfig(**values["loss_fn"]))
    metrics = worker.train(data, loss)
    worker.prepare_for_lp_inference()
    after = worker.get_logprobs(data=data)["logprobs"]
    held = sum(linear._cache._operand is not None for linear in linears)
    worker.offload_before_refit()
    worker.offload_after_refit()
    seen = {
        "linears": sorted(type(linear).__name__ for linear in linears),
        "endpoints": len(endpoints),
        "synchronizer": worker._synchronizer.version,
        "finite": bool(before.isfinite().all()),
        "spread": float(before[:, 1:].std()),
        "moved": float((after - before).abs().max()),
        "grad_norm": float(metrics["grad_norm"]),
        "held": held,
        "released": sum(linear._cache._operand is None for linear in linears),
        "spec": str(worker.megatron_cfg.model.transformer_layer_spec),
    }
    for name in ("token_mult_prob_error", "gen_kl_error", "probs_ratio"):
        seen[name] = sum(metrics["all_mb_metrics"][name])
    print(json.dumps(seen))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": sys.argv[2], "NRL_MEGATRON_CHECKPOINT_DIR": str(where / "megatron")}
    torch.set_num_threads(2)
    pretend_cuda()
    main(where)
