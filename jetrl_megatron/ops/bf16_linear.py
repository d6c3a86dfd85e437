"""BF16 products whose rows do not depend on how many rows there are: lm_head, on both sides."""

# Shape suffixes: M tokens, N and K rows and columns of the weight.

from __future__ import annotations

import functools

import torch

from jetrl_megatron.ops.deep_gemm import find_deep_gemm
from jetrl_megatron.ops.hopper import hopper_refusal

_FEWEST_ROWS = 8


@functools.cache
def row_invariant_refusal(device: torch.device) -> str | None:
    """None where `row_invariant_linear` keeps its promise, else why it does not."""
    reason = hopper_refusal(device)
    if reason is None:
        module, where = find_deep_gemm()
        reason = None if module is not None else where
    return reason


def row_invariant_linear(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """x W^T with DeepGEMM's BF16 kernel, which adds along K in one order whatever M is.

    Args:
        x: BF16 [..., K].
        weight_NK: BF16 [N, K], contiguous; N and K multiples of 8.

    Returns:
        BF16 [..., N].

    Raises:
        ValueError: N or K is no multiple of 8.
    """
    rows, features = weight_NK.shape
    if rows % _FEWEST_ROWS or features % _FEWEST_ROWS:
        raise ValueError(
            f"weight {[rows, features]}: DeepGEMM's BF16 product wants multiples of {_FEWEST_ROWS}; pad the vocabulary"
        )
    module, where = find_deep_gemm()
    assert module is not None, where
    x_MK = x.reshape(-1, features).contiguous()
    y_MN = torch.empty(x_MK.shape[0], rows, dtype=torch.bfloat16, device=x.device)
    if x_MK.numel() > 0:
        module.bf16_gemm_nt(x_MK, weight_NK, y_MN)
    return y_MN.view(*x.shape[:-1], rows)
