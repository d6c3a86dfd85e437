"""What lies in a Hugging Face folder, by its configuration and the headers of its weight files; no weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
"""File that says which tensor lies in which weight file."""
SINGLE = "model.safetensors"
"""The weight file of a model that fits into one."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's header in a safetensors file: dtype by safetensors' name, and shape."""

    dtype: str
    shape: tuple[int, ...]


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        ValueError: it is missing or no JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: name the folder of a Hugging Face model")
    return read_object(file, "a model's configuration")


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a Hugging Face folder; None where there is none.

    Raises:
        ValueError: it is no JSON object with a "weight_map" from tensor names to file names, or its "metadata" is none.
    """
    file = folder / INDEX
    if not file.is_file():
        return None
    index = read_object(file, "an index")
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f'{file} has no "weight_map" that names a file for each tensor: export the folder again')
    metadata = index.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f'{file}: "metadata" is {metadata!r}, not an object: export the folder again')
    return {**index, "metadata": metadata}


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of a Hugging Face folder, by the index where there is one.

    Raises:
        ValueError: there are no safetensors, the index is damaged, or the single file is.
    """
    index = read_index(folder)
    if index is not None:
        return {name: folder / file for name, file in index["weight_map"].items()}
    single = folder / SINGLE
    if not single.is_file():
        raise ValueError(f"{folder} has neither {INDEX} nor {SINGLE}: name the folder of an exported model")
    return dict.fromkeys(headers_of(single), single)


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """dtype and shape of every tensor of a Hugging Face folder.

    Raises:
        ValueError: a file is missing or damaged, or lacks a tensor that the index places in it.
    """
    by_file: dict[Path, list[str]] = {}
    for name, file in tensor_files(path).items():
        by_file.setdefault(file, []).append(name)
    headers = {}
    for file, names in by_file.items():
        if not file.is_file():
            raise ValueError(
                f"{file} is missing, and the index places {len(names)} tensors in it: copy the whole folder"
            )
        found = headers_of(file)
        missing = sorted(set(names) - set(found))
        if missing:
            raise ValueError(f"{file} lacks {missing[0]}, which the index places in it: export the folder again")
        headers.update({name: found[name] for name in names})
    return headers


def headers_of(file: Path) -> dict[str, StoredTensor]:
    """dtype and shape of every tensor in one safetensors file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}; copy or export it again") from error


def read_object(file: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        what: it is, for the error.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__}: {what} is an object")
    return content
