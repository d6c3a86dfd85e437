"""The operators around the linears for vLLM's CPU backend, with the numbers of Megatron's own forward.

FP8 does not forgive small differences. A code is a step of up to 1/8, so an input that moves by its last BF16 bit takes
another code once in some sixteen times, and after a few layers training and rollout have independent quantisation
noise: as much as if one of them did not quantise. vLLM's CPU operators differ from Megatron's in such bits:

| operator  | vLLM on a CPU                                    | here, as Megatron (and vLLM on CUDA) has it      |
|-----------|--------------------------------------------------|--------------------------------------------------|
| RMSNorm   | of the float32 sum of input and residual,        | of the sum rounded to BF16, one rounding         |
|           | rounded before and after the weight              |                                                  |
| RoPE      | float32; truncated to BF16 without AVX512        | BF16 products and sum                            |
| attention | float32, truncated without AVX512; sums depend   | scores and weights rounded to BF16, sums exact   |
|           | on how the batch is cut                          |                                                  |
| lm_head   | sums depend on the number of rows                | sums exact                                       |

An exact sum is one in float64: its rounding does not depend on order, batch or machine. Megatron's side sums exactly
under `jetrl_megatron.verify.exact_sums.ExactSums`.

Models whose checkpoint carries a recipe get these operators, all others keep vLLM's.
"""

# Shape suffixes: T tokens of a batch, Q query tokens and L tokens so far of one sequence, H query heads, G KV heads,
# D head size, V vocabulary rows that the rank holds, K hidden size.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from jetrl_megatron.integrations.vllm import carried_recipe
from jetrl_megatron.tensor import ceil_div


def register_operators() -> None:
    """Has vLLM build these classes in the place of its own; may be called any number of times."""
    for layer, ours in (
        (RMSNorm, MegatronRMSNorm),
        (RotaryEmbedding, MegatronRotaryEmbedding),
        (Llama3RotaryEmbedding, MegatronLlama3RotaryEmbedding),
        (LogitsProcessor, ExactLogitsProcessor),
    ):
        if layer.__name__ not in op_registry_oot:
            layer.register_oot(ours, name=layer.__name__)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ExactAttentionBackend.__name__}")


def _model_carries_recipe() -> bool:
    model_config = get_current_vllm_config().model_config
    return model_config is not None and carried_recipe(model_config.hf_config) is not None


class MegatronRMSNorm(RMSNorm):
    """RMSNorm of the BF16 residual stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = self.has_weight and self.variance_size_override is None
        self.as_megatron = plain and _model_carries_recipe()

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x), or norm(x + residual) and x + residual; all BF16 [T, K]."""
        if not self.as_megatron:
            result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = super().forward_native(x, residual)
            return result
        if residual is not None:
            x = x + residual
        normed = F.rms_norm(x, (x.shape[-1],), self.weight.data, self.variance_epsilon)
        return normed if residual is None else (normed, x)


class MegatronRotaryEmbedding(RotaryEmbedding):
    """RoPE with a rounding after each product, as torch computes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.as_megatron = _model_carries_recipe()

    def forward_cpu(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Query [T, H * D] and key [T, G * D], rotated."""
        forward = super().forward_native if self.as_megatron else super().forward_cpu
        rotated: tuple[torch.Tensor, torch.Tensor | None] = forward(positions, query, key)
        return rotated


class MegatronLlama3RotaryEmbedding(Llama3RotaryEmbedding, MegatronRotaryEmbedding):
    """The same, with the frequencies of Llama 3."""


class ExactLogitsProcessor(LogitsProcessor):
    """lm_head with exact sums."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.as_megatron = _model_carries_recipe()
        self._weight_VK = torch.empty(0, dtype=torch.bfloat16)
        self._exact_VK = torch.empty(0, dtype=torch.float64)

    def _apply_head(
        self, lm_head: VocabParallelEmbedding, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight_VK: torch.Tensor = lm_head.weight
        if not self.as_megatron or embedding_bias is not None or weight_VK.dtype != torch.bfloat16:
            logits: torch.Tensor = super()._apply_head(lm_head, hidden_states, embedding_bias)
            return logits
        # A write through `.data`, which is how vLLM loads, leaves no other trace than the bytes.
        if not _same_bytes(weight_VK, self._weight_VK):
            self._weight_VK, self._exact_VK = weight_VK.data.clone(), weight_VK.data.double()
        return (hidden_states.double() @ self._exact_VK.t()).to(torch.bfloat16)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    # numpy compares several times as fast as torch.equal.
    return bool((a.data.view(torch.int16).numpy() == b.view(torch.int16).numpy()).all())


class ExactAttentionImpl(CPUAttentionBackendImpl):
    """Causal attention of one sequence after the other, with exact sums."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = self.attn_type == AttentionType.DECODER and self.sinks is None and self.alibi_slopes is None
        plain = plain and self.sliding_window == -1 and not self.logits_soft_cap and not self.is_fp8_kv_cache
        self.as_megatron = plain and self.kv_sharing_target_layer_name is None and _model_carries_recipe()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of query BF16 [T, H, D] over the cache, written to output [T, H, D].

        Args:
            kv_cache: [blocks, G, tokens a block, 2 * D]: key, then value.
        """
        if not self.as_megatron or attn_metadata is None or not attn_metadata.causal:
            arguments = layer, query, key, value, kv_cache, attn_metadata, output, *args
            result: torch.Tensor = super().forward(*arguments, **kwargs)
            return result
        self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        size = kv_cache.shape[2]
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            held = attn_metadata.block_table[row, : ceil_div(length, size)].long()
            kv_GLD = kv_cache[held].transpose(0, 1).flatten(1, 2)[:, :length]
            tokens = slice(starts[row], starts[row + 1])
            keys_GLD, values_GLD = kv_GLD.chunk(2, dim=-1)
            output[tokens] = causal_attention(query[tokens], keys_GLD, values_GLD, self.scale).view_as(output[tokens])
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Puts key and value [T, G, D] into the cache."""
        if not self.as_megatron:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        size, tokens = kv_cache.shape[2], len(slot_mapping)
        kv_cache[slot_mapping // size, :, slot_mapping % size] = torch.cat([key[:tokens], value[:tokens]], dim=-1)


class ExactAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `ExactAttentionImpl`."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """ExactAttentionImpl."""
        return ExactAttentionImpl


def causal_attention(
    query_QHD: torch.Tensor, keys_GLD: torch.Tensor, values_GLD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of a sequence's last Q tokens, as Megatron's DotProductAttention computes it with exact sums.

    Scores are rounded to BF16, weights to float32 and then to BF16, the result to BF16.

    Returns:
        BF16 [Q, H, D].
    """
    queries, length = query_QHD.shape[0], keys_GLD.shape[1]
    query_GQD = query_QHD.transpose(0, 1).reshape(keys_GLD.shape[0], -1, query_QHD.shape[2])
    scores = ((query_GQD.double() @ keys_GLD.double().transpose(1, 2)) * scale).to(torch.bfloat16)
    later_QL = torch.ones(queries, length, dtype=torch.bool).triu(length - queries + 1)
    scores_HQL = scores.view(query_QHD.shape[1], queries, length).double().masked_fill(later_QL, -torch.inf)
    weights_HQL = scores_HQL.softmax(-1).float().to(torch.bfloat16)
    context = weights_HQL.view_as(scores).double() @ values_GLD.double()
    return context.to(torch.bfloat16).view(-1, queries, query_QHD.shape[2]).transpose(0, 1)
