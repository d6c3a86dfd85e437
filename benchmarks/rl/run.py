"""Runs a study, in as many sittings as it takes: precisions and ablations, each with several seeds.

    python -m benchmarks.rl.run --out runs/study [--variants bf16,jetrl_fp8] [--seeds 0,1,2] [--time-budget 1500] \
        [--gpus 0,1 --parallel 6] [-- --task chain_sum --steps 100 ...]

What follows `--` goes to every run of `examples.grpo.train`. A run that is complete is left alone, and keeps its
options and metrics; one that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.rl.pool import Job, places, run_all
from benchmarks.rl.variants import PRECISIONS, VARIANTS, RunFolder, runs_of
from examples.grpo.options import Options, parse
from examples.grpo.train import prepare

_SHORTEST = 60.0
"""Seconds under which no further run is started."""


def main() -> None:
    """Command line; the status is 1 if a run failed, and 0 also where some are left for another sitting."""
    # As Ctrl-C: the runs are ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.monotonic()
    own, more = _split(sys.argv[1:])
    options, parser = _options(own)
    variants, seeds = options.variants.split(","), _seeds(options.seeds, parser)
    unknown = ", ".join(sorted(set(variants) - set(VARIANTS)))
    if unknown:
        parser.error(f"--variants: {unknown} unknown, use {', '.join(VARIANTS)}")
    if options.parallel < 1:
        parser.error(f"--parallel {options.parallel}: use 1 or more")
    runs = list(runs_of(options.out, variants, seeds))
    asked = {run: parse(_arguments(run, more)) for run in runs}

    def left() -> float:
        return options.time_budget - (time.monotonic() - started) if options.time_budget else 0.0

    missing = [run for run in runs if not run.is_complete(asked[run].steps)]
    for run in missing:
        if run.is_complete(1) and not (run.path / "checkpoints").is_dir():
            done = run.rows()[-1]["step"]
            parser.error(
                f"--out {options.out}: {run.variant}, seed {run.seed} came to the end of its {done} steps and keeps no "
                f"checkpoint to go on from: use --steps {done}, or another folder"
            )
    for run in missing:
        # Before any starts: what is wrong with one is known then, and what they have in common is made once.
        try:
            prepare(asked[run])
        except ValueError as error:
            parser.error(str(error))
    jobs = [_job(run, [] if options.warm else runs, _arguments(run, more), left) for run in missing]
    where = places([gpu for gpu in options.gpus.split(",") if gpu], options.parallel)
    failed = run_all(jobs, where, lambda: not options.time_budget or left() > _SHORTEST)
    _report(runs, asked)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


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
    parser.add_argument("--gpus", default="", help="comma-separated, for CUDA_VISIBLE_DEVICES; empty: all to every run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once, spread over --gpus")
    parser.add_argument(
        "--warm", action="store_true", help="vLLM has compiled all variants before: let their seeds start together"
    )
    parser.add_argument("--time-budget", type=float, default=0.0, help="seconds of this sitting; 0: to the end")
    return parser.parse_args(arguments), parser


def _seeds(text: str, parser: argparse.ArgumentParser) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        parser.error(f"--seeds {text!r}: use whole numbers such as 0,1,2")


def _arguments(run: RunFolder, more: Sequence[str]) -> list[str]:
    own = ["--out", str(run.path), *VARIANTS[run.variant], "--seed", str(run.seed)]
    return ["--shared", str(run.study / "shared"), *more, *own]


def _job(run: RunFolder, runs: Sequence[RunFolder], arguments: Sequence[str], left: Callable[[], float]) -> Job:
    """Starts or resumes a run."""
    name, steps = f"{run.variant}, seed {run.seed}", parse(list(arguments)).steps
    before = [other for other in runs if other.variant == run.variant and runs.index(other) < runs.index(run)]

    def command() -> list[str]:
        print(name, file=sys.stderr, flush=True)
        return [sys.executable, "-m", "examples.grpo.train", *arguments, "--time-budget", str(left())]

    def may_start() -> bool:
        # The first of a variant compiles the engine's graphs; the others find them in vLLM's cache.
        return not before or any(other.rows() for other in before)

    log = run.study / "logs" / f"{run.variant}-seed{run.seed}.log"
    return Job(name, command, log, may_start, lambda: _clear(run, steps))


def _clear(run: RunFolder, steps: int) -> None:
    """Removes what a complete run needs no more, gigabytes of it."""
    if run.is_complete(steps):
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)


def _report(runs: Sequence[RunFolder], asked: dict[RunFolder, Options]) -> None:
    complete = [run for run in runs if run.is_complete(asked[run].steps)]
    for run in runs:
        _clear(run, asked[run].steps)
        done = sum("reward" in row for row in run.rows())
        print(f"{run.variant:34} seed {run.seed:<4} {done} of {asked[run].steps} steps")
    print(f"{len(complete)} of {len(runs)} runs complete" + ("" if len(complete) == len(runs) else ": call it again"))


if __name__ == "__main__":
    main()
