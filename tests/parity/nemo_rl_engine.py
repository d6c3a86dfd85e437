"""The process of test_nemo_rl_engine.py: `python -m tests.parity.nemo_rl_engine FOLDER` prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_models import RandomModel
from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.verify.environment import cpu_engine_environment

MODEL = RandomModel(
    family="qwen3", hidden=256, intermediate=512, heads=2, kv_heads=2, layers=2, vocabulary=512, positions=256
)
PROMPTS = [{"prompt_token_ids": list(range(3 + index, 40 + 5 * index, 2))} for index in range(3)]


def nemo_rl_arguments(folder: str) -> dict[str, Any]:
    """What NeMo-RL starts an engine with, but for what a CPU needs."""
    backend = "nemo_rl.models.generation.vllm.vllm_backend"
    return {
        "model": folder,
        "served_model_name": folder,
        "load_format": "auto",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
        "seed": 0,
        "enforce_eager": True,
        "max_model_len": 128,
        "trust_remote_code": True,
        "worker_extension_cls": f"{backend}.VllmInternalWorkerExtension",
        "disable_log_stats": False,
        "logprobs_mode": "processed_logprobs",
        "hf_overrides": {},
        "max_num_batched_tokens": 128,
        "max_num_seqs": len(PROMPTS),
        "enable_chunked_prefill": False,
    }


def scores(llm: Any) -> list[list[float]]:
    """Log-probs of the prompts' tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
    outputs = llm.generate(PROMPTS, parameters, use_tqdm=False)
    return [list(output.prompt_logprobs.logprobs)[1:] for output in outputs]


def main(folder: Path) -> None:
    """Starts an engine as NeMo-RL's worker does, updates it, and plants a fault."""
    from safetensors.torch import load_file

    from jetrl_megatron.integrations.nemo_rl.generation_worker import JetRLVllmGenerationWorkerImpl
    from jetrl_megatron.integrations.nemo_rl.resolution import ENDPOINTS
    from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource, weight_version
    from tests.unit.plain_engine import sending

    old, new = (MODEL.write(folder / str(seed), seed, JETRL_FP8) for seed in (0, 1))
    # The worker without Ray, without NeMo-RL's patches of vLLM's files.
    worker = object.__new__(JetRLVllmGenerationWorkerImpl)
    worker.cfg = {"jetrl": {**JETRL_FP8.to_stamp(), "parity": True}, "vllm_cfg": {"async_engine": False}}
    worker._create_engine(nemo_rl_arguments(str(old)))
    seen: dict[str, Any] = {"logprobs_mode": worker.llm.llm_engine.model_config.logprobs_mode}
    seen["before"] = scores(worker.llm)
    tensors = load_file(new / "model.safetensors")
    source = TensorSource(tensors, JETRL_FP8)
    synchronizer = JetRLWeightSynchronizer(source, senders="all", timeout=60)
    worker.prepare_refit_info({ENDPOINTS: synchronizer.endpoints})

    def update() -> tuple[bool, str]:
        with sending(synchronizer) as said:
            taken = worker.update_weights_via_ipc_zmq()
        return taken, said[0]

    seen["update"], seen["version"], seen["after"] = update(), weight_version(worker.llm), scores(worker.llm)
    source.replace({name: t for name, t in tensors.items() if name != "model.layers.1.mlp.down_proj.weight_scale_inv"})
    seen["fault"], seen["kept"], seen["still"] = update(), weight_version(worker.llm), scores(worker.llm)
    del worker.llm
    worker._create_engine(nemo_rl_arguments(str(new)))
    seen["fresh"] = scores(worker.llm)
    print(json.dumps(seen))


if __name__ == "__main__":
    os.environ |= {name: os.environ.get(name, value) for name, value in cpu_engine_environment(1).items()}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    torch.set_num_threads(2)
    main(Path(sys.argv[1]))
