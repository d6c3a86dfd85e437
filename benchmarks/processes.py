"""Processes that answer commands over a connection, so that several of them can be driven step by step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


class Failed(Exception):
    """A process answered with an error."""


class Process:
    """`python -m MODULE PIPE ARGUMENTS...`, which calls `answer` on `connection_of(PIPE)`.

    Args:
        log: file for its output.
    """

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._connection, theirs = Pipe()
        command = [sys.executable, "-W", "ignore", "-m", module, str(theirs.fileno()), *arguments]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()

    def send(self, do: str, **arguments: Any) -> None:
        """Gives a command; `result` is its answer."""
        self._connection.send({"do": do, **arguments})

    def result(self) -> Any:
        """The answer to the oldest command that has none yet.

        Raises:
            Failed: the command raised, or the process ended.
        """
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise Failed(f"{self.log} ends:\n{self.log.read_text()[-4000:]}") from None
        if kind != "ok":
            raise Failed(f"{kind}: {value}")
        return value

    def ask(self, do: str, **arguments: Any) -> Any:
        """Gives a command and waits for the answer."""
        self.send(do, **arguments)
        return self.result()

    def stop(self) -> None:
        """Ends the process, and those that it started and did not end itself."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def connection_of(pipe: str) -> Connection:
    """The connection of a process to the one that started it.

    Args:
        pipe: the first argument of its command line.
    """
    os.set_inheritable(int(pipe), False)
    return Connection(int(pipe))


def answer(connection: Connection, commands: dict[str, Callable[..., Any]]) -> None:
    """Answers commands until the other end closes. One that raises is answered with the error's type and text."""
    while True:
        try:
            command = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            connection.send(("ok", commands[command.pop("do")](**command)))
        except Exception as error:
            connection.send((type(error).__name__, str(error)))


def answer_on_all_ranks(connection: Connection | None, commands: dict[str, Callable[..., Any]]) -> None:
    """The same where every command is a collective: rank 0 has the connection, and answers."""
    # NCCL would keep the GPU busy while ranks wait for a command, and give up after some minutes.
    group = dist.new_group(backend="gloo")
    if connection is not None:
        answer(connection, {name: _with_others(name, command, group) for name, command in commands.items()})
        dist.broadcast_object_list([None], src=0, group=group)
        return
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=group)
        if box[0] is None:
            return
        name, arguments = box[0]
        try:
            commands[name](**arguments)
        except RuntimeError as error:
            print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)


def _with_others(name: str, command: Callable[..., Any], group: Any) -> Callable[..., Any]:
    def run(**arguments: Any) -> Any:
        dist.broadcast_object_list([(name, arguments)], src=0, group=group)
        return command(**arguments)

    return run
