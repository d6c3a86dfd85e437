"""NeMo-RL's own FP8 rollout on the vLLM that this package is for: the class that vLLM mixes into its workers."""

from __future__ import annotations

from typing import Any

from nemo_rl.models.generation.vllm.quantization import fp8
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from vllm.model_executor.layers.fused_moe import RoutedExperts

WORKER_EXTENSION = f"{__name__}.BaselineWorkerExtension"


class BaselineWorkerExtension(VllmInternalWorkerExtension):
    """NeMo-RL's extension; its quantiser knows layers of experts by a class that is a function since vLLM 0.26."""

    def _load_weights(self, weights: Any) -> None:
        if not isinstance(fp8.FusedMoE, type):
            fp8.FusedMoE = RoutedExperts
        super()._load_weights(weights)
