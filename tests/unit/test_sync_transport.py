"""Weight sync's control connection and its transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from jetrl_megatron.sync import WeightSyncError
from jetrl_megatron.sync.transport import (
    GroupReceiving,
    GroupSending,
    SharedMemoryReceiving,
    SharedMemorySending,
    mappable,
)
from jetrl_megatron.sync.wire import Connection, Listener, Message, connect, expect_all

CPU = torch.device("cpu")


@pytest.fixture(params=["unix", "tcp:127.0.0.1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    """A sender's and a worker's end."""
    listener = Listener(request.param)
    worker, (accepted,) = _meet(listener)
    yield accepted[0], worker
    for end in (accepted[0], worker):
        end.close()
    listener.close()


def _meet(listener: Listener) -> tuple[Connection, list[tuple[Connection, Message]]]:
    met: list[Connection] = []

    def join() -> None:
        worker = connect(listener.address, 5.0)
        worker.send("hello", token=listener.token, name="worker 0", version=3, group=None)
        worker.expect("welcome")
        worker.send("here")
        met.append(worker)

    thread = threading.Thread(target=join)
    thread.start()
    accepted = listener.accept(1, 5.0)
    thread.join()
    return met[0], accepted


def test_connection_carries_messages_in_order_and_early_ones_are_kept(pair: tuple[Connection, Connection]) -> None:
    sender, worker = pair
    sender.send("one", value=[1, "a"])
    sender.send("two")
    worker.check()
    worker.check()
    assert worker.expect("one") == {"kind": "one", "value": [1, "a"]}
    with pytest.raises(WeightSyncError, match="says 'two' where 'three' is due"):
        worker.expect("three")


def test_connection_hands_on_why_the_other_end_gave_up(pair: tuple[Connection, Connection]) -> None:
    sender, worker = pair
    sender.send("unread")
    worker.fail(["scale is nan", "norm is missing"])
    worker.close()
    for action in (sender.check, lambda: sender.expect("done")):
        with pytest.raises(WeightSyncError) as caught:
            action()
        if action == sender.check:
            assert caught.value.problems == ["scale is nan", "norm is missing"]
        else:
            assert "went away" in str(caught.value)


def test_expect_all_does_not_wait_for_others_once_one_failed(pair: tuple[Connection, Connection]) -> None:
    sender, worker = pair
    worker.fail(["bad"])
    assert expect_all([sender], "done", 60.0) == ["bad"]
    assert expect_all([worker], "bucket", 0.05) == [f"{worker.peer} said nothing for 0.05 s"]


def test_listener_lets_nobody_in_without_its_token_and_skips_those_who_left() -> None:
    listener = Listener("unix")
    stranger = connect(listener.address, 5.0)
    stranger.send("hello", token="guess", name="stranger")
    left = connect(listener.address, 5.0)
    left.send("hello", token=listener.token, name="left", version=0, group=None)
    left.close()
    worker, accepted = _meet(listener)
    assert [hello["name"] for _, hello in accepted] == ["worker 0"]
    with pytest.raises(WeightSyncError, match="0 of 1 workers came"):
        listener.accept(1, 0.05)
    for connection in (stranger, worker, accepted[0][0]):
        connection.close()
    listener.close()


@pytest.mark.parametrize("address", ["", "tcp", "http://x", "unix:/x"])
def test_listener_refuses_other_addresses(address: str) -> None:
    with pytest.raises(ValueError, match='must be "unix", "tcp:HOST" or "tcp:HOST:PORT"'):
        Listener(address)


# Transports


def test_shared_memory_shows_the_workers_what_the_sender_wrote() -> None:
    sending = SharedMemorySending()
    receiving = SharedMemoryReceiving(sending.offer([], 1000))
    sending.slots[1][:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    fetched = receiving.fetch(1, 4, None)  # type: ignore[arg-type]
    sending.end(failed=False)
    assert fetched.tolist() == [1, 2, 3, 4]


def test_broadcast_keeps_its_group_until_an_update_fails(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sending, groups = GroupSending("gloo", CPU, "127.0.0.1"), []
    group: Any = None
    for failed in (False, True, False):
        receiving = _joined(sending, group, pair[1])
        sending.slots[0][:3] = 7
        sending.publish(0, 3)
        assert receiving.fetch(0, 3, pair[1]).tolist() == [7, 7, 7]
        sending.complete(0, 5.0, pair[0].check)
        groups.append(receiving.group.name)
        receiving.end(failed=failed)
        sending.end(failed=failed)
        group = receiving.group
    assert groups[0] == groups[1] != groups[2]


def _joined(sending: GroupSending, group: Any, connection: Connection) -> Any:
    offer = sending.offer([{"name": "w", "group": None if group is None else group.name}], 1000)
    joined: list[GroupReceiving] = []
    thread = threading.Thread(target=lambda: joined.append(GroupReceiving(offer, "w", group, CPU, connection)))
    thread.start()
    sending.begin(offer, 5.0, lambda: None)
    thread.join()
    return joined[0]


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> tuple[GroupSending, Message]:
    """A sender whose worker does not come, and its offer."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sending = GroupSending("gloo", CPU, "127.0.0.1")
    return sending, sending.offer([{"name": "w", "group": None}], 1000)


def test_broadcast_waits_no_longer_than_it_may_for_a_worker_that_does_not_come(
    lonely: tuple[GroupSending, Message],
) -> None:
    sending, offer = lonely
    started, threads = time.monotonic(), threading.active_count()
    with pytest.raises(WeightSyncError, match="no communicator of 2 processes"):
        sending.begin(offer, 0.5, lambda: None)
    assert time.monotonic() - started < 5
    # One that still waits when the interpreter ends would have C++ abort the process.
    assert threading.active_count() == threads
    sending.end(failed=True)


def test_broadcast_gives_up_at_once_when_a_worker_is_gone(lonely: tuple[GroupSending, Message]) -> None:
    sending, offer = lonely

    def check() -> None:
        raise WeightSyncError(["w went away"])

    started, threads = time.monotonic(), threading.active_count()
    with pytest.raises(WeightSyncError, match="w went away"):
        sending.begin(offer, 60.0, check)
    assert time.monotonic() - started < 5
    assert threading.active_count() == threads
    sending.end(failed=True)


@pytest.mark.parametrize(
    ("settings", "meanwhile"),
    [
        ("expandable_segments:True,max_split_size_mb:64", "expandable_segments:False,max_split_size_mb:64"),
        ("max_split_size_mb:64", None),
    ],
)
def test_slots_for_other_processes_are_not_in_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, settings: str, meanwhile: str | None
) -> None:
    given_settings: list[str] = []
    # Torch has no way to ask for them.
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given_settings.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    with mappable():
        assert given_settings == ([] if meanwhile is None else [meanwhile])
    assert given_settings == ([] if meanwhile is None else [meanwhile, settings])
