"""Megatron-core and Megatron-Bridge on two CPU ranks: every layout loads, trains and exports the same model."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.ranks import ROOT, launch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("megatron.core", reason="needs megatron-core")

LAYOUTS = ("dp2", "tp2", "tp2_sp", "tp2_sp_recompute", "pp2", "pp2_vpp2")
FOLDER = "JETRL_TEST_MEGATRON_CPU_FOLDER"
REFUSALS = """
import sys, torch
from jetrl_megatron.integrations import megatron_cpu
def refused(*words):
    finders = list(sys.meta_path)
    try:
        megatron_cpu.install()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
        return sys.meta_path == finders
torch.cuda.is_available = lambda: True
assert refused("torch.cuda.is_available() is True", "hide the device with CUDA_VISIBLE_DEVICES=")
torch.cuda.is_available = lambda: False
megatron_cpu.release_of = lambda package: (0, 20, 1)
assert refused("megatron-core 0.20.1 is installed", "pip install 'megatron-core==0.19.*'")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3 with random weights, and the configuration of an architecture that is not supported."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, vocab_size=512, tie_word_embeddings=False, max_position_embeddings=128, initializer_range=0.05,
        dtype="bfloat16",
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    transformers.MixtralConfig(architectures=["MixtralForCausalLM"]).save_pretrained(folder / "mixtral")
    return folder


@pytest.fixture(scope="module")
def ranks(folder) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(FOLDER, str(folder))
        return launch("tests.distributed.megatron_cpu_bodies", 2, folder / "results.pt")


def loss_of(results: list[dict[str, Any]]) -> float:
    losses = [loss for result in results for loss in result["losses"]]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("body", [*(f"bf16_{layout}" for layout in LAYOUTS), "fp8_tp2_sp", "fp8_pp2_vpp2"])
def test_export_hf_weights_equals_the_file_exact(ranks, folder, body):
    names = sorted(load_file(folder / "model.safetensors"))
    for result in ranks[body]:
        assert result["names"] == names
        assert result["unequal"] == []


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "tp2_sp_recompute"])
def test_build_model_trains_alike_under_tensor_parallelism_close(ranks, folder, layout):
    # Sums of BF16 in another order; the first step of Adam moves a weight by the sign of its gradient.
    before, one, other = load_file(folder / "model.safetensors"), ranks["bf16_dp2"], ranks[f"bf16_{layout}"]
    assert math.log(512) < loss_of(one) < 7.5
    assert loss_of(other) == pytest.approx(loss_of(one), rel=1e-3)
    for result in other:
        assert result["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=2e-3)
        for name, weight in result["stepped"].items():
            assert (weight != before[name]).float().mean() > 0.9, name
            assert (weight == one[0]["stepped"][name]).float().mean() > 0.95, name


@pytest.mark.parametrize("layout", ["pp2", "pp2_vpp2"])
def test_build_model_trains_alike_under_pipeline_parallelism_exact(ranks, layout):
    one, other = ranks["bf16_dp2"], ranks[f"bf16_{layout}"]
    assert loss_of(other) == loss_of(one)
    for result in other:
        assert result["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
        for name, weight in result["stepped"].items():
            assert (weight == one[0]["stepped"][name]).float().mean() > 0.999, name


def test_build_model_with_a_recipe_trains_in_fp8_close(ranks):
    bf16, sharded, staged = (ranks[name] for name in ("bf16_dp2", "fp8_tp2_sp", "fp8_pp2_vpp2"))
    assert loss_of(sharded) != loss_of(bf16)
    assert loss_of(sharded) == pytest.approx(loss_of(bf16), rel=5e-3)
    assert loss_of(staged) == pytest.approx(loss_of(sharded), rel=1e-3)
    assert sharded[0]["grad_norm"] == pytest.approx(staged[0]["grad_norm"], rel=1e-2)


def test_install_expert_parallel_all_to_all_close(ranks):
    alone, spread = ranks["moe_ep1"], ranks["moe_ep2"]
    assert [result["loss"] for result in spread] == pytest.approx([result["loss"] for result in alone], rel=1e-5)
    for rank, result in enumerate(spread):
        # The owner of an expert sums what both ranks' sequences give it.
        assert len(result["gradients"]) == 2 * 2  # experts x linears
        for name, gradient in result["gradients"].items():
            assert int(name.split("expert ")[1].split(".")[0]) // 2 == rank
            expected = sum(other["gradients"].get(name, torch.zeros(())) for other in alone)
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def test_install_random_states_are_tracked_exact(ranks):
    first, second = ranks["random_states"]
    assert first["outer"] != second["outer"]
    assert first["inner"] == second["inner"]
    assert first["after"] == second["after"]
    # A state inside another one neither disturbs it nor the generator outside.
    assert first["outer"] == first["alone"]
    assert first["after"] == first["after_alone"]


def test_install_gathers_float8_exact(ranks):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for gathered in ranks["float8_gather"]:
        assert torch.equal(gathered, torch.cat([codes[0::2], codes[1::2]]))


def test_install_broadcast_data_exact(ranks):
    assert all(torch.equal(received, torch.arange(6)) for received in ranks["data_broadcast"])


def test_install_leaves_the_real_torch_alone(ranks):
    for facts in ranks["isolation"]:
        assert all(facts.values()), facts


def test_install_refuses_a_gpu_and_other_releases():
    run = subprocess.run([sys.executable, "-c", REFUSALS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def test_use_jetrl_on_a_provider_exact(ranks):
    for result in ranks["own_provider"]:
        assert result["classes"] == ["JetRLColumnParallelLinear", "JetRLRowParallelLinear"]
        assert result["unequal"] == []


def test_build_model_refuses_wrong_arguments(ranks):
    for said in ranks["refusals"]:
        assert "call torch.distributed.init_process_group and parallel_state.initialize_model" in said["no groups"]
        assert said["other size"] == (
            "tensor_parallel=1, but the initialised group has 2 ranks: give both the same size"
        )
        assert said["unknown field"].startswith("['num_layer'] are no fields of GPTModelProvider")
        assert said["architecture"].startswith("model_type='mixtral' of ")
        assert "use one of llama, qwen2, qwen3, or build the provider" in said["architecture"]
        assert said["no provider"].startswith("provider=object has no transformer_layer_spec: pass what to_megatron")


def test_weight_sync_refuses_ranks_that_disagree(ranks):
    first, second = ranks["sync_settings"]
    values = {"recipe": ("'67a6d90aa006d1cf'",), "receivers": (" 2,", " 3,"), "bucket_bytes": ("1048576", "2097152")}
    values["timeout"] = ("5.0]", "7.0]")
    assert first == second and set(first) == set(values)
    for name, expected in values.items():
        assert all(value in first[name] for value in (*expected, "rank 1 has", "give all ranks the same")), first[name]
