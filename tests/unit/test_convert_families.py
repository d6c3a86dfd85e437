"""Every family under every layout and in both formats: always the bytes of quantising the model's own matrices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
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
from jetrl_megatron.convert.families import FAMILIES
from tests.unit.megatron_layouts import Layout, megatron_parameters, save_legacy, save_torch_dist

# Widths that are no multiple of a tile, on one rank or on all.
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "vocab_size": 200,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 160}
SHARED: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **UNTIED),
    "mistral": MistralConfig(**SIZES, **UNTIED),
    "qwen2": Qwen2Config(**{**SIZES, "num_attention_heads": 12, "head_dim": 16}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, **UNTIED),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, **UNTIED, num_experts=4),
    "mixtral": MixtralConfig(**SIZES, **UNTIED, num_local_experts=4),
    "gemma2": Gemma2Config(**SIZES),
    "gemma3_text": Gemma3TextConfig(**SIZES),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, **EXPERTS, **SHARED, **UNTIED, attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 8}, **EXPERTS, **SHARED, **LATENT, **UNTIED, num_nextn_predict_layers=1
    ),
}
MIXED = ("glm4_moe", "deepseek_v3")
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2, fused=True),
    "tp4": Layout(tp=4),
    "pp2": Layout(pp=2, fused=True),
    "pp2_uneven": Layout(pp=2, stages=(3, 1)),
    "tp2_pp2": Layout(tp=2, pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2, stages=(1, 1, 2, 0), fused=True),
}
EXPERT_LAYOUTS = {
    "ep2": Layout(ep=2),
    "ep4_fused": Layout(ep=4, fused=True),
    "tp2_ep2": Layout(tp=2, ep=2, fused=True),
    "tp2_ep2_etp1": Layout(tp=2, ep=2, etp=1),
    "tp4_ep2_etp2_pp2": Layout(tp=4, pp=2, ep=2, etp=2, fused=True),
}
CASES = [
    *((family, layout) for family in CONFIGS for layout in LAYOUTS),
    *((family, layout) for family in CONFIGS if family not in DENSE for layout in EXPERT_LAYOUTS),
]
_LINEAR = re.compile(r"\.(((q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj)|kv_a_proj_with_mqa|experts\.\d+\.w[123])\.weight$")


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


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of operators on small tensors: threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    root = tmp_path_factory.mktemp("families")
    return {family: Model(config, root / family) for family, config in CONFIGS.items()}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def test_every_family_is_tested() -> None:
    assert set(CONFIGS) == set(FAMILIES)
    assert all(config.model_type == family for family, config in CONFIGS.items())


@pytest.mark.parametrize("file_format", ["torch_dist", "legacy"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_layout_equals_direct_quantisation_exact(
    tmp_path: Path, models: dict[str, Model], family: str, name: str, file_format: str
) -> None:
    model, layout = models[family], {**LAYOUTS, **EXPERT_LAYOUTS}[name]
    parameters = megatron_parameters(model.tensors, model.config, fused=layout.fused)
    if file_format == "torch_dist":
        save_torch_dist(tmp_path / "ck", parameters, model.config, layout, stacked=family not in MIXED)
    else:
        save_legacy(tmp_path / "ck/iter_0000007", parameters, model.config, layout)
    out = convert_checkpoint(tmp_path / "ck", tmp_path / "out", hf_config=model.folder)
    assert_same_tensors(load_file(out / "model.safetensors"), model.expected)


@st.composite
def shapes_and_layouts(draw: st.DrawFn) -> tuple[PretrainedConfig, Layout]:
    """A model with experts of any widths and heads, and a layout that can cut it."""
    layout = draw(
        st.builds(
            Layout,
            tp=st.sampled_from([1, 2, 4]),
            pp=st.sampled_from([1, 2]),
            vpp=st.sampled_from([1, 2]),
            ep=st.sampled_from([1, 2]),
            fused=st.booleans(),
        )
    )
    groups = draw(st.integers(1, 3)) * layout.tp
    # transformers drops an expert's axes of size 1.
    config = Qwen3MoeConfig(
        **{**SIZES, "vocab_size": draw(st.integers(3, 130)), "hidden_size": draw(st.integers(2, 150))},
        num_experts=draw(st.integers(2, 3)) * layout.ep,
        num_experts_per_tok=1,
        moe_intermediate_size=draw(st.integers(2, 150)) * layout.tp,
        tie_word_embeddings=draw(st.booleans()),
    )
    config.num_hidden_layers = draw(st.integers(1, 2)) * layout.pp * layout.vpp
    config.num_key_value_heads, config.num_attention_heads = groups, groups * draw(st.integers(1, 3))
    config.head_dim = draw(st.integers(1, 20)) * 2
    return config, layout


@settings(max_examples=25)
@given(model_and_layout=shapes_and_layouts(), legacy=st.booleans())
def test_any_shape_and_layout_equals_direct_quantisation_exact(
    tmp_path_factory: pytest.TempPathFactory, model_and_layout: tuple[PretrainedConfig, Layout], legacy: bool
) -> None:
    config, layout = model_and_layout
    root = tmp_path_factory.mktemp("property")
    model = Model(config, root / "hf")
    parameters = megatron_parameters(model.tensors, config, fused=layout.fused)
    (save_legacy if legacy else save_torch_dist)(root / "ck", parameters, config, layout)
    out = convert_checkpoint(root / "ck", root / "out", hf_config=root / "hf")
    assert_same_tensors(load_file(out / "model.safetensors"), model.expected)
