"""Mixtral for Megatron-Bridge, which has no bridge of its own for it."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def register_mixtral() -> None:
    """Registers the bridge with Megatron-Bridge, which must be importable; calling it again costs nothing."""
    conversion = "megatron.bridge.models.conversion"
    model_bridge = importlib.import_module(f"{conversion}.model_bridge").MegatronModelBridge
    registry = importlib.import_module(f"{conversion}.mapping_registry").MegatronMappingRegistry
    gpt_model = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel
    mixtral = importlib.import_module("transformers").MixtralForCausalLM

    def provider_bridge(self: Any, hf_pretrained: Any) -> Any:
        provider = model_bridge.provider_bridge(self, hf_pretrained)
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.hidden_dropout = 0.0
        # The experts are the only feed-forward layers, so Mixtral names their width as others name a dense one.
        provider.moe_ffn_hidden_size = hf_pretrained.config.intermediate_size
        provider.moe_grouped_gemm = True
        provider.moe_router_load_balancing_type = "aux_loss"
        provider.moe_token_dispatcher_type = "alltoall"
        # Softmax over the chosen experts alone.
        provider.moe_router_pre_softmax = False
        return provider

    def mapping_registry(self: Any) -> Any:
        return registry(*_mixtral_mappings())

    bridge = type(
        "MixtralBridge", (model_bridge,), {"provider_bridge": provider_bridge, "mapping_registry": mapping_registry}
    )
    model_bridge.register_bridge(source=mixtral, target=gpt_model, model_type="mixtral")(bridge)


def _mixtral_mappings() -> list[Any]:
    mappings = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    decoder, hf = "decoder.layers.*", "model.layers.*"
    experts = f"{hf}.block_sparse_moe.experts.*"
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        f"{decoder}.self_attention.linear_qkv.layer_norm_weight": f"{hf}.input_layernorm.weight",
        f"{decoder}.self_attention.linear_proj.weight": f"{hf}.self_attn.o_proj.weight",
        f"{decoder}.pre_mlp_layernorm.weight": f"{hf}.post_attention_layernorm.weight",
        f"{decoder}.mlp.router.weight": f"{hf}.block_sparse_moe.gate.weight",
        f"{decoder}.mlp.experts.linear_fc2.weight*": f"{experts}.w2.weight",
        f"{decoder}.mlp.experts.local_experts.*.linear_fc2.weight": f"{experts}.w2.weight",
    }
    gated = (f"{decoder}.mlp.experts.linear_fc1.weight*", f"{decoder}.mlp.experts.local_experts.*.linear_fc1.weight")
    qkv = {part: f"{hf}.self_attn.{part}_proj.weight" for part in "qkv"}
    return [
        *(mappings.AutoMapping(megatron_param=megatron, hf_param=name) for megatron, name in whole.items()),
        mappings.QKVMapping(megatron_param=f"{decoder}.self_attention.linear_qkv.weight", **qkv),
        *(
            mappings.GatedMLPMapping(megatron_param=name, gate=f"{experts}.w1.weight", up=f"{experts}.w3.weight")
            for name in gated
        ),
    ]
