"""Rollout TP sizes: legal ones pass, the others are refused by name before anything is written."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from jetrl_megatron.convert.rollout_tp import check_rollout_tp
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

QWEN2_HALF_B = {
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_hidden_layers": 48,
}


DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
}


def legal_sizes(config: object, recipe: Fp8BlockRecipe = JETRL_FP8, upto: int = 64) -> list[int]:
    legal = []
    for tp in range(1, upto + 1):
        try:
            check_rollout_tp(config, tp, recipe)
        except ValueError:
            continue
        legal.append(tp)
    return legal


def test_check_rollout_tp_qwen3_8b_every_divisor_of_the_heads() -> None:
    config = Qwen3Config(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288
    )
    assert legal_sizes(config) == [1, 2, 4, 8, 16, 32]


def test_check_rollout_tp_llama_70b_stops_where_the_feed_forward_is_cut() -> None:
    config = LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672)
    assert legal_sizes(config) == [1, 2, 4, 8, 16, 32]
    with pytest.raises(ValueError, match=r"rows of gate_proj and up_proj, .*28672 / 64 = 448 .*128; use rollout TP 1,"):
        check_rollout_tp(config, 64, JETRL_FP8)


def test_check_rollout_tp_half_billion_at_two_names_the_cut() -> None:
    check_rollout_tp(QWEN2_HALF_B, 1, JETRL_FP8)
    with pytest.raises(ValueError, match=r"q_proj: 896 / 2 = 448 is no multiple of the tile, 128; use rollout TP 1$"):
        check_rollout_tp(QWEN2_HALF_B, 2, JETRL_FP8)


@pytest.mark.parametrize(("width", "tp", "cut", "legal"), [(768, 4, 192, "1, 2"), (1408, 2, 704, "1")])
def test_check_rollout_tp_expert_width_names_the_cut(width: int, tp: int, cut: int, legal: str) -> None:
    """vllm#44763."""
    config = {**QWEN3_30B_A3B, "moe_intermediate_size": width}
    with pytest.raises(ValueError, match=rf"experts' down_proj: {width} / {tp} = {cut} .*128; use rollout TP {legal}$"):
        check_rollout_tp(config, tp, JETRL_FP8)


def test_check_rollout_tp_dense_layers_of_a_moe_count_only_where_there_are_some() -> None:
    config = {**QWEN3_30B_A3B, "intermediate_size": 128 * 3}
    assert 2 in legal_sizes(config)
    with pytest.raises(ValueError, match=r"rows of gate_proj and up_proj, columns of down_proj: 384 / 2 = 192"):
        check_rollout_tp({**config, "mlp_only_layers": [0]}, 2, JETRL_FP8)


def test_check_rollout_tp_shared_experts_count() -> None:
    with pytest.raises(ValueError, match=r"shared experts' down_proj: 384 / 2 = 192"):
        check_rollout_tp({**QWEN3_30B_A3B, "shared_expert_intermediate_size": 384}, 2, JETRL_FP8)


def test_check_rollout_tp_moe_configuration_classes() -> None:
    assert legal_sizes(Qwen3MoeConfig(**QWEN3_30B_A3B)) == [1, 2]
    mixtral = MixtralConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336)
    assert legal_sizes(mixtral) == [1, 2, 4, 8, 16]


def test_check_rollout_tp_key_value_heads_are_copied_beyond_their_number() -> None:
    config = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
    config |= {"intermediate_size": 128 * 12, "num_hidden_layers": 2}
    assert legal_sizes(config) == [1, 2, 4, 6, 12]
    with pytest.raises(ValueError, match="2 key/value heads"):
        check_rollout_tp(config, 3, JETRL_FP8)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(3, 1, 1), (7, 1, 1), (14, 2, 2), (4, 1, 1), (16, 2, 2)])
def test_check_rollout_tp_merged_scales_that_would_overlap_are_refused(heads: int, kv_heads: int, tp: int) -> None:
    config = {"hidden_size": 256, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    with pytest.raises(ValueError, match=r"rows of (q_proj|k_proj and v_proj): .* no multiple of the tile, 128"):
        check_rollout_tp({**config, "intermediate_size": 512, "num_hidden_layers": 2}, tp, JETRL_FP8)


def test_check_rollout_tp_ragged_hidden_size_has_no_legal_size() -> None:
    config = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    with pytest.raises(ValueError, match=r"hidden size\): 576 is no multiple .* no TP is legal: pad"):
        check_rollout_tp({**config, "intermediate_size": 1536}, 1, JETRL_FP8)


def test_check_rollout_tp_ignores_linears_that_stay_bf16() -> None:
    attention_free = Fp8BlockRecipe(ignore=("*.self_attention.*",))
    assert legal_sizes(QWEN2_HALF_B, attention_free) == [1, 2]
    all_layers = Fp8BlockRecipe(num_layers_at_start_in_bf16=QWEN2_HALF_B["num_hidden_layers"])
    assert legal_sizes(QWEN2_HALF_B, all_layers) == [1, 2]


@pytest.mark.parametrize("pattern", ["*.mlp.experts.*", "*.local_experts.*", "*.experts.local_experts.*.linear_fc?"])
def test_check_rollout_tp_knows_experts_by_the_names_of_their_linears(pattern: str) -> None:
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 2}
    check_rollout_tp({**sizes, **experts}, 4, Fp8BlockRecipe(ignore=(pattern,)))
    with pytest.raises(ValueError, match="768 / 4 = 192"):
        check_rollout_tp({**sizes, **experts}, 4, JETRL_FP8)


def test_check_rollout_tp_reads_the_text_part_of_a_multimodal_configuration() -> None:
    with pytest.raises(ValueError, match="896 / 2 = 448"):
        check_rollout_tp({"text_config": QWEN2_HALF_B, "hidden_size": 1024}, 2, JETRL_FP8)


def test_check_rollout_tp_deepseek_v3_stops_where_the_dense_layers_are_cut() -> None:
    assert legal_sizes(DEEPSEEK_V3, upto=128) == [1, 2, 4, 8, 16]
    with pytest.raises(
        ValueError, match=r"columns of down_proj: 18432 / 32 = 576 .*128; use rollout TP 1, 2, 4, 8, 16"
    ):
        check_rollout_tp(DEEPSEEK_V3, 32, JETRL_FP8)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_attention_heads": 2}, 2, r"rows of q_b_proj: 384 / 2 = 192 is no multiple"),
        ({"num_attention_heads": 2, "q_lora_rank": None}, 2, r"rows of q_proj: 384 / 2 = 192 is no multiple"),
        ({"q_lora_rank": 1500}, 1, r"rows of q_a_proj, columns of q_b_proj: 1500 is no multiple"),
        ({"kv_lora_rank": 500}, 1, r"columns of kv_b_proj: 500 is no multiple"),
        ({"v_head_dim": 64, "qk_nope_head_dim": 192, "num_attention_heads": 6}, 2, r"columns of o_proj: 384 / 2 = 192"),
        ({"qk_nope_head_dim": 192, "num_attention_heads": 2}, 2, r"rows of kv_b_proj: 640 / 2 = 320 is no multiple"),
    ],
)
def test_check_rollout_tp_latent_attention_names_the_cut(changes: dict[str, object], tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rollout_tp({**DEEPSEEK_V3, **changes}, tp, JETRL_FP8)
