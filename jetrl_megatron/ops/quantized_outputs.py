"""Norm and SwiGLU that write the next linear's codes, with the scales in the layout that an engine's GEMM is given.

The bytes are those of `norm_forward` or `silu_and_mul`, then `quantize_activation`: in one kernel instead of two
wherever training has one.
"""

# Shape suffixes: M rows, K features of a norm, F features of a gated pair's half.

from __future__ import annotations

import torch

from jetrl_megatron.ops.norm import has_extension, kernel, norm_forward, norm_kernel
from jetrl_megatron.ops.selection import select_quantizer
from jetrl_megatron.ops.swiglu import silu_and_mul
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor, ceil_div

_TMA_FLOATS = 4
"""float32 values in 16 bytes, the alignment of a column of scales."""


def scale_stride(rows: int) -> int:
    """Distance of an activation's columns of scales, in elements; rows may be symbolic."""
    return (rows + _TMA_FLOATS - 1) // _TMA_FLOATS * _TMA_FLOATS


def norm_quantizes(x_MK: torch.Tensor, weight_K: torch.Tensor, recipe: Fp8BlockRecipe) -> bool:
    """Whether one kernel norms and quantises; Triton has two."""
    return norm_kernel(x_MK, weight_K) == "cuda" and select_quantizer(recipe, x_MK.device).name == "cuda"


def swiglu_quantizes(y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> bool:
    """Whether one kernel computes SwiGLU and quantises."""
    whole = y_M2F.shape[1] % (2 * recipe.block) == 0
    return whole and select_quantizer(recipe, y_M2F.device).fused


def norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: Fp8BlockRecipe, residual: torch.Tensor | None = None
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """`norm_forward` in codes.

    Args:
        x_MK, residual: BF16 [M, K].
        weight_K: BF16 [K].

    Returns:
        [M, K], scales of strides (1, `scale_stride(M)`); the BF16 sum of x and residual, or None.
    """
    if norm_quantizes(x_MK, weight_K, recipe):
        added = None if residual is None else residual.contiguous()
        codes, _, total = kernel("extension").rms_norm_quantize(
            x_MK.contiguous(), weight_K, eps, recipe, added, fewest_rows=1
        )
        return codes, total
    y_MK, _, total = norm_forward(x_MK, weight_K, eps, residual)
    return _quantize(y_MK, recipe), total


def swiglu_quantize(y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
    """`silu_and_mul` in codes.

    Args:
        y_M2F: BF16 [M, 2F]: gate, then up.

    Returns:
        [M, F], scales of strides (1, `scale_stride(M)`).
    """
    if not swiglu_quantizes(y_M2F, recipe):
        return _quantize(silu_and_mul(y_M2F), recipe)
    module = kernel("extension" if has_extension() else "swiglu")
    codes: BlockScaledTensor = module.swiglu_quantize(y_M2F.contiguous(), recipe, fewest_rows=1)
    return codes


def _quantize(x: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
    codes = select_quantizer(recipe, x.device).activation(x, recipe)
    rows, groups = x.shape[0], ceil_div(x.shape[1], recipe.block)
    scale = codes.scale.new_empty_strided((rows, groups), (1, scale_stride(rows)))
    return BlockScaledTensor(codes.data.contiguous(), scale.copy_(codes.scale), codes.block, recipe)
