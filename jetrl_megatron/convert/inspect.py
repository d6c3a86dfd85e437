"""What an FP8 checkpoint in Hugging Face format holds, ours or another's, and where it contradicts itself.

Engines skip a scale that belongs to no FP8 weight, cast a weight that has none, and read a wrong grid, with a warning
at most; `inspect_folder` finds these before an engine is started.
"""

# Shape suffixes: N rows and K columns of a weight.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from jetrl_megatron.convert.fp8_weights import SCALE, WEIGHT, scale_name
from jetrl_megatron.convert.plan import count_of, text_table
from jetrl_megatron.convert.quantization import block_of, read_quantization
from jetrl_megatron.convert.stored import INDEX, SINGLE, StoredTensor, headers_of, read_config, read_index
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import ceil_div

CODES = "F8_E4M3"
"""safetensors' name of the dtype of block FP8 codes."""
_FP8, _BF16 = (CODES, "F8_E5M2"), "BF16"
# Of block FP8, as an export of ours stores them.
_SCALES, _EXPONENTS = "F32", "F8_E8M0"
_LINEAR = "_proj.weight"
# The one linear of an MTP layer that engines and DeepSeek's own checkpoints keep in BF16, whatever the list says.
_NEVER_FP8 = ".eh_proj.weight"
# In the order in which they are looked for: block FP8, other static quantisers.
_SCALE_SUFFIXES = (SCALE, ".weight_scale", ".scale", ".scale_inv")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class ScaleGrid:
    """The scales of one FP8 tensor.

    Attributes:
        name: of the tensor that holds them.
        dtype: by safetensors' name.
        shape: of that tensor.
        kind: "tile", "channel", "tensor", or "?" for a shape that fits none.
        low, high: smallest and largest one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    low: float
    high: float


@dataclass(frozen=True)
class Inspection:
    """What a folder holds.

    Attributes:
        path: the folder.
        quantization: quantization_config (or compression_config) of its config.json; {} where it has none.
        fingerprint: of the recipe that an export of ours carries, else None.
        tensors: dtype and shape by name.
        files: file by tensor name.
        grids: scales by the name of the FP8 tensor that they belong to.
        faults: a line for each contradiction.
    """

    path: Path
    quantization: Mapping[str, Any]
    fingerprint: str | None
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, str]
    grids: Mapping[str, ScaleGrid]
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        rows = []
        for name, tensor in sorted(self.tensors.items()):
            row: dict[str, Any] = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            row["file"] = self.files[name]
            if name in self.grids:
                row["scale"] = {**vars(self.grids[name]), "shape": list(self.grids[name].shape)}
            rows.append(row)
        return {
            "path": str(self.path),
            "quantization_config": dict(self.quantization),
            "fingerprint": self.fingerprint,
            "tensors": rows,
            "faults": list(self.faults),
        }

    def to_text(self) -> str:
        """A table of the tensors, those that differ in their numbers alone in one line, and the faults."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, tensor in self.tensors.items():
            grid = self.grids.get(name)
            scales = f"{grid.kind} {_shape(grid.shape)} {grid.dtype}" if grid else ""
            alike.setdefault((_NUMBER.sub("*", name), tensor.dtype, _shape(tensor.shape), scales), []).append(name)
        rows = [("tensor", "number", "dtype", "shape", "scales", "smallest", "largest")]
        for (name, dtype, shape, scales), names in sorted(alike.items()):
            grids = [self.grids[name] for name in names if name in self.grids]
            low = f"{min(grid.low for grid in grids):.4g}" if grids else ""
            high = f"{max(grid.high for grid in grids):.4g}" if grids else ""
            rows.append((name, str(len(names)), dtype, shape, scales, low, high))
        method = self.quantization.get("quant_method") or "none"
        block = self.quantization.get("weight_block_size")
        fp8 = sum(tensor.dtype in _FP8 for tensor in self.tensors.values())
        head = f"{self.path}: quantisation {method}{f', tiles of {_shape(block)}' if block else ''}, " + (
            f"recipe {self.fingerprint}" if self.fingerprint else "no recipe of ours"
        )
        tail = f"{len(self.tensors)} tensors, {fp8} in FP8, in {count_of(len(set(self.files.values())), 'file')}"
        if not self.faults:
            return "\n".join([head, text_table(rows, numbers=(1, 5, 6)), f"{tail}; nothing contradicts itself"])
        faults = [f"  {fault}" for fault in self.faults]
        return "\n".join(
            [head, text_table(rows, numbers=(1, 5, 6)), f"{tail}; {count_of(len(faults), 'fault')}:", *faults]
        )


def inspect_folder(path: Path) -> Inspection:
    """Reads configuration, index, headers and scales of a Hugging Face folder; codes are not read.

    Raises:
        ValueError: the folder has no config.json or no safetensors, or they cannot be read as such.
    """
    config = read_config(path)
    quantization = read_quantization(path, config)
    faults: list[str] = []
    recipe = None
    if "jetrl" in config:
        try:
            recipe = Fp8BlockRecipe.from_stamp(config["jetrl"], str(path / "config.json"))
        except (ValueError, TypeError) as error:
            faults.append(str(error))
    tensors, files, file_faults = read_files(path)
    block = None
    try:
        block = block_of(quantization)
    except ValueError as error:
        faults.append(f"config.json: {error}")
    grids: dict[str, ScaleGrid] = {}
    faults += [*file_faults, *_dtype_faults(tensors, quantization, block, ours="jetrl" in config)]
    ue8m0 = quantization.get("scale_fmt") == "ue8m0" or (recipe is not None and recipe.scale_format == "ue8m0")
    for name, scale, fault in _scales(path, tensors, files, block, ue8m0):
        if scale is not None:
            grids[name] = scale
        faults += [fault] if fault else []
    fingerprint = recipe.fingerprint if recipe else None
    return Inspection(path, quantization, fingerprint, tensors, files, grids, tuple(dict.fromkeys(faults)))


def rollout_faults(tensors: Mapping[str, StoredTensor], ignored: set[str], block: tuple[int, int]) -> Iterator[str]:
    """What an engine would load wrongly from a block FP8 checkpoint, by headers alone.

    Args:
        ignored: modules that the configuration says are BF16.
        block: rows and columns of a tile.
    """
    for name, tensor in sorted(tensors.items()):
        fault = _rollout_fault(name, tensor, tensors, ignored, block)
        if fault:
            yield f"{name}: {fault}"


def ignored_modules(quantization: Mapping[str, Any]) -> set[str]:
    """Modules that a quantization_config leaves alone; both names stand in the wild.

    Raises:
        ValueError: they are no list of names.
    """
    names = quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"ignored_layers={names!r} in quantization_config must be a list of modules' names")
    return set(names)


def read_files(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str], list[str]]:
    """Tensors and their files as they are on disk, and where the index says otherwise.

    Raises:
        ValueError: there are no safetensors, or the index is damaged.
    """
    index = read_index(path)
    on_disk = sorted(file.name for file in path.glob("*.safetensors"))
    if not on_disk and index is None:
        raise ValueError(f"{path} has neither {INDEX} nor {SINGLE}: name the folder of a model in safetensors")
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, str] = {}
    faults = []
    damaged = set()
    for file in on_disk:
        try:
            found = headers_of(path / file)
        except ValueError as error:
            faults.append(str(error))
            damaged.add(file)
            continue
        faults += [f"{name}: in {files[name]} and in {file}" for name in sorted(found.keys() & tensors.keys())]
        tensors.update(found)
        files.update(dict.fromkeys(found, file))
    if index is None:
        faults += [f"{file}: beside {SINGLE}, and no {INDEX} names it" for file in on_disk if len(on_disk) > 1]
    else:
        faults += _index_faults(index, tensors, files, set(on_disk), damaged)
    return tensors, files, faults


def _index_faults(
    index: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    files: Mapping[str, str],
    on_disk: set[str],
    damaged: set[str],
) -> Iterator[str]:
    where: dict[str, str] = index["weight_map"]
    for file in sorted(set(where.values()) - on_disk):
        count = sum(named == file for named in where.values())
        yield f"{file}: missing, and {INDEX} places {count} tensors in it"
    for file in sorted(on_disk - set(where.values())):
        yield f"{file}: {INDEX} does not name it"
    for name, file in sorted(where.items()):
        if file in on_disk and file not in damaged and files.get(name) != file:
            found = f"in {files[name]}" if name in files else "nowhere"
            yield f"{name}: {INDEX} places it in {file}, and it is {found}"
    for name in sorted(tensors.keys() - where.keys()):
        yield f"{name}: in {files[name]}, and {INDEX} does not name it"
    total = index["metadata"].get("total_size")
    actual = sum(_nbytes(tensor) for tensor in tensors.values())
    if total is not None and total != actual and not damaged and set(where.values()) <= on_disk:
        yield f"{INDEX}: total_size is {total}, and the tensors have {actual} bytes"


def _dtype_faults(
    tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any], block: tuple[int, int] | None, *, ours: bool
) -> Iterator[str]:
    if ours and block:
        # Engines' rules hold where the configuration is ours; others name ignored modules by patterns of their own.
        yield from rollout_faults(tensors, ignored_modules(quantization), block)
        yield from _scale_fmt_faults(tensors, quantization.get("scale_fmt"))
        return
    for name, tensor in sorted(tensors.items()):
        if _is_codes(name, tensor) and _scale_of(name, tensors) is None:
            yield f"{name}: is FP8 and has no scale {scale_name(name)}"
        if name.endswith((SCALE, ".weight_scale")) and tensor.dtype in _SCALE_DTYPES:
            weight = name.rpartition(".")[0] + WEIGHT
            if weight not in tensors and weight.removesuffix(WEIGHT) + ".weight_packed" not in tensors:
                yield f"{name}: a scale that nobody reads: there is no {weight}"
            elif name.endswith(SCALE) and tensors[weight].dtype not in _FP8:
                yield f"{name}: a scale that nobody reads: {weight} is {tensors[weight].dtype}"
    if not quantization and any(tensor.dtype in _FP8 for tensor in tensors.values()):
        yield "config.json: has no quantization_config, and there are FP8 tensors"
    elif quantization.get("quant_method") == "fp8" and not any(t.dtype in _FP8 for t in tensors.values()):
        yield "config.json: quant_method is fp8, and there is no FP8 tensor"


def _scale_fmt_faults(tensors: Mapping[str, StoredTensor], scale_fmt: Any) -> Iterator[str]:
    dtypes = sorted({tensor.dtype for name, tensor in tensors.items() if name.endswith(SCALE)})
    if dtypes and (dtypes == [_EXPONENTS]) != (scale_fmt == "ue8m0"):
        yield (
            f"config.json: scale_fmt is {scale_fmt!r}, and scales are {', '.join(dtypes)}: by it transformers decides "
            "what dtype they have"
        )


def _scales(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    files: Mapping[str, str],
    block: tuple[int, int] | None,
    ue8m0: bool,
) -> Iterator[tuple[str, ScaleGrid | None, str | None]]:
    """For each FP8 tensor with a scale: its name, the scales, and what is wrong with them."""
    by_file: dict[str, list[tuple[str, str]]] = {}
    for name, tensor in sorted(tensors.items()):
        scale = _scale_of(name, tensors) if _is_codes(name, tensor) else None
        if scale is not None:
            by_file.setdefault(files[scale], []).append((name, scale))
    for file, pairs in sorted(by_file.items()):
        with safe_open(path / file, framework="pt") as opened:
            for name, scale in pairs:
                header = tensors[scale]
                kind = _kind(tensors[name].shape, header.shape, block)
                if header.dtype not in _SCALE_DTYPES:
                    yield name, None, f"{scale}: is {header.dtype}, and scales are one of {', '.join(_SCALE_DTYPES)}"
                    continue
                values = opened.get_tensor(scale).float()
                low, high = (value.item() for value in torch.aminmax(values)) if values.numel() else (0.0, 0.0)
                grid = ScaleGrid(scale, header.dtype, header.shape, kind, low, high)
                if kind == "?":
                    shape = tensors[name].shape
                    expected = f"; expected {_shape(_grid(shape, block))}" if block and len(shape) > 1 else ""
                    text = f"{scale}: grid {_shape(header.shape)} does not fit {name} {_shape(shape)}"
                    yield name, grid, text + expected
                yield name, grid, _value_fault(scale, values, ue8m0)


def _value_fault(name: str, values: torch.Tensor, ue8m0: bool) -> str | None:
    """What is wrong with scales, float32 of any shape."""
    for what, bad in (
        ("is not finite", ~values.isfinite()),
        ("is zero", values == 0),
        ("is negative", values < 0),
        ("is no power of two, as the format wants", torch.frexp(values).mantissa != 0.5) if ue8m0 else ("", None),
    ):
        if bad is not None and bad.any():
            first = bad.nonzero()[0].tolist()
            return f"{name}{first}: {values[tuple(first)].item()} {what}; {int(bad.sum())} of {bad.numel()} scales"
    return None


def _is_codes(name: str, tensor: StoredTensor) -> bool:
    # The scales of FP4 weights are FP8 themselves.
    return tensor.dtype in _FP8 and not name.endswith((*_SCALE_SUFFIXES, "_scale", "_scale_inv"))


def _scale_of(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    stem = name.removesuffix(WEIGHT)
    # Fused experts have no ".weight": the suffix is joined to the name itself.
    candidates = [stem + suffix for suffix in _SCALE_SUFFIXES] + [name + "_scale_inv", name + "_scale"]
    return next((candidate for candidate in candidates if candidate in tensors and candidate != name), None)


def _kind(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> str:
    if block and len(shape) >= 2:
        return "tile" if scale == _grid(shape, block) else "?"
    if torch.Size(scale).numel() == 1:
        return "tensor"
    rows = shape[:-1]
    if len(shape) < 2:
        return "?"
    return "channel" if scale in (rows, (*rows, 1), (*shape[:-2], 1, shape[-1])) else "?"


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return *shape[:-2], ceil_div(shape[-2], block[0]), ceil_div(shape[-1], block[1])


def _nbytes(tensor: StoredTensor) -> int:
    return torch.Size(tensor.shape).numel() * _BYTES.get(tensor.dtype, 1)


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _rollout_fault(
    name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor], ignored: set[str], block: tuple[int, int]
) -> str | None:
    module = name.removesuffix(WEIGHT)
    if tensor.dtype == CODES:
        return _fault_of_codes(name, tensor, tensors, module in ignored, block)
    linear = name.endswith(_LINEAR) and not name.endswith(_NEVER_FP8) and len(tensor.shape) == 2
    if linear and tensor.dtype == _BF16 and module not in ignored:
        return "is BF16, and no entry of ignored_layers says so: an engine would cast it to FP8 without a scale"
    if name.endswith(SCALE):
        weight = name.removesuffix(SCALE) + WEIGHT
        found = tensors.get(weight)
        if found is None:
            return f"a scale that nobody reads: there is no {weight}"
        if found.dtype != CODES:
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
    if scale not in (StoredTensor(_SCALES, expected), StoredTensor(_EXPONENTS, expected)):
        found = f"{scale_name(name)} is {scale.dtype} {list(scale.shape)}"
        return f"needs a scale {_SCALES} or {_EXPONENTS} {list(expected)}, and {found}"
    return None
