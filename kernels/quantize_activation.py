"""Activations and gradients in groups of 1 x block along their last axis."""

# Shape suffixes: M tokens, K features, Kb groups of features.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.reference import quantize_activation as quantize_activation_twin
from jetrl_megatron.tensor import BlockScaledTensor

from .device_functions import constants, encode, quantize_groups, scale_of
from .outputs import empty_codes, rows_contiguous
from .rules import activation_rule

__all__ = ["quantize_activation", "quantize_activation_twin"]


@triton.jit
def _kernel(
    x,
    codes,
    scales,
    amaxes,
    M,
    K,
    stride,
    scale_stride,
    amax_stride_m,
    amax_stride_k,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    DIVISOR: tl.constexpr,
    SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    # Programs next to each other work on the same rows, which keeps memory pages open.
    parts = tl.cdiv(K, GROUPS * BLOCK)
    part = tl.program_id(0) % parts
    rows = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = part * GROUPS * BLOCK + tl.arange(0, GROUPS * BLOCK)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    value = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    groups = part * GROUPS + tl.arange(0, GROUPS)
    held = (rows < M)[:, None] & (groups * BLOCK < K)[None, :]
    if HAS_AMAX:
        amax = tl.load(amaxes + rows[:, None] * amax_stride_m + groups[None, :] * amax_stride_k, mask=held, other=1.0)
        scale = scale_of(amax, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, POWER_OF_TWO)
        grouped = tl.reshape(value, (ROWS, GROUPS, BLOCK))
        code = encode(grouped, tl.expand_dims(scale, 2), ELEMENT_MAX, POWER_OF_TWO)
        code = tl.reshape(code, (ROWS, GROUPS * BLOCK))
    else:
        code, scale = quantize_groups(
            value, ROWS, GROUPS, BLOCK, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, ELEMENT_MAX, POWER_OF_TWO
        )
    tl.store(codes + rows[:, None] * K + columns[None, :], code, mask=inside)
    tl.store(scales + rows[:, None] + groups[None, :].to(tl.int64) * scale_stride, scale, mask=held)


def quantize_activation(
    x_MK: torch.Tensor,
    recipe: Fp8BlockRecipe,
    *,
    amax: torch.Tensor | None = None,
    rows: int = 8,
    groups: int = 4,
    num_warps: int = 4,
) -> BlockScaledTensor:
    """Codes and scales of x, see `jetrl_megatron.ops.quantize_activation`.

    Args:
        x_MK: float [M, K].
        amax: float32 [M, Kb] instead of the groups' own.
        rows, groups: what one program quantises; powers of two.

    Returns:
        [M, K]; scales with their rows next to each other.
    """
    x_MK = rows_contiguous(x_MK)
    tokens, features = x_MK.shape
    out = empty_codes(tokens, features, recipe, x_MK.device)
    if x_MK.numel() == 0:
        return out
    if tokens < rows:
        # Decoding: more programs, each with less to do.
        rows, groups = triton.next_power_of_2(tokens), 1
    grid = (triton.cdiv(tokens, rows) * triton.cdiv(features, groups * recipe.block),)
    strides = (0, 0) if amax is None else amax.stride()
    _kernel[grid](
        x_MK,
        out.data,
        out.scale,
        amax,
        tokens,
        features,
        x_MK.stride(0),
        out.scale.stride(1),
        *strides,
        ROWS=rows,
        GROUPS=groups,
        HAS_AMAX=amax is not None,
        num_warps=num_warps,
        **constants(activation_rule(recipe)),
    )
    return out
