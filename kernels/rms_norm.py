"""RMSNorm, with residual add in the same kernel, and its gradient.

A row is reduced by one program with a tile that depends on the number of features alone, so a row's result does not
depend on how many rows there are.
"""

# Shape suffixes: M tokens, K features, P programs of the backward kernel.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.reference import quantize_activation as reference_quantize
from jetrl_megatron.reference import rms_norm as reference_norm
from jetrl_megatron.reference import rms_norm_backward as rms_norm_backward_twin
from jetrl_megatron.tensor import BlockScaledTensor

from .quantize_activation import quantize_activation

__all__ = [
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_twin",
    "rms_norm_quantize",
    "rms_norm_quantize_twin",
    "rms_norm_twin",
]

_BACKWARD_PROGRAMS = 528
"""Four for each of a Hopper chip's 132 multiprocessors; a constant, because the order of summation depends on it."""


def rms_norm_twin(
    x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Plain torch; the order of summation is torch's own."""
    if residual is not None:
        x_MK = residual = (x_MK.float() + residual.float()).to(torch.bfloat16)
    return *reference_norm(x_MK, weight_K, eps), residual


def rms_norm_quantize_twin(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor,
    eps: float,
    recipe: Fp8BlockRecipe,
    residual: torch.Tensor | None = None,
) -> tuple[BlockScaledTensor, torch.Tensor, torch.Tensor | None]:
    """Plain torch: one after the other."""
    y_MK, rstd_M, residual = rms_norm_twin(x_MK, weight_K, eps, residual)
    return reference_quantize(y_MK, recipe), rstd_M, residual


@triton.jit
def _forward_kernel(x, residual, weight, y, rstd, sums, K, eps, HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < K
    value = tl.load(x + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * K + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(sums + row * K + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, 0), K.to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd + row, inverse)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * K + columns, (value * inverse * gain).to(tl.bfloat16), mask=inside)


def _warps(features: int) -> int:
    return 4 if features <= 2048 else 8


def rms_norm(
    x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x / rms(x) * weight, of x + residual where one is given.

    Args:
        x_MK, residual: BF16 [M, K]; their sum is rounded to BF16 before it is normed.
        weight_K: float [K].

    Returns:
        y BF16 [M, K], float32 [M] 1 / rms, and the rounded sum or None.
    """
    tokens, features = x_MK.shape
    y_MK = torch.empty(x_MK.shape, dtype=torch.bfloat16, device=x_MK.device)
    rstd_M = torch.empty(tokens, dtype=torch.float32, device=x_MK.device)
    sums = None if residual is None else torch.empty_like(y_MK)
    if x_MK.numel() > 0:
        _forward_kernel[(tokens,)](
            x_MK.contiguous(),
            None if residual is None else residual.contiguous(),
            weight_K.contiguous(),
            y_MK,
            rstd_M,
            sums,
            features,
            eps,
            HAS_RESIDUAL=residual is not None,
            WIDTH=triton.next_power_of_2(features),
            num_warps=_warps(features),
            enable_fp_fusion=False,
        )
    return y_MK, rstd_M, sums


def rms_norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: Fp8BlockRecipe, residual: torch.Tensor | None = None
) -> tuple[BlockScaledTensor, torch.Tensor, torch.Tensor | None]:
    """`quantize_activation` of `rms_norm`: codes [M, K] instead of y.

    Two kernels, where the CUDA extension has one: in one Triton kernel the layout that quantisation asks for changes
    the order in which the row is summed, and with it the last bit of the norm.
    """
    y_MK, rstd_M, sums = rms_norm(x_MK, weight_K, eps, residual)
    return quantize_activation(y_MK, recipe), rstd_M, sums


@triton.jit
def _backward_kernel(dy, x, weight, rstd, dx, partial, M, K, rows, WIDTH: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < K
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((WIDTH,), tl.float32)
    for row in range(program * rows, tl.minimum((program + 1) * rows, M)):
        gradient = tl.load(dy + row * K + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * K + columns, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row)
        normed = value * inverse
        weighted = gradient * gain
        of_weight += gradient * normed
        mean = tl.sum(weighted * normed, 0) / K
        tl.store(dx + row * K + columns, ((weighted - normed * mean) * inverse).to(tl.bfloat16), mask=inside)
    tl.store(partial + program * K + columns, of_weight, mask=inside)


def rms_norm_backward(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, weight_K: torch.Tensor, rstd_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm`: of x, BF16 [M, K], and of the weight, float32 [K]. Repeats give the same bytes.

    Args:
        dy_MK, x_MK: BF16 [M, K]; x is what was normed, after the residual was added.
        rstd_M: float32 [M] from the forward kernel.
    """
    tokens, features = x_MK.shape
    dx_MK = torch.empty(x_MK.shape, dtype=torch.bfloat16, device=x_MK.device)
    rows = max(triton.cdiv(tokens, _BACKWARD_PROGRAMS), 1)
    programs = triton.cdiv(tokens, rows)
    partial_PK = torch.empty(programs, features, dtype=torch.float32, device=x_MK.device)
    if x_MK.numel() > 0:
        _backward_kernel[(programs,)](
            dy_MK.contiguous(),
            x_MK.contiguous(),
            weight_K.contiguous(),
            rstd_M,
            dx_MK,
            partial_PK,
            tokens,
            features,
            rows,
            WIDTH=triton.next_power_of_2(features),
            num_warps=_warps(features),
        )
    return dx_MK, partial_PK.sum(dim=0)
