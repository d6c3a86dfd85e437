"""Megatron-core's parallel linears with blockwise FP8 in all three GEMMs, and parity operators around them."""

from jetrl_megatron.layers.attention import JetRLFlashAttention, JetRLSelfAttention
from jetrl_megatron.layers.column_parallel import JetRLColumnParallelLinear
from jetrl_megatron.layers.fp8_linear import Fp8LinearMixin
from jetrl_megatron.layers.layernorm_column_parallel import JetRLLayerNormColumnParallelLinear
from jetrl_megatron.layers.mlp import JetRLMLP
from jetrl_megatron.layers.output_layer import JetRLOutputLayer, use_parity_head
from jetrl_megatron.layers.rms_norm import JetRLRMSNorm
from jetrl_megatron.layers.row_parallel import JetRLRowParallelLinear
from jetrl_megatron.layers.weight import VersionedParameter, WeightCache

__all__ = [
    "Fp8LinearMixin",
    "JetRLColumnParallelLinear",
    "JetRLFlashAttention",
    "JetRLLayerNormColumnParallelLinear",
    "JetRLMLP",
    "JetRLOutputLayer",
    "JetRLRMSNorm",
    "JetRLRowParallelLinear",
    "JetRLSelfAttention",
    "VersionedParameter",
    "WeightCache",
    "use_parity_head",
]
