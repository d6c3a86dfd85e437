"""Reads a Megatron torch_dist checkpoint, saved with any parallel layout, in one process and one tensor at a time.

A torch_dist checkpoint is a folder with a `.metadata` index and the `.distcp` files of the ranks. The index names every
global tensor and says which box of it lies where, so that no process group, no GPU and no Megatron is needed to read
it. Layers are stacked by default (`decoder.layers.mlp.linear_fc2.weight` [layers, out, in]); a parameter here is always
one layer's.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

_INDEX = ".metadata"
_TRACKER = "latest_checkpointed_iteration.txt"
_NOT_THE_MODEL = re.compile(r"^(optimizer|chained_\d+|opt_param_scheduler|rng_state|rerun_state_machine_state)(\.|$)")
_STACKED = re.compile(r"^(.*\blayers)\.(?!\d+\.)(.+)$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
        name: global Megatron name, e.g. "decoder.layers.3.mlp.linear_fc2.weight".
        key: the checkpoint's name for the tensor that holds it.
        layer: its place in a stacked tensor, or None.
        shape: its own shape, without the stacking axis.
        dtype: its dtype in the checkpoint.
    """

    name: str
    key: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShardedCheckpoint:
    """A torch_dist checkpoint folder.

    Args:
        source: the folder that holds `.metadata`, or a training folder with iter_XXXXXXX subfolders, of which
            latest_checkpointed_iteration.txt names one.

    Attributes:
        folder: the folder that holds `.metadata`.
        parameters: the model's parameters, layer after layer; optimizer state and extra state are left out.

    Raises:
        ValueError: the folder is no torch_dist checkpoint, or a file that a parameter lies in is missing or too short.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.folder = checkpoint_folder(source)
        self._reader = FileSystemReader(self.folder)
        self._metadata = _read_index(self._reader, self.folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not _NOT_THE_MODEL.match(key)
        }
        if not self._tensors:
            raise ValueError(f"{self.folder} holds no model tensor: pass a checkpoint that was saved with the model")
        self._check_files()
        self.parameters = sorted(self._unstacked(), key=_by_layer)

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, whatever ranks saved it: `parameter.dtype` and `parameter.shape`, on the CPU.

        Raises:
            ValueError: a file cannot be read; the message names it.
        """
        entry = self._tensors[parameter.key]
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if parameter.layer is not None:
            offsets[0], sizes[0] = parameter.layer, 1
        box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        items = create_read_items_for_chunk_list(parameter.key, entry, [box])
        out = torch.empty(sizes, dtype=entry.properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), _Destination(out)).wait()
        except (OSError, RuntimeError, EOFError, ValueError, AssertionError, pickle.UnpicklingError) as error:
            files = sorted({self._metadata.storage_data[item.storage_index].relative_path for item in items})
            where = ", ".join(str(self.folder / name) for name in files)
            raise ValueError(
                f"{parameter.name} cannot be read from {where}: {error}. The file is damaged: restore it from a copy, "
                "or convert another iteration"
            ) from error
        return out if parameter.layer is None else out[0]

    def _unstacked(self) -> Iterable[Parameter]:
        for key, entry in self._tensors.items():
            shape, dtype = tuple(entry.size), entry.properties.dtype
            stacked = _STACKED.match(key)
            if not stacked:
                yield Parameter(key, key, None, shape, dtype)
                continue
            for layer in range(shape[0]):
                yield Parameter(f"{stacked[1]}.{layer}.{stacked[2]}", key, layer, shape[1:], dtype)

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for key, entry in self._tensors.items():
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) < math.prod(entry.size):
                raise ValueError(
                    f"{self.folder / _INDEX}: the shards of {key} do not cover its {list(entry.size)} elements: the "
                    "checkpoint was saved incompletely; convert another iteration"
                )
            for chunk in entry.chunks:
                info = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                end = info.offset + info.length
                needed[info.relative_path] = max(needed.get(info.relative_path, 0), end)
        for name, length in sorted(needed.items()):
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing: it holds parameters of the model; copy the whole folder")
            if path.stat().st_size < length:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes, the index wants {length}: it was cut off, copy it again"
                )


def checkpoint_folder(source: str | os.PathLike[str]) -> Path:
    """The folder with the `.metadata` index: `source` itself, or the iteration in it that was saved last.

    Raises:
        ValueError: there is none; the message says what the folder looks like instead.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: pass a torch_dist checkpoint, e.g. CHECKPOINTS/iter_0001000")
    if (folder / _INDEX).is_file():
        return folder
    tracker = folder / _TRACKER
    if tracker.is_file():
        return _tracked(folder, tracker)
    iterations = sorted(entry for entry in folder.iterdir() if (entry / _INDEX).is_file())
    if len(iterations) == 1:
        return iterations[0]
    if iterations:
        names = ", ".join(entry.name for entry in iterations)
        raise ValueError(f"{folder} holds several checkpoints and no {_TRACKER}: pass one of {names}")
    raise ValueError(f"{folder} is no torch_dist checkpoint, it has no {_INDEX}: {_looks_like(folder)}")


def _tracked(folder: Path, tracker: Path) -> Path:
    text = tracker.read_text().strip()
    name = f"iter_{int(text):07d}" if text.isdigit() else text
    if name and (folder / name / _INDEX).is_file():
        return folder / name
    what = _looks_like(folder / name) if name and (folder / name).is_dir() else f"{folder / name} is no folder"
    raise ValueError(f"{tracker} names {text!r}, but {folder / name} has no {_INDEX}: {what}")


def _looks_like(folder: Path) -> str:
    if any(folder.glob("*.safetensors")) or (folder / "config.json").is_file():
        return "it looks like a Hugging Face model, which has the layout that this converter writes"
    if any(folder.glob("**/mp_rank_*")):
        return "it holds mp_rank_* files, the legacy format: save it again with --ckpt-format torch_dist"
    return "pass the folder that dist_checkpointing.save wrote"


def _read_index(reader: FileSystemReader, folder: Path) -> Metadata:
    try:
        metadata = reader.read_metadata()
        storage = metadata.storage_data
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        raise ValueError(f"{folder / _INDEX} is no index of torch.distributed.checkpoint: {error}") from error
    if not storage:
        raise ValueError(f"{folder / _INDEX} names no file: the checkpoint was saved incompletely")
    return metadata


def _by_layer(parameter: Parameter) -> tuple[int, str]:
    # The order in which Megatron-Bridge exports a live model, so that both routes fill the same files.
    layer = _LAYER.search(parameter.name)
    return (int(layer[1]) if layer else -1), parameter.name


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
