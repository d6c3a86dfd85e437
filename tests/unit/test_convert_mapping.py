"""Names and cuts: Megatron's stored parameters against the matrices of the Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe, quantize_weight
from jetrl_megatron.convert.families import family_bridge
from jetrl_megatron.convert.hf_model import HfModel, open_hf_model
from jetrl_megatron.convert.mapping import HfMapping, LogicalMatrix
from jetrl_megatron.convert.plan import TensorSpec, bf16_modules, plan_export
from tests.unit.family_models import WHOLE_TILES, family_configs

QKV = "decoder.layers.0.self_attention.linear_qkv"
FC1 = "decoder.layers.0.mlp.linear_fc1"
ATTENTION = "model.layers.0.self_attn"
LATENT_LINEARS = [
    *(f"decoder.layers.1.self_attention.linear_{name}_proj" for name in ("q_down", "kv_down", "q_up", "kv_up")),
    *(f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc{n}" for expert in range(4) for n in (1, 2)),
]
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def opened(config: PretrainedConfig, architecture: str) -> HfModel:
    config.architectures = [architecture]
    return open_hf_model(config)


def llama(**fields: Any) -> HfModel:
    config = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64, **fields}
    return opened(LlamaConfig(**config), "LlamaForCausalLM")


def qwen2_half_billion(**fields: Any) -> HfModel:
    config = Qwen2Config(
        hidden_size=896,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        num_hidden_layers=24,
        vocab_size=151936,
        tie_word_embeddings=True,
        **fields,
    )
    return opened(config, "Qwen2ForCausalLM")


def split(hf: HfModel, parameter: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {matrix.name: matrix.tensor for matrix in HfMapping(hf).split(parameter, tensor)}


def linear_names(layers: int) -> list[str]:
    return [f"decoder.layers.{layer}.{name}" for layer in range(layers) for name in LINEARS]


def test_split_qkv_by_groups_exact() -> None:
    """NeMo-RL#2802, sglang#35703."""
    hf = llama(num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    # q0 q1 k0 v0 q2 q3 k1 v1, one value for each tile.
    stored = torch.arange(8.0).repeat_interleave(128)
    for suffix, tensor in (("weight", stored[:, None].expand(-1, 256)), ("bias", stored)):
        if suffix == "bias":
            hf = opened(Qwen2Config(**hf.config.to_dict()), "Qwen2ForCausalLM")
        parts = split(hf, f"{QKV}.{suffix}", tensor.to(torch.bfloat16))
        tiles = {name: part.view(part.shape[0], -1)[::128, 0].tolist() for name, part in parts.items()}
        assert tiles == {
            f"{ATTENTION}.q_proj.{suffix}": [0, 1, 4, 5],
            f"{ATTENTION}.k_proj.{suffix}": [2, 6],
            f"{ATTENTION}.v_proj.{suffix}": [3, 7],
        }


def test_split_fc1_into_halves_exact() -> None:
    """Megatron-LM#360."""
    hf = llama(num_attention_heads=4, num_key_value_heads=2)
    stored = torch.arange(8.0, dtype=torch.bfloat16).repeat_interleave(128)[:, None].expand(-1, 256)
    parts = split(hf, f"{FC1}.weight", stored)
    tiles = {name: part[::128, 0].tolist() for name, part in parts.items()}
    halves = {"model.layers.0.mlp.gate_proj.weight": [0, 1, 2, 3], "model.layers.0.mlp.up_proj.weight": [4, 5, 6, 7]}
    assert tiles == halves
    separate = {**split(hf, f"{FC1}.weight_w", stored[:512]), **split(hf, f"{FC1}.weight_v", stored[512:])}
    assert {name: part[::128, 0].tolist() for name, part in separate.items()} == halves


def test_half_billion_scales_and_biases() -> None:
    """Megatron-Bridge#5757, vllm#52915, torchtune#2233."""
    hf = qwen2_half_billion()
    heads = {f"{ATTENTION}.q_proj": [7, 7], f"{ATTENTION}.k_proj": [1, 7], f"{ATTENTION}.v_proj": [1, 7]}
    weights = split(hf, f"{QKV}.weight", torch.randn(1152, 896))
    assert {name: list(quantize_weight(w, JETRL_FP8).scale.shape) for name, w in weights.items()} == {
        f"{name}.weight": shape for name, shape in heads.items()
    }
    output = split(hf, "decoder.layers.0.self_attention.linear_proj.weight", torch.randn(896, 896))
    assert list(quantize_weight(output[f"{ATTENTION}.o_proj.weight"], JETRL_FP8).scale.shape) == [7, 7]
    biases = split(hf, f"{QKV}.bias", torch.randn(1152))
    assert {name: (list(b.shape), b.dtype) for name, b in biases.items()} == {
        f"{ATTENTION}.q_proj.bias": ([896], torch.bfloat16),
        f"{ATTENTION}.k_proj.bias": ([128], torch.bfloat16),
        f"{ATTENTION}.v_proj.bias": ([128], torch.bfloat16),
    }


def test_few_kv_heads_scale_shapes() -> None:
    """modelexpress#650."""
    hf = llama(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2, head_dim=128)
    parts = split(hf, f"{QKV}.weight", torch.randn(2048, 1536))
    shapes = [list(quantize_weight(part, JETRL_FP8).scale.shape) for part in parts.values()]
    assert shapes == [[12, 12], [2, 12], [2, 12]]


def test_split_cuts_the_padded_vocabulary() -> None:
    """Megatron-Bridge#5375."""
    hf = qwen2_half_billion()
    padded = torch.empty(152064, 896, dtype=torch.bfloat16)
    padded[151935] = 1
    embedding = split(hf, "embedding.word_embeddings.weight", padded)["model.embed_tokens.weight"]
    assert list(embedding.shape) == [151936, 896]
    assert embedding[-1].eq(1).all()
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight has 1000 rows, fewer than .*vocab_size=151936"):
        split(hf, "embedding.word_embeddings.weight", padded[:1000])


def test_plan_of_24_layers_has_every_norm_and_one_embedding() -> None:
    """Model-Optimizer#876, Megatron-Bridge#919, Megatron-Bridge#4694."""
    hf = qwen2_half_billion()
    plan = plan_export(hf, HfMapping(hf), linear_names(24), JETRL_FP8)
    norms = [name for name in plan.tensors if name.endswith("norm.weight")]
    assert len(norms) == 48 + 1
    assert "lm_head.weight" not in plan.tensors
    assert plan.tensors["model.embed_tokens.weight"] == TensorSpec((151936, 896), torch.bfloat16)
    assert plan.tensors["model.layers.23.mlp.down_proj.weight"] == TensorSpec((896, 4864), torch.float8_e4m3fn)
    assert plan.tensors["model.layers.23.mlp.down_proj.weight_scale_inv"] == TensorSpec((7, 38), torch.float32)
    assert sum(spec.dtype == torch.float8_e4m3fn for spec in plan.tensors.values()) == 24 * 7
    assert plan.ignored == ()


def test_plan_lists_ignored_modules_by_hugging_face_names() -> None:
    hf = llama(num_hidden_layers=2)
    recipe = Fp8BlockRecipe(ignore=("*.0.self_attention.linear_qkv",), num_layers_at_end_in_bf16=1)
    plan = plan_export(hf, HfMapping(hf), linear_names(2), recipe)
    attention = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"}
    rest = {f"model.layers.1.{name}" for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    assert set(plan.ignored) == attention | rest | {"lm_head"}


def test_plan_lists_routers_which_engines_build_as_linears() -> None:
    hf = opened(family_configs(WHOLE_TILES)["qwen3_moe"], "Qwen3MoeForCausalLM")
    experts = [f"decoder.layers.{n}.mlp.experts.local_experts.{e}.linear_fc1" for n in range(2) for e in range(4)]
    plan = plan_export(hf, HfMapping(hf), [*experts, *(name.replace("fc1", "fc2") for name in experts)], JETRL_FP8)
    routers = {f"model.layers.{layer}.mlp.gate" for layer in range(2)}
    assert routers | {"lm_head"} <= set(plan.ignored)
    assert not any("experts" in name for name in plan.ignored)


def test_bf16_modules_of_a_recipe_without_ignored_layers_are_routers_and_the_head() -> None:
    configs = family_configs(WHOLE_TILES)
    for config, architecture in ((configs["qwen3_moe"], "Qwen3MoeForCausalLM"), (configs["llama"], "LlamaForCausalLM")):
        config.architectures = [architecture]
    routers = {f"model.layers.{layer}.mlp.gate" for layer in range(configs["qwen3_moe"].num_hidden_layers)}
    assert set(bf16_modules(configs["qwen3_moe"], JETRL_FP8)) == routers | {"lm_head"}
    assert bf16_modules(configs["llama"], JETRL_FP8) == ()


def test_local_and_fused_norm_names_mean_the_same() -> None:
    families = [
        llama(),
        qwen2_half_billion(),
        opened(Qwen3Config(num_hidden_layers=1), "Qwen3ForCausalLM"),
        opened(MistralConfig(num_hidden_layers=1), "MistralForCausalLM"),
    ]
    for hf in families:
        mapping = HfMapping(hf)
        for local, fused, name in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm"),
        ):
            assert mapping.targets(f"decoder.layers.0.{local}") == (f"model.layers.0.{name}.weight",)
            assert mapping.targets(f"decoder.layers.0.{fused}") == (f"model.layers.0.{name}.weight",)


def test_split_refuses_stored_fp8() -> None:
    with pytest.raises(
        ValueError, match=r"linear_fc1\.weight is stored as torch\.float8_e4m3fn, and .* save the .* with BF16"
    ):
        split(llama(), f"{FC1}.weight", torch.zeros(1024, 256).to(torch.float8_e4m3fn))


def test_unknown_family_is_refused_by_name() -> None:
    hf = opened(PhiConfig(num_hidden_layers=1), "PhiForCausalLM")
    with pytest.raises(ValueError, match=r"'phi' is no family .*llama, mistral, .*v3.*save_hf_pretrained"):
        HfMapping(hf)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "*.experts.*.linear_fc2",
            r"linear_fc1 is FP8 and .*linear_fc2 stays BF16, .*ignore all of them \('\*\.mlp\.exp",
        ),
        ("*.local_experts.3.*", r"local_experts\.0\.linear_fc1 is FP8 and .*local_experts\.3\.linear_fc1 stays BF16"),
        (
            "*.linear_q_down_proj",
            r"linear_kv_down_proj is FP8 and .*linear_q_down_proj stays BF16, .*\('\*_down_proj'\)",
        ),
    ],
)
def test_plan_refuses_half_of_what_engines_serve_as_one(pattern: str, message: str) -> None:
    hf = opened(family_configs(WHOLE_TILES)["deepseek_v3"], "DeepseekV3ForCausalLM")
    with pytest.raises(ValueError, match=message):
        plan_export(hf, HfMapping(hf), LATENT_LINEARS, Fp8BlockRecipe(ignore=(pattern,)))
    plan = plan_export(hf, HfMapping(hf), LATENT_LINEARS, Fp8BlockRecipe(ignore=("*.mlp.experts.*", "*_down_proj")))
    assert {"model.layers.1.mlp.experts", "model.layers.1.mlp.experts.3.up_proj"} <= set(plan.ignored)


def test_plan_refuses_a_tile_of_gate_and_up() -> None:
    hf = opened(Glm4Config(num_hidden_layers=1, hidden_size=256, intermediate_size=320), "Glm4ForCausalLM")
    with pytest.raises(ValueError, match=r"gate_up_proj\.weight holds gate above up, 320 rows each, no multiple .*128"):
        plan_export(hf, HfMapping(hf), [FC1], JETRL_FP8)
    linears = [FC1, FC1.replace("fc1", "fc2")]
    plan = plan_export(hf, HfMapping(hf), linears, Fp8BlockRecipe(ignore=("*.linear_fc1",)))
    assert plan.tensors["model.layers.0.mlp.gate_up_proj.weight"] == TensorSpec((640, 256), torch.bfloat16)


def test_bridge_builds_no_glm4_without_its_norms() -> None:
    hf = opened(Glm4Config(num_hidden_layers=1), "Glm4ForCausalLM")
    provider = family_bridge(hf.config).to_megatron_provider(load_weights=False)
    with pytest.raises(ValueError, match="no layer with GLM-4's norms behind attention and MLP"):
        provider.transformer_layer_spec(provider)


@pytest.mark.parametrize("stored", ["experts.linear_fc1.weight3", "experts.local_experts.3.linear_fc1.weight"])
def test_experts_have_one_name_in_every_class(stored: str) -> None:
    families = {"mixtral": MixtralConfig(num_local_experts=4), "glm4_moe": Glm4MoeConfig(n_routed_experts=4)}
    mixtral = HfMapping(opened(families["mixtral"], "MixtralForCausalLM"))
    glm = HfMapping(opened(families["glm4_moe"], "Glm4MoeForCausalLM"))
    names = [f"model.layers.2.block_sparse_moe.experts.3.{part}.weight" for part in ("w1", "w3")]
    assert mixtral.targets(f"decoder.layers.2.mlp.{stored}") == tuple(names)
    names = [f"model.layers.2.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")]
    assert glm.targets(f"decoder.layers.2.mlp.{stored}") == tuple(names)
    module = "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1"
    assert glm.from_hf(names[0], torch.zeros(2, 2)).module == module


def test_router_bias_keeps_float32_exact() -> None:
    """sglang#37133."""
    glm = HfMapping(opened(Glm4MoeConfig(n_routed_experts=4), "Glm4MoeForCausalLM"))
    bias = torch.tensor([1 + 2**-20, -3.0, 0.1, 7.0])
    (matrix,) = glm.split("decoder.layers.2.mlp.router.expert_bias", bias)
    assert matrix.name == "model.layers.2.mlp.gate.e_score_correction_bias"
    assert matrix.tensor.dtype == torch.float32 and torch.equal(matrix.tensor, bias)


def test_split_refuses_another_models_parameters() -> None:
    with pytest.raises(ValueError, match=r"linear_qkv has 512 rows; 4 heads, 2 groups and head size 128 make 1024"):
        split(llama(num_attention_heads=4, num_key_value_heads=2, head_dim=128), f"{QKV}.weight", torch.zeros(512, 256))
    with pytest.raises(ValueError, match=r"linear_qkv\.bias has no counterpart in the Hugging Face model"):
        split(llama(), f"{QKV}.bias", torch.zeros(1024))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_without_tied_head_keeps_one_owner(order: tuple[int, int]) -> None:
    def both(head: float) -> list[LogicalMatrix]:
        named = [
            ("embedding.word_embeddings", "model.embed_tokens.weight", 1.0),
            ("output_layer", "lm_head.weight", head),
        ]
        matrices = [LogicalMatrix(module, name, torch.full((2, 2), value)) for module, name, value in named]
        return [matrices[index] for index in order]

    tied = HfMapping(qwen2_half_billion())
    assert [matrix.name for matrix in tied.without_tied_head(both(1.0))] == ["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"differ, but config\.json ties them"):
        list(tied.without_tied_head(both(2.0)))
    untied = HfMapping(llama())
    assert len(list(untied.without_tied_head(both(2.0)))) == 2
