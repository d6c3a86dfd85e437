"""The benchmarks run end to end with tiny shapes on a CPU, and refuse to measure there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FIELDS = [
    *("bench", "model", "shape", "m", "metric", "value", "unit", "peer", "ratio"),
    *("device", "versions", "command", "date"),
]


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.bench_{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_refuses_a_machine_without_a_hopper_gpu(tmp_path):
    done = bench("decode_linear", "--out", str(tmp_path / "rows.json"))
    assert done.returncode == 2
    assert "needs a Hopper GPU (compute capability 9.0), here is no GPU" in done.stderr
    assert not (tmp_path / "rows.json").exists()


def test_bench_memory_dry_run_counts_what_a_linear_saves(tmp_path):
    out = tmp_path / "rows.json"
    done = bench("memory", "--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert all(list(row) == FIELDS for row in rows)
    assert all(row["command"] == "python -m benchmarks.bench_memory --dry-run" for row in rows)
    saved = {row["shape"]: row["ratio"] for row in rows if row["metric"] == "jetrl/saved for backward"}
    assert len(saved) == 4 and all(0.5 < ratio < 0.55 for ratio in saved.values())


def test_bench_decode_linear_dry_run_adds_up_the_linears(tmp_path):
    out = tmp_path / "rows.json"
    done = bench("decode_linear", "--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [row for row in json.loads(out.read_text()) if row["metric"] == "jetrl/fprop" and row["m"] == 8]
    whole = [row["value"] for row in rows if row["shape"] == "all four linears"]
    parts = [row["value"] for row in rows if row["shape"] != "all four linears"]
    assert len(parts) == 4 and whole == [pytest.approx(sum(parts))]


def test_bench_training_dry_run_trains_the_same_model_in_two_forms(tmp_path):
    out = tmp_path / "rows.json"
    done = bench("training", "--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    losses = {(row["metric"], row["m"]): row["value"] for row in json.loads(out.read_text())}
    assert set(losses) == {(f"{form}/loss", step) for form in ("bf16_megatron", "jetrl") for step in (1, 2)}
    # Random tokens of a vocabulary of 256: ln 256 nats, whatever the precision.
    assert all(abs(loss - 5.545) < 0.5 for loss in losses.values())


def test_bench_convert_dry_run_converts_and_checks(tmp_path):
    out = tmp_path / "rows.json"
    done = bench("convert", "--dry-run", "--workers", "2", "--folder", str(tmp_path), "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert all(list(row) == FIELDS for row in rows)
    metrics = ["wall time", "BF16 input", "BF16 input per core", "peak memory above the interpreter"]
    assert [row["metric"] for row in rows] == [f"jetrl/{metric}" for metric in metrics]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_bench_head_dry_run_takes_megatrons_head_through_both_passes(tmp_path):
    out = tmp_path / "rows.json"
    done = bench("head", "--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert [row["metric"] for row in rows] == [
        f"megatron/{part}" for part in ("forward+backward", "forward", "backward")
    ]
    assert all(row["value"] > 0 for row in rows)
