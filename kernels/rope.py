"""Rotary position embedding, forward and backward: halves of a head rotated against each other ("NeoX style").

cos and sin are BF16, as in the engine's cache. A product of two BF16 numbers is exact in float32, so one
float32 addition and one rounding to BF16 are all that happens, with or without contraction.
"""

# Shape suffixes: T tokens, H heads, D head size, R positions in the cache.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jetrl_megatron.reference import rope as rope_twin

__all__ = ["rope", "rope_twin"]


@triton.jit
def _kernel(
    x, positions, cos_sin, y, rows, H, D, token_stride, head_stride, INVERSE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    half = D // 2
    inside = (row < rows)[:, None] & (columns < half)[None, :]
    source = (x + (row // H) * token_stride + (row % H) * head_stride)[:, None] + columns[None, :]
    position = tl.load(positions + row // H, mask=row < rows, other=0).to(tl.int64)
    angle = (cos_sin + position * D)[:, None] + columns[None, :]
    cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = (y + row * D)[:, None] + columns[None, :]
    tl.store(target, (first * cos - second * sin).to(tl.bfloat16), mask=inside)
    tl.store(target + half, (second * cos + first * sin).to(tl.bfloat16), mask=inside)


def rope(
    x_THD: torch.Tensor, positions_T: torch.Tensor, cos_sin_RD: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """x rotated by its position's angles, or back.

    Args:
        x_THD: BF16 [T, H, D], the last axis contiguous.
        positions_T: integer [T], rows of the cache.
        cos_sin_RD: BF16 [R, D], contiguous: D / 2 cosines, then as many sines.
        inverse: rotate back, which is the gradient.

    Returns:
        BF16 [T, H, D], contiguous.
    """
    tokens, heads, features = x_THD.shape
    y_THD = torch.empty(x_THD.shape, dtype=torch.bfloat16, device=x_THD.device)
    width = triton.next_power_of_2(features // 2)
    rows = max(2048 // width, 1)
    if x_THD.numel() > 0:
        _kernel[(triton.cdiv(tokens * heads, rows),)](
            x_THD, positions_T, cos_sin_RD, y_THD, tokens * heads, heads, features, x_THD.stride(0), x_THD.stride(1),
            INVERSE=inverse, ROWS=rows, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return y_THD
