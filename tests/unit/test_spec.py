"""Spec transformation: what is swapped, what stays, and models built from the result."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron import spec as specs
from jetrl_megatron.layers import (
    Fp8LinearMixin,
    JetRLColumnParallelLinear,
    JetRLLayerNormColumnParallelLinear,
    JetRLRowParallelLinear,
)

pytestmark = pytest.mark.usefixtures("megatron")
TOKENS = torch.arange(24).view(2, 12)


def config(**changes) -> TransformerConfig:
    settings = {
        "num_layers": 3,
        "hidden_size": 256,
        "ffn_hidden_size": 384,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 64,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
    }
    return TransformerConfig(**{**settings, **changes})


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 192,
    "moe_shared_expert_intermediate_size": 256,
    "moe_token_dispatcher_type": "allgather",
    "moe_layer_freq": [0, 1, 1],
}


def gpt(spec, settings: TransformerConfig, **options) -> GPTModel:
    torch.manual_seed(0)
    options = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope", **options}
    return GPTModel(settings, spec, 64, 32, **options)


def loss(model: GPTModel) -> torch.Tensor:
    mask = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), 1)
    return model(TOKENS, torch.arange(12).expand(2, 12), mask, labels=TOKENS).float().mean()


def kinds(model: torch.nn.Module) -> dict[str, str]:
    linears = (ColumnParallelLinear, RowParallelLinear)
    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, linears)}


def test_spec_local_dense_swaps_all_but_the_output_layer():
    original = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    untouched = copy.deepcopy(original)
    swapped = specs.jetrl_spec(original)
    assert repr(original) == repr(untouched)
    model = gpt(swapped, config(qk_layernorm=True))
    found = kinds(model)
    assert found.pop("output_layer") == "ColumnParallelLinear"
    assert len(found) == 3 * 4 and all(name.startswith("JetRL") for name in found.values())
    stock = gpt(original, config(qk_layernorm=True))
    assert list(model.state_dict()) == list(stock.state_dict())
    model.load_state_dict(stock.state_dict())
    # Eight-bit operands in 12 linears against BF16: close, and not the same computation.
    fp8, bf16 = loss(model).item(), loss(stock).item()
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=0.02)


def test_spec_builder_takes_the_local_builders_arguments():
    spec = specs.get_gpt_layer_jetrl_spec(qk_layernorm=True, normalization="RMSNorm")
    assert repr(spec) == repr(specs.gpt_layer_qk_norm_spec)
    assert spec.submodules.self_attention.submodules.linear_qkv is JetRLColumnParallelLinear


def test_spec_module_level_objects_build_models():
    for spec, settings in (
        (specs.gpt_layer_spec, config()),
        (specs.gpt_layer_qk_norm_spec, config(qk_layernorm=True)),
    ):
        model = gpt(spec, settings)
        assert sum(name.startswith("JetRL") for name in kinds(model).values()) == 12
        assert torch.isfinite(loss(model))


def test_spec_moe_sequential_and_shared_experts_and_mtp():
    settings = config(**MOE, mtp_num_layers=1)
    block = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    mtp = get_gpt_mtp_block_spec(settings, block, use_transformer_engine=False)
    model = gpt(specs.jetrl_spec(block), settings, mtp_block_spec=specs.jetrl_spec(mtp))
    found = kinds(model)
    stock = {name for name, kind in found.items() if not kind.startswith("JetRL")}
    assert stock == {"output_layer", "mtp.layers.0.eh_proj"}
    assert found["decoder.layers.1.mlp.experts.local_experts.1.linear_fc2"] == "JetRLRowParallelLinear"
    assert found["decoder.layers.1.mlp.shared_experts.linear_fc1"] == "JetRLColumnParallelLinear"
    assert "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv" in found
    value = loss(model)
    value.backward()
    assert torch.isfinite(value)
    experts = [p for n, p in model.named_parameters() if ".local_experts." in n]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in experts)


def test_spec_transformer_engine_fused_norm_keeps_state_dict_keys():
    spec = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(te.TELayerNormColumnParallelLinear, te.TERowParallelLinear, None)
    )
    swapped = specs.jetrl_spec(spec)
    assert swapped.submodules.linear_fc1 is JetRLLayerNormColumnParallelLinear
    mlp = MLP(config(), swapped.submodules, ffn_hidden_size=384)
    assert set(mlp.state_dict()) == {
        "linear_fc1.layer_norm_weight",
        "linear_fc1.weight",
        "linear_fc1._extra_state",
        "linear_fc2.weight",
        "linear_fc2._extra_state",
    }


def test_spec_hybrid_stack_swaps_attention_and_mlp_alone():
    stack = specs.jetrl_spec(hybrid_stack_spec).submodules
    attention = stack.attention_layer.submodules.self_attention.submodules
    assert attention.linear_qkv is JetRLLayerNormColumnParallelLinear
    assert attention.linear_proj is JetRLRowParallelLinear
    assert stack.mlp_layer.submodules.mlp.keywords["submodules"].linear_fc2 is JetRLRowParallelLinear
    mixer = stack.mamba_layer.submodules.mixer
    assert mixer.module is MambaMixer and mixer is hybrid_stack_spec.submodules.mamba_layer.submodules.mixer
    assert stack.mtp_block_spec.submodules.layer_specs[0].submodules.eh_proj is te.TEColumnParallelLinear


def test_spec_hybrid_model_trains(monkeypatch):
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not te.HAVE_TE:  # HybridStack's final norm is TransformerEngine's whatever the spec says
        monkeypatch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)
    model = HybridModel(
        config=config(num_layers=4),
        hybrid_stack_spec=specs.jetrl_spec(hybrid_stack_spec),
        vocab_size=64,
        max_sequence_length=32,
        hybrid_layer_pattern="*-*-",
        position_embedding_type="rope",
    )
    found = kinds(model)
    assert sum(kind.startswith("JetRL") for kind in found.values()) == 8
    value = loss(model)
    value.backward()
    assert torch.isfinite(value)


def test_spec_choices_go_by_layer_number_and_name():
    recipe = Fp8BlockRecipe(num_layers_at_start_in_bf16=1, ignore=("decoder.layers.2.mlp.linear_fc2",))
    model = gpt(specs.get_gpt_layer_jetrl_spec(normalization="RMSNorm", recipe=recipe), config())
    quantized = {name: m.quantized for name, m in model.named_modules() if isinstance(m, Fp8LinearMixin)}
    bf16 = {name for name, is_fp8 in quantized.items() if not is_fp8}
    assert bf16 == {name for name in quantized if name.startswith("decoder.layers.0.")} | {
        "decoder.layers.2.mlp.linear_fc2"
    }
    assert len(quantized) == 12 and type(model.decoder.layers[0]).__name__ == "TransformerLayer"
    assert torch.isfinite(loss(model))


def test_spec_recipe_reaches_every_linear():
    recipe = Fp8BlockRecipe(scale_format="fp32")
    model = gpt(specs.get_gpt_layer_jetrl_spec(normalization="RMSNorm", recipe=recipe), config())
    recipes = [m.recipe for m in model.modules() if isinstance(m, Fp8LinearMixin)]
    assert len(recipes) == 12 and set(recipes) == {recipe}


def test_spec_partials_and_lists_are_transformed():
    partial = functools.partial(MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear, None))
    (swapped,) = specs.jetrl_spec([partial])
    assert swapped.keywords["submodules"].linear_fc1 is JetRLColumnParallelLinear


def test_spec_without_linears_raises():
    with pytest.raises(ValueError, match="holds no Column- or RowParallelLinear to swap"):
        specs.jetrl_spec(ModuleSpec(module=torch.nn.Identity))


def test_provider_gives_fp8_linears():
    provider = specs.JetRLSpecProvider(Fp8BlockRecipe(scale_format="fp32"))
    assert provider.column_parallel_linear().module is JetRLColumnParallelLinear
    assert specs.JetRLSpecProvider().row_parallel_linear() is JetRLRowParallelLinear
    assert specs.JetRLSpecProvider().column_parallel_layer_norm_linear() is JetRLLayerNormColumnParallelLinear
    experts = specs.JetRLSpecProvider().grouped_mlp_modules(True).keywords["submodules"]
    assert experts.linear_fc1 is JetRLColumnParallelLinear
    with pytest.raises(ValueError, match=r"use jetrl_spec\(spec, recipe\)"):
        specs.JetRLSpecProvider(Fp8BlockRecipe(ignore=("*.linear_fc2",)))


def test_spec_config_fp8_explains():
    settings = config()
    settings.fp8 = "e4m3"
    with pytest.raises(ValueError, match="config.fp8='e4m3' asks TransformerEngine"):
        gpt(specs.gpt_layer_spec, settings)
    assert JETRL_FP8.scale_format == "ue8m0"
