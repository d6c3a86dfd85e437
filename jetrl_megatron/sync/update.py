"""One update, seen from one worker of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jetrl_megatron.sync.manifest import Manifest, WeightSyncError
from jetrl_megatron.sync.transport import GroupReceiving, Receiving
from jetrl_megatron.sync.wire import Connection, Message, connect

if TYPE_CHECKING:
    from jetrl_megatron.sync.receiver import EngineReceiver


class Update:
    """One update, seen from one worker.

    Args:
        receiver: the worker's.
        endpoints: of the trainer, see `JetRLWeightSynchronizer`.
        timeout: seconds that the sender may stay silent.
    """

    def __init__(self, receiver: EngineReceiver, endpoints: Sequence[Message], timeout: float) -> None:
        self._receiver = receiver
        self._endpoints = endpoints
        self._timeout = timeout
        self._connection: Connection | None = None
        self._receiving: Receiving | None = None
        self._version = receiver.version
        self._fresh = False
        self._transport = ""

    def run(self) -> list[str]:
        """Runs it to its end, good or bad; returns the engine's problems, the same on every worker."""
        return (
            self._together(self._shake_hands)
            or self._together(self._compare)
            or self._together(self._receive)
            or self._decide()
        )

    def give_up(self, problems: list[str]) -> list[str]:
        """Makes everything as it was before; returns why that is not possible, or []."""
        if self._connection is not None:
            self._connection.fail(problems)
        weights = self._receiver.weights
        try:
            # First: a broadcast whose sender is gone keeps the GPU busy for ever, and what follows waits for the GPU.
            self._stop_receiving(failed=True)
            if weights is not None:
                weights.roll_back()
        except Exception as error:
            # After some CUDA errors, e.g. one while the memory of a killed sender is read, a process has no GPU left.
            reason = self._receiver.problem(error)
            return [f"{reason}; version {self._receiver.version} could not be put back: restart the engine"]
        finally:
            self._close()
        return []

    def _together(self, action: Callable[[], list[str]]) -> list[str]:
        """Runs a step and waits for the other workers; returns the problems of all."""
        problems: list[str] = []
        try:
            problems = action()
        except WeightSyncError as error:
            problems = error.problems
        except Exception as error:
            # What vLLM or torch raise must reach the sender, and must not keep the other workers waiting.
            problems = [self._receiver.problem(error)]
        if problems and self._connection is not None:
            # At once: other workers may wait for a sender that waits for this one.
            self._connection.fail(problems)
        return list(dict.fromkeys(problem for rank in self._receiver.gather(problems) for problem in rank))

    def _shake_hands(self) -> list[str]:
        receiver = self._receiver
        endpoint = receiver.endpoint(self._endpoints)
        self._transport = endpoint["transport"]
        self._connection = connection = connect(endpoint["address"], self._timeout)
        group = None if receiver.group is None else receiver.group.name
        # Of this engine, that come to this sender.
        workers = receiver.workers if len(self._endpoints) == 1 else 1
        hello = {"name": receiver.name, "workers": workers, "version": receiver.version, "group": group}
        connection.send("hello", token=endpoint["token"], **hello)
        digest = receiver.known_digest()
        if receiver.weights is not None:
            # Where it fails it does so again in `begin`, where the sender hears of it.
            with contextlib.suppress(Exception):
                receiver.weights.save()
        connection.expect("welcome")
        connection.send("here")
        offer = connection.expect("offer")
        connection.send("known", digest=digest)
        self._version = offer["version"]
        if self._version <= receiver.version:
            return [f"version {self._version} is not newer than {receiver.version}, which is served"]
        self._fresh = digest != offer["digest"]
        if not self._fresh:
            return []
        receiver.forget()
        manifest = Manifest.from_message(connection.expect("manifest"))
        return receiver.prepare(manifest)

    def _compare(self) -> list[str]:
        """Whether all workers together take all of every tensor; a collective where one of them met them first."""
        receiver = self._receiver
        if not any(receiver.gather(self._fresh)):
            return []
        return receiver.check_taken()

    def _receive(self) -> list[str]:
        connection, weights = self._connection, self._receiver.weights
        assert connection is not None and weights is not None
        connection.send("ready")
        offer = connection.expect("open")["offer"]
        self._receiving = self._receiver.open(self._transport, offer, connection)
        connection.send("opened")
        weights.begin()
        buckets = len(weights.manifest.buckets)
        for index in range(buckets):
            try:
                message = connection.expect("bucket")
                bucket = self._receiving.fetch(message["slot"], weights.manifest.buckets[index].nbytes, connection)
                weights.write(index, bucket)
            except WeightSyncError as error:
                return [f"bucket {index + 1} of {buckets}: {problem}" for problem in error.problems]
            connection.send("done")
        weights.finish()
        return []

    def _decide(self) -> list[str]:
        """Takes the version if the sender has told any worker to, so that they never differ."""
        connection, weights = self._connection, self._receiver.weights
        assert connection is not None and weights is not None
        problems: list[str] = []
        try:
            connection.send("complete")
            connection.expect("commit")
        except WeightSyncError as error:
            problems = error.problems
        outcomes = self._receiver.gather(problems)
        if all(outcomes):
            return list(dict.fromkeys(problem for outcome in outcomes for problem in outcome))
        weights.commit()
        self._receiver.version = self._version
        # Before the sender hears of it and frees its slots, which torch keeps while somebody maps them.
        self._stop_receiving(failed=False)
        with contextlib.suppress(WeightSyncError):
            connection.send("committed")
        self._close()
        return []

    def _stop_receiving(self, *, failed: bool) -> None:
        if self._receiving is not None:
            self._receiving.end(failed=failed)
        if isinstance(self._receiving, GroupReceiving):
            self._receiver.group = self._receiving.group

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
