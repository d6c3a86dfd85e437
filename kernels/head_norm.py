"""RMSNorm of attention heads: many short rows, several to a program.

A row is reduced within its program's tile, whose shape depends on the head size alone, so a row's result depends
neither on how many rows there are nor on where it stands.
"""

# Shape suffixes: T tokens, H heads, D head size, P programs of the backward kernel.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device_functions import head_tile
from .rms_norm import rms_norm_backward_twin, rms_norm_twin

__all__ = ["MOST_FEATURES", "head_norm", "head_norm_backward", "head_norm_backward_twin", "head_norm_twin"]

MOST_FEATURES = 256
"""Longest row that this kernel takes; longer ones are the business of `rms_norm`."""

_BACKWARD_PROGRAMS = 528
"""Four for each of a Hopper chip's 132 multiprocessors; a constant, because the order of summation depends on it."""


def head_norm_twin(x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch; the order of summation is torch's own."""
    y, rstd, _ = rms_norm_twin(x_THD.flatten(0, 1), weight_D, eps)
    return y.view(x_THD.shape), rstd.view(x_THD.shape[:2])


def head_norm_backward_twin(
    dy_THD: torch.Tensor, x_THD: torch.Tensor, weight_D: torch.Tensor, rstd_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch."""
    dx, dweight = rms_norm_backward_twin(dy_THD.flatten(0, 1), x_THD.flatten(0, 1), weight_D, rstd_TH.flatten())
    return dx.view(x_THD.shape), dweight


@triton.jit
def _forward_kernel(
    x, weight, y, rstd, rows, H, D, token_stride, head_stride, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (columns < D)[None, :]
    source = x + (row // H) * token_stride + (row % H) * head_stride
    value = tl.load(source[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, 1), D.to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd + row, inverse, mask=row < rows)
    gain = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    normed = (value * inverse[:, None] * gain[None, :]).to(tl.bfloat16)
    tl.store(y + row[:, None] * D + columns[None, :], normed, mask=inside)


@triton.jit
def _backward_kernel(
    dy, x, weight, rstd, dx, partial, rows, H, D, tiles, token_stride, head_stride,
    dy_token_stride, dy_head_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    gain = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    of_weight = tl.zeros((WIDTH,), tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < D)[None, :]
        token, head = row // H, row % H
        source = x + token * token_stride + head * head_stride
        upstream = dy + token * dy_token_stride + head * dy_head_stride
        gradient = tl.load(upstream[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.load(source[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = value * inverse
        weighted = gradient * gain[None, :]
        of_weight += tl.sum(gradient * normed, 0)
        mean = tl.sum(weighted * normed, 1) / D
        result = ((weighted - normed * mean[:, None]) * inverse).to(tl.bfloat16)
        tl.store(dx + row[:, None] * D + columns[None, :], result, mask=inside)
    tl.store(partial + program * D + columns, of_weight, mask=columns < D)


def head_norm(x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * weight over the last axis, computed in float32 and rounded once.

    Args:
        x_THD: BF16 [T, H, D], the last axis contiguous, D at most `MOST_FEATURES`.
        weight_D: float [D].

    Returns:
        y BF16 [T, H, D], contiguous, and float32 [T, H] 1 / rms.
    """
    tokens, heads, features = x_THD.shape
    y_THD = torch.empty(x_THD.shape, dtype=torch.bfloat16, device=x_THD.device)
    rstd_TH = torch.empty(tokens, heads, dtype=torch.float32, device=x_THD.device)
    rows, width = head_tile(features)
    if x_THD.numel() > 0:
        _forward_kernel[(triton.cdiv(tokens * heads, rows),)](
            x_THD, weight_D, y_THD, rstd_TH, tokens * heads, heads, features, x_THD.stride(0), x_THD.stride(1), eps,
            ROWS=rows, WIDTH=width, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y_THD, rstd_TH


def head_norm_backward(
    dy_THD: torch.Tensor, x_THD: torch.Tensor, weight_D: torch.Tensor, rstd_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `head_norm`: of x, BF16 [T, H, D], and of the weight, float32 [D]. Repeats give the same bytes.

    Args:
        dy_THD, x_THD: BF16 [T, H, D], the last axis contiguous.
        rstd_TH: float32 [T, H] from the forward kernel.
    """
    tokens, heads, features = x_THD.shape
    dx_THD = torch.empty(x_THD.shape, dtype=torch.bfloat16, device=x_THD.device)
    rows, width = head_tile(features)
    tiles = triton.cdiv(tokens * heads, rows)
    programs = min(tiles, _BACKWARD_PROGRAMS)
    partial_PD = torch.empty(programs, features, dtype=torch.float32, device=x_THD.device)
    if x_THD.numel() > 0:
        _backward_kernel[(programs,)](
            dy_THD, x_THD, weight_D, rstd_TH, dx_THD, partial_PD, tokens * heads, heads, features, tiles,
            x_THD.stride(0), x_THD.stride(1), dy_THD.stride(0), dy_THD.stride(1), ROWS=rows, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return dx_THD, partial_PD.sum(dim=0)
