"""Runs commands beside each other, each on a GPU and on CPU cores of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_POLL_SECONDS = 0.5
_FEWEST_CORES = 4


@dataclass(frozen=True)
class Place:
    """Where a command runs: a GPU, None where the machine has none or all are meant, and CPU cores."""

    gpu: str | None
    cores: frozenset[int]


@dataclass
class Job:
    """A command that waits to be run.

    Attributes:
        name: for messages.
        command: called when it starts, since a budget of time depends on when that is.
        log: file for its output, which is appended to.
        may_start: whether it may start now.
        done: called at its end.
    """

    name: str
    command: Callable[[], Sequence[str]]
    log: Path
    may_start: Callable[[], bool] = lambda: True
    done: Callable[[], None] = lambda: None
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)


def places(gpus: Sequence[str], parallel: int) -> list[Place]:
    """As many places as run at once: GPUs in turn, and this process's cores in equal parts, which overlap if small.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them; empty leaves that variable alone.
    """
    cores = sorted(os.sched_getaffinity(0))
    own, each = len(cores) / parallel, max(len(cores) // parallel, min(_FEWEST_CORES, len(cores)))
    starts = [int(index * own) for index in range(parallel)]
    parts = [frozenset(cores[(start + core) % len(cores)] for core in range(each)) for start in starts]
    return [Place(gpus[index % len(gpus)] if gpus else None, part) for index, part in enumerate(parts)]


def run_all(jobs: Sequence[Job], where: Sequence[Place], may_go_on: Callable[[], bool] = lambda: True) -> list[str]:
    """Runs jobs in their order, as many at once as there are places; ends all when it is interrupted.

    Args:
        may_go_on: whether further jobs may start; those that run come to their end.

    Returns:
        the names of those that failed.
    """
    waiting, running, failed = list(jobs), dict[int, Job](), list[str]()
    try:
        while running or waiting:
            for index, job in list(running.items()):
                assert job.process is not None
                if job.process.poll() is not None:
                    del running[index]
                    failed += [job.name] if job.process.returncode else []
                    job.done()
            if not may_go_on():
                waiting.clear()
            for index in set(range(len(where))) - set(running):
                ready = next((job for job in waiting if job.may_start()), None)
                if ready is not None:
                    waiting.remove(ready)
                    ready.process = _start(ready, where[index])
                    running[index] = ready
            if waiting and not running:
                # Nobody is left whom they could wait for.
                waiting[0].may_start = lambda: True
            time.sleep(_POLL_SECONDS if running else 0)
    finally:
        processes = [job.process for job in running.values() if job.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    return failed


def _start(job: Job, place: Place) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if place.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place.gpu
    # Whatever takes its number of threads from the machine's cores instead of from those that it may use.
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(len(place.cores)))
    cores = ",".join(map(str, sorted(place.cores)))
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as log:
        return subprocess.Popen(["taskset", "-c", cores, *job.command()], env=environment, stdout=log, stderr=log)
