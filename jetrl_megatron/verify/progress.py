"""How a child process tells the driver how far it is, by lines of its standard output; and where time goes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import torch

_PREFIX = "jetrl-progress "


def report_progress(done: int, total: int, note: str = "") -> None:
    """Says that `done` of `total` parts of this phase are complete."""
    print(_PREFIX + json.dumps({"done": done, "total": total, "note": note}), flush=True)


def parse_progress(line: str) -> dict[str, Any] | None:
    """What `report_progress` printed, as {"done", "total", "note"}; None for any other line.

    A line that another process of the same log wrote into is another line.
    """
    if not line.startswith(_PREFIX):
        return None
    try:
        progress: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
    except json.JSONDecodeError:
        return None
    return progress


class Clock:
    """Seconds by phase.

    Attributes:
        seconds: so far; replace it to start anew.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds what happens inside, up to its end on the GPU."""
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
