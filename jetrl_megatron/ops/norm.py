"""RMSNorm with a gradient: one order of summation for a row, whatever the number of rows, on both sides.

On a Hopper GPU the kernels of `jetrl_megatron.kernels` (or the CUDA extension's) compute it; vLLM runs the same ones
through its plugin. Elsewhere it is plain torch.
"""

# Shape suffixes: M rows, K features, H heads.

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from jetrl_megatron import reference
from jetrl_megatron.ops.hopper import hopper_refusal


@functools.cache
def kernel(module: str) -> Any:
    """A module of `jetrl_megatron.kernels`, imported when first asked for: Triton is not there on every machine."""
    return importlib.import_module(f"jetrl_megatron.kernels.{module}")


@functools.cache
def runs_kernels(device: torch.device) -> bool:
    """Whether the kernels serve on the device."""
    return hopper_refusal(device) is None


@functools.cache
def has_extension() -> bool:
    """Whether the CUDA extension `jetrl_megatron._C` was built."""
    return importlib.util.find_spec("jetrl_megatron._C") is not None


def norm_kernel(x: torch.Tensor, weight_K: torch.Tensor) -> str:
    """What norms x: "triton_heads" for heads [M, H, K], "cuda" or "triton" for rows [M, K], "torch" off the GPU."""
    if not runs_kernels(x.device):
        return "torch"
    if x.dim() == 3 and x.shape[-1] <= kernel("head_norm").MOST_FEATURES:
        return "triton_heads"
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return "cuda" if has_extension() and kernel("extension").takes_norm(rows, weight_K) else "triton"


def norm_forward(
    x: torch.Tensor, weight_K: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """RMSNorm over the last axis, of x + residual where one is given.

    Args:
        x: BF16 [M, K], or heads [M, H, K].
        weight_K: BF16 [K].
        residual: BF16 like x; the sum is rounded to BF16 before it is normed.

    Returns:
        y BF16 like x; float32 1 / rms of each row; the rounded sum or None.
    """
    name = norm_kernel(x, weight_K)
    if residual is not None and name in ("torch", "triton_heads"):
        x = residual = x + residual
    if name == "triton_heads":
        y, rstd = kernel("head_norm").head_norm(_contiguous_last(x), weight_K, eps)
        return y, rstd, residual
    x_MK = x.reshape(-1, x.shape[-1])
    if name == "torch":
        y, rstd = reference.rms_norm(x_MK, weight_K, eps)
        return y.view(x.shape), rstd.view(x.shape[:-1]), residual
    module = kernel("extension" if name == "cuda" else "rms_norm")
    added = None if residual is None else residual.reshape(x_MK.shape).contiguous()
    y, rstd, sums = module.rms_norm(x_MK.contiguous(), weight_K, eps, added)
    return y.view(x.shape), rstd.view(x.shape[:-1]), None if sums is None else sums.view(x.shape)


def norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight_K: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `norm_forward` without a residual: of x, BF16 like x, and of the weight, float32 [K]."""
    name, features = norm_kernel(x, weight_K), x.shape[-1]
    if name == "triton_heads":
        pair: tuple[torch.Tensor, torch.Tensor] = kernel("head_norm").head_norm_backward(
            _contiguous_last(dy), _contiguous_last(x), weight_K, rstd
        )
        return pair
    dy_MK, x_MK = dy.reshape(-1, features), x.reshape(-1, features)
    if name == "torch":
        dx, dweight = reference.rms_norm_backward(dy_MK, x_MK, weight_K, rstd.flatten())
    else:
        module = kernel("extension" if name == "cuda" else "rms_norm")
        dx, dweight = module.rms_norm_backward(dy_MK.contiguous(), x_MK.contiguous(), weight_K, rstd.flatten())
    return dx.view(x.shape), dweight


def _contiguous_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
        y, rstd, _ = norm_forward(x.detach(), weight_K.detach(), eps)
        ctx.save_for_backward(x, weight_K, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight_K, rstd = ctx.saved_tensors
        dx, dweight_K = norm_backward(dy, x, weight_K, rstd)
        return dx, dweight_K.to(weight_K.dtype), None


def rms_norm(x: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, in float32, rounded once.

    Args:
        x: BF16 [..., K]. Four axes [s, b, H, K] are heads: the last three may be views into a fused projection.
        weight_K: BF16 [K].

    Returns:
        BF16 like x.
    """
    rows = x.reshape(-1, *x.shape[-2:]) if x.dim() == 4 else x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _RmsNorm.apply(rows, weight_K, eps)  # type: ignore[no-untyped-call]
    return y.view(x.shape)
