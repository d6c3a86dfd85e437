"""Quantisers and GEMM, each on the backend that `select` chose for the device."""

from jetrl_megatron.ops.backends import BACKENDS, Backend, select
from jetrl_megatron.ops.linear import LinearOperand, gemm, quantize_activation, quantize_weight

__all__ = [
    "BACKENDS",
    "Backend",
    "LinearOperand",
    "gemm",
    "quantize_activation",
    "quantize_weight",
    "select",
]
