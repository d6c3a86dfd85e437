"""Random weights that a vLLM engine makes for itself, on its GPU: nothing is written, read or copied.

`load_format="random"` of an engine whose worker is `RandomWorker`; vLLM imports that class before it loads a model.
"""

from __future__ import annotations

import math

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from jetrl_megatron.verify.worker import DescribedWorker

_GAIN = 1.6
_EMBEDDING = 0.02
_LARGEST_CODE = 448.0
_DEVIATIONS = 4.0
"""Standard deviations of a weight that its largest FP8 code stands for, about those of a tile's largest one."""


class RandomWorker(DescribedWorker):
    """The worker of a verification's engine, whose module knows the load format."""


@register_model_loader("random")
class RandomLoader(BaseModelLoader):
    """Normal weights of a size that keeps residual streams of order 1; FP8 weights have one power of two as scale."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fills every weight."""
        generators: dict[torch.device, torch.Generator] = {}
        # FP8 layers also have scalars for keys and values, whose value says that there is no scale.
        for name, parameter in [(name, one) for name, one in model.named_parameters() if one.dim()]:
            generator = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(0))
            _fill(name, parameter.data, generator)
        for module in model.modules():
            scale, weight = getattr(module, "weight_scale_inv", None), getattr(module, "weight", None)
            if scale is not None and weight is not None:
                deviation = _GAIN / weight.shape[1] ** 0.5
                scale.data.fill_(2.0 ** round(math.log2(deviation * _DEVIATIONS / _LARGEST_CODE)))


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if weight.dtype == torch.float8_e4m3fn:
        codes = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
        codes.normal_(0.0, _LARGEST_CODE / _DEVIATIONS, generator=generator).clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        weight.copy_(codes)
    elif "norm" in name:
        weight.normal_(1.0, 0.1, generator=generator)
    elif "proj" in name:
        weight.normal_(0.0, _GAIN / weight.shape[-1] ** 0.5, generator=generator)
    else:
        weight.normal_(0.0, _EMBEDDING, generator=generator)
