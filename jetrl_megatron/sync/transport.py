"""How the bytes of a bucket get from a sender to workers: shared memory, CUDA IPC, or a broadcast.

A sender fills a slot, publishes it, and fills it again when every worker has said that it is done with it. There are
two slots, so that one is filled while the other is read. Shared memory and CUDA IPC have the workers read the sender's
own slots; a broadcast needs a slot on each side.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from jetrl_megatron.sync.communicator import Communicator, wait_for
from jetrl_megatron.sync.manifest import WeightSyncError
from jetrl_megatron.sync.wire import Connection, Message

SLOTS = 2
TRANSPORTS = ("shm", "ipc", "gloo", "nccl")
_DEVICE_ARGUMENT = 6
"""Place of the device's index in the arguments of `rebuild_cuda_tensor`."""


class Sending(Protocol):
    """The sender's side.

    Attributes:
        slots: uint8 buffers to fill.
    """

    slots: tuple[torch.Tensor, ...]

    def offer(self, hellos: list[Message], slot_bytes: int) -> Message:
        """Makes the slots; returns what the workers that said these hellos need to know, ready for JSON."""

    def begin(self, offer: Message, timeout: float, check: Callable[[], None]) -> None:
        """Meets the workers, once they have the offer; `check` raises if one of them is gone."""

    def publish(self, slot: int, nbytes: int) -> None:
        """Lets the workers have the first bytes of a slot; returns when they may be told."""

    def complete(self, slot: int, timeout: float, check: Callable[[], None]) -> None:
        """Waits until the bytes have left, after the workers were told; `check` raises if one of them is gone."""

    def end(self, *, failed: bool) -> None:
        """Gives the slots back."""


class Receiving(Protocol):
    """A worker's side."""

    def fetch(self, slot: int, nbytes: int, connection: Connection) -> torch.Tensor:
        """The bytes of a slot that was published, uint8 [nbytes]."""

    def end(self, *, failed: bool) -> None:
        """Gives up what belongs to one update."""


class SharedMemorySending:
    """Two slots in memory that processes of one user on one machine map. It has no name, so it ends with them."""

    def __init__(self) -> None:
        self.slots: tuple[torch.Tensor, ...] = ()

    def offer(self, hellos: list[Message], slot_bytes: int) -> Message:
        """See `Sending`."""
        self._file = os.memfd_create("jetrl-sync")
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.slots = _mapped(path, slot_bytes)
        return {"path": path, "slot_bytes": slot_bytes}

    def begin(self, offer: Message, timeout: float, check: Callable[[], None]) -> None:
        """Nothing to do."""

    def publish(self, slot: int, nbytes: int) -> None:
        """Nothing to do: the bytes are where they are read."""

    def complete(self, slot: int, timeout: float, check: Callable[[], None]) -> None:
        """Nothing to do."""

    def end(self, *, failed: bool) -> None:
        """See `Sending`."""
        if self.slots:
            os.close(self._file)
        self.slots = ()


class SharedMemoryReceiving:
    """The other end of `SharedMemorySending`."""

    def __init__(self, offer: Message) -> None:
        self._slots = _mapped(offer["path"], offer["slot_bytes"])

    def fetch(self, slot: int, nbytes: int, connection: Connection) -> torch.Tensor:
        """See `Receiving`."""
        return self._slots[slot][:nbytes]

    def end(self, *, failed: bool) -> None:
        """See `Receiving`."""
        self._slots = ()


class IpcSending:
    """Two slots in the memory of the sender's GPU, which workers on it map.

    Args:
        device: the sender's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.slots: tuple[torch.Tensor, ...] = ()
        self._device = device

    def offer(self, hellos: list[Message], slot_bytes: int) -> Message:
        """See `Sending`."""
        with mappable():
            self.slots = tuple(torch.empty(slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS))
        # A handle each: torch counts with it whether the other end still reads.
        handles = {hello["name"]: [_handle(slot) for slot in self.slots] for hello in hellos}
        return {"uuid": device_uuid(self._device), "slots": handles}

    def begin(self, offer: Message, timeout: float, check: Callable[[], None]) -> None:
        """Nothing to do."""

    def publish(self, slot: int, nbytes: int) -> None:
        """Waits for the kernels that filled the slot, since streams do not order processes."""
        torch.cuda.current_stream(self._device).synchronize()

    def complete(self, slot: int, timeout: float, check: Callable[[], None]) -> None:
        """Nothing to do."""

    def end(self, *, failed: bool) -> None:
        """See `Sending`."""
        self.slots = ()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class IpcReceiving:
    """The other end of `IpcSending`.

    Raises:
        WeightSyncError: this process does not see the sender's GPU.
    """

    def __init__(self, offer: Message, name: str) -> None:
        index = _device_of(offer["uuid"])
        self._slots = tuple(_rebuilt(handle, index) for handle in offer["slots"][name])

    def fetch(self, slot: int, nbytes: int, connection: Connection) -> torch.Tensor:
        """See `Receiving`."""
        return self._slots[slot][:nbytes]

    def end(self, *, failed: bool) -> None:
        """See `Receiving`."""
        self._slots = ()


class GroupSending:
    """A broadcast from this process to all workers. The communicator is kept until an update fails.

    Args:
        backend: "nccl" or "gloo".
        device: where the slots are.
        host: name by which workers reach this machine.
    """

    def __init__(self, backend: str, device: torch.device, host: str) -> None:
        self.slots: tuple[torch.Tensor, ...] = ()
        self._backend, self._device, self._host = backend, device, host
        self._store: TCPStore | None = None
        self._group: Communicator | None = None
        self._works: dict[int, Any] = {}
        self._size = 0

    def offer(self, hellos: list[Message], slot_bytes: int) -> Message:
        """See `Sending`."""
        self.slots = tuple(torch.empty(slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS))
        if self._group is not None and any(hello["group"] != self._group.name for hello in hellos):
            # A worker that was started anew is not in it.
            self._drop()
        self._size = len(hellos) + 1
        if self._group is None:
            # The store of an earlier group may still be read by a worker that has not seen its end.
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            name = secrets.token_hex(8)
        else:
            name = self._group.name
        assert self._store is not None
        return {
            "backend": self._backend,
            "host": self._host,
            "port": self._store.port,
            "group": name,
            "size": self._size,
            "ranks": {hello["name"]: index + 1 for index, hello in enumerate(hellos)},
            "slot_bytes": slot_bytes,
        }

    def begin(self, offer: Message, timeout: float, check: Callable[[], None]) -> None:
        """Makes the communicator where there is none, while the workers do the same.

        Raises:
            WeightSyncError: they do not all come in time, or one of them is gone.
        """
        if self._group is None:
            assert self._store is not None
            self._group = Communicator(offer, 0, self._store, self._device, timeout, check)

    def publish(self, slot: int, nbytes: int) -> None:
        """Starts the broadcast."""
        assert self._group is not None
        self._works[slot] = self._group.broadcast(self.slots[slot][:nbytes])

    def complete(self, slot: int, timeout: float, check: Callable[[], None]) -> None:
        """Waits for the broadcast.

        Raises:
            WeightSyncError: it does not end in time, or a worker is gone.
        """
        late = f"a broadcast did not end within {timeout:g} s: a worker does not take part"
        wait_for(self._works.pop(slot), timeout, check, late)

    def end(self, *, failed: bool) -> None:
        """See `Sending`."""
        self.slots, self._works = (), {}
        if failed:
            self._drop()

    def _drop(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None


class GroupReceiving:
    """The other end of `GroupSending`.

    Args:
        group: what an earlier update left, or None.
        device: where the slot is.
        connection: to the sender.

    Raises:
        WeightSyncError: there is no communicator in time.
    """

    def __init__(
        self, offer: Message, name: str, group: Communicator | None, device: torch.device, connection: Connection
    ) -> None:
        timeout = connection.timeout
        if group is not None and group.name != offer["group"]:
            group.abort()
            group = None
        if group is None:
            store = TCPStore(offer["host"], offer["port"], is_master=False, timeout=datetime.timedelta(seconds=timeout))
            group = Communicator(offer, offer["ranks"][name], store, device, timeout, connection.check)
        self.group: Communicator | None = group
        # One will do: a worker reads them one after the other.
        self._slot = torch.empty(offer["slot_bytes"], dtype=torch.uint8, device=device)

    def fetch(self, slot: int, nbytes: int, connection: Connection) -> torch.Tensor:
        """See `Receiving`.

        Raises:
            WeightSyncError: the sender is gone, gives up or stands still.
        """
        assert self.group is not None
        bucket = self._slot[:nbytes]
        late = f"a broadcast of {connection.peer} did not end in {connection.timeout:g} s"
        wait_for(self.group.broadcast(bucket), connection.timeout, connection.check, late)
        return bucket

    def end(self, *, failed: bool) -> None:
        """See `Receiving`."""
        self._slot = self._slot.new_empty(0)
        if failed and self.group is not None:
            self.group.abort()
            self.group = None


@contextlib.contextmanager
def mappable() -> Iterator[None]:
    """GPU memory allocated inside can be mapped by other processes, in containers too.

    Expandable segments could not: torch has processes take file descriptors from each other for them, which needs the
    right to trace a process. With the setting off it takes no memory from such segments.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    without = re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", settings)
    if without == settings:
        yield
        return
    change = torch._C._accelerator_setAllocatorSettings
    change(without)
    try:
        yield
    finally:
        change(settings)


def _mapped(path: str, slot_bytes: int) -> tuple[torch.Tensor, ...]:
    whole = torch.from_file(path, shared=True, size=SLOTS * slot_bytes, dtype=torch.uint8)
    return tuple(whole.view(SLOTS, slot_bytes))


def device_uuid(device: torch.device) -> str | None:
    """What identifies a GPU in all processes; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _device_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) == uuid:
            return index
    raise WeightSyncError([f"this worker does not see GPU {uuid} of the sender: use transport nccl"])


def _handle(slot: torch.Tensor) -> list[Any]:
    _, arguments = reduce_tensor(slot)  # type: ignore[no-untyped-call]
    # Classes, sizes and dtype are known to the other end; handles are bytes.
    return [{"b64": base64.b64encode(a).decode()} if isinstance(a, bytes) else a for a in arguments[_DEVICE_ARGUMENT:]]


def _rebuilt(handle: list[Any], index: int) -> torch.Tensor:
    arguments: list[Any] = [base64.b64decode(a["b64"]) if isinstance(a, dict) else a for a in handle]
    arguments[0] = index
    size = torch.Size([arguments[2]])
    slot: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8, *arguments
    )
    return slot
