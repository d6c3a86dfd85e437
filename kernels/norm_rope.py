"""RMSNorm of attention heads and their rotation in one pass, from and into the interleaved q, k and v of a projection.

Forward gives the bytes of `head_norm`, then `rope`: a row is summed in a tile of the same shape, and its halves, which
the rotation wants apart, are read a second time, from the cache. The gradient adds up a row by halves.
"""

# Shape suffixes: T tokens, G groups of heads, R heads of a group, H = G R heads, D head size, P programs of the
# backward kernel.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jetrl_megatron.reference import norm_rope as norm_rope_twin
from jetrl_megatron.reference import norm_rope_backward as norm_rope_backward_twin

from .device_functions import head_tile

__all__ = ["norm_rope", "norm_rope_backward", "norm_rope_backward_twin", "norm_rope_twin"]

_BACKWARD_PROGRAMS = 792
"""Six for each of a Hopper chip's 132 multiprocessors, as many as its registers hold for heads of 128; a constant,
because the order of summation depends on it."""


@triton.jit
def _load(rows, offset, inside):
    return tl.load(rows[:, None] + offset[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x, weight, positions, cos_sin, y, rstd, rows, token_stride, group_stride, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, HEADS_OF_GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    position = tl.load(positions + token, mask=row < rows, other=0).to(tl.int64)
    source = x + token * token_stride + (head // HEADS_OF_GROUP) * group_stride + (head % HEADS_OF_GROUP) * SIZE
    near = tl.arange(0, WIDTH // 2)
    inside = (row < rows)[:, None] & (near < HALF)[None, :]
    if NORM:
        columns = tl.arange(0, WIDTH)
        value = _load(source, columns, (row < rows)[:, None] & (columns < SIZE)[None, :])
        squares = tl.sum(value * value, 1)
        mean = tl.div_rn(squares, tl.full(squares.shape, SIZE, tl.float32))
        inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        tl.store(rstd + row, inverse, mask=row < rows)
    first, second = _load(source, near, inside), _load(source, near + HALF, inside)
    if NORM:
        gain_1 = tl.load(weight + near, mask=near < HALF, other=0.0).to(tl.float32)
        gain_2 = tl.load(weight + HALF + near, mask=near < HALF, other=0.0).to(tl.float32)
        first = (first * inverse[:, None] * gain_1[None, :]).to(tl.bfloat16).to(tl.float32)
        second = (second * inverse[:, None] * gain_2[None, :]).to(tl.bfloat16).to(tl.float32)
    angles = cos_sin + position * SIZE
    cos, sin = _load(angles, near, inside), _load(angles, near + HALF, inside)
    target = (y + row.to(tl.int64) * SIZE)[:, None] + near[None, :]
    tl.store(target, (first * cos - second * sin).to(tl.bfloat16), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(tl.bfloat16), mask=inside)


@triton.jit
def _backward_kernel(
    dy, x, weight, rstd, positions, cos_sin, dx, partial, rows, tiles, token_stride, group_stride,
    dx_token_stride, dx_group_stride, dy_token_stride, dy_head_stride,
    NORM: tl.constexpr, HEADS: tl.constexpr, HEADS_OF_GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    near = tl.arange(0, WIDTH // 2)
    if NORM:
        gain_1 = tl.load(weight + near, mask=near < HALF, other=0.0).to(tl.float32)[None, :]
        gain_2 = tl.load(weight + HALF + near, mask=near < HALF, other=0.0).to(tl.float32)[None, :]
        # Not summed over rows before the end: that takes all warps of a program.
        of_weight_1 = tl.zeros((ROWS, WIDTH // 2), tl.float32)
        of_weight_2 = tl.zeros((ROWS, WIDTH // 2), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = (row // HEADS).to(tl.int64), row % HEADS
        group, member = head // HEADS_OF_GROUP, head % HEADS_OF_GROUP
        inside = (row < rows)[:, None] & (near < HALF)[None, :]
        position = tl.load(positions + token, mask=row < rows, other=0).to(tl.int64)
        upstream = dy + token * dy_token_stride + head * dy_head_stride
        dy_1, dy_2 = _load(upstream, near, inside), _load(upstream, near + HALF, inside)
        if NORM:
            source = x + token * token_stride + group * group_stride + member * SIZE
            inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
            normed_1, normed_2 = _load(source, near, inside) * inverse, _load(source, near + HALF, inside) * inverse
        angles = cos_sin + position * SIZE
        cos, sin = _load(angles, near, inside), _load(angles, near + HALF, inside)
        first = (dy_1 * cos + dy_2 * sin).to(tl.bfloat16)
        second = (dy_2 * cos - dy_1 * sin).to(tl.bfloat16)
        if NORM:
            of_weight_1 += first.to(tl.float32) * normed_1
            of_weight_2 += second.to(tl.float32) * normed_2
            weighted_1, weighted_2 = first.to(tl.float32) * gain_1, second.to(tl.float32) * gain_2
            mean = (tl.sum(weighted_1 * normed_1 + weighted_2 * normed_2, 1) / SIZE)[:, None]
            first = ((weighted_1 - normed_1 * mean) * inverse).to(tl.bfloat16)
            second = ((weighted_2 - normed_2 * mean) * inverse).to(tl.bfloat16)
        target = dx + token * dx_token_stride + group * dx_group_stride + member * SIZE
        tl.store(target[:, None] + near[None, :], first, mask=inside)
        tl.store(target[:, None] + HALF + near[None, :], second, mask=inside)
    if NORM:
        sums = partial + tl.program_id(0) * SIZE + near
        tl.store(sums, tl.sum(of_weight_1, 0), mask=near < HALF)
        tl.store(sums + HALF, tl.sum(of_weight_2, 0), mask=near < HALF)


def norm_rope(
    x_TGRD: torch.Tensor,
    weight_D: torch.Tensor | None,
    eps: float,
    positions_T: torch.Tensor,
    cos_sin_RD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`head_norm`, where there is a weight, then `rope`.

    Args:
        x_TGRD: BF16; the heads of a group are next to each other, tokens and groups anywhere. D is even and at most
            `head_norm.MOST_FEATURES`.
        weight_D: float [D] of the norm, or None for no norm.
        positions_T, cos_sin_RD: as for `rope`.

    Returns:
        BF16 [T, H, D], contiguous; float32 [T, H] 1 / rms, or None.
    """
    tokens, groups, heads, features = x_TGRD.shape
    y_THD = torch.empty(tokens, groups * heads, features, dtype=torch.bfloat16, device=x_TGRD.device)
    rstd_TH = None
    if weight_D is not None:
        rstd_TH = torch.empty(y_THD.shape[:2], dtype=torch.float32, device=x_TGRD.device)
    rows, width = head_tile(features)
    count = tokens * groups * heads
    if count > 0:
        _forward_kernel[(triton.cdiv(count, rows),)](
            x_TGRD, weight_D, positions_T, cos_sin_RD, y_THD, rstd_TH, count,
            x_TGRD.stride(0), x_TGRD.stride(1), eps,
            NORM=weight_D is not None, HEADS=groups * heads, HEADS_OF_GROUP=heads, SIZE=features, ROWS=rows,
            WIDTH=width, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y_THD, rstd_TH


def norm_rope_backward(
    dy_THD: torch.Tensor,
    x_TGRD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rstd_TH: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin_RD: torch.Tensor,
    dx_TGRD: torch.Tensor,
) -> torch.Tensor | None:
    """Gradients of `norm_rope`: of x into `dx`, of the weight float32 [D] as the result. Repeats give the same bytes.

    Args:
        dy_THD: BF16, the last axis contiguous.
        rstd_TH: float32 from the forward kernel.
        dx_TGRD: BF16, laid out as x may be; every element is written.
    """
    tokens, groups, heads, features = x_TGRD.shape
    rows, width = head_tile(features)
    count = tokens * groups * heads
    tiles = triton.cdiv(count, rows)
    programs = min(tiles, _BACKWARD_PROGRAMS)
    partial_PD = None
    if weight_D is not None:
        partial_PD = torch.empty(programs, features, dtype=torch.float32, device=x_TGRD.device)
    if count > 0:
        _backward_kernel[(programs,)](
            dy_THD, x_TGRD, weight_D, rstd_TH, positions_T, cos_sin_RD, dx_TGRD, partial_PD, count, tiles,
            x_TGRD.stride(0), x_TGRD.stride(1), dx_TGRD.stride(0), dx_TGRD.stride(1),
            dy_THD.stride(0), dy_THD.stride(1),
            NORM=weight_D is not None, HEADS=groups * heads, HEADS_OF_GROUP=heads, SIZE=features, ROWS=rows,
            WIDTH=width, num_warps=4,
        )  # fmt: skip
    return None if partial_PD is None else partial_PD.sum(dim=0)
