"""Megatron-core's parallel linears with blockwise FP8 in all three GEMMs."""

from jetrl_megatron.layers.column_parallel import JetRLColumnParallelLinear
from jetrl_megatron.layers.fp8_linear import Fp8LinearMixin
from jetrl_megatron.layers.layernorm_column_parallel import JetRLLayerNormColumnParallelLinear
from jetrl_megatron.layers.mlp import JetRLMLP
from jetrl_megatron.layers.row_parallel import JetRLRowParallelLinear
from jetrl_megatron.layers.weight import VersionedParameter, WeightCache

__all__ = [
    "Fp8LinearMixin",
    "JetRLColumnParallelLinear",
    "JetRLLayerNormColumnParallelLinear",
    "JetRLMLP",
    "JetRLRowParallelLinear",
    "VersionedParameter",
    "WeightCache",
]
