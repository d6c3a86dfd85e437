"""The operators around the linears for vLLM on a Hopper GPU, with the numbers of the parity layer spec.

An engine started with `Fp8BlockRecipe.to_vllm_engine_args()` gets them; any other engine keeps vLLM's own. Operator by
operator, vLLM 0.26:

| operator  | here                                       | why                                                      |
|-----------|--------------------------------------------|----------------------------------------------------------|
| RMSNorm   | the kernels of training, as provider       | vLLM's change their reduction at 256 tokens; Inductor's  |
|           | "jetrl" of vLLM's own IR operators         | belong to a compiled graph that training has not         |
| SwiGLU    | the kernel of training, in SiluAndMul      | so that training may fuse it with quantisation           |
| RoPE      | vLLM's own CUDA operator                   | one float32 sum of exact products: easy to meet          |
| attention | vLLM's FlashAttention 3, num_splits = 1    | training calls the same binary; a split depends on the   |
|           |                                            | batch, and the blocks of keys on the number of queries   |
| quantiser | vLLM's own CUDA operator; in a compiled    | byte-equal to training's                                 |
|           | graph after norm or SwiGLU training's      |                                                          |
|           | fused kernels, see `vllm_fusion`           |                                                          |
| linears   | vLLM's DeepGEMM path                       | training calls the same kernels                          |
| lm_head   | DeepGEMM's BF16 product                    | cuBLAS chooses by the number of rows                     |
| log-prob  | vLLM's own Triton kernel (V2 model runner) | training sums in its order                               |
"""

# Shape suffixes: T tokens, H heads, D head size, F features of a gated pair's half.

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.ir.op import IrOp
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from jetrl_megatron.integrations.vllm import carried_recipe
from jetrl_megatron.integrations.vllm_fusion import offer_quantized_outputs
from jetrl_megatron.ops.attention import fewest_queries
from jetrl_megatron.ops.bf16_linear import row_invariant_linear, row_invariant_refusal
from jetrl_megatron.ops.norm import norm_forward
from jetrl_megatron.ops.swiglu import silu_and_mul
from jetrl_megatron.recipe import VLLM_CONFIG_KEY, VLLM_PROVIDER, Fp8BlockRecipe


def register_gpu_operators() -> None:
    """Offers the operators to vLLM; may be called any number of times."""
    for layer, ours in ((SiluAndMul, ParitySiluAndMul), (LogitsProcessor, ParityLogitsProcessor)):
        if layer.__name__ not in op_registry_oot:
            name = layer.name
            layer.register_oot(ours, name=layer.__name__)
            ours.name = name  # the one under which `custom_ops` switches it
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{ParityFlashAttentionBackend.__name__}")
    if VLLM_PROVIDER not in IrOp.registry["rms_norm"].impls:
        IrOp.registry["rms_norm"].register_impl(VLLM_PROVIDER, supports_args=_takes_norm)(_rms_norm)
        IrOp.registry["fused_add_rms_norm"].register_impl(VLLM_PROVIDER, supports_args=_takes_add_norm)(_add_rms_norm)


def engine_recipe(config: VllmConfig | None = None) -> Fp8BlockRecipe | None:
    """The recipe whose parity operators an engine was asked to run, None where it was not.

    Args:
        config: the engine's configuration; the current one by default.

    Raises:
        ValueError: the checkpoint carries another recipe, or the engine's scale format is not the recipe's.
    """
    config = get_current_vllm_config() if config is None else config
    additional = config.additional_config
    stamp = additional.get(VLLM_CONFIG_KEY) if isinstance(additional, dict) else None
    if stamp is None:
        return None
    recipe = Fp8BlockRecipe.from_stamp(stamp, "additional_config")
    carried = None if config.model_config is None else carried_recipe(config.model_config.hf_config)
    if carried is not None:
        recipe.require_same(carried, ours="engine arguments", theirs="checkpoint")
    if is_deep_gemm_e8m0_used() != (recipe.scale_format == "ue8m0"):
        raise ValueError(
            f"VLLM_USE_DEEP_GEMM_E8M0 is {'on' if is_deep_gemm_e8m0_used() else 'off'}, but the recipe's scale_format "
            f"is {recipe.scale_format!r}: start vLLM with the environment of recipe.to_vllm_env()"
        )
    return recipe


# What torch.compile sees are opaque operators: their kernels choose themselves, and their bytes stay what they are.


@torch.library.custom_op("jetrl_megatron::rms_norm", mutates_args=())
def _norm_operator(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return norm_forward(x, weight, eps)[0]


@_norm_operator.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("jetrl_megatron::add_rms_norm", mutates_args=())
def _add_norm_operator(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, total = norm_forward(x, weight, eps, residual)
    assert total is not None
    return y, total


@_add_norm_operator.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("jetrl_megatron::silu_and_mul", mutates_args=())
def _swiglu_operator(gate_up: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(gate_up)


@_swiglu_operator.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("jetrl_megatron::row_invariant_linear", mutates_args=())
def _head_operator(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return row_invariant_linear(x, weight)


@_head_operator.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _takes_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    plain = weight is not None and variance_size is None
    return plain and x.dtype == torch.bfloat16 and x.is_cuda


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    assert weight is not None
    y: torch.Tensor = _norm_operator(x, weight, epsilon)
    return y


def _takes_add_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _takes_norm(x, weight, epsilon, variance_size) and x_residual.dtype == torch.bfloat16


def _add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert weight is not None
    pair: tuple[torch.Tensor, torch.Tensor] = _add_norm_operator(x, x_residual, weight, epsilon)
    return pair


class ParitySiluAndMul(SiluAndMul):
    """silu(gate) rounded to BF16, times up, with training's kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        recipe = engine_recipe()
        self.parity = recipe is not None
        if recipe is not None:
            offer_quantized_outputs(get_current_vllm_config(), recipe)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [..., F] from gate and up [..., 2F]."""
        y: torch.Tensor = _swiglu_operator(x) if self.parity else super().forward_cuda(x)
        return y


class ParityLogitsProcessor(LogitsProcessor):
    """lm_head with a product whose rows do not depend on the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parity = engine_recipe() is not None
        if self.parity and (reason := row_invariant_refusal(torch.device("cuda"))) is not None:
            raise ValueError(f"the parity lm_head cannot run: {reason}")

    def _apply_head(
        self, lm_head: VocabParallelEmbedding, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.parity:
            logits: torch.Tensor = super()._apply_head(lm_head, hidden_states, embedding_bias)
            return logits
        weight: torch.Tensor = lm_head.weight
        if embedding_bias is not None or weight.dtype != torch.bfloat16:
            raise ValueError(
                f"lm_head is {weight.dtype}, bias={embedding_bias is not None}: the parity lm_head is BF16 without "
                "bias; serve without recipe.to_vllm_engine_args()"
            )
        result: torch.Tensor = _head_operator(hidden_states, weight)
        return result


class ParityFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """vLLM's builder, which never lets FlashAttention split the KV axis, and has it add up keys in training's blocks.

    vLLM allows splits by the batch's size: none of its settings forbids them in every step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not vars(self)["use_full_cuda_graph"]:
            # Without graphs there is no buffer for the schedule that is made ahead; FlashAttention then makes its own.
            self.aot_schedule, self.use_full_cuda_graph = False, True
        # In the steps up to this size the number of splits is bounded by the next attribute: in all of them.
        self.max_cudagraph_size = sys.maxsize
        self.max_num_splits = 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """What vLLM builds, for `fewest_queries` at least."""
        queries = max(common_attn_metadata.max_query_len, fewest_queries(self.headdim))
        common = dataclasses.replace(common_attn_metadata, max_query_len=queries)
        return super().build(common_prefix_len, common, fast_build)


class ParityFlashAttentionBackend(FlashAttentionBackend):
    """vLLM's FlashAttention 3 backend with `ParityFlashAttentionMetadataBuilder`."""

    @staticmethod
    def get_name() -> str:
        """The name under which plugins register a backend."""
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """ParityFlashAttentionMetadataBuilder."""
        return ParityFlashAttentionMetadataBuilder
