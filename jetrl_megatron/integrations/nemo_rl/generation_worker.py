"""NeMo-RL's vLLM workers with our engine arguments and receiver, and for baselines. Ray imports it in each worker."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from jetrl_megatron.integrations.nemo_rl.resolution import SECTION


class JetRLVllmGenerationWorkerImpl(VllmGenerationWorkerImpl):
    """NeMo-RL's vLLM worker, for policies with `precision: jetrl_fp8` and for baselines."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(_engine_arguments(self.cfg, llm_kwargs))


class JetRLVllmAsyncGenerationWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """NeMo-RL's asynchronous vLLM worker, for the same."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(_engine_arguments(self.cfg, llm_kwargs))


def _engine_arguments(generation: Any, llm_kwargs: dict[str, Any]) -> dict[str, Any]:
    # NeMo-RL sets vLLM's environment before it lets anybody import vLLM, as the modules here do.
    if generation.get(SECTION) is not None:
        from jetrl_megatron.integrations.nemo_rl.engine import our_engine_arguments

        return our_engine_arguments(generation, llm_kwargs)
    if generation["vllm_cfg"]["precision"] != "fp8":
        return llm_kwargs
    from jetrl_megatron.integrations.nemo_rl.baseline import WORKER_EXTENSION

    return {**llm_kwargs, "worker_extension_cls": WORKER_EXTENSION}


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class JetRLVllmGenerationWorker(JetRLVllmGenerationWorkerImpl):
    """The Ray actor."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class JetRLVllmAsyncGenerationWorker(JetRLVllmAsyncGenerationWorkerImpl):
    """The Ray actor."""
