"""An engine of plain tensors: the product's receiver and transports, and no vLLM."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.sync import JetRLWeightSynchronizer
from jetrl_megatron.sync.manifest import Manifest, view_of
from jetrl_megatron.sync.receiver import EngineReceiver
from jetrl_megatron.sync.wire import Message


class PlainWeights:
    """What `EngineWeights` does, for tensors by their own names."""

    def __init__(self, held: dict[str, torch.Tensor], manifest: Manifest) -> None:
        self.manifest = manifest
        self._held = held
        self.saved: dict[str, torch.Tensor] = {}
        self.saves = 0

    def is_current(self) -> bool:
        return True

    def save(self) -> None:
        self.saves += 1
        self.saved = self.saved or {name: tensor.clone() for name, tensor in self._held.items()}

    def begin(self) -> None:
        self.save()

    def write(self, index: int, buffer: torch.Tensor) -> None:
        for part in self.manifest.buckets[index].slices:
            target = self._held[part.name][part.first_row : part.first_row + part.rows]
            target.copy_(view_of(buffer, part, self.manifest.tensors[part.name]).reshape(target.shape))
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()

    def finish(self) -> None:
        pass

    def roll_back(self) -> None:
        for name, old in self.saved.items():
            self._held[name].copy_(old)
        self.saved = {}

    def commit(self) -> None:
        self.saved = {}


class PlainReceiver(EngineReceiver):
    """A worker that is its whole engine.

    Args:
        held: its weights, with one dimension or more.
    """

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held
        self.name, self.workers = "worker 0 of 1", 1
        self.weights, self.group, self.version = None, None, 0
        self._device = next(iter(held.values())).device

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def prepare(self, manifest: Manifest) -> list[str]:
        self.weights = PlainWeights(self.held, manifest)  # type: ignore[assignment]
        return [f"{name} is unknown" for name in manifest.tensors if name not in self.held]

    def check_taken(self) -> list[str]:
        return []


def random_tensors(seed: int, rows: int = 512, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Codes, their scales and a norm."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x78, (rows, 384), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    tiles = rows // JETRL_FP8.block, 384 // JETRL_FP8.block
    tensors = {
        "up.weight": codes,
        "up.weight_scale_inv": torch.exp2(torch.randint(-9, 9, tiles, generator=generator).float()),
        "norm.weight": torch.randn(384, generator=generator).bfloat16(),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all bytes are equal."""
    return all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


@contextlib.contextmanager
def sending(synchronizer: JetRLWeightSynchronizer) -> Iterator[list[str]]:
    """One update is sent meanwhile; afterwards the list's only element is the sender's error, or ""."""
    said = [""]

    def send() -> None:
        try:
            synchronizer.update()
        except Exception as error:
            said[0] = str(error)

    sender = threading.Thread(target=send)
    sender.start()
    yield said
    sender.join()


def update(synchronizer: JetRLWeightSynchronizer, receiver: EngineReceiver) -> tuple[Message, str]:
    """One update: the receiver's report, and the sender's error."""
    with sending(synchronizer) as said:
        report = receiver.receive(synchronizer.endpoints, 20.0)
    return report, said[0]
