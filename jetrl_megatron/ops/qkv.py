"""Query, key and value from the interleaved output of their projection: norm of heads and RoPE, and the gradient.

The bytes are those of `rms_norm`, then `rope`, in one pass over memory; the gradient is written where the projection's
backward reads it.
"""

# Shape suffixes: T tokens, G groups, R query heads of a group, H = G R query heads, D head size.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jetrl_megatron import reference
from jetrl_megatron.ops.norm import kernel, runs_kernels


@dataclass(frozen=True)
class Rotation:
    """How heads are rotated.

    Attributes:
        positions: integer [T], rows of the cache.
        cos_sin: BF16 of `cos_sin_cache`.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor


def _module(device: torch.device) -> Any:
    return kernel("norm_rope") if runs_kernels(device) else reference


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        rotation: Rotation,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = _parts(qkv.detach())
        module, places = _module(qkv.device), (rotation.positions, rotation.cos_sin)
        q_THD, q_rstd = module.norm_rope(q, q_weight, eps, *places)
        k_TGD, k_rstd = module.norm_rope(k, k_weight, eps, *places)
        ctx.save_for_backward(qkv, q_weight, k_weight, q_rstd, k_rstd)
        ctx.places = places
        return q_THD, k_TGD, v.squeeze(2)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv, *weights_and_rstds = ctx.saved_tensors
        weights, rstds = weights_and_rstds[:2], weights_and_rstds[2:]
        dqkv, module = torch.empty_like(qkv), _module(qkv.device)
        *inputs, _ = _parts(qkv)
        *outputs, of_v = _parts(dqkv)
        of_v.squeeze(2).copy_(dv)
        of_weights = []
        for dy, x, weight, rstd, dx in zip((dq, dk), inputs, weights, rstds, outputs, strict=True):
            dy = dy if dy.stride(-1) == 1 else dy.contiguous()
            dweight = module.norm_rope_backward(dy, x, weight, rstd, *ctx.places, dx)
            of_weights.append(None if weight is None else dweight.to(weight.dtype))
        return dqkv, *of_weights, None, None


def _parts(qkv_TGRD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv_TGRD[:, :, :-2], qkv_TGRD[:, :, -2:-1], qkv_TGRD[:, :, -1:]


def split_heads(
    qkv: torch.Tensor,
    rotation: Rotation,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query and key, normed where there are weights and rotated, and the value.

    Args:
        qkv: BF16 [T, G, R + 2, D], contiguous: of each group R query heads, then key, then value.
        q_weight, k_weight: float [D] of the norms; `eps` is theirs.

    Returns:
        BF16 [T, G R, D], [T, G, D] and [T, G, D]; the value is a view into qkv.
    """
    q, k, v = _SplitHeads.apply(qkv, q_weight, k_weight, eps, rotation)  # type: ignore[no-untyped-call]
    return q, k, v
