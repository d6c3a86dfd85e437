"""NeMo-RL's asynchronous vLLM worker with our engine arguments and receiver. Ray imports it in each worker."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl
from nemo_rl.utils.nsys import get_nsight_config_if_pattern_matches


class JetRLVllmAsyncGenerationWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """NeMo-RL's asynchronous vLLM worker for a policy with `precision: jetrl_fp8`."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        from jetrl_megatron.integrations.nemo_rl.engine import our_engine_arguments

        super()._create_engine(our_engine_arguments(self.cfg, llm_kwargs))


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class JetRLVllmAsyncGenerationWorker(JetRLVllmAsyncGenerationWorkerImpl):
    """The Ray actor."""
