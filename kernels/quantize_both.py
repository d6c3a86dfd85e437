"""Both orientations of an activation or gradient: in groups along features, and transposed in groups along tokens."""

# Shape suffixes: M tokens, C features, Mp tokens padded with zero to whole groups.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.reference import quantize_activation as reference_quantize
from jetrl_megatron.reference import quantize_along_tokens as quantize_along_tokens_twin
from jetrl_megatron.tensor import BlockScaledTensor

from .device_functions import amax_bits, constants, encode, scale_of
from .outputs import empty_along_tokens, empty_codes, rows_contiguous
from .rules import activation_rule


def quantize_both_twin(x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Plain torch: one after the other."""
    return reference_quantize(x_MC, recipe), quantize_along_tokens_twin(x_MC, recipe)


@triton.jit
def store_along_features(
    value, codes, scales, rows, columns, M, C, scale_stride,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Quantises a tile [BLOCK, BLOCK] in groups along its columns."""
    amax = tl.max(amax_bits(value), 1).to(tl.float32, bitcast=True)
    scale = scale_of(amax, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, POWER_OF_TWO)
    inside = (rows < M)[:, None] & (columns < C)[None, :]
    tl.store(
        codes + rows[:, None] * C + columns[None, :],
        encode(value, scale[:, None], ELEMENT_MAX, POWER_OF_TWO),
        mask=inside,
    )
    group = tl.min(columns, 0).to(tl.int64) // BLOCK
    tl.store(scales + rows + group * scale_stride, scale, mask=rows < M)


@triton.jit
def store_along_tokens(
    value, codes, scales, rows, columns, C, padded, scale_stride,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Quantises a tile [BLOCK, BLOCK] in groups along its rows, and stores it transposed."""
    amax = tl.max(amax_bits(value), 0).to(tl.float32, bitcast=True)
    scale = scale_of(amax, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, POWER_OF_TWO)
    code = tl.trans(encode(value, scale[None, :], ELEMENT_MAX, POWER_OF_TWO))
    tl.store(codes + columns[:, None].to(tl.int64) * padded + rows[None, :], code, mask=(columns < C)[:, None])
    group = tl.min(rows, 0) // BLOCK
    tl.store(scales + columns + group * scale_stride, scale, mask=columns < C)


@triton.jit
def _kernel(
    x, row_codes, row_scales, column_codes, column_scales,
    M, C, stride, row_scale_stride, column_scale_stride, padded,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < C)[None, :]
    value = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        store_along_features(
            value, row_codes, row_scales, rows, columns, M, C, row_scale_stride,
            BLOCK, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, ELEMENT_MAX, POWER_OF_TWO,
        )  # fmt: skip
    store_along_tokens(
        value, column_codes, column_scales, rows, columns, C, padded, column_scale_stride,
        BLOCK, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, ELEMENT_MAX, POWER_OF_TWO,
    )  # fmt: skip


def _launch(
    x_MC: torch.Tensor, rows: BlockScaledTensor | None, recipe: Fp8BlockRecipe, num_warps: int
) -> BlockScaledTensor:
    x_MC = rows_contiguous(x_MC)
    tokens, features = x_MC.shape
    columns = empty_along_tokens(tokens, features, recipe, x_MC.device)
    if x_MC.numel() == 0:
        return columns
    of_rows = columns if rows is None else rows
    _kernel[(triton.cdiv(features, recipe.block), triton.cdiv(tokens, recipe.block))](
        x_MC,
        of_rows.data,
        of_rows.scale,
        columns.data,
        columns.scale,
        tokens,
        features,
        x_MC.stride(0),
        of_rows.scale.stride(1),
        columns.scale.stride(1),
        columns.data.shape[1],
        ROWS=rows is not None,
        num_warps=num_warps,
        **constants(activation_rule(recipe)),
    )
    return columns


def quantize_both(
    x_MC: torch.Tensor, recipe: Fp8BlockRecipe, *, num_warps: int = 8
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """x in groups along features [M, C], and transposed in groups along tokens [C, Mp], from one read.

    Args:
        x_MC: float [M, C].
    """
    rows = empty_codes(*x_MC.shape, recipe, x_MC.device)
    return rows, _launch(x_MC, rows, recipe, num_warps)


def quantize_along_tokens(x_MC: torch.Tensor, recipe: Fp8BlockRecipe, *, num_warps: int = 8) -> BlockScaledTensor:
    """x transposed in groups along tokens: [C, Mp].

    Args:
        x_MC: float [M, C].
    """
    return _launch(x_MC, None, recipe, num_warps)
