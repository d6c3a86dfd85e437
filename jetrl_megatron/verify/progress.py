"""How a child process tells the driver how far it is: lines of its standard output."""

from __future__ import annotations

import json
from typing import Any

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
