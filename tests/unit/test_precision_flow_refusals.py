"""What the checker refuses by name: operators that nobody has compared, and ranks that differ or say nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from jetrl_megatron.layers import use_parity_head
from jetrl_megatron.precision_flow import EngineDescription, EngineModule, PrecisionGraph, RankReport, rollout_graph
from jetrl_megatron.precision_flow.predicted import predicted_modules
from jetrl_megatron.precision_flow.training import training_graph
from jetrl_megatron.spec import jetrl_spec
from jetrl_megatron.verify.static_check import static_check
from tests.unit.precision_flow_cases import CUDA, FINGERPRINT, config, found, gpt, gpu_engine, parity_gpt

pytestmark = pytest.mark.usefixtures("megatron")

REPLACED = "nemo_rl.models.generation.vllm.quantization.fp8.process_weights_after_loading"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDescription:
    return gpu_engine(tmp_path_factory.mktemp("rollout"))


@pytest.fixture(scope="module")
def training(megatron: None) -> PrecisionGraph:
    return training_graph(parity_gpt(), device=CUDA)


def test_check_refuses_experts_on_both_sides(engine: EngineDescription) -> None:
    changes = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "moe_layer_freq": [0, 1]}
    settings = config(**changes, moe_token_dispatcher_type="allgather")
    block = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    model = use_parity_head(gpt(jetrl_spec(block, parity=True), settings))
    report = found(training_graph(model, device=CUDA), engine, experts=4, architecture="Qwen3MoeForCausalLM")
    refused = {(entry.node, entry.side) for entry in report.not_promised}
    assert ("model.layers.1.mlp.experts", "training") in refused
    assert ("model.layers.0.mlp.experts", "rollout") in refused
    assert any("routed experts" in line for line in report.lines())


def test_check_refuses_unknown_operators(training: PrecisionGraph, engine: EngineDescription) -> None:
    module = EngineModule(name="model.layers.0.mixer", kind="other", implementation="vllm.mamba.MambaMixer2")
    report = found(training, engine, modules=(module,), ranks=(good_rank(0),))
    assert any("MambaMixer2" in entry.reason and entry.node == module.name for entry in report.not_promised)
    report = found(training, engine, architecture="NemotronHForCausalLM", scaling="yarn: 4", hidden_act="relu2")
    assert {"NemotronHForCausalLM", "yarn", "relu2"} <= {
        word
        for entry in report.not_promised
        for word in ("NemotronHForCausalLM", "yarn", "relu2")
        if word in entry.reason
    }


def test_check_refuses_unknown_layers_of_training(engine: EngineDescription) -> None:
    model = parity_gpt()
    model.decoder.layers[0].mlp = torch.nn.Identity()
    report = found(training_graph(model, device=CUDA), engine)
    assert [entry.node for entry in report.not_promised] == ["model.layers.0.mlp"]
    assert "torch.nn" in report.not_promised[0].reason or "Identity" in report.not_promised[0].reason


def good_rank(rank: int, **changes: Any) -> RankReport:
    report = RankReport(rank=rank, fingerprint=FINGERPRINT, plugin=True, operators={"RMSNorm": 9})
    return dataclasses.replace(report, **changes)


@pytest.mark.parametrize(
    ("ranks", "field", "value"),
    [
        ((good_rank(0),), "report", None),
        ((good_rank(0), good_rank(1, fingerprint="0" * 16)), "recipe", "0" * 16),
        ((good_rank(0), good_rank(1, fingerprint=None)), "recipe", None),
        ((good_rank(0), good_rank(1, plugin=False)), "plugin", False),
        ((good_rank(0), good_rank(1, replaced=(REPLACED,))), "replaced", REPLACED),
        ((good_rank(0), good_rank(1, operators={"RMSNorm": 8, "Other": 1})), "operators", "1 Other, 8 RMSNorm"),
    ],
)
def test_check_rank_that_differs_is_named(
    engine: EngineDescription, ranks: tuple[RankReport, ...], field: str, value: Any
) -> None:
    two = dataclasses.replace(engine, tensor_parallel=2)
    assert rollout_graph(dataclasses.replace(two, ranks=(good_rank(0), good_rank(1)))).faults == ()
    (fault,) = rollout_graph(dataclasses.replace(two, ranks=ranks)).faults
    assert (fault.node, fault.field, fault.rollout) == ("rank 1", field, value)
    assert "plugin jetrl_megatron in every worker" in fault.setting


def test_check_loaded_model_without_reports_names_every_rank(engine: EngineDescription) -> None:
    loaded = dataclasses.replace(engine, tensor_parallel=2, modules=(), ranks=None)
    assert [fault.node for fault in rollout_graph(loaded).faults] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("options", "scaling"),
    [({"seq_len_interpolation_factor": 4.0}, "linear 4"), ({"rotary_percent": 0.5}, "default over 0.5 of a head")],
)
def test_check_rope_that_the_rollout_has_not(
    engine: EngineDescription, options: dict[str, float], scaling: str
) -> None:
    report = found(training_graph(gpt(**options), device=CUDA), engine)
    by_field = {entry.field: entry for entry in report.differences if entry.node.endswith("rotary_emb")}
    assert (by_field["scaling"].training, by_field["scaling"].rollout) == (scaling, "default")
    assert any(scaling in entry.reason for entry in report.not_promised)


def test_check_dropout_in_training(engine: EngineDescription) -> None:
    model = parity_gpt()
    # The parity spec refuses it when the model is built; a setting that is changed later is the checker's business.
    model.config.hidden_dropout = 0.1
    report = found(training_graph(model, device=CUDA), engine)
    (note,) = report.not_promised
    assert "hidden_dropout=0.1" in note.reason and not report.differences


def test_check_batch_invariant_norms(training: PrecisionGraph, engine: EngineDescription) -> None:
    # vLLM's RMSNorm then goes past its providers.
    report = found(training, engine, batch_invariant=True)
    kernels = {entry.node: entry for entry in report.differences if entry.field == "kernel"}
    norm = kernels["model.layers.1.input_layernorm"]
    assert (norm.training, norm.rollout) == ("jetrl", "vllm_batch_invariant")
    assert "VLLM_BATCH_INVARIANT=0" in norm.setting and "model.norm" in kernels


def test_check_random_weights(training: PrecisionGraph, engine: EngineDescription) -> None:
    (difference,) = found(training, engine, load_format="dummy").differences
    assert difference.field == "weights_source" and 'load_format="dummy"' in difference.setting


def test_training_graph_refuses_hybrid_models(monkeypatch: pytest.MonkeyPatch) -> None:
    if not te.HAVE_TE:  # HybridStack's final norm is TransformerEngine's whatever the spec says
        monkeypatch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)
    spec, options = jetrl_spec(hybrid_stack_spec), {"hybrid_layer_pattern": "*-", "position_embedding_type": "rope"}
    model = HybridModel(config(qk_layernorm=False), spec, 384, 128, **options)
    with pytest.raises(ValueError, match="HybridModel does not tell its RoPE"):
        training_graph(model)


def test_check_extension_on_one_side_alone(training: PrecisionGraph, engine: EngineDescription) -> None:
    # Its norms add a row in another order than Triton's.
    (difference,) = found(training, engine, extension=not engine.extension).differences
    assert difference.field == "cuda_extension" and "on both or neither" in difference.setting


def test_check_unknown_architecture_of_known_operators(training: PrecisionGraph, engine: EngineDescription) -> None:
    # Granite scales residuals and logits, which no module of the loaded model shows.
    loaded = tuple(predicted_modules(engine))
    ranks = (good_rank(0),)
    assert not found(training, engine, modules=loaded, ranks=ranks).not_promised
    report = found(training, engine, modules=loaded, ranks=ranks, architecture="GraniteForCausalLM")
    assert ["GraniteForCausalLM" in entry.reason for entry in report.not_promised] == [True]


def test_check_decode_context_parallelism(training: PrecisionGraph, engine: EngineDescription) -> None:
    differences = found(training, engine, decode_context_parallel=2).differences
    assert {(entry.field, entry.rollout) for entry in differences} == {("kv_splits", "2 ranks")}
    assert "decode_context_parallel_size=1" in differences[0].setting


def test_static_check_joins_layers_in_a_line(engine: EngineDescription) -> None:
    # A report shows a dozen lines: one fault in every layer must not hide another.
    description = {**engine.to_dict(), "platform": "cpu", "cascade": False, "theta": 1e6, "tensor_parallel": 4}
    result = static_check([gpt()], description)
    (theta,) = (line for line in result["differences"] if "theta" in line)
    assert theta.startswith("model.layers.{0-1}.self_attn.rotary_emb: theta")
    assert any("4 tensor-parallel ranks" in line for line in result["not_promised"])
