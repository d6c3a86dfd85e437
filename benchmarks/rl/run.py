"""Runs a study, in as many sittings as it takes: precisions and ablations, each with several seeds.

    python -m benchmarks.rl.run --out runs/study [--variants bf16,jetrl_fp8] [--seeds 0,1,2] [--time-budget 1500] \
        [-- --task chain_sum --steps 100 ...]

What follows `--` goes to every run of `examples.grpo.train`. A run that is complete is left alone, and keeps its
options and metrics; one that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rl.variants import PRECISIONS, VARIANTS, RunFolder, runs_of
from examples.grpo.options import Options, parse

_SHORTEST = 60.0
"""Seconds under which no further run is started."""
_WORKING_FOLDERS = ("checkpoints", "model", "rollout")


def main() -> None:
    """Command line; the status is 1 if a run failed, and 0 also where some are left for another sitting."""
    started = time.monotonic()
    own, more = _split(sys.argv[1:])
    options, parser = _options(own)
    variants, seeds = options.variants.split(","), _seeds(options.seeds, parser)
    unknown = ", ".join(sorted(set(variants) - set(VARIANTS)))
    if unknown:
        parser.error(f"--variants: {unknown} unknown, use {', '.join(VARIANTS)}")
    runs = list(runs_of(options.out, variants, seeds))
    asked = {run: parse([*more, *_of_run(run)]) for run in runs}
    failed = []
    for run in runs:
        left = options.time_budget - (time.monotonic() - started) if options.time_budget else 0.0
        if options.time_budget and left < _SHORTEST:
            break
        if not run.is_complete(asked[run].steps) and not _go_on(run, more, left):
            failed.append(run)
    _report(runs, asked)
    if failed:
        raise SystemExit(f"failed: {', '.join(str(run.path) for run in failed)}")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _options(arguments: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rl.run", description="Runs a study; options behind -- go to every run."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--variants", default=",".join(PRECISIONS), help=f"comma-separated, of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--time-budget", type=float, default=0.0, help="seconds of this sitting; 0: to the end")
    return parser.parse_args(arguments), parser


def _seeds(text: str, parser: argparse.ArgumentParser) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        parser.error(f"--seeds {text!r}: use whole numbers such as 0,1,2")


def _of_run(run: RunFolder) -> list[str]:
    return ["--out", str(run.path), *VARIANTS[run.variant], "--seed", str(run.seed)]


def _go_on(run: RunFolder, more: Sequence[str], seconds: float) -> bool:
    """Starts or resumes a run; whether it came to its end or to that of its time."""
    print(f"{run.variant}, seed {run.seed}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "examples.grpo.train", *more, *_of_run(run), "--time-budget", str(seconds)]
    return subprocess.run(command, check=False).returncode == 0


def _report(runs: Sequence[RunFolder], asked: dict[RunFolder, Options]) -> None:
    complete = [run for run in runs if run.is_complete(asked[run].steps)]
    for run in runs:
        done = sum("reward" in row for row in run.rows())
        print(f"{run.variant:34} seed {run.seed:<4} {done} of {asked[run].steps} steps")
    for run in complete:
        for name in _WORKING_FOLDERS:
            shutil.rmtree(run.path / name, ignore_errors=True)
    print(f"{len(complete)} of {len(runs)} runs complete" + ("" if len(complete) == len(runs) else ": call it again"))


if __name__ == "__main__":
    main()
