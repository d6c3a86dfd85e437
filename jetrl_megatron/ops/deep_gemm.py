"""DeepGEMM: blockwise FP8 products for Hopper, the ones that vLLM serves with."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from jetrl_megatron.ops.hopper import HopperGemm
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor

# Trainer and rollout must use one build. An installed deep_gemm is what vLLM takes first as well.
_HOMES = ("deep_gemm", "vllm.third_party.deep_gemm")
_FEWEST_ROWS = 8
_FULL_TOKENS = 2048


@functools.cache
def find_deep_gemm() -> tuple[ModuleType | None, str]:
    """The module, and where it was found or why it was not."""
    reasons = []
    for home in _HOMES:
        try:
            # The parent of a dotted name is imported on the way, so a missing vLLM shows here.
            if importlib.util.find_spec(home) is None:
                reasons.append(f"{home} is not installed")
                continue
            module = importlib.import_module(home)
        except (ImportError, OSError, AssertionError, RuntimeError) as error:
            # DeepGEMM asserts that it finds a CUDA toolkit.
            reasons.append(f"{home} does not import ({type(error).__name__}: {error})")
            continue
        return module, home
    return None, "; ".join(reasons)


class DeepGemm(HopperGemm):
    """DeepGEMM's `fp8_gemm_nt`: with a weight into BF16 ("1D2D"), along tokens into FP32 ("1D1D")."""

    name = "deep_gemm"

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        reason = super().refusal(recipe, device)
        if reason is not None:
            return reason
        module, where = find_deep_gemm()
        return None if module is not None else where

    def origin(self) -> str:
        """Which package the kernels come from."""
        return find_deep_gemm()[1]

    def nt(self, a: BlockScaledTensor, b: BlockScaledTensor) -> torch.Tensor:
        rows = a.shape[0]
        codes, scale = _at_least_rows(a, _FEWEST_ROWS)
        y_MN = codes.new_empty(codes.shape[0], b.shape[0], dtype=torch.bfloat16)
        # Scales are float32 on Hopper, whatever their values: nothing is cast.
        _module().fp8_gemm_nt((codes, scale), (b.data, b.scale), y_MN, disable_ue8m0_cast=True)
        return y_MN[:rows]

    def accumulate_nt(self, a: BlockScaledTensor, b: BlockScaledTensor, out_NK: torch.Tensor) -> None:
        # DeepGEMM compiles what is contracted into a kernel, which makes it a tenth faster. Here that is the tokens: in
        # RL another number in every step, but for full microbatches.
        known = "nk" if a.data.shape[1] % _FULL_TOKENS == 0 else "mn"
        _module().fp8_gemm_nt(
            (a.data, a.scale), (b.data, b.scale), out_NK, c=out_NK, recipe=(1, 1, a.block[1]), compiled_dims=known,
            disable_ue8m0_cast=True,
        )  # fmt: skip


def _at_least_rows(a: BlockScaledTensor, fewest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales with further rows of arbitrary content, where the quantiser left room for them.

    DeepGEMM takes a slower tile for fewer rows. Its rows do not depend on each other, so the result is the same.
    """
    rows, columns = a.shape
    stride = a.scale.stride(1)
    roomy = a.data.untyped_storage().nbytes() >= fewest * columns and stride == fewest
    if not 0 < rows < fewest or not roomy or a.data.storage_offset() or a.scale.storage_offset():
        return a.data, a.scale
    return (
        a.data.as_strided((fewest, columns), (columns, 1)),
        a.scale.as_strided((fewest, a.scale.shape[1]), (1, stride)),
    )


def _module() -> ModuleType:
    module, where = find_deep_gemm()
    if module is None:
        raise ValueError(f"DeepGEMM is not available: {where}")
    return module
