"""A saved Megatron checkpoint of any format and parallel layout, read in one process and one parameter at a time."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from jetrl_megatron.convert.legacy import RANK_FOLDERS, LegacyStore
from jetrl_megatron.convert.parameters import Parameter
from jetrl_megatron.convert.torch_dist import INDEX, TorchDistStore

_TRACKER = "latest_checkpointed_iteration.txt"


class ShardedCheckpoint:
    """A checkpoint folder: torch_dist (`.metadata` and `.distcp` files) or legacy (`mp_rank_*` folders).

    Args:
        source: the folder itself, or a training folder with iter_XXXXXXX subfolders, of which
            latest_checkpointed_iteration.txt names one.

    Attributes:
        folder: the checkpoint's own folder.
        parameters: the model's parameters, layer after layer; optimizer state and extra state are left out.
        arguments: of the training run, where it saved them; else {}.

    Raises:
        ValueError: the folder is no checkpoint, or a file that a parameter lies in is missing, foreign or too short.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.folder = checkpoint_folder(source, legacy=True)
        torch_dist = (self.folder / INDEX).is_file()
        self._store = TorchDistStore(self.folder) if torch_dist else LegacyStore(self.folder)
        self.parameters = self._store.parameters
        self.arguments = self._store.arguments

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, whatever ranks saved it: `parameter.dtype` and `parameter.shape`, on the CPU.

        Raises:
            ValueError: a file cannot be read, or ranks that hold the same disagree; the message names them.
        """
        return self._store.read(parameter)


def checkpoint_folder(source: str | os.PathLike[str], *, legacy: bool = False) -> Path:
    """The folder of one checkpoint: `source` itself, or the iteration in it that was saved last.

    Args:
        source: a checkpoint or a training folder.
        legacy: whether the legacy format will do, or torch_dist alone.

    Raises:
        ValueError: there is none; the message says what the folder looks like instead.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: pass a checkpoint, e.g. CHECKPOINTS/iter_0001000")
    if _is_checkpoint(folder, legacy):
        return folder
    tracker = folder / _TRACKER
    if tracker.is_file():
        return _tracked(folder, tracker, legacy)
    iterations = sorted(entry for entry in folder.iterdir() if _is_checkpoint(entry, legacy))
    if len(iterations) == 1:
        return iterations[0]
    if iterations:
        names = ", ".join(entry.name for entry in iterations)
        raise ValueError(f"{folder} holds several checkpoints and no {_TRACKER}: pass one of {names}")
    lacks = f"{INDEX} and no mp_rank_* folder" if legacy else INDEX
    raise ValueError(f"{folder} is no checkpoint, it has no {lacks}: {_looks_like(folder)}")


def _is_checkpoint(folder: Path, legacy: bool) -> bool:
    return (folder / INDEX).is_file() or (legacy and any(folder.glob(RANK_FOLDERS)))


def _tracked(folder: Path, tracker: Path, legacy: bool) -> Path:
    text = tracker.read_text().strip()
    name = f"iter_{int(text):07d}" if text.isdigit() else text
    if name and _is_checkpoint(folder / name, legacy):
        return folder / name
    what = _looks_like(folder / name) if name and (folder / name).is_dir() else f"{folder / name} is no folder"
    raise ValueError(f"{tracker} names {text!r}, but {folder / name} has no {INDEX}: {what}")


def _looks_like(folder: Path) -> str:
    if any(folder.glob("*.safetensors")) or (folder / "config.json").is_file():
        return "it looks like a Hugging Face model, which has the layout that this converter writes"
    if any(folder.glob(f"**/{RANK_FOLDERS}")):
        return "it holds mp_rank_* files, the legacy format: save it again with --ckpt-format torch_dist"
    return "pass the folder that dist_checkpointing.save wrote"
