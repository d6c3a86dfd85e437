"""silu(gate) * up with training's rounding, for a rollout that does not fuse it with quantisation."""

from __future__ import annotations

import torch

from jetrl_megatron import reference
from jetrl_megatron.ops.norm import has_extension, kernel, runs_kernels
from jetrl_megatron.recipe import JETRL_FP8


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate), rounded to BF16, times up.

    Args:
        gate_up: BF16 [..., 2F]: gate, then up.

    Returns:
        BF16 [..., F].
    """
    y_M2F = gate_up.reshape(-1, gate_up.shape[-1])
    if not runs_kernels(gate_up.device):
        h_MF = reference.swiglu(y_M2F)
    elif has_extension() and y_M2F.shape[1] % (2 * JETRL_FP8.block) == 0:
        h_MF = kernel("extension").swiglu(y_M2F.contiguous(), JETRL_FP8)
    else:
        h_MF = kernel("swiglu").swiglu(y_M2F, JETRL_FP8)
    return h_MF.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
