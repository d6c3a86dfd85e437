"""One rank's file of a legacy Megatron checkpoint, opened without running anything that is stored in it."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MODEL = "model"
# Quantisers of TransformerEngine and the like: bytes beside the parameters, not parameters.
_NO_PARAMETER = ("_extra_state", ".inv_freq")


@dataclass(frozen=True)
class RankFile:
    """What one rank saved.

    Attributes:
        path: the file.
        chunks: tensors by the rank's own names, one mapping for each virtual pipeline stage. The file is mapped into
            memory: a tensor's bytes are read when it is used, those of optimizer state never.
        args: the training run's arguments; empty where the file has none.
    """

    path: Path
    chunks: tuple[Mapping[str, torch.Tensor], ...]
    args: Mapping[str, Any]


class _Unread:
    """Stands for an object of a class that is neither imported nor called: an optimizer, a random state, an enum."""

    def __new__(cls, *args: object, **kwargs: object) -> _Unread:
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes whatever the stored object was made from."""

    def __setstate__(self, state: object) -> None:
        """Forgets the stored object's attributes."""


def open_rank_file(path: Path) -> RankFile:
    """Opens a `model_optim_rng.pt`.

    The file is a pickle, which can name any function. Only tensors, containers and the namespace of arguments are
    made; in the place of any other class stands an inert object.

    Raises:
        ValueError: the file is missing, cut off, no checkpoint, or holds a model in a form that cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: it holds parameters of the model; copy the whole folder")
    content = _load(path)
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds {type(content).__name__} and no checkpoint: pass a folder that Megatron-LM saved"
        )
    chunks = tuple(_parameters(path, content[key]) for key in _stages(path, content))
    return RankFile(path, chunks, _arguments(content))


def stored_arguments(path: Path) -> Mapping[str, Any]:
    """The training run's arguments in a file that torch.save wrote; empty where it has none, or is not there.

    Raises:
        ValueError: the file cannot be read.
    """
    return _arguments(_load(path)) if path.is_file() else {}


def _arguments(content: Any) -> Mapping[str, Any]:
    args = content.get("args") if isinstance(content, dict) else None
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def release(tensor: torch.Tensor) -> None:
    """Lets the system drop a mapped tensor's pages from memory; whoever uses it again reads them from the file.

    Without it a process that goes through a checkpoint seems to hold all of it.
    """
    drop = getattr(mmap, "MADV_DONTNEED", None)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if drop is not None and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), drop)


def _load(path: Path) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_safe_globals(path)):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} cannot be read: {_reason(error)}. It was cut off or is no file of torch.save: copy it again, or "
            "convert another iteration"
        ) from error


def _reason(error: Exception) -> str:
    # torch wraps the reason in advice to load the file unsafely and in a link.
    text = str(error).partition("\n\nCheck the documentation")[0]
    reason = text.rpartition("WeightsUnpickler error:")[2].rpartition("\n\n")[2].strip()
    return reason.splitlines()[0].rstrip(".") if reason else type(error).__name__


def _safe_globals(path: Path) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return [argparse.Namespace, *((unread(name), name) for name in names if name != "argparse.Namespace")]


def unread(name: str) -> type[_Unread]:
    """An inert class in the place of one that is neither imported nor called.

    Args:
        name: full name of the stored class.
    """
    # A class of its own for each: torch's unpickler looks the class up by its identity.
    return type(name.rpartition(".")[2], (_Unread,), {"stored_class": name})


def _stages(path: Path, content: dict[str, Any]) -> list[str]:
    if _MODEL in content:
        return [_MODEL]
    stages: list[str] = []
    while f"{_MODEL}{len(stages)}" in content:
        stages.append(f"{_MODEL}{len(stages)}")
    if not stages:
        keys = ", ".join(map(str, list(content)[:6]))
        raise ValueError(f'{path} has no "model" (it has {keys}): pass a checkpoint that was saved with the model')
    return stages


def _parameters(path: Path, model: Any) -> dict[str, torch.Tensor]:
    if not isinstance(model, dict):
        raise ValueError(f'{path}: "model" is a {type(model).__name__}, not a dict of tensors: save the state_dict')
    parameters = {}
    for name, value in model.items():
        if not isinstance(name, str):
            raise ValueError(f'{path}: "model" has the key {name!r}, not a parameter\'s name: save the state_dict')
        if isinstance(value, dict):
            raise ValueError(
                f'{path}: "{name}" is a dict inside the model, as Megatron-LM saved before Megatron-core: convert the '
                "checkpoint with its tools/checkpoint/convert.py --saver core first"
            )
        if name.endswith(_NO_PARAMETER) or value is None:
            continue
        if not isinstance(value, torch.Tensor):
            stored = getattr(value, "stored_class", type(value).__name__)
            raise ValueError(
                f"{path}: {name} is stored as {stored}, whose values are unknown here: save the checkpoint with BF16 "
                "parameters (fp8_param off)"
            )
        parameters[name] = value.detach()
    return parameters
