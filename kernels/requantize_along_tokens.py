"""Codes in groups along features become codes in groups along tokens, transposed: the saved input for wgrad."""

# Shape suffixes: M tokens, C features, Mp tokens padded with zero to whole groups.

from __future__ import annotations

import triton
import triton.language as tl

from jetrl_megatron.reference import quantize_along_tokens as reference_quantize
from jetrl_megatron.tensor import BlockScaledTensor

from .device_functions import constants
from .outputs import empty_along_tokens
from .quantize_both import store_along_tokens
from .rules import activation_rule


def requantize_along_tokens_twin(codes: BlockScaledTensor) -> BlockScaledTensor:
    """Plain torch: dequantise, transpose, quantise."""
    return reference_quantize(codes.dequantize(), codes.recipe)


@triton.jit
def _kernel(
    codes, scales, column_codes, column_scales,
    M, C, scale_stride_m, scale_stride_c, column_scale_stride, padded,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < C)[None, :]
    code = tl.load(codes + rows[:, None] * C + columns[None, :], mask=inside, other=0.0)
    scale = tl.load(scales + rows * scale_stride_m + tl.program_id(0) * scale_stride_c, mask=rows < M, other=0.0)
    store_along_tokens(
        code.to(tl.float32) * scale[:, None], column_codes, column_scales, rows, columns, C, padded,
        column_scale_stride, BLOCK, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, ELEMENT_MAX, POWER_OF_TWO,
    )  # fmt: skip


def requantize_along_tokens(codes: BlockScaledTensor, *, num_warps: int = 8) -> BlockScaledTensor:
    """What codes [M, C] stand for, transposed in groups along tokens: [C, Mp]. Scales may have any strides."""
    recipe = codes.recipe
    tokens, features = codes.shape
    columns = empty_along_tokens(tokens, features, recipe, codes.data.device)
    if tokens == 0 or features == 0:
        return columns
    _kernel[(triton.cdiv(features, recipe.block), triton.cdiv(tokens, recipe.block))](
        codes.data.contiguous(),
        codes.scale,
        columns.data,
        columns.scale,
        tokens,
        features,
        *codes.scale.stride(),
        columns.scale.stride(1),
        columns.data.shape[1],
        num_warps=num_warps,
        **constants(activation_rule(recipe)),
    )
    return columns
