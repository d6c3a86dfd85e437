"""Every family under every layout and in both formats: always the bytes of quantising the model's own matrices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import PretrainedConfig

from jetrl_megatron.convert.export import convert_checkpoint
from jetrl_megatron.convert.families import FAMILIES
from tests.unit.family_models import DENSE, MIXED, RAGGED, Model, assert_same_tensors, family_configs
from tests.unit.megatron_layouts import Layout, megatron_parameters, save_legacy, save_torch_dist

CONFIGS = family_configs(RAGGED)
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
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.vocab_size, config.num_experts_per_tok = draw(st.integers(3, 130)), 1
    # transformers drops an expert's axes of size 1.
    config.hidden_size, config.num_experts = draw(st.integers(2, 150)), draw(st.integers(2, 3)) * layout.ep
    config.moe_intermediate_size = draw(st.integers(2, 150)) * layout.tp
    config.tie_word_embeddings = draw(st.booleans())
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
