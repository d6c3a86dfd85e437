"""Faults that a training run or an engine can have, each found by the checker under its name, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from jetrl_megatron.precision_flow import (
    CheckReport,
    EngineDescription,
    PrecisionGraph,
    check,
    rollout_graph,
)
from jetrl_megatron.precision_flow.engine import PLUGIN
from jetrl_megatron.precision_flow.training import training_graph
from jetrl_megatron.recipe import Fp8BlockRecipe
from tests.unit.precision_flow_cases import (
    CUDA,
    FINGERPRINT,
    checkpoint_config,
    config,
    described,
    found,
    gpt,
    gpu_engine,
    parity_gpt,
)

pytestmark = pytest.mark.usefixtures("megatron")

Q_PROJ = "model.layers.1.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"
NORM = "model.layers.1.input_layernorm"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDescription:
    return gpu_engine(tmp_path_factory.mktemp("rollout"))


@pytest.fixture(scope="module")
def training(megatron: None) -> PrecisionGraph:
    return training_graph(parity_gpt(), device=CUDA)


def only(report: CheckReport, node: str, field: str) -> Any:
    """The difference in the node's field; no other field differs anywhere."""
    assert not report.promises_zero
    assert {entry.field for entry in report.differences} == {field}
    (difference,) = (entry for entry in report.differences if entry.node == node)
    with pytest.raises(ValueError, match=field):
        report.require_zero()
    return difference


def test_check_sound_pair_promises_zero(training: PrecisionGraph, engine: EngineDescription) -> None:
    report = found(training, engine)
    assert report.lines() == [] and report.promises_zero
    report.require_zero()
    assert "zero mismatch is promised" in report.to_markdown()


def test_check_bf16_layer_in_training(engine: EngineDescription) -> None:
    model = parity_gpt()
    model.decoder.layers[1].mlp.linear_fc2.quantized = False
    report = found(training_graph(model, device=CUDA), engine)
    difference = only(report, DOWN_PROJ, "dtype")
    assert (difference.training, difference.rollout) == ("bfloat16", "float8_e4m3fn")
    assert "recipe.ignore" in difference.setting
    assert [entry.node for entry in report.differences] == [DOWN_PROJ]


def test_check_fp32_training_against_ue8m0(engine: EngineDescription) -> None:
    recipe = Fp8BlockRecipe(scale_format="fp32")
    report = found(training_graph(parity_gpt(recipe), device=CUDA), engine)
    by_field = {entry.field: entry for entry in report.differences if entry.node in ("model", Q_PROJ)}
    assert (by_field["recipe"].training, by_field["recipe"].rollout) == (recipe.fingerprint, FINGERPRINT)
    assert (by_field["scale_format"].training, by_field["scale_format"].rollout) == ("fp32", "ue8m0")
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in by_field["scale_format"].setting
    assert 'Fp8BlockRecipe(scale_format="ue8m0")' in by_field["scale_format"].setting


def test_check_fp32_recipe_on_an_engine_that_requantises(engine: EngineDescription) -> None:
    recipe = Fp8BlockRecipe(scale_format="fp32")
    training = training_graph(parity_gpt(recipe), device=CUDA)
    stamp = recipe.to_stamp()
    assert found(training, engine, stamp=stamp, operators=stamp, deep_gemm_e8m0=False).promises_zero
    report = found(training, engine, stamp=stamp, operators=stamp, deep_gemm_e8m0=True)
    by_field = {entry.field: entry for entry in report.differences if entry.node == Q_PROJ}
    assert set(by_field) == {"scale_format", "activation_scale_format", "activation_scale_floor"}
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in by_field["scale_format"].setting
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in "\n".join(report.lines())


def test_check_e8m0_off_under_ue8m0(training: PrecisionGraph, engine: EngineDescription) -> None:
    report = found(training, engine, deep_gemm_e8m0=False)
    by_field = {entry.field: entry for entry in report.differences if entry.node == Q_PROJ}
    assert by_field["activation_scale_format"].rollout == "fp32"
    assert "VLLM_USE_DEEP_GEMM_E8M0=1" in by_field["activation_scale_format"].setting


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("fuse_norm_quant", NORM),
        ("fuse_act_quant", "model.layers.1.mlp.act_fn"),
        ("fuse_attn_quant", "model.layers.1.self_attn.attn"),
        ("fuse_allreduce_rms", "model.norm"),
        ("enable_qk_norm_rope_fusion", "model.layers.1.self_attn.q_norm"),
        ("fuse_qk_norm_rope_kvcache", "model.layers.1.self_attn.k_norm"),
        ("fuse_rope_kvcache", "model.layers.1.self_attn.rotary_emb"),
        ("enable_sp", DOWN_PROJ),
        ("fuse_gemm_comms", "model.layers.1.self_attn.o_proj"),
    ],
)
def test_check_fusion_on(training: PrecisionGraph, engine: EngineDescription, name: str, node: str) -> None:
    difference = only(found(training, engine, fusions=("eliminate_noops", name)), node, "fused_by")
    assert (difference.training, difference.rollout) == (None, name)
    assert f'{{"pass_config": {{"{name}": False}}}}' in difference.setting
    # Passes belong to the compiler, so nothing is fused without it.
    assert "fused_by" not in {
        entry.field for entry in found(training, engine, fusions=(name,), compiled=False).differences
    }


def test_check_unknown_fusion_is_named(training: PrecisionGraph, engine: EngineDescription) -> None:
    difference = only(found(training, engine, fusions=("fuse_new_things",)), "model", "other_fusions")
    assert difference.rollout == "fuse_new_things" and "pass_config" in difference.setting
    difference = only(found(training, engine, fusions=("theirs.Pass", f"{PLUGIN}ours.Pass")), "model", "other_fusions")
    assert difference.rollout == "theirs.Pass" and "inductor_compile_config" in difference.setting


@pytest.mark.parametrize("backend", [None, "FLASH_ATTN"])
def test_check_split_kv(training: PrecisionGraph, engine: EngineDescription, backend: str | None) -> None:
    difference = only(found(training, engine, attention_backend=backend), "model.layers.1.self_attn.attn", "kv_splits")
    assert (difference.training, difference.rollout) == ("1", "varying")
    assert 'attention_backend="CUSTOM"' in difference.setting


def test_check_other_attention_kernel(training: PrecisionGraph, engine: EngineDescription) -> None:
    report = found(training, engine, attention_backend="FLASHINFER")
    by_field = {entry.field: entry.rollout for entry in report.differences}
    assert by_field == {"kernel": "FLASHINFER", "kv_splits": "varying"}


def test_check_cascade_attention(training: PrecisionGraph, engine: EngineDescription) -> None:
    difference = only(found(training, engine, cascade=True), "model.layers.0.self_attn.attn", "cascade")
    assert "disable_cascade_attn=True" in difference.setting


def test_check_other_skip_list(training: PrecisionGraph, engine: EngineDescription) -> None:
    report = found(training, engine, ignored_layers=(DOWN_PROJ,))
    difference = only(report, DOWN_PROJ, "dtype")
    assert (difference.training, difference.rollout) == ("float8_e4m3fn", "bfloat16")
    assert "ignored_layers" in difference.setting
    assert [entry.node for entry in report.differences] == [DOWN_PROJ]


def test_check_equal_skip_lists_differ_in_nothing_but_promise_nothing(engine: EngineDescription) -> None:
    recipe = Fp8BlockRecipe(ignore=("decoder.layers.1.mlp.linear_fc2",))
    stamp = recipe.to_stamp()
    training = training_graph(parity_gpt(recipe), device=CUDA)
    report = found(training, engine, ignored_layers=(DOWN_PROJ,), stamp=stamp, operators=stamp)
    assert not report.differences and not report.promises_zero
    assert {entry.node for entry in report.not_promised} == {DOWN_PROJ}
    assert "number of tokens" in report.not_promised[0].reason


@pytest.mark.parametrize(
    ("fault", "kernel"),
    [
        ({"linear_backend": "auto", "flashinfer": True}, "flashinfer below 32 tokens, deep_gemm above"),
        ({"linear_backend": "cutlass"}, "cutlass"),
        ({"linear_backend": "auto", "disabled_kernels": ("DeepGemmFp8BlockScaledMMKernel",)}, "cutlass"),
        ({"linear_backend": "triton"}, "triton"),
    ],
)
def test_check_other_gemm(
    training: PrecisionGraph, engine: EngineDescription, fault: dict[str, Any], kernel: str
) -> None:
    report = found(training, engine, **fault)
    difference = next(entry for entry in report.differences if (entry.node, entry.field) == (Q_PROJ, "kernel"))
    assert (difference.training, difference.rollout) == ("deep_gemm", kernel)
    assert 'linear_backend="deep_gemm"' in difference.setting


def test_check_weight_only_kernel(training: PrecisionGraph, engine: EngineDescription) -> None:
    report = found(training, engine, linear_backend="marlin")
    values = {entry.field: entry.rollout for entry in report.differences if entry.node == Q_PROJ}
    assert values["activation_dtype"] == "bfloat16" and values["kernel"] == "marlin"


def test_check_other_weight_floor(training: PrecisionGraph, engine: EngineDescription) -> None:
    stamp = Fp8BlockRecipe(weight_amax_floor=1e-6).to_stamp()
    report = found(training, engine, stamp=stamp, operators=stamp)
    by_field = {entry.field: entry for entry in report.differences if entry.node in ("model", Q_PROJ)}
    assert set(by_field) == {"recipe", "weight_amax_floor"}
    assert (by_field["weight_amax_floor"].training, by_field["weight_amax_floor"].rollout) == (1e-4, 1e-6)
    assert "Fp8BlockRecipe(weight_amax_floor=1e-06)" in by_field["weight_amax_floor"].setting


def test_check_activation_floor_that_the_engine_has_not(engine: EngineDescription) -> None:
    recipe = Fp8BlockRecipe(activation_amax_floor=1e-6)
    training = training_graph(parity_gpt(recipe), device=CUDA)
    report = found(training, engine, stamp=recipe.to_stamp(), operators=recipe.to_stamp())
    difference = only(report, Q_PROJ, "activation_amax_floor")
    assert (difference.training, difference.rollout) == (1e-6, 1e-10)
    assert "Fp8BlockRecipe(activation_amax_floor=1e-10)" in difference.setting


def test_check_other_tensor_parallel(training: PrecisionGraph, engine: EngineDescription) -> None:
    difference = only(found(training, engine, tensor_parallel=2), "model", "tensor_parallel")
    assert (difference.training, difference.rollout) == (1, 2)
    assert "tensor_parallel_size=1" in difference.setting
    assert "tensor_model_parallel_size=2" in difference.setting


def test_check_many_ranks_are_not_promised(training: PrecisionGraph, engine: EngineDescription) -> None:
    report = found(training, engine, tensor_parallel=4)
    assert any("4 tensor-parallel ranks" in entry.reason for entry in report.not_promised)


def test_check_stale_weight(engine: EngineDescription) -> None:
    names = [node.name for node in training_graph(parity_gpt(), device=CUDA).nodes if node.quantized]
    fresh = {name: f"{index:016x}" for index, name in enumerate(names)}
    training = training_graph(parity_gpt(), device=CUDA, weights=fresh, weights_version=3)
    assert found(training, engine, weights=fresh, weights_version=3).promises_zero
    report = found(training, engine, weights={**fresh, Q_PROJ: "f" * 16}, weights_version=3)
    difference = only(report, Q_PROJ, "weights")
    assert len(report.differences) == 1 and "sync the weights again" in difference.setting
    older = only(found(training, engine, weights=fresh, weights_version=2), "model", "weights_version")
    assert (older.training, older.rollout) == (3, 2) and "optimizer step 3" in older.setting


NEMO = "nemo_rl.models.generation.vllm.quantization.fp8.process_weights_after_loading"


@pytest.mark.parametrize(
    ("fault", "source"),
    [
        ({"replaced": (NEMO,)}, f"requantised by {NEMO}"),
        ({"overrides": ("quantization_config",), "stamp": None}, "requantised: hf_overrides has a quantization_config"),
        ({"serialized_fp8": False, "weight_block": None}, "quantised online by vLLM (fp8)"),
        ({"stamp": None, "operators": None}, "a checkpoint without a recipe"),
    ],
)
def test_check_weights_that_training_did_not_quantise(
    training: PrecisionGraph, engine: EngineDescription, fault: dict[str, Any], source: str
) -> None:
    report = found(training, engine, **fault)
    difference = next(entry for entry in report.differences if entry.field == "weights_source")
    assert str(difference.rollout).startswith(source) and difference.node == "model"
    assert "jetrl convert" in difference.setting and "NeMo-RL" in difference.setting


def test_check_bf16_checkpoint(tmp_path: Path, training: PrecisionGraph, engine: EngineDescription) -> None:
    bf16 = described(tmp_path, checkpoint_config(recipe=None), enforce_eager=True)
    fields = ("quantization", "serialized_fp8", "weight_block", "stamp")
    report = found(training, engine, **{name: getattr(bf16, name) for name in fields})
    assert {entry.rollout for entry in report.differences if entry.field == "dtype"} == {"bfloat16"}
    assert any("checkpoint is not FP8" in line for line in report.lines())


def test_check_fp8_kv_cache(training: PrecisionGraph, engine: EngineDescription) -> None:
    difference = only(found(training, engine, cache_dtype="fp8"), "model.layers.1.self_attn.attn", "cache_dtype")
    assert (difference.training, difference.rollout) == ("bfloat16", "fp8")
    assert 'kv_cache_dtype="auto"' in difference.setting


@pytest.mark.parametrize(
    ("fault", "node", "field", "rollout", "setting"),
    [
        ({"speculative": "ngram"}, "model", "speculative_decoding", "ngram", "speculative_config=None"),
        ({"lora": True}, "model", "lora", True, "enable_lora=False"),
        ({"logprobs_mode": "processed_logprobs"}, "model", "logprobs_mode", "processed_logprobs", "raw_logprobs"),
        ({"v2_runner": False}, "log_prob", "kernel", "torch", "VLLM_USE_V2_MODEL_RUNNER=1"),
        ({"epsilon": 1e-5}, NORM, "epsilon", 1e-5, "rms_norm_eps=1e-06"),
        ({"theta": 1e6}, "model.layers.1.self_attn.rotary_emb", "theta", 1e6, "rope_theta=10000.0"),
        ({"fused_add_rms_norm": ("native",)}, NORM, "kernel", "inductor", 'fused_add_rms_norm": ["jetrl"]'),
        ({"window": 64}, "model.layers.1.self_attn.attn", "window", 64, "sliding_window=None"),
        (
            {"custom_ops": ("none", "+quant_fp8", "+silu_and_mul")},
            "model.layers.1.self_attn.rotary_emb",
            "kernel",
            "inductor",
            "+rotary_embedding",
        ),
        (
            {"custom_ops": ("none", "+rotary_embedding", "+silu_and_mul")},
            Q_PROJ,
            "quantizer",
            "vllm native",
            "+quant_fp8",
        ),
        (
            {"custom_ops": ("none", "+quant_fp8", "+rotary_embedding")},
            "model.layers.1.mlp.act_fn",
            "kernel",
            "inductor",
            "+silu_and_mul",
        ),
    ],
)  # fmt: skip
def test_check_engine_setting(
    training: PrecisionGraph,
    engine: EngineDescription,
    fault: dict[str, Any],
    node: str,
    field: str,
    rollout: Any,
    setting: str,
) -> None:
    difference = only(found(training, engine, **fault), node, field)
    assert difference.rollout == rollout and setting in difference.setting


def test_check_engine_without_its_arguments(training: PrecisionGraph, engine: EngineDescription) -> None:
    report = found(training, engine, operators=None)
    kernels = {entry.node: entry for entry in report.differences if entry.field == "kernel"}
    assert kernels["lm_head"].rollout == "cublas" and "to_vllm_engine_args()" in kernels["lm_head"].setting
    assert kernels["model.layers.0.mlp.act_fn"].rollout == "vllm_c"


def test_check_two_recipes_in_one_engine(training: PrecisionGraph, engine: EngineDescription) -> None:
    other = Fp8BlockRecipe(scale_format="fp32")
    difference = only(found(training, engine, operators=other.to_stamp()), "model", "additional_config")
    assert (difference.training, difference.rollout) == (FINGERPRINT, other.fingerprint)


def test_check_ordinary_operators_in_training(engine: EngineDescription) -> None:
    report = found(training_graph(gpt(), device=CUDA), engine)
    kernels = {entry.node: entry for entry in report.differences if entry.field == "kernel"}
    for node in (NORM, "model.norm", "model.layers.0.self_attn.k_norm"):
        assert (kernels[node].training, kernels[node].rollout) == ("torch", "jetrl")
        assert "parity=True" in kernels[node].setting
    assert "parity=True" in kernels["model.layers.0.self_attn.attn"].setting
    assert "parity=True" in kernels["model.layers.0.self_attn.rotary_emb"].setting
    assert "use_parity_head" in kernels["lm_head"].setting
    assert "token_log_probs" in kernels["log_prob"].setting


def test_check_ordinary_linears_in_training(engine: EngineDescription) -> None:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    report = found(training_graph(gpt(spec), device=CUDA), engine)
    recipe = next(entry for entry in report.differences if entry.field == "recipe")
    assert (recipe.training, recipe.rollout) == (None, FINGERPRINT)
    dtypes = [entry.node for entry in report.differences if entry.field == "dtype"]
    assert len(dtypes) == 14 and Q_PROJ in dtypes


@pytest.mark.parametrize(
    ("changes", "node", "field", "setting"),
    [
        ({"bias_activation_fusion": True}, "model.layers.1.mlp.act_fn", "kernel", "bias_activation_fusion=False"),
        ({"fp32_residual_connection": True}, "model.layers.1.residual", "dtype", "fp32_residual_connection=False"),
        ({"layernorm_epsilon": 1e-5}, "model.norm", "epsilon", "layernorm_epsilon=1e-06"),
    ],
)
def test_check_megatron_setting(tmp_path: Path, changes: dict[str, Any], node: str, field: str, setting: str) -> None:
    cpu = described(tmp_path, checkpoint_config(), enforce_eager=True)
    model = gpt(settings=config(**changes))
    report = check(training_graph(model, exact_sums=True), rollout_graph(cpu))
    difference = next(entry for entry in report.differences if (entry.node, entry.field) == (node, field))
    assert setting in difference.setting


def test_check_mixed_recipes_in_training(engine: EngineDescription) -> None:
    model = parity_gpt()
    model.decoder.layers[0].mlp.linear_fc1.recipe = Fp8BlockRecipe(weight_amax_floor=1e-6)
    report = found(training_graph(model, device=CUDA), engine)
    assert any(entry.field == "recipes" and "jetrl_spec" in entry.setting for entry in report.differences)
    assert {entry.node for entry in report.differences if entry.field == "weight_amax_floor"} == {
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    }
