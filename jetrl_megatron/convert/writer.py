"""Writes an export: safetensors, config.json and the files beside them, all of it or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from jetrl_megatron.convert.files import FileLayout, TensorFiles, lay_out
from jetrl_megatron.convert.hf_model import HfModel
from jetrl_megatron.convert.plan import ExportPlan
from jetrl_megatron.convert.stored import INDEX
from jetrl_megatron.recipe import Fp8BlockRecipe

SHARD_BYTES = 5 * 10**9
"""Largest weight file, in bytes of tensors; a model that fits into one has no index."""

_FORMAT_VERSION = 1


def export_config(hf: HfModel, recipe: Fp8BlockRecipe, plan: ExportPlan) -> dict[str, Any]:
    """config.json of an export.

    Returns:
        the model's own fields with "dtype" bfloat16, the recipe's "quantization_config", and "jetrl": version of this
        format, the recipe's fields and its fingerprint.
    """
    fields = {key: value for key, value in hf.fields.items() if key != "torch_dtype"}
    return {
        **fields,
        "dtype": "bfloat16",
        "tie_word_embeddings": hf.tied,
        "quantization_config": recipe.to_vllm_quantization_config(
            plan.ignored, str(plan.scale_dtype).removeprefix("torch.")
        ),
        "jetrl": {"version": _FORMAT_VERSION, **recipe.to_stamp()},
    }


def exported_recipe(folder: Path) -> Fp8BlockRecipe:
    """The recipe that an export carries.

    Raises:
        ValueError: the folder is no export of this converter, or its recipe was edited.
    """
    if not is_export(folder):
        raise ValueError(f'{folder} is no export of this converter: its config.json has no "jetrl"')
    config = folder / "config.json"
    return Fp8BlockRecipe.from_stamp(json.loads(config.read_text(encoding="utf-8"))["jetrl"], str(config))


def check_parent(out: Path) -> None:
    """Checks that the folder to write into exists.

    Raises:
        ValueError: it does not, or `out` has no name.
    """
    if not out.name:
        raise ValueError(f"{out} names no folder to make: choose a name for the export, e.g. {out / 'export'}")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is no folder: create it, or choose another place for the export")


def check_out(out: Path, *, force: bool) -> None:
    """Checks that an export may be written to `out`.

    Raises:
        ValueError: something is there that may not be replaced, or the folder to write into does not exist.
    """
    check_parent(out)
    if not os.path.lexists(out):
        return
    if not is_export(out):
        raise ValueError(f"{out} exists and is no export of this converter: choose another name, or remove it yourself")
    if not force:
        raise ValueError(f"{out} exists: choose another name, or replace the export with --force (force=True)")


def write_export(
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    plan: ExportPlan,
    config: dict[str, Any],
    files: Sequence[Path] = (),
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes tensors, config.json and copied files into a new folder that gets its name when it is complete.

    Args:
        tensors: (Hugging Face name, tensor), in any order; each goes to its place at once.
        out: the folder to make.
        plan: what the tensors must be.
        config: content of config.json.
        files: files and folders to copy.
        force: replace an export that is there already.
        shard_bytes: largest weight file, in bytes of tensors.

    Returns:
        `out`.

    Raises:
        ValueError: `out` is taken, or the tensors are not those of the plan. Nothing is left under `out` or beside it.
    """
    check_out(out, force=force)
    with _new_folder(out) as folder:
        _write_tensors(tensors, folder, plan, shard_bytes)
        write_beside(folder, config, files)
    return out


def _write_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, plan: ExportPlan, shard_bytes: int
) -> None:
    layout = lay_out(plan.tensors, shard_bytes)
    seen: set[str] = set()
    # disable=None: no bar where nobody watches, e.g. in a log file.
    with (
        TensorFiles(folder, layout, create=True) as files,
        tqdm(total=plan.nbytes, unit="B", unit_scale=True, desc="export", disable=None) as progress,
    ):
        for name, tensor in tensors:
            plan.check(name, tensor)
            if name in seen:
                raise ValueError(f"{name} arrives twice: two parameters of the source map to it")
            seen.add(name)
            files.write(name, tensor)
            progress.update(tensor.nbytes)
        plan.check_complete(seen)
        files.sync()
    write_index(folder, layout)


def write_index(folder: Path, layout: FileLayout) -> None:
    """Writes the file that names each tensor's weight file, where there are several."""
    index = layout.index()
    if index is not None:
        _write_json(folder / INDEX, index)


def write_beside(folder: Path, config: dict[str, Any], files: Sequence[Path]) -> None:
    """Writes config.json and copies files and folders beside the weights."""
    _write_json(folder / "config.json", config)
    for path in files:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def is_export(folder: Path) -> bool:
    """Whether a folder is an export of this converter."""
    try:
        return "jetrl" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` if the body succeeds and is removed if it does not."""
    suffix = uuid.uuid4().hex[:8]
    folder, replaced = out.with_name(f".{out.name}.partial-{suffix}"), out.with_name(f".{out.name}.replaced-{suffix}")
    folder.mkdir()
    try:
        yield folder
        if out.exists():
            out.rename(replaced)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
