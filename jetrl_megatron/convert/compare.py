"""Reads an export back and compares it, byte for byte, with what the source makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from jetrl_megatron.convert.inspect import read_files
from jetrl_megatron.convert.plan import DTYPE_NAMES, ExportPlan
from jetrl_megatron.convert.stored import StoredTensor, read_headers, tensor_files
from jetrl_megatron.convert.stream import Piece, Stream, Task, run_tasks


def differing_headers(folder: Path, plan: ExportPlan) -> list[str]:
    """Compares names, dtypes and shapes of the tensors in a folder with those of a plan, and its files with its index.

    Returns:
        a line for each tensor that differs, and for each tensor or file that the index does not place there.

    Raises:
        ValueError: a file of the folder is missing or damaged.
    """
    stored = read_headers(folder)
    planned = {name: StoredTensor(DTYPE_NAMES[spec.dtype], spec.shape) for name, spec in plan.tensors.items()}
    lines = []
    for name in sorted({*stored, *planned}):
        found, wanted = stored.get(name), planned.get(name)
        if found != wanted:
            lines.append(f"{name}: {_text(found)} in {folder}, {_text(wanted)} from the source")
    *_, faults = read_files(folder)
    return lines + faults


def differing_files(folder: Path, files: Iterable[Path]) -> list[str]:
    """Compares what was copied beside the weights with what it was copied from.

    Args:
        files: files and folders, of which `folder` should hold copies.

    Returns:
        a line for each file that is missing or differs.
    """
    pairs: list[tuple[Path, Path]] = []
    for path in files:
        inner = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
        pairs += [(found, found.relative_to(path.parent)) for found in inner]
    lines = []
    for original, name in pairs:
        copy = folder / name
        if not copy.is_file():
            lines.append(f"{name}: missing in {folder}")
        elif copy.read_bytes() != original.read_bytes():
            lines.append(f"{name}: differs from {original}")
    return lines


def differing_tensors(
    folder: Path, stream: Stream, tasks: Sequence[Task], workers: int, *, show: bool = True
) -> list[str]:
    """Converts the tasks again and compares each tensor with the one in a folder.

    Args:
        folder: with exactly the tensors of the plan.
        show: whether to show a progress bar where somebody watches.

    Returns:
        a line for each tensor that differs.

    Raises:
        ValueError: the source or a file of the folder cannot be read.
    """
    files = tensor_files(folder)
    differing: Counter[str] = Counter()

    def compare(task: Task) -> None:
        with ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in _files_of(task, files)}
            for piece in stream.pieces(task):
                differing[piece.name] += _differing_bytes(opened[files[piece.name]], piece)

    total = sum(task.nbytes for task in tasks)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None if show else True)
    with bar as progress, closing(run_tasks(tasks, compare, workers=workers, progress=progress)) as compared:
        for _ in compared:
            pass
    return [f"{name}: {count} bytes differ from the source's" for name, count in sorted(differing.items()) if count]


def _files_of(task: Task, files: Mapping[str, Path]) -> set[Path]:
    return {files[name] for name in task.names}


def _differing_bytes(file: Any, piece: Piece) -> int:
    theirs = file.get_tensor(piece.name)
    if piece.tensor.dim():
        theirs = theirs[piece.first_row : piece.first_row + len(piece.tensor)]
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (piece.tensor, theirs))
    return 0 if torch.equal(ours, theirs) else int((ours != theirs).sum())


def _text(tensor: StoredTensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
