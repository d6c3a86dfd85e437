"""Megatron's torch_dist format: a `.metadata` index and the `.distcp` files of the ranks.

The index names every global tensor and says which box of it lies where, so that no process group, no GPU and no
Megatron is needed to read it. Layers are stacked by default, and so are experts
(`decoder.layers.mlp.experts.experts.linear_fc2.weight` [layers, experts, out, in]).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from jetrl_megatron.convert.legacy_file import stored_arguments, unread
from jetrl_megatron.convert.parameters import Parameter, by_layer, canonical_name

INDEX = ".metadata"
"""Name of the index; a folder that holds one is a checkpoint in this format."""

# What ranks have in common and is no tensor; Megatron-LM's arguments are in it.
_COMMON = "common.pt"

# Classes and functions that an index is made of, by module.
_OF_AN_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
# Some trainers save the wrapper around the model, whose one module it is.
_WRAPPER = re.compile(r"^(module\.)+")
_NOT_THE_MODEL = re.compile(r"^(optimizer|chained_\d+|opt_param_scheduler|rng_state|rerun_state_machine_state)(\.|$)")
_STACKED_LAYERS = re.compile(r"^(.*\blayers)\.(?!\d+\.)(.+)$")
_STACKED_EXPERTS = re.compile(r"^(.*\.experts)\.experts\.(?!\d+\.)(.+)$")

type _Box = tuple[tuple[int, ...], tuple[int, ...]]


class TorchDistStore:
    """A folder in the torch_dist format.

    Args:
        folder: the folder that holds `.metadata`.

    Attributes:
        parameters: the model's parameters, layer after layer; optimizer state and extra state are left out.
        arguments: of the training run, where it saved them.

    Raises:
        ValueError: the index is none, or a file that a parameter lies in is missing or too short.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        self._metadata = _read_index(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not _NOT_THE_MODEL.match(key)
        }
        if not self._tensors:
            raise ValueError(f"{folder} holds no model tensor: pass a checkpoint that was saved with the model")
        self._chunks = {key: _by_index(entry, _template(key)[1]) for key, entry in self._tensors.items()}
        self._check_files()
        self.parameters = sorted(self._unstacked(), key=by_layer)
        self.arguments = stored_arguments(folder / _COMMON)

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, whatever ranks saved it.

        Raises:
            ValueError: a file cannot be read; the message names it.
        """
        entry, stacked = self._tensors[parameter.key], len(parameter.index)
        chunks = self._chunks[parameter.key]
        if chunks is not None:
            # A tensor may have a chunk for each of thousands of experts: only this one's are searched.
            entry = dataclasses.replace(entry, chunks=chunks[parameter.index])
        offsets = [*parameter.index, *(0 for _ in parameter.shape)]
        sizes = [*(1 for _ in parameter.index), *parameter.shape]
        box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        items = create_read_items_for_chunk_list(parameter.key, entry, [box])
        out = torch.empty(sizes, dtype=entry.properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), _Destination(out)).wait()
        except (OSError, RuntimeError, EOFError, ValueError, AssertionError, pickle.UnpicklingError) as error:
            files = sorted({self._metadata.storage_data[item.storage_index].relative_path for item in items})
            where = ", ".join(str(self._folder / name) for name in files)
            raise ValueError(
                f"{parameter.name} cannot be read from {where}: {error}. The file is damaged: restore it from a copy, "
                "or convert another iteration"
            ) from error
        return out[(0,) * stacked]

    def _unstacked(self) -> Iterator[Parameter]:
        for key, entry in self._tensors.items():
            template, stacked = _template(key)
            for index in itertools.product(*map(range, entry.size[:stacked])):
                name = canonical_name(template.format(*index))
                yield Parameter(name, key, index, tuple(entry.size[stacked:]), entry.properties.dtype)

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for key, entry in self._tensors.items():
            if not isinstance(entry.properties.dtype, torch.dtype):
                raise ValueError(
                    f"{self._folder / INDEX}: the dtype of {key} is {entry.properties.dtype!r}, which is none: the "
                    "index is damaged; restore it from a copy, or convert another iteration"
                )
            groups = self._chunks[key]
            if not _fill(entry.size, [entry.chunks] if groups is None else groups.values()):
                # What no shard fills would be whatever lies in memory.
                raise ValueError(
                    f"{self._folder / INDEX}: the shards of {key} do not cover its {list(entry.size)} elements, each "
                    "once: the checkpoint was saved incompletely; convert another iteration"
                )
            for chunk in entry.chunks:
                info = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                end = info.offset + info.length
                needed[info.relative_path] = max(needed.get(info.relative_path, 0), end)
        for name, length in sorted(needed.items()):
            path = self._folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing: it holds parameters of the model; copy the whole folder")
            if path.stat().st_size < length:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes, the index wants {length}: it was cut off, copy it again"
                )


def _template(key: str) -> tuple[str, int]:
    """The name of a stacked tensor's parameters with {} for each stacking axis, and the number of those axes."""
    key, stacked = _WRAPPER.sub("", key), 0
    for pattern, numbered in ((_STACKED_LAYERS, "{}.{{}}.{}"), (_STACKED_EXPERTS, "{}.experts.{{}}.{}")):
        match = pattern.match(key)
        if match:
            key, stacked = numbered.format(match[1], match[2]), stacked + 1
    return key, stacked


def _by_index(entry: TensorStorageMetadata, stacked: int) -> dict[tuple[int, ...], list[ChunkStorageMetadata]] | None:
    """The chunks of each stacked parameter; None where a chunk spans several."""
    if any(size != 1 for chunk in entry.chunks for size in chunk.sizes[:stacked]):
        return None
    chunks = defaultdict(list)
    for chunk in entry.chunks:
        chunks[tuple(chunk.offsets[:stacked])].append(chunk)
    return chunks


def _fill(size: Sequence[int], groups: Iterable[Sequence[ChunkStorageMetadata]]) -> bool:
    """Whether chunks fill a tensor without overlapping; copies of one chunk count once.

    Args:
        groups: chunks, of which those of two groups do not overlap.
    """
    filled = 0
    for chunks in groups:
        boxes = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks}
        filled += sum(math.prod(sizes) for _, sizes in boxes)
        inside = all(_inside(size, box) for box in boxes)
        if not inside or any(_overlap(*pair) for pair in itertools.combinations(boxes, 2)):
            return False
    return filled == math.prod(size)


def _inside(size: Sequence[int], box: _Box) -> bool:
    return all(0 <= start <= start + length <= whole for start, length, whole in zip(*box, size, strict=True))


def _overlap(box: _Box, other: _Box) -> bool:
    return all(
        start < other_start + other_length and other_start < start + length
        for start, length, other_start, other_length in zip(*box, *other, strict=True)
    )


class _IndexUnpickler(pickle.Unpickler):
    """Makes what an index holds; in the place of any other class or function stands an inert object."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function with this name, if an index may have it."""
        if name in _OF_AN_INDEX.get(module, ()):
            return super().find_class(module, name)
        return unread(f"{module}.{name}")


def _read_index(folder: Path) -> Metadata:
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
    except Exception as error:
        # A damaged pickle fails in any way.
        raise ValueError(f"{path} is no index of torch.distributed.checkpoint: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} is no index of torch.distributed.checkpoint: it holds {type(metadata).__name__}")
    if not metadata.storage_data:
        raise ValueError(f"{folder / INDEX} names no file: the checkpoint was saved incompletely")
    return metadata


class _Destination(DefaultLoadPlanner):
    """Tells the reader where in `out` each stored box goes."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__()
        self._out = out

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return _narrow(self._out, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `tensor` is a view of `out`."""


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor
