"""Weight sync without an engine: manifests, the control connection, transports, and what a sender refuses."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.convert.plan import TensorSpec
from jetrl_megatron.layout import qkv_layout, tile_runs
from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource, WeightSyncError, receive_update
from jetrl_megatron.sync.manifest import Manifest, view_of
from jetrl_megatron.sync.transport import (
    GroupReceiving,
    GroupSending,
    SharedMemoryReceiving,
    SharedMemorySending,
    mappable,
)
from jetrl_megatron.sync.wire import Connection, Listener, Message, connect, expect_all
from tests.unit.plain_engine import PlainReceiver, PlainWeights, random_tensors, same, update

CODES, SCALE = TensorSpec((256, 384), torch.float8_e4m3fn), TensorSpec((2, 3), torch.float32)
CPU = torch.device("cpu")


def manifest(tensors: dict[str, TensorSpec], bucket_bytes: int = 1 << 20) -> Manifest:
    return Manifest(tensors, JETRL_FP8, bucket_bytes)


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=2), min_size=1, max_size=6),
    bucket_bytes=st.integers(160, 2000),
)
def test_manifest_buckets_hold_every_row_once_and_are_no_larger_than_asked(
    shapes: list[list[int]], bucket_bytes: int
) -> None:
    tensors = {f"t{index}": TensorSpec(tuple(shape), torch.float32) for index, shape in enumerate(shapes)}
    found: dict[str, list[int]] = {}
    for bucket in manifest(tensors, bucket_bytes).buckets:
        assert bucket.nbytes <= bucket_bytes
        end = 0
        for part in bucket.slices:
            assert part.offset >= end and part.offset % 16 == 0
            end = part.offset + part.nbytes
            found.setdefault(part.name, []).extend(range(part.first_row, part.first_row + part.rows))
    for name, spec in tensors.items():
        assert found.get(name, []) == list(range(spec.shape[0] if spec.shape else 1)), name


def test_manifest_refuses_a_row_that_is_larger_than_a_bucket() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=100 holds no row of w, which has 384 bytes"):
        _ = manifest({"w": CODES}, 100).buckets


def test_manifest_survives_its_message_and_its_digest_is_that_of_everything_in_it() -> None:
    first = manifest({"a.weight": CODES, "a.weight_scale_inv": SCALE})
    again = Manifest.from_message(first.to_message())
    assert again == first and again.digest == first.digest
    others = [
        manifest({"a.weight": CODES}),
        manifest(dict(first.tensors), 1 << 21),
        Manifest(first.tensors, Fp8BlockRecipe(dgrad="bf16"), 1 << 20),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight": CODES}, "a.weight_scale_inv is missing"),
        ({"a.weight_scale_inv": SCALE}, "a.weight_scale_inv is a scale without codes: send a.weight beside it"),
        ({"a.weight": CODES, "a.weight_scale_inv": TensorSpec((3, 2), torch.float32)}, "is F32 [3, 2]: codes"),
        ({"a.weight": CODES, "a.weight_scale_inv": TensorSpec((2, 3), torch.bfloat16)}, "is BF16 [2, 3]: codes"),
    ],
)
def test_manifest_names_codes_and_scales_that_do_not_belong_together(
    tensors: dict[str, TensorSpec], message: str
) -> None:
    (problem,) = manifest(tensors).problems()
    assert message in problem


def test_tile_runs_say_where_interleaved_heads_belong() -> None:
    # Stored q0 q1 k0 v0 on the first rank, q2 q3 k1 v1 on the second.
    runs = [tile_runs(qkv_layout(4, 2, 128, rank=rank, world=2, block=128), [512, 256, 256], 128) for rank in (0, 1)]
    assert runs == [[(0, 0, 0, 2), (2, 1, 0, 1), (3, 2, 0, 1)], [(0, 0, 2, 2), (2, 1, 1, 1), (3, 2, 1, 1)]]


# The control connection


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


# Sender and receiver


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_update_reaches_an_engine_of_plain_tensors(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sent, receiver = TensorSource(random_tensors(1), JETRL_FP8), PlainReceiver(random_tensors(0))
    synchronizer = JetRLWeightSynchronizer(sent, transport=transport, bucket_bytes=1 << 16, timeout=20)
    for seed in (1, 2):
        sent.replace(random_tensors(seed))
        assert update(synchronizer, receiver) == ({"version": seed, "problems": []}, "")
        assert same(receiver.held, random_tensors(seed))
    synchronizer.close()


def test_worker_that_cannot_take_an_update_back_asks_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    sent, receiver = TensorSource(random_tensors(1), JETRL_FP8), PlainReceiver(random_tensors(0))
    monkeypatch.setattr(PlainWeights, "write", lost)
    monkeypatch.setattr(PlainWeights, "roll_back", lost)
    synchronizer = JetRLWeightSynchronizer(sent, timeout=20)
    report, said = update(synchronizer, receiver)
    synchronizer.close()
    assert report["version"] == 0 and "illegal memory access" in report["problems"][0]
    assert report["problems"][-1].endswith("version 0 could not be put back: restart the engine")
    assert "served as before" not in "".join(report["problems"])
    assert "worker 0 of 1: AcceleratorError: CUDA error: an illegal memory access" in said


def test_worker_whose_collective_fails_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PlainReceiver, value: object) -> list[object]:
        raise RuntimeError("Connection closed by peer")

    receiver = PlainReceiver(random_tensors(0))
    monkeypatch.setattr(PlainReceiver, "gather", broken)
    report = receiver.receive([{"transport": "shm", "address": "unix:/nowhere", "token": "", "device": None}], 0.1)
    assert report["problems"] == [
        "worker 0 of 1: RuntimeError: Connection closed by peer; version 0 is served as before"
    ]


def test_receive_update_says_when_old_keys_and_values_stay() -> None:
    class Busy:
        def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[Message]:
            return [{"version": 3, "problems": []}]

        def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
            return False

    with pytest.raises(RuntimeError, match="version 3 is served, with keys and values of the version before"):
        receive_update(Busy(), [])


# The sender


def source() -> TensorSource:
    return TensorSource({"norm.weight": torch.arange(300.0).bfloat16(), "step": torch.tensor(3.0)}, JETRL_FP8)


def test_tensor_source_fills_buckets_with_its_bytes() -> None:
    sent = source()
    parts: dict[str, list[torch.Tensor]] = {}
    for bucket in manifest(dict(sent.tensors), 128).buckets:
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        sent.fill(bucket, buffer)
        for part in bucket.slices:
            parts.setdefault(part.name, []).append(view_of(buffer, part, sent.tensors[part.name]).reshape(-1))
    assert torch.equal(torch.cat(parts["norm.weight"]), torch.arange(300.0).bfloat16())
    assert torch.cat(parts["step"]).tolist() == [3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "ipc"}, "transport='ipc' does not carry weights on cpu: use shm or gloo"),
        ({"transport": "mpi"}, "transport='mpi' is unknown: use auto, shm, ipc, gloo, nccl"),
        ({"receivers": 0}, "receivers=0 counts the workers"),
        ({"senders": "some"}, "senders='some' with transport 'shm'"),
        ({"transport": "gloo", "senders": "all"}, "senders='all' with transport 'gloo'"),
    ],
)
def test_synchronizer_refuses_what_it_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        JetRLWeightSynchronizer(source(), **options)
    assert message in str(caught.value)


def test_synchronizer_without_an_engine_says_what_is_missing() -> None:
    synchronizer = JetRLWeightSynchronizer(source(), timeout=0.1)
    with pytest.raises(WeightSyncError, match="0 of 1 workers came to unix:.*call receive_update on the engine"):
        synchronizer.update()
    assert synchronizer.version == 0
    synchronizer.close()


def test_weight_sync_error_survives_the_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(WeightSyncError(["a is missing", "b is NaN"])))
    assert error.problems == ["a is missing", "b is NaN"] and str(error) == "a is missing; b is NaN"
