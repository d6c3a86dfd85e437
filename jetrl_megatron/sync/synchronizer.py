"""The trainer's side of weight sync."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.sync.manifest import Bucket, Manifest, WeightSyncError
from jetrl_megatron.sync.source import WeightSource
from jetrl_megatron.sync.transport import (
    SLOTS,
    TRANSPORTS,
    GroupSending,
    IpcSending,
    Sending,
    SharedMemorySending,
    device_uuid,
)
from jetrl_megatron.sync.wire import Connection, Listener, Message, expect_all

BUCKET_BYTES = 512 << 20
TIMEOUT = 120.0


@dataclass(frozen=True)
class SyncReport:
    """An update that took place.

    Attributes:
        version: which the engines serve now.
        seconds: from the call to the last worker's word that it serves it.
        nbytes: of all tensors.
        buckets: in how many pieces they went.
    """

    version: int
    seconds: float
    nbytes: int
    buckets: int


class JetRLWeightSynchronizer:
    """Sends a trainer's FP8 weights into running vLLM engines. Every rank of the trainer makes one, at the same time.

    An update is two calls at once: `update` here, on every rank, and `receive_update` on the engine. Either all workers
    of an engine take the new version, or the engine goes on serving the old one, and both calls raise.

    Args:
        source: the weights: a `MegatronSource`, or a `TensorSource` for tensors of one process.
        receivers: workers that each sending rank serves.
        transport: "ipc" for workers on the trainer's own GPUs, "nccl" for others, "shm" and "gloo" for a CPU; "auto"
            takes "ipc" or "shm".
        senders: "first" has rank 0 send to all workers, "all" has each rank send to the workers on its GPU.
        address: where senders listen, see `Listener`.
        bucket_bytes: memory for bytes on their way, on the sender's device and, with a broadcast, on each worker's.
        timeout: seconds that anybody may stay silent.

    Attributes:
        endpoints: what the engine has to know, ready for JSON; the same on every rank.
        version: of the last update that succeeded; 0 before.

    Raises:
        ValueError: an argument is unknown, or the ranks were given different ones.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        receivers: int = 1,
        transport: str = "auto",
        senders: str = "first",
        address: str = "unix",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = TIMEOUT,
    ) -> None:
        transport = _transport(transport, source.device)
        if senders not in ("first", "all") or (senders == "all" and transport in ("gloo", "nccl")):
            raise ValueError(
                f'senders={senders!r} with transport {transport!r}: use "first", or "all" with "ipc" or "shm"'
            )
        if receivers < 1:
            raise ValueError(f"receivers={receivers} counts the workers that a sender serves: use 1 or more")
        self._source = source
        self._receivers = receivers
        self._timeout = timeout
        self._slot_bytes = bucket_bytes // SLOTS
        self._manifest: Manifest | None = None
        self._spread = source.distributed and dist.get_world_size() > 1
        settings = [source.recipe.fingerprint, receivers, transport, senders, bucket_bytes, timeout]
        self._require_same(settings)
        sends = senders == "all" or self._rank == 0
        self._listener = Listener(address) if sends else None
        self._sending = _sending(transport, source.device, address) if sends else None
        self.endpoints: list[Message] = [e for e in self._gather(self._endpoint(transport)) if e is not None]
        self.version = 0

    def update(self, version: int | None = None) -> SyncReport:
        """Sends the weights as they are now. A collective over the trainer's ranks.

        Args:
            version: what the engines are to call it; greater than any that they have. None counts on.

        Raises:
            WeightSyncError: on every rank, with everything that went wrong; the engines serve the version that they
                had, and may be sent another one at once.
        """
        started = time.perf_counter()
        manifest = self._manifest_of(self._source)
        buckets = manifest.buckets
        connections: list[Connection] = []
        succeeded = False
        try:
            self._agree(self._source.refresh)
            hellos = self._meet(connections)
            version = self._next(version, hellos)
            self._agree(lambda: self._offer(connections, manifest, version))
            self._agree(lambda: self._open(connections, hellos))
            self._agree(lambda: self._send(connections, buckets))
            # No worker is told to take the version before every worker has all of it.
            self._agree(lambda: expect_all(connections, "complete", self._timeout))
            self._agree(lambda: self._commit(connections))
            succeeded = True
        except WeightSyncError as error:
            for connection in connections:
                connection.fail(error.problems)
            raise
        finally:
            self._source.release()
            if self._sending is not None:
                self._sending.end(failed=not succeeded)
            for connection in connections:
                connection.close()
        self.version = version
        return SyncReport(version, time.perf_counter() - started, manifest.nbytes, len(buckets))

    def close(self) -> None:
        """Stops listening."""
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def _endpoint(self, transport: str) -> Message | None:
        if self._listener is None:
            return None
        uuid = device_uuid(self._source.device) if transport == "ipc" else None
        return {
            "address": self._listener.address,
            "token": self._listener.token,
            "device": uuid,
            "transport": transport,
        }

    def _meet(self, connections: list[Connection]) -> list[Message]:
        """Waits for this rank's workers; returns what they said."""
        hellos: list[Message] = []

        def accept() -> list[str]:
            if self._listener is not None:
                accepted = self._listener.accept(self._receivers, self._timeout)
                connections.extend(connection for connection, _ in accepted)
                hellos.extend(hello for _, hello in accepted)
            most = max((hello["workers"] for hello in hellos), default=0)
            if most <= self._receivers:
                return []
            return [f"receivers={self._receivers}, and an engine has {most} workers: count the workers of all engines"]

        self._agree(accept)
        return hellos

    def _next(self, version: int | None, hellos: list[Message]) -> int:
        """The number of this update, the same on every rank."""
        served = max((hello["version"] for hello in hellos), default=0)
        newest: int = max(self.version, *self._gather(served))
        if version is None:
            return newest + 1
        if version <= newest:
            raise WeightSyncError(
                [f"version={version} is not newer than {newest}, which was sent already: leave it out, or count on"]
            )
        return version

    def _offer(self, connections: list[Connection], manifest: Manifest, version: int) -> list[str]:
        for connection in connections:
            connection.send("offer", version=version, digest=manifest.digest, timeout=self._timeout)
        for connection in connections:
            if connection.expect("known")["digest"] != manifest.digest:
                connection.send("manifest", **manifest.to_message())
        return expect_all(connections, "ready", self._timeout)

    def _open(self, connections: list[Connection], hellos: list[Message]) -> list[str]:
        if self._sending is None:
            return []
        offer = self._sending.offer(hellos, self._slot_bytes)
        for connection in connections:
            connection.send("open", offer=offer)
        self._sending.begin(offer, self._timeout, lambda: _check(connections))
        return expect_all(connections, "opened", self._timeout)

    def _send(self, connections: list[Connection], buckets: Sequence[Bucket]) -> list[str]:
        problems: list[str] = []
        scratch: torch.Tensor | None = None
        for index, bucket in enumerate(buckets):
            if index >= SLOTS and not problems:
                problems += self._done(connections, index - SLOTS, len(buckets))
            if self._sending is not None and not problems:
                buffer = self._sending.slots[index % SLOTS]
            else:
                # A rank that has nobody to send to, or no more, goes on filling: the others need its part. It leaves
                # the slots alone, which a worker that is late may still read.
                if scratch is None:
                    scratch = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._source.device)
                buffer = scratch
            self._source.fill(bucket, buffer[: bucket.nbytes])
            if self._sending is not None and not problems:
                problems += self._publish(connections, index, bucket)
        for index in range(max(len(buckets) - SLOTS, 0), len(buckets)):
            if not problems:
                problems += self._done(connections, index, len(buckets))
        return problems

    def _done(self, connections: list[Connection], index: int, buckets: int) -> list[str]:
        problems = expect_all(connections, "done", self._timeout)
        return [
            problem if "bucket" in problem else f"bucket {index + 1} of {buckets}: {problem}" for problem in problems
        ]

    def _publish(self, connections: list[Connection], index: int, bucket: Bucket) -> list[str]:
        assert self._sending is not None
        slot = index % SLOTS
        with _collected() as problems:
            self._sending.publish(slot, bucket.nbytes)
            for connection in connections:
                connection.send("bucket", index=index, slot=slot)
            self._sending.complete(slot, self._timeout, lambda: _check(connections))
        return problems

    def _commit(self, connections: list[Connection]) -> list[str]:
        told = [problem for connection in connections for problem in _told(connection, "commit")]
        return told or expect_all(connections, "committed", self._timeout)

    def _agree(self, action: Callable[[], list[str]]) -> None:
        """Runs a step on every rank; raises on every rank if one has problems.

        Raises:
            WeightSyncError: with the problems of all ranks.
        """
        problems: list[str] = []
        failure: Exception | None = None
        try:
            problems = action()
        except WeightSyncError as error:
            problems = error.problems
        except Exception as error:
            # The other ranks wait for this one's word, whatever happened to it.
            failure, problems = error, [f"rank {self._rank}: {type(error).__name__}: {error}"]
        gathered = self._gather(problems)
        everything = list(dict.fromkeys(problem for rank in gathered for problem in rank))
        if everything:
            raise WeightSyncError(everything) from failure

    @property
    def _rank(self) -> int:
        return dist.get_rank() if self._spread else 0

    def _manifest_of(self, source: WeightSource) -> Manifest:
        if self._manifest is None or self._manifest.tensors is not source.tensors:
            self._manifest = Manifest(source.tensors, source.recipe, self._slot_bytes)
        return self._manifest

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [value]
        if self._spread:
            values = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
        return values

    def _require_same(self, settings: list[Any]) -> None:
        everywhere = self._gather(settings)
        for rank, other in enumerate(everywhere):
            if other != everywhere[0]:
                raise ValueError(
                    f"rank 0 has (recipe, receivers, transport, senders, bucket_bytes, timeout) = {everywhere[0]}, "
                    f"rank {rank} has {other}: give all ranks the same"
                )


@contextlib.contextmanager
def _collected() -> Iterator[list[str]]:
    """A list that gets the problems of a WeightSyncError raised inside."""
    problems: list[str] = []
    try:
        yield problems
    except WeightSyncError as error:
        problems += error.problems


def _check(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.check()


def _told(connection: Connection, kind: str) -> list[str]:
    """Sends a message; returns why it could not be sent, if so."""
    with _collected() as problems:
        connection.send(kind)
    return problems


def _transport(name: str, device: torch.device) -> str:
    cuda = device.type == "cuda"
    if name == "auto":
        return "ipc" if cuda else "shm"
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r} is unknown: use auto, {', '.join(TRANSPORTS)}")
    if cuda != (name in ("ipc", "nccl")):
        fitting = "ipc or nccl" if cuda else "shm or gloo"
        raise ValueError(f"transport={name!r} does not carry weights on {device.type}: use {fitting}")
    return name


def _sending(transport: str, device: torch.device, address: str) -> Sending:
    if transport == "shm":
        return SharedMemorySending()
    if transport == "ipc":
        return IpcSending(device)
    _, _, place = address.partition(":")
    return GroupSending(transport, device, place.partition(":")[0] or "127.0.0.1")
