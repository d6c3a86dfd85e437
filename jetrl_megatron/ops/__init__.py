"""Quantisers and GEMMs, each on the candidate that `select` chose for the device."""

from jetrl_megatron.ops.backends import Gemm, Quantizer
from jetrl_megatron.ops.linear import LinearOperand, quantize_activation, quantize_weight
from jetrl_megatron.ops.selection import GEMMS, QUANTIZERS, select, select_gemm, select_quantizer

__all__ = [
    "GEMMS",
    "QUANTIZERS",
    "Gemm",
    "LinearOperand",
    "Quantizer",
    "quantize_activation",
    "quantize_weight",
    "select",
    "select_gemm",
    "select_quantizer",
]
