"""Mixtral and the dense GLM-4 for Megatron-Bridge, which has no bridges of its own for them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_DECODER, _HF = "decoder.layers.*", "model.layers.*"
_WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    f"{_DECODER}.self_attention.linear_qkv.layer_norm_weight": f"{_HF}.input_layernorm.weight",
    f"{_DECODER}.self_attention.linear_proj.weight": f"{_HF}.self_attn.o_proj.weight",
}


@functools.cache
def register_own_bridges() -> None:
    """Registers them with Megatron-Bridge, which must be importable; calling it again costs nothing."""
    transformers = importlib.import_module("transformers")
    _register(transformers.MixtralForCausalLM, "mixtral", _configure_mixtral, _mixtral_mappings)
    _register(transformers.Glm4ForCausalLM, "glm4", _configure_glm4, _glm4_mappings)


def _register(
    source: Any, model_type: str, configure: Callable[[Any, Any], None], mappings: Callable[[Any], list[Any]]
) -> None:
    """Registers a bridge for a transformers class.

    Args:
        configure: sets fields of a provider for a configuration.
        mappings: from Bridge's module of mappings to those of the family.
    """
    conversion = "megatron.bridge.models.conversion"
    model_bridge = importlib.import_module(f"{conversion}.model_bridge").MegatronModelBridge
    registry = importlib.import_module(f"{conversion}.mapping_registry").MegatronMappingRegistry
    param_mapping = importlib.import_module(f"{conversion}.param_mapping")
    gpt_model = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel

    def provider_bridge(self: Any, hf_pretrained: Any) -> Any:
        provider = model_bridge.provider_bridge(self, hf_pretrained)
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.hidden_dropout = 0.0
        configure(provider, hf_pretrained.config)
        return provider

    def mapping_registry(self: Any) -> Any:
        return registry(*mappings(param_mapping))

    methods = {"provider_bridge": provider_bridge, "mapping_registry": mapping_registry}
    bridge = type(f"{source.__name__}Bridge", (model_bridge,), methods)
    model_bridge.register_bridge(source=source, target=gpt_model, model_type=model_type)(bridge)


def _configure_mixtral(provider: Any, config: Any) -> None:
    # The experts are the only feed-forward layers, so Mixtral names their width as others name a dense one.
    provider.moe_ffn_hidden_size = config.intermediate_size
    provider.moe_grouped_gemm = True
    provider.moe_router_load_balancing_type = "aux_loss"
    provider.moe_token_dispatcher_type = "alltoall"
    # Softmax over the chosen experts alone.
    provider.moe_router_pre_softmax = False


def _mixtral_mappings(mappings: Any) -> list[Any]:
    experts = f"{_HF}.block_sparse_moe.experts.*"
    whole = {
        **_WHOLE,
        f"{_DECODER}.pre_mlp_layernorm.weight": f"{_HF}.post_attention_layernorm.weight",
        f"{_DECODER}.mlp.router.weight": f"{_HF}.block_sparse_moe.gate.weight",
        f"{_DECODER}.mlp.experts.linear_fc2.weight*": f"{experts}.w2.weight",
        f"{_DECODER}.mlp.experts.local_experts.*.linear_fc2.weight": f"{experts}.w2.weight",
    }
    gated = (f"{_DECODER}.mlp.experts.linear_fc1.weight*", f"{_DECODER}.mlp.experts.local_experts.*.linear_fc1.weight")
    return [
        *_auto(mappings, whole),
        _qkv(mappings, "weight"),
        *(
            mappings.GatedMLPMapping(megatron_param=name, gate=f"{experts}.w1.weight", up=f"{experts}.w3.weight")
            for name in gated
        ),
    ]


def _configure_glm4(provider: Any, config: Any) -> None:
    provider.add_qkv_bias = config.attention_bias
    provider.rotary_interleaved = True
    provider.transformer_layer_spec = _no_glm4_layer


def _no_glm4_layer(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "model_type='glm4': Megatron-core has no layer with GLM-4's norms behind attention and MLP, and a model "
        "without them would train to something else: set transformer_layer_spec to a layer of yours that has them as "
        "post_self_attn_layernorm and post_mlp_layernorm; its checkpoints can be converted"
    )


def _glm4_mappings(mappings: Any) -> list[Any]:
    whole = {
        **_WHOLE,
        f"{_DECODER}.mlp.linear_fc1.layer_norm_weight": f"{_HF}.post_attention_layernorm.weight",
        f"{_DECODER}.post_self_attn_layernorm.weight": f"{_HF}.post_self_attn_layernorm.weight",
        f"{_DECODER}.post_mlp_layernorm.weight": f"{_HF}.post_mlp_layernorm.weight",
        # Both keep gate above up in one matrix.
        f"{_DECODER}.mlp.linear_fc1.weight": f"{_HF}.mlp.gate_up_proj.weight",
        f"{_DECODER}.mlp.linear_fc2.weight": f"{_HF}.mlp.down_proj.weight",
    }
    return [*_auto(mappings, whole), _qkv(mappings, "weight"), _qkv(mappings, "bias")]


def _auto(mappings: Any, names: dict[str, str]) -> list[Any]:
    return [mappings.AutoMapping(megatron_param=megatron, hf_param=name) for megatron, name in names.items()]


def _qkv(mappings: Any, kind: str) -> Any:
    parts = {part: f"{_HF}.self_attn.{part}_proj.{kind}" for part in "qkv"}
    return mappings.QKVMapping(megatron_param=f"{_DECODER}.self_attention.linear_qkv.{kind}", **parts)
