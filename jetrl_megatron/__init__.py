"""FP8 reinforcement learning for Megatron-core: training and rollout compute the same FP8 numbers.

This package imports torch alone. What needs Megatron-core is in `jetrl_megatron.layers` and `jetrl_megatron.spec`, what
needs vLLM in `jetrl_megatron.integrations.vllm`.
"""

from jetrl_megatron.ops import quantize_activation, quantize_weight
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor

__version__ = "0.1.0.dev0"

__all__ = [
    "JETRL_FP8",
    "BlockScaledTensor",
    "Fp8BlockRecipe",
    "__version__",
    "quantize_activation",
    "quantize_weight",
]
