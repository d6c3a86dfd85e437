"""Weight sync without an engine: manifests, a sender and a receiver of plain tensors, and what a sender refuses."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.convert.plan import TensorSpec
from jetrl_megatron.layout import qkv_layout, tile_runs
from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource, WeightSyncError, receive_update, wire
from jetrl_megatron.sync.manifest import Manifest, view_of
from jetrl_megatron.sync.wire import Message
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


def test_what_was_saved_ahead_is_given_up_when_other_tensors_are_offered() -> None:
    receiver = PlainReceiver(random_tensors(0))
    first = JetRLWeightSynchronizer(TensorSource(random_tensors(1), JETRL_FP8), timeout=20)
    assert update(first, receiver) == ({"version": 1, "problems": []}, "")
    prepared = receiver.weights
    assert isinstance(prepared, PlainWeights) and not prepared.saved
    prepared.saves = 0
    other = JetRLWeightSynchronizer(TensorSource({"other.weight": torch.ones(3)}, JETRL_FP8), timeout=20)
    assert "other.weight is unknown" in update(other, receiver)[1]
    assert prepared.saves == 1 and not prepared.saved and same(receiver.held, random_tensors(1))
    for synchronizer in (first, other):
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


def test_synchronizer_with_fewer_receivers_than_an_engine_has_workers_says_so() -> None:
    receiver = PlainReceiver(random_tensors(0))
    receiver.workers = 2
    synchronizer = JetRLWeightSynchronizer(TensorSource(random_tensors(1), JETRL_FP8), timeout=20)
    started = time.monotonic()
    report, said = update(synchronizer, receiver)
    synchronizer.close()
    assert said == "receivers=1, and an engine has 2 workers: count the workers of all engines"
    assert report["problems"] == [f"{said}; version 0 is served as before"]
    assert time.monotonic() - started < 5


def test_worker_that_is_late_reads_what_was_sent_when_another_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    late, refusing = PlainReceiver(random_tensors(0)), PlainReceiver(random_tensors(0))
    over, read = threading.Event(), []

    class Sent(TensorSource):
        def release(self) -> None:
            over.set()

    def write(self: PlainWeights, index: int, buffer: torch.Tensor) -> None:
        if self._held is refusing.held:
            raise WeightSyncError(["no"])
        read.append(buffer.clone())
        assert over.wait(20)
        read.append(buffer.clone())

    monkeypatch.setattr(wire, "_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(PlainWeights, "write", write)
    # Seven buckets: the third has the place of the first.
    synchronizer = JetRLWeightSynchronizer(
        Sent(random_tensors(1), JETRL_FP8), receivers=2, timeout=20, bucket_bytes=1 << 16
    )
    other = threading.Thread(target=refusing.receive, args=(synchronizer.endpoints, 20.0))
    other.start()
    report, said = update(synchronizer, late)
    other.join()
    synchronizer.close()
    assert said == "bucket 1 of 7: no"
    assert report["version"] == 0 and said in report["problems"][0]
    # It may have been sent the second bucket as well.
    assert read and all(map(torch.equal, read[::2], read[1::2]))


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
