"""Random weights that a vLLM engine makes for itself, on its GPU: nothing is written, read or copied.

`load_format="random"` of an engine whose worker is `RandomWorker`; vLLM imports that class before it loads a model.
"""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from benchmarks.random_models import scaled
from jetrl_megatron import JETRL_FP8, quantize_weight
from jetrl_megatron.verify.worker import DescribedWorker


class RandomWorker(DescribedWorker):
    """The worker of a verification's engine, whose module knows the load format."""


@register_model_loader("random")
class RandomLoader(BaseModelLoader):
    """The weights of `RandomModel`, with FP8 ones quantised by the default recipe."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fills every weight."""
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(0)
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                # Scales come with their weight. FP8 layers also have scalars whose value says that there is no scale.
                if name.endswith("weight_scale_inv") or not parameter.dim():
                    continue
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                weight = scaled(f"{prefix}.{name}", noise).to(torch.bfloat16)
                if parameter.dtype == torch.float8_e4m3fn:
                    codes = quantize_weight(weight, JETRL_FP8)
                    parameter.data.copy_(codes.data)
                    module.weight_scale_inv.data.copy_(codes.scale)
                else:
                    parameter.data.copy_(weight)
