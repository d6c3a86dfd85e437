"""The control connection between a sender and an engine's worker: JSON messages over a socket.

Weights never travel here. JSON, because what arrives from a network must not be able to run code; a token, because a
port may be found by others.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from jetrl_megatron.sync.manifest import WeightSyncError

_LENGTH = struct.Struct("!Q")
_RETRY_SECONDS = 0.05
_GRACE_SECONDS = 1.0
_HELLO_SECONDS = 5.0
"""Workers answer at once; somebody else who connects must not keep them waiting."""
_LONGEST_MESSAGE = 1 << 28

Message = dict[str, Any]


class Connection:
    """One end of a connection.

    Args:
        sock: connected.
        peer: what errors call the other end.
        timeout: seconds that the other end may stay silent when something is expected of it.

    Attributes:
        early: messages that came before they were expected.
    """

    def __init__(self, sock: socket.socket, peer: str, timeout: float) -> None:
        if sock.family != socket.AF_UNIX:
            # Messages are short and follow each other: each is to leave at once.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self.peer = peer
        self.timeout = timeout
        self.early: list[Message] = []

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message.

        Raises:
            WeightSyncError: the other end is gone.
        """
        body = json.dumps({"kind": kind, **fields}).encode()
        self._socket.settimeout(self.timeout)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            # It may have said why before it went.
            self._drain()
            raise self._gone() from error

    def expect(self, kind: str, *, timeout: float | None = None) -> Message:
        """Waits for a message of this kind.

        Raises:
            WeightSyncError: the other end is gone, says nothing in time, or gives up; then with its reasons.
        """
        if self.early:
            message = self.early.pop(0)
        else:
            message = self._receive(time.monotonic() + (self.timeout if timeout is None else timeout))
        if message["kind"] == "failed":
            raise WeightSyncError(message["problems"])
        if message["kind"] != kind:
            raise WeightSyncError([f"{self.peer} says {message['kind']!r} where {kind!r} is due"])
        return message

    def check(self) -> None:
        """Raises if the other end is gone or has given up; returns at once otherwise.

        Raises:
            WeightSyncError: see `expect`.
        """
        if select.select([self._socket], [], [], 0)[0]:
            self._read_early()

    def fail(self, problems: list[str]) -> None:
        """Tells the other end, if it is still there, that the update is given up."""
        with contextlib.suppress(WeightSyncError):
            self.send("failed", problems=problems)

    def fileno(self) -> int:
        """Of the socket, to wait for several at once."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the connection."""
        # Bytes that were not read would make the kernel drop those that the other end has not read yet.
        with contextlib.suppress(WeightSyncError, OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._drain()
        self._socket.close()

    def _drain(self) -> None:
        while select.select([self._socket], [], [], 0)[0]:
            self._read_early()

    def _read_early(self) -> None:
        message = self._receive(time.monotonic() + self.timeout)
        if message["kind"] == "failed":
            raise WeightSyncError(message["problems"])
        self.early.append(message)

    def _receive(self, deadline: float) -> Message:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > _LONGEST_MESSAGE:
            raise WeightSyncError([f"{self.peer} sent {length} bytes where a message is due: it is no peer of ours"])
        message: Message = json.loads(self._read(length, deadline))
        return message

    def _read(self, size: int, deadline: float) -> bytes:
        read = bytearray()
        while len(read) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                part = self._recv(size - len(read))
            except TimeoutError as error:
                raise WeightSyncError([f"{self.peer} said nothing for {self.timeout:g} s"]) from error
            except OSError as error:
                raise self._gone() from error
            if not part:
                raise self._gone()
            read += part
        return bytes(read)

    def _recv(self, size: int) -> bytes:
        try:
            return self._socket.recv(size)
        except ConnectionResetError:
            # Said once, and in front of what arrived before.
            return self._socket.recv(size)

    def _gone(self) -> WeightSyncError:
        return WeightSyncError([f"{self.peer} went away"])


class Listener:
    """Where a sender waits for workers.

    Args:
        address: "unix" for a socket file of this machine, "tcp:HOST" or "tcp:HOST:PORT" for a network; HOST is the name
            by which workers reach this machine.

    Attributes:
        address: to connect to.
        token: what a worker has to say first.

    Raises:
        ValueError: the address is none of these.
    """

    def __init__(self, address: str) -> None:
        kind, _, place = address.partition(":")
        self.token = secrets.token_hex(16)
        self._folder: str | None = None
        if kind == "unix" and not place:
            self._folder = tempfile.mkdtemp(prefix="jetrl-sync-")
            path = os.path.join(self._folder, "socket")
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(path)
            self.address = f"unix:{path}"
        elif kind == "tcp" and place:
            host, _, port = place.partition(":")
            self._socket = socket.create_server((host, int(port or 0)))
            self.address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        else:
            raise ValueError(f'address={address!r} must be "unix", "tcp:HOST" or "tcp:HOST:PORT"')
        self._socket.listen(1024)

    def accept(self, count: int, timeout: float) -> list[tuple[Connection, Message]]:
        """Waits for `count` workers, and returns what each said first.

        Raises:
            WeightSyncError: they are fewer when the time is over.
        """
        deadline = time.monotonic() + timeout
        accepted: list[tuple[Connection, Message]] = []
        while len(accepted) < count:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection = Connection(self._socket.accept()[0], "a worker", timeout)
            except TimeoutError as error:
                for other, _ in accepted:
                    other.close()
                raise WeightSyncError(
                    [
                        f"{len(accepted)} of {count} workers came to {self.address} within {timeout:g} s: call "
                        "receive_update on the engine at the same time, and set receivers to the number of its workers"
                    ]
                ) from error
            hello = self._hello(connection)
            if hello is not None:
                accepted.append((connection, hello))
        return accepted

    def _hello(self, connection: Connection) -> Message | None:
        """What a worker says first; None for somebody else, and for a worker that left while it waited in the queue."""
        try:
            hello = connection.expect("hello", timeout=_HELLO_SECONDS)
            if not hmac.compare_digest(str(hello.get("token")), self.token):
                raise WeightSyncError(["wrong token"])
            connection.send("welcome")
            # From one who knows the token; it may save what it serves first.
            connection.expect("here")
        except (WeightSyncError, ValueError):
            connection.close()
            return None
        connection.peer = str(hello["name"])
        return hello

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()
        if self._folder is not None:
            os.unlink(os.path.join(self._folder, "socket"))
            os.rmdir(self._folder)


def expect_all(connections: Sequence[Connection], kind: str, timeout: float) -> list[str]:
    """Waits for a message of this kind from every connection.

    Returns:
        the problems of those that fail, or [] when all have answered. With the first failure the others get a moment
        to tell theirs, and are not waited for any longer: they may be stuck because of it.
    """
    waiting = {connection.fileno(): connection for connection in connections}
    problems: list[str] = []
    deadline = time.monotonic() + timeout
    while waiting:
        ready = [number for number, connection in waiting.items() if connection.early]
        ready = ready or select.select(list(waiting), [], [], max(deadline - time.monotonic(), 0))[0]
        if not ready:
            break
        for number in ready:
            try:
                waiting.pop(number).expect(kind)
            except WeightSyncError as error:
                problems += error.problems
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if waiting and not problems:
        problems = [f"{connection.peer} said nothing for {timeout:g} s" for connection in waiting.values()]
    return list(dict.fromkeys(problems))


def connect(address: str, timeout: float) -> Connection:
    """Connects to a `Listener`, waiting until it listens.

    Raises:
        WeightSyncError: nobody listens there in time.
    """
    kind, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            sock.connect(place if kind == "unix" else (host, int(port)))
            return Connection(sock, f"the sender at {address}", timeout)
        except OSError as error:
            sock.close()
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise WeightSyncError([f"nobody listens at {address} ({error}) after {timeout:g} s"]) from error
        time.sleep(_RETRY_SECONDS)
