"""`benchmarks.rl`: which runs a study has and still needs, and what its tables say. Metrics are made up here."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rl.plot import collect, differing_options, over_positions, summarize, tables, tokens_by_position
from benchmarks.rl.pool import Job, Place, places, run_all
from benchmarks.rl.variants import PRECISIONS, VARIANTS, RunFolder, found_in, runs_of
from examples.grpo.options import parse


def row(step: int, reward: float, error: float = 1.0) -> dict[str, Any]:
    found = {"tokens": 10, "tokens_differing": 0 if error == 1.0 else 9, "token_mult_prob_error": error}
    positions = [
        {"position": 0, "tokens": 4, "mean_abs_dlogp": error - 1, "gen_kl_error": 0.0},
        {"position": 2, "tokens": 6 - 6 * (step % 2), "mean_abs_dlogp": 2 * error - 2, "gen_kl_error": 0.0},
    ]
    return {
        "step": step,
        "reward": reward,
        "entropy": 1.0,
        "grad_norm": 0.5,
        "kl": 0.0,
        "mismatch": {**found, "gen_kl_error": 0.0 if error == 1.0 else 0.01},
        "positions": positions,
        "tokens_per_second": 100.0,
        "peak_memory_gib": 1.0,
        "seconds": {"rollout": 1.0 + step, "step": 2.0 + step},
    }


def write(run: RunFolder, rows: list[dict[str, Any]], end: str = "") -> RunFolder:
    run.path.mkdir(parents=True)
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    (run.path / "options.json").write_text(json.dumps({"steps": len(rows)}))
    return run


@dataclasses.dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `python -m benchmarks.rl.COMMAND`, in this process: another one would spend its time on imports."""

    def run(command: str, *arguments: str) -> Done:
        module = importlib.import_module(f"benchmarks.rl.{command}")
        monkeypatch.setattr(sys, "argv", [module.__file__, *arguments])
        # The command's own handler must not stay behind.
        monkeypatch.setattr(module, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=signal.SIGTERM), False)
        status = 0
        try:
            module.main()
        except SystemExit as end:
            assert isinstance(end.code, int), end.code
            status = end.code
        return Done(status, *capsys.readouterr())

    return run


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for seed, (first, last) in enumerate([(0.25, 0.5), (0.25, 1.0)]):
        rows = [row(0, first), row(1, last), {"step": 2, "held_out_accuracy": last, "seconds": {}}]
        write(RunFolder(tmp_path, "jetrl_fp8", seed), rows)
    write(RunFolder(tmp_path, "bf16", 0), [row(0, 0.25, 1.5)], end='{"step": 1, "rew')
    return tmp_path


def test_every_variant_is_a_valid_command_line() -> None:
    recipes = {name: parse(["--out", "x", *options]).recipes for name, options in VARIANTS.items()}
    assert tuple(VARIANTS)[:3] == PRECISIONS and recipes["jetrl_fp8_wgrad_bf16"][0].wgrad == "bf16"


def test_runs_take_a_seed_of_every_variant_before_the_next() -> None:
    runs = [(run.variant, run.seed) for run in runs_of(Path("x"), ["a", "b"], [3, 5])]
    assert runs == [("a", 3), ("b", 3), ("a", 5), ("b", 5)]


def test_run_is_complete_with_the_row_behind_its_last_step(study: Path) -> None:
    complete, begun, missing = (RunFolder(study, *name) for name in (("jetrl_fp8", 1), ("bf16", 0), ("bf16", 7)))
    assert complete.is_complete(2) and not complete.is_complete(3)
    assert not begun.is_complete(1) and len(begun.rows()) == 1
    assert not missing.is_complete(1) and missing.rows() == []
    assert {name: len(runs) for name, runs in found_in(study).items()} == {"bf16": 1, "jetrl_fp8": 2}


def test_summary_has_means_and_deviations_over_seeds(study: Path) -> None:
    found = summarize(found_in(study)["jetrl_fp8"], last=1)
    assert found["reward at the end"] == {"mean": 0.75, "std": pytest.approx(0.5 / 2**0.5), "seeds": {0: 0.5, 1: 1.0}}
    assert found["held-out accuracy at the end"]["mean"] == 0.75
    assert (found["steps_exactly_equal"], found["tokens"], found["tokens_differing"]) == (4, 40, 0)
    assert found["median seconds"]["rollout"] == 1.5
    baseline = summarize(found_in(study)["bf16"], last=10)
    assert baseline["steps_exactly_equal"] == 0
    assert baseline["reward at the end"] == {"mean": 0.25, "std": None, "seeds": {0: 0.25}}
    text = tables({"bf16": baseline, "jetrl_fp8": found}, 1)
    assert "| jetrl_fp8 | 0 of 40 | 4 of 4 | 1 ± 0 | 1 | 0 ± 0 |" in text
    assert "| bf16 | 9 of 10 | 0 of 1 | 1.5 | 1.5 | 0.01 |" in text


def test_table_pairs_runs_with_bf16_of_the_same_seed_and_length(study: Path) -> None:
    end = {"step": 2, "held_out_accuracy": 0.25, "seconds": {}}
    write(RunFolder(study, "bf16", 1), [row(0, 0.25), row(1, 0.25), end])
    text = tables({name: summarize(runs, last=1) for name, runs in found_in(study).items()}, 1)
    part = text[text.index("### Minus bf16") : text.index("### Mismatch")]
    # With seed 0 bf16 has come to its first step alone.
    assert "| jetrl_fp8 | 1 | 0.75 | 0.75 |" in part and "| bf16 |" not in part


def test_accuracy_at_the_start_is_that_of_the_first_step(study: Path) -> None:
    assert summarize(found_in(study)["jetrl_fp8"], last=1)["held-out accuracy at the start"]["mean"] is None


def test_runs_with_other_options_are_not_compared(study: Path) -> None:
    for seed, rate in ((0, 1e-5), (1, 1e-6)):
        path = RunFolder(study, "jetrl_fp8", seed).path / "options.json"
        path.write_text(json.dumps({"steps": 2, "seed": seed, "learning_rate": rate, "out": str(path)}))
    assert differing_options(found_in(study)["jetrl_fp8"]) == ["learning_rate"]
    assert differing_options(found_in(study)["jetrl_fp8"][:1]) == []


def test_over_positions_weighs_by_tokens_exact() -> None:
    rows = [row(0, 0.0, 1.5), row(1, 0.0, 2.0)]
    assert over_positions(rows, "mean_abs_dlogp") == {0: 0.75, 2: 1.0}
    assert tokens_by_position(rows) == {0: 8, 2: 6}


def test_collect_puts_seeds_side_by_side_in_order() -> None:
    assert collect([{2: 1.0, 1: 3.0}, {2: 5.0}]) == {1: [3.0], 2: [1.0, 5.0]}


def test_plot_writes_tables_and_pictures(call: Callable[..., Done], study: Path, tmp_path: Path) -> None:
    out = tmp_path / "drawn"
    done = call("plot", str(study), "--out", str(out))
    assert done.status == 0, done.stderr
    names = {"curves.png", "phases.png", "positions.png", "series.json", "study.json", "study.md"}
    assert {path.name for path in out.iterdir()} == names
    assert set(json.loads((out / "study.json").read_text())["variants"]) == {"bf16", "jetrl_fp8"}
    series = {
        (line["metric"], line["run"], line["seed"]): line for line in json.loads((out / "series.json").read_text())
    }
    assert series["reward", "jetrl_fp8", 1] == {
        "metric": "reward", "run": "jetrl_fp8", "seed": 1, "step": [0, 1], "values": [0.25, 1.0],
    }  # fmt: skip
    assert series["mean |dlogp|", "bf16", 0]["position"] == [0, 2]
    assert series["tokens by position", "jetrl_fp8", 0]["values"] == [8, 6]
    assert series["seconds", "jetrl_fp8", 0]["values"] == [2.0, 3.0]
    # What was not measured in a step is left out.
    assert series["held-out accuracy", "jetrl_fp8", 1]["step"] == [2]
    assert series["held-out accuracy", "bf16", 0]["step"] == []


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("plot", ["nowhere"], "nowhere: no runs there, name the folder that was --out of benchmarks.rl.run"),
        ("run", ["--out", "x", "--variants", "fp8"], "--variants: fp8 unknown, use bf16, bf16_train_fp8_rollout"),
        ("run", ["--out", "x", "--seeds", "a"], "--seeds 'a': use whole numbers such as 0,1,2"),
        ("run", ["--out", "x", "--", "--steps", "0"], "steps=0: use 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(
    call: Callable[..., Done], command: str, arguments: list[str], message: str
) -> None:
    done = call(command, *arguments)
    assert done.status == 2 and message in done.stderr


def test_run_leaves_complete_runs_alone_and_clears_their_working_folders(
    call: Callable[..., Done], study: Path
) -> None:
    (study / "jetrl_fp8/seed0/checkpoints").mkdir()
    before = (study / "jetrl_fp8/seed0/metrics.jsonl").read_text()
    done = call("run", "--out", str(study), "--variants", "jetrl_fp8", "--seeds", "0,1", "--", "--steps", "2")
    assert done.status == 0 and "2 of 2 runs complete" in done.stdout, done.stderr
    assert (study / "jetrl_fp8/seed0/metrics.jsonl").read_text() == before
    assert not (study / "jetrl_fp8/seed0/checkpoints").exists()


def test_run_that_is_complete_is_not_begun_anew_for_more_steps(call: Callable[..., Done], study: Path) -> None:
    before = (study / "jetrl_fp8/seed0/metrics.jsonl").read_text()
    done = call("run", "--out", str(study), "--variants", "jetrl_fp8", "--seeds", "0", "--", "--steps", "3")
    assert done.status == 2 and "came to the end of its 2 steps and keeps no checkpoint" in done.stderr
    assert (study / "jetrl_fp8/seed0/metrics.jsonl").read_text() == before


def test_places_share_gpus_and_cores() -> None:
    cores = os.sched_getaffinity(0)
    three = places(["2", "5"], 3)
    assert [place.gpu for place in three] == ["2", "5", "2"]
    assert {core for place in three for core in place.cores} == cores
    assert places([], 1) == [Place(None, frozenset(cores))]


def test_pool_runs_beside_each_other_and_tells_who_failed(tmp_path: Path) -> None:
    says = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], len(os.sched_getaffinity(0)))"
    ended: list[str] = []

    def job(name: str, code: str, may_start: Callable[[], bool] = lambda: True) -> Job:
        command = [sys.executable, "-c", code]
        return Job(name, lambda: command, tmp_path / "logs" / name, may_start, lambda: ended.append(name))

    # The second waits for the first, although there is a place for it.
    jobs = [job("first", says), job("second", f"{says}; raise SystemExit(3)", lambda: ended == ["first"])]
    assert run_all(jobs, places(["7"], 2)) == ["second"] and ended == ["first", "second"]
    assert (tmp_path / "logs/first").read_text().split()[0] == "7"
    # Somebody who waits for nobody that runs is let go.
    assert run_all([job("third", "pass", lambda: False)], places([], 1)) == [] and ended[-1] == "third"
    assert run_all([job("fourth", "pass")], places([], 1), lambda: False) == [] and "fourth" not in ended


def test_pool_that_is_ended_ends_its_processes(tmp_path: Path) -> None:
    job = Job("long", lambda: [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")

    def end() -> bool:
        if job.process is not None:
            raise SystemExit(143)
        return True

    with pytest.raises(SystemExit):
        run_all([job], places([], 1), end)
    assert job.process is not None and job.process.returncode == -signal.SIGTERM
