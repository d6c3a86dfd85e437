"""Broadcasts between processes that share nothing else, over gloo or NCCL, which end when a process is lost."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from jetrl_megatron.sync.manifest import WeightSyncError
from jetrl_megatron.sync.wire import Message

_POLL_SECONDS = 2e-4
"""Between two looks at something that is under way."""
_MEET_SECONDS = 0.01
_GRACE_SECONDS = 0.2

_log = logging.getLogger(__name__)


class Communicator:
    """Processes of one update, apart from the process groups that they are in. Rank 0 sends.

    Attributes:
        name: the same in all its processes.

    Args:
        offer: what all its processes know: "backend", "nccl" or "gloo"; "group", the name; "size", how many they are.
        rank: of this process.
        store: which all of them reach.
        device: where the tensors are.
        timeout: seconds until all must be here.
        check: raises if one of them is gone.

    Raises:
        WeightSyncError: they do not all come in time, or one of them is gone.
    """

    def __init__(
        self,
        offer: Message,
        rank: int,
        store: Store,
        device: torch.device,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        self.name: str = offer["group"]
        self._rank, self._size, self._timeout = rank, offer["size"], datetime.timedelta(seconds=timeout)
        store.set_timeout(self._timeout)
        self._store = PrefixStore(self.name, store)
        failure = f"no communicator of {self._size} processes"
        # What makes one waits for others without end and cannot be stopped meanwhile: it starts when all are here.
        self._meet(failure, timeout, check)
        make = self._nccl if offer["backend"] == "nccl" else self._gloo
        self._backend: Any = _awaited(lambda: make(device), failure, timeout, check)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Starts a broadcast from rank 0; returns torch's handle, see `wait_for`.

        Raises:
            WeightSyncError: it cannot be started.
        """
        try:
            return _broadcast(self._backend, tensor)
        except RuntimeError as error:
            raise WeightSyncError([f"a broadcast failed: {error}"]) from error

    def abort(self) -> None:
        """Ends it, whatever is under way."""
        try:
            self._backend.abort()
        except RuntimeError as error:
            # Why the update failed matters more.
            _log.warning("a communicator could not be ended and keeps its memory: %s", error)

    def _meet(self, failure: str, timeout: float, check: Callable[[], None]) -> None:
        ranks = [f"rank {rank}" for rank in range(self._size)]
        try:
            self._store.set(ranks[self._rank], "")
            _until(lambda: self._store.check(ranks), timeout, check, _late(failure, timeout), pause=_MEET_SECONDS)
        except WeightSyncError:
            raise
        except RuntimeError as error:
            check()
            raise WeightSyncError([f"{failure}: {error}"]) from error

    def _gloo(self, device: torch.device) -> Any:
        return ProcessGroupGloo(self._store, self._rank, self._size, self._timeout)

    def _nccl(self, device: torch.device) -> Any:
        # Not in every build of torch.
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        # Without it a watchdog looks for errors too, and has torch end the process when a peer is lost.
        with torch.cuda.device(device), _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            backend = ProcessGroupNCCL(self._store, self._rank, self._size, options)
            # NCCL connects in its first collective.
            _broadcast(backend, torch.zeros(1, dtype=torch.uint8, device=device)).wait()
            torch.cuda.current_stream(device).synchronize()
        return backend


def wait_for(work: Any, timeout: float, check: Callable[[], None], late: str) -> None:
    """Waits for a broadcast.

    Args:
        timeout: seconds.
        check: raises if another process is gone.
        late: what is said when the time is over.

    Raises:
        WeightSyncError: it failed or did not end in time, or `check` raised.
    """
    try:
        _until(work.is_completed, timeout, check, late)
        work.wait()
    except WeightSyncError:
        raise
    except RuntimeError as error:
        # The broadcast may be the first to notice that a process is gone; `check` knows which.
        time.sleep(_GRACE_SECONDS)
        check()
        raise WeightSyncError([f"a broadcast failed: {error}"]) from error


def _until(
    done: Callable[[], bool], timeout: float, check: Callable[[], None], late: str, *, pause: float = _POLL_SECONDS
) -> None:
    """Looks every `pause` seconds whether it is done; raises WeightSyncError after `timeout`, or what `check` does."""
    deadline = time.monotonic() + timeout
    while not done():
        check()
        if time.monotonic() > deadline:
            raise WeightSyncError([late])
        time.sleep(pause)


def _late(failure: str, timeout: float) -> str:
    return f"{failure} after {timeout:g} s: one of them does not take part"


def _broadcast(backend: Any, tensor: torch.Tensor) -> Any:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return backend.broadcast([tensor], options)


def _awaited(make: Callable[[], Any], failure: str, timeout: float, check: Callable[[], None]) -> Any:
    """What `make` returns, run in a thread of its own, which is left behind if it does not end.

    Raises:
        WeightSyncError: `make` fails or does not end in time, or `check` says that a process is gone.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            made = make()
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
            return
        try:
            future.set_result(made)
        except InvalidStateError:
            # Too late: nobody waits for it any longer.
            made.abort()

    threading.Thread(target=run, daemon=True).start()
    try:
        _until(future.done, timeout, check, _late(failure, timeout))
    except WeightSyncError:
        if not future.cancel() and future.exception() is None:
            future.result().abort()
        raise
    try:
        return future.result()
    except RuntimeError as error:
        raise WeightSyncError([f"{failure}: {error}"]) from error


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
