"""What parity operators compute, in float64 and with autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jetrl_megatron.ops.qkv import Rotation


def split_heads64(
    qkv: torch.Tensor, rotation: Rotation, weights: list[torch.Tensor], eps: float
) -> tuple[torch.Tensor, ...]:
    """Query, key and value of float64 [T, G, R + 2, D]; `weights` of the norms of query and key, or none."""
    cos, sin = rotation.cos_sin[rotation.positions].double()[:, None].chunk(2, -1)
    found = []
    for index, part in enumerate((qkv[:, :, :-2], qkv[:, :, -2:-1])):
        heads = part.flatten(1, 2)
        if weights:
            heads = F.rms_norm(heads, heads.shape[-1:], weights[index], eps)
        first, second = heads.chunk(2, -1)
        found.append(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
    return *found, qkv[:, :, -1]
