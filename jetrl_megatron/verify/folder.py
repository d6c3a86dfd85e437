"""Checks a rollout folder before an engine is started: what vLLM would load from it, and what it would not read.

Engines skip a scale that belongs to no FP8 weight, or cast a weight that has none, with a warning at most.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jetrl_megatron.convert.fp8_weights import SCALE, WEIGHT, scale_name
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import ceil_div
from jetrl_megatron.verify.weights import tensor_files

_CODES, _SCALES, _BF16 = "F8_E4M3", "F32", "BF16"
_LINEAR = "_proj.weight"
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor's header in a safetensors file: dtype by safetensors' name, and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RolloutFolder:
    """A block FP8 checkpoint whose tensors fit together.

    Attributes:
        path: the folder.
        config: its config.json.
        recipe: the recipe that it carries, None for a checkpoint made by others.
        fp8_weights: number of FP8 matrices.
    """

    path: Path
    config: Mapping[str, Any]
    recipe: Fp8BlockRecipe | None
    fp8_weights: int


def check_rollout_folder(path: Path) -> RolloutFolder:
    """Reads configuration and headers, no weights.

    Raises:
        ValueError: the folder is no block FP8 checkpoint, its recipe was edited, an FP8 weight has no scale, a scale
            would be read by nobody, or a linear's dtype contradicts the configuration; the message names the tensors.
    """
    config = read_config(path)
    quantization: Any = config.get("quantization_config")
    block = _block(quantization)
    if block is None:
        raise ValueError(
            f"{path} is no block FP8 checkpoint: its config.json has no quantization_config with quant_method 'fp8' "
            "and a weight_block_size of two numbers; make one with `jetrl convert CHECKPOINT OUT --hf-config DIR`, or "
            "with export_vllm_checkpoint from the live model"
        )
    recipe = Fp8BlockRecipe.from_stamp(config["jetrl"], str(path / "config.json")) if "jetrl" in config else None
    tensors = read_headers(path)
    # Both names stand in the wild: engines read the first, transformers the second.
    ignored = set(quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or ())
    faults = list(_faults(tensors, ignored, block))
    if faults:
        more = f"\n... and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(
            f"{path} does not hold what its configuration says, export it again:\n" + "\n".join(faults[:_SHOWN]) + more
        )
    return RolloutFolder(path, config, recipe, sum(tensor.dtype == _CODES for tensor in tensors.values()))


def _block(quantization: Any) -> tuple[int, int] | None:
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        ValueError: it is missing or no JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: name the folder of a Hugging Face model")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {type(config).__name__}: a model's configuration is an object")
    return config


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
        try:
            headers.update(_headers_of(file, names))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}; copy or export it again") from error
    return headers


def _headers_of(file: Path, names: list[str]) -> dict[str, StoredTensor]:
    with safe_open(file, framework="pt") as opened:
        missing = sorted(set(names) - set(opened.keys()))
        if missing:
            raise ValueError(f"{file} lacks {missing[0]}, which the index places in it: export the folder again")
        slices = {name: opened.get_slice(name) for name in names}
        return {name: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def _faults(tensors: Mapping[str, StoredTensor], ignored: set[str], block: tuple[int, int]) -> Iterator[str]:
    for name, tensor in sorted(tensors.items()):
        fault = _fault(name, tensor, tensors, ignored, block)
        if fault:
            yield f"{name}: {fault}"


def _fault(
    name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor], ignored: set[str], block: tuple[int, int]
) -> str | None:
    module = name.removesuffix(WEIGHT)
    if tensor.dtype == _CODES:
        return _fault_of_codes(name, tensor, tensors, module in ignored, block)
    if name.endswith(_LINEAR) and tensor.dtype == _BF16 and len(tensor.shape) == 2 and module not in ignored:
        return "is BF16, and no entry of ignored_layers says so: an engine would cast it to FP8 without a scale"
    if name.endswith(SCALE):
        weight = name.removesuffix(SCALE) + WEIGHT
        found = tensors.get(weight)
        if found is None:
            return f"a scale that nobody reads: there is no {weight}"
        if found.dtype != _CODES:
            return f"a scale that nobody reads: {weight} is {found.dtype}"
        return None
    if name.endswith(("_scale", ".scale", "scale_inv")):
        return f"a scale that nobody reads: block FP8 has *{SCALE} alone"
    return None


def _fault_of_codes(
    name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor], ignored: bool, block: tuple[int, int]
) -> str | None:
    if not name.endswith(WEIGHT) or len(tensor.shape) != 2 or ".layers." not in name:
        return "is FP8, but engines quantise the linears of decoder layers alone: nobody would read its scale"
    if ignored:
        return f"is FP8, but ignored_layers says BF16: nobody would read {scale_name(name)}"
    scale = tensors.get(scale_name(name))
    if scale is None:
        return f"is FP8 and has no scale {scale_name(name)}"
    expected = tuple(ceil_div(size, edge) for size, edge in zip(tensor.shape, block, strict=True))
    if scale != StoredTensor(_SCALES, expected):
        return f"needs a scale {_SCALES} {list(expected)}, and {scale_name(name)} is {scale.dtype} {list(scale.shape)}"
    return None
