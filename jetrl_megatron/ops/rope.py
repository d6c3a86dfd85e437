"""Rotary position embedding with vLLM's numbers, and its gradient."""

# Shape suffixes: T tokens, H heads, D head size, R positions.

from __future__ import annotations

from typing import Any

import torch

from jetrl_megatron import reference
from jetrl_megatron.ops.norm import kernel, runs_kernels


def cos_sin_cache(angles_RD: torch.Tensor) -> torch.Tensor:
    """vLLM's cache from Megatron's angles.

    Args:
        angles_RD: float32 [R, ..., D], position times inverse frequency, the same for both halves.

    Returns:
        BF16 [R, D]: D / 2 cosines, then as many sines.
    """
    half = angles_RD.reshape(angles_RD.shape[0], -1)[:, : angles_RD.shape[-1] // 2]
    return torch.cat((half.cos(), half.sin()), dim=-1).to(torch.bfloat16)


def _rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    if runs_kernels(x.device):
        x = x if x.stride(-1) == 1 else x.contiguous()
        rotated: torch.Tensor = kernel("rope").rope(x, positions, cos_sin, inverse=inverse)
        return rotated
    return reference.rope(x, positions, cos_sin, inverse=inverse)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, positions_T: torch.Tensor, cos_sin_RD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(positions_T, cos_sin_RD)
        return _rotate(x_THD.detach(), positions_T, cos_sin_RD, inverse=False)

    @staticmethod
    def backward(ctx: Any, dy_THD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate(dy_THD, *ctx.saved_tensors, inverse=True), None, None


def rope(x_THD: torch.Tensor, positions_T: torch.Tensor, cos_sin_RD: torch.Tensor) -> torch.Tensor:
    """x with the halves of each head rotated by its position's angles; products in float32, rounded once.

    Args:
        x_THD: BF16 [T, H, D].
        positions_T: integer [T], rows of the cache.
        cos_sin_RD: BF16 [R, D] of `cos_sin_cache`.

    Returns:
        BF16 [T, H, D].
    """
    rotated: torch.Tensor = _Rope.apply(x_THD, positions_T, cos_sin_RD)  # type: ignore[no-untyped-call]
    return rotated
