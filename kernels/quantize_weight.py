"""Weights in tiles of block x block, W and its transpose from one read."""

# Shape suffixes: N and K rows and columns of a weight, Nb and Kb the same in tiles.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.reference import quantize_weight as reference_quantize
from jetrl_megatron.tensor import BlockScaledTensor

from .device_functions import amax_bits, constants, encode, scale_of
from .outputs import empty_weight, rows_contiguous
from .rules import weight_rule


def quantize_weight_twin(
    w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Plain torch: quantise, transpose."""
    codes = reference_quantize(w_NK, recipe, amax=amax)
    return codes, codes.t()


@triton.jit
def _kernel(
    w, codes, transposed, scales, amaxes, N, K, stride,
    HAS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    value = tl.load(w + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    # One scale, held once for each row: vectors of one element are not stored reliably.
    if HAS_AMAX:
        amax = tl.load(amaxes + tile + tl.zeros((BLOCK,), tl.int32))
    else:
        bits = tl.max(tl.max(amax_bits(value), 1), 0)
        amax = (tl.zeros((BLOCK,), tl.int32) + bits).to(tl.float32, bitcast=True)
    scale = scale_of(amax, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, POWER_OF_TWO)
    tl.store(scales + tile + tl.zeros((BLOCK,), tl.int32), scale, mask=tl.arange(0, BLOCK) == 0)
    code = encode(value, scale[:, None], ELEMENT_MAX, POWER_OF_TWO)
    tl.store(codes + rows[:, None] * K + columns[None, :], code, mask=inside)
    outside = (columns < K)[:, None] & (rows < N)[None, :]
    tl.store(transposed + columns[:, None].to(tl.int64) * N + rows[None, :], tl.trans(code), mask=outside)


def quantize_weight(
    w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None, num_warps: int = 8
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Codes of w [N, K], and of its transpose [K, N], see `jetrl_megatron.ops.quantize_weight`.

    Args:
        w_NK: float [N, K]; other dtypes than BF16 are rounded to it first.
        amax: float32 [Nb, Kb] instead of the tiles' own.
    """
    w_NK = rows_contiguous(w_NK.detach().to(torch.bfloat16))
    rows, columns = w_NK.shape
    out, transposed = empty_weight(rows, columns, recipe, w_NK.device)
    if w_NK.numel() == 0:
        return out, transposed
    _kernel[(triton.cdiv(columns, recipe.block), triton.cdiv(rows, recipe.block))](
        w_NK,
        out.data,
        transposed.data,
        out.scale,
        None if amax is None else amax.contiguous(),
        rows,
        columns,
        w_NK.stride(0),
        HAS_AMAX=amax is not None,
        num_warps=num_warps,
        **constants(weight_rule(recipe)),
    )
    return out, transposed


def quantize_weights(
    weights: Sequence[torch.Tensor], recipe: Fp8BlockRecipe
) -> list[tuple[BlockScaledTensor, BlockScaledTensor]]:
    """`quantize_weight` of each; the CUDA extension does many in one launch."""
    return [quantize_weight(w_NK, recipe) for w_NK in weights]
