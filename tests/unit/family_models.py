"""A small random model of every family that the converter knows, and what an export of it must hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from jetrl_megatron import JETRL_FP8, quantize_weight
from jetrl_megatron.convert.export import convert_checkpoint
from tests.unit.megatron_layouts import Layout, megatron_parameters, save_torch_dist

RAGGED: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "moe_intermediate_size": 160,
    "num_hidden_layers": 4,
    "vocab_size": 200,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
    "qwen2": {"num_attention_heads": 12, "head_dim": 16},
    "glm4": {"intermediate_size": 256},
}
"""Widths that are no multiple of a tile, on one rank or on all."""
WHOLE_TILES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "glm4": {},
}
"""Widths that engines serve: whole tiles."""
MIXED = ("glm4_moe", "deepseek_v3")
"""Families with dense layers among those with experts."""
DENSE = ("llama", "mistral", "qwen2", "qwen3", "glm4", "gemma2", "gemma3_text")
_EXPERT_KEYS = ("moe_intermediate_size",)
_LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Engines take a Qwen2's head size to be hidden size / heads; a GLM-4 has gate and up in one matrix of whole tiles.
_OWN = ("qwen2", "glm4")


def family_configs(sizes: dict[str, Any]) -> dict[str, PretrainedConfig]:
    """A configuration of every family, by its model_type."""
    common = {key: value for key, value in sizes.items() if key not in (*_EXPERT_KEYS, *_LATENT_KEYS, *_OWN)}
    common |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_experts_per_tok": 2, **{key: sizes[key] for key in _EXPERT_KEYS}}
    shared = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    latent = {"n_group": 2, "topk_group": 1, **{key: sizes[key] for key in _LATENT_KEYS}}
    # vLLM asks for these two, and the configuration class does not know them.
    latent |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    untied = {"tie_word_embeddings": False}
    heads = common["num_attention_heads"]
    return {
        "llama": LlamaConfig(**common, **untied),
        "mistral": MistralConfig(**common, **untied),
        "qwen2": Qwen2Config(**{**common, **sizes["qwen2"]}, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**common, **untied),
        "qwen3_moe": Qwen3MoeConfig(**common, **experts, **untied, num_experts=4),
        "mixtral": MixtralConfig(**common, **untied, num_local_experts=4),
        "glm4": Glm4Config(**{**common, **sizes["glm4"]}, **untied, attention_bias=True),
        "gemma2": Gemma2Config(**common),
        "gemma3_text": Gemma3TextConfig(**common),
        "glm4_moe": Glm4MoeConfig(**common, **experts, **shared, **untied, attention_bias=True, use_qk_norm=True),
        "deepseek_v3": DeepseekV3Config(
            **{**common, "num_key_value_heads": heads}, **experts, **shared, **latent, **untied
        ),
    }


def _tile_factors(shape: torch.Size, seed: int) -> torch.Tensor:
    """Powers of two that differ from tile to tile and between matrices, bfloat16: a misplaced scale is then seen."""
    rows, columns = (torch.arange(size) // JETRL_FP8.block for size in shape)
    return torch.exp2((3 * rows[:, None] + 5 * columns + seed) % 7 - 3).bfloat16()


_LINEAR = re.compile(
    r"\.((([qkvo]|gate|up|gate_up|down|q_a|q_b|kv_b)_proj)|kv_a_proj_with_mqa|experts\.\d+\.w[123])\.weight$"
)


class Model:
    """A random model of a family: its folder, its configuration, its tensors and what an export of it must hold."""

    def __init__(self, config: PretrainedConfig, folder: Path) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                torch.nn.init.normal_(tensor, std=0.02)
        model.save_pretrained(folder)
        self.folder, self.config = folder, config
        self.tensors = load_file(folder / "model.safetensors")
        for name, tensor in self.tensors.items():
            if name.endswith("e_score_correction_bias"):
                self.tensors[name] = torch.randn(tensor.shape)
        self.tensors |= self._mtp_tensors()
        for number, (name, tensor) in enumerate(self.tensors.items()):
            if tensor.dim() == 2:
                self.tensors[name] = tensor * _tile_factors(tensor.shape, number)
        self.expected = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if _LINEAR.search(name):
                quantized = quantize_weight(tensor, JETRL_FP8)
                self.expected[name], self.expected[name + "_scale_inv"] = quantized.data, quantized.scale

    def _mtp_tensors(self) -> dict[str, torch.Tensor]:
        layers, hidden = self.config.num_hidden_layers, self.config.hidden_size
        if not getattr(self.config, "num_nextn_predict_layers", 0):
            return {}
        old, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
        inner = {
            name.replace(old, new): torch.randn_like(t) for name, t in self.tensors.items() if name.startswith(old)
        }
        joint = {
            f"{new}{norm}.weight": torch.randn(hidden).bfloat16() for norm in ("enorm", "hnorm", "shared_head.norm")
        }
        return {**inner, **joint, f"{new}eh_proj.weight": torch.randn(hidden, 2 * hidden).bfloat16()}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def export_of_family(config: PretrainedConfig, work: Path, out: Path, **options: Any) -> Model:
    """Converts a random model's checkpoint of two tensor-parallel ranks, with options of the conversion."""
    source = work / f"{out.name}-source"
    model = Model(config, source / "hf")
    parameters = megatron_parameters(model.tensors, config, fused=False)
    save_torch_dist(source / "ck", parameters, config, Layout(tp=2), stacked=config.model_type not in MIXED)
    convert_checkpoint(source / "ck", out, hf_config=source / "hf", **options)
    return model
