"""What an engine's workers say about themselves: a class that vLLM mixes into its worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class EngineProbe:
    """Methods that vLLM mixes into its worker class; call them through `collective_rpc`."""

    model_runner: GPUModelRunner
    rank: int

    def jetrl_fp8_operators(self) -> dict[str, int]:
        """How many FP8 linears of this rank run each kernel class."""
        layers = fp8_linears(self.model_runner.get_model())
        return dict(Counter(type(layer.quant_method.fp8_linear).__name__ for _, layer in layers))

    def jetrl_load(self, folder: str) -> None:
        """Loads the weights of another checkpoint of the same model in place, as a weight update does."""
        self.model_runner.reload_weights(weights_path=folder)


def fp8_linears(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of the linears that vLLM runs in block FP8."""
    for name, layer in model.named_modules():
        if hasattr(getattr(layer, "quant_method", None), "fp8_linear"):
            yield name, layer
