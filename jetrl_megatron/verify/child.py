"""A child process with a log file and a progress bar."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from jetrl_megatron.verify.progress import parse_progress

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 15.0
_LOG_LINES = 30


class ChildError(RuntimeError):
    """A child process failed; the message names its log and ends with the log's last lines."""


def run_child(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Runs a command to its end.

    Args:
        name: title of the progress bar, which shows what the command reports with `report_progress`.
        log: file for its output, standard and error.
        environment: variables to set for it on top of this process's own.

    Raises:
        ChildError: it ended with another status than 0.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        # disable=None: no bar where nobody looks at a terminal.
        with log.open(errors="replace") as lines, tqdm(desc=name, total=1, disable=None, leave=True) as bar:
            while process.poll() is None:
                _show(lines, bar)
                time.sleep(_POLL_SECONDS)
            if process.returncode == 0:
                _finish(bar)
    finally:
        _stop(process)
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise ChildError(f"{name} ended with status {process.returncode}; {log} ends:\n{tail}")


def _show(lines: TextIO, bar: Any) -> None:
    for line in lines:
        progress = parse_progress(line)
        if progress is not None:
            bar.total, bar.n = progress["total"], progress["done"]
            bar.set_postfix_str(progress["note"], refresh=False)
    bar.refresh()


def _finish(bar: Any) -> None:
    bar.n = bar.total
    bar.refresh()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs, e.g. after Ctrl-C."""
    # SIGTERM first: torchrun hands it on to its ranks, which have sessions of their own.
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
