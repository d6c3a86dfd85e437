"""The weight files of an export, laid out before a byte is written: tensors may arrive in any order and in parts.

safetensors' own writer wants all tensors of a file at once. Here a file gets its header and its final size first, and
each part of a tensor goes to its place: nothing waits in memory, and several threads or processes may fill one file.
The bytes are those that `safetensors.torch.save_file` writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from jetrl_megatron.convert.plan import DTYPE_NAMES, TensorSpec
from jetrl_megatron.convert.stored import SINGLE

_ORDER = list(DTYPE_NAMES)
_ALIGNMENT = 8
# Linux writes at most 2 GiB - 4 KiB at once.
_LARGEST_WRITE = 1 << 30


class Place(NamedTuple):
    """Where the data of a tensor lies: file name, first byte in the file, number of bytes."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file.

    Attributes:
        name: of the file.
        header: everything before the data.
        nbytes: of the whole file.
    """

    name: str
    header: bytes
    nbytes: int


@dataclass(frozen=True)
class FileLayout:
    """The weight files of an export and the place of every tensor in them."""

    files: tuple[WeightFile, ...]
    places: Mapping[str, Place]

    def index(self) -> dict[str, Any] | None:
        """Content of the index file; None for a single file, which has none."""
        if len(self.files) == 1:
            return None
        total = sum(place.nbytes for place in self.places.values())
        where = {name: place.file for name, place in sorted(self.places.items())}
        return {"metadata": {"total_size": total}, "weight_map": where}


def lay_out(tensors: Mapping[str, TensorSpec], shard_bytes: int) -> FileLayout:
    """Distributes tensors over files, in the given order; a scale is never cut from its weight's place in that order.

    Args:
        tensors: shape and dtype by name.
        shard_bytes: largest file, in bytes of tensors; a tensor that is larger has a file of its own.

    Raises:
        ValueError: shard_bytes is not positive.
    """
    if shard_bytes <= 0:
        raise ValueError(f"max_shard_size={shard_bytes} must be a positive number of bytes, e.g. 5GB")
    groups: list[dict[str, TensorSpec]] = [{}]
    held = 0
    for name, spec in tensors.items():
        if groups[-1] and held + spec.nbytes > shard_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = spec
        held += spec.nbytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    files, places = [], {}
    for file, group in zip(names if len(groups) > 1 else [SINGLE], groups, strict=True):
        header, starts = _header(group)
        files.append(WeightFile(file, header, len(header) + sum(spec.nbytes for spec in group.values())))
        places.update({name: Place(file, len(header) + starts[name], group[name].nbytes) for name in group})
    return FileLayout(tuple(files), places)


def _header(tensors: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda name: (_ORDER.index(tensors[name].dtype), name.encode())):
        spec, start = tensors[name], end
        end += spec.nbytes
        starts[name] = start
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


class TensorFiles:
    """The weight files in a folder, open for writing. Threads may write at the same time.

    Args:
        folder: where the files lie.
        layout: what they are.
        create: write the headers and give the files their sizes; otherwise they are there already.
    """

    def __init__(self, folder: Path, layout: FileLayout, *, create: bool) -> None:
        self._layout = layout
        self._descriptors: dict[str, int] = {}
        for file in layout.files:
            # Not readable: a network file system then never reads a page back to complete it.
            flags = os.O_WRONLY | (os.O_CREAT if create else 0)
            descriptor = os.open(folder / file.name, flags, 0o666)
            self._descriptors[file.name] = descriptor
            if create:
                _write_all(descriptor, memoryview(file.header), 0)
                os.ftruncate(descriptor, file.nbytes)

    def write(self, name: str, tensor: torch.Tensor, first_row: int = 0) -> None:
        """Writes a tensor, or some of its rows.

        Args:
            tensor: whole, or rows first_row ... of it; any strides, any device.
        """
        place = self._layout.places[name]
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        row_bytes = flat.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
        start = first_row * row_bytes
        assert start + flat.numel() <= place.nbytes, name
        _write_all(self._descriptors[place.file], memoryview(flat.numpy()), place.start + start)

    def sync(self, names: Iterable[str] | None = None) -> None:
        """Waits until what was written is on disk: of these tensors' files, or of all."""
        places = self._layout.places
        for file in sorted(self._descriptors if names is None else {places[name].file for name in names}):
            os.fsync(self._descriptors[file])

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[:_LARGEST_WRITE], offset)
        data, offset = data[written:], offset + written
