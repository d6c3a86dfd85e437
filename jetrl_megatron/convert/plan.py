"""What an export will hold, tensor by tensor, before the first byte is written."""

# Shape suffixes: N rows and K columns of a weight.

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from jetrl_megatron.convert.fp8_weights import WEIGHT, check_ignore, is_decoder_linear, scale_name
from jetrl_megatron.convert.hf_model import HfModel, open_hf_model
from jetrl_megatron.convert.mapping import HfMapping
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import ceil_div

_MERGED_HALVES = ".gate_up_proj.weight"
# Megatron linears that engines put into one layer, which has one precision, and what names all of them.
_SERVED_AS_ONE = (
    (re.compile(r"^(.+\.experts)\."), "'*.mlp.experts.*'"),
    (re.compile(r"^(.+)\.linear_(?:q|kv)_down_proj$"), "'*_down_proj'"),
)
_EXPERT = re.compile(r"^(.+\.experts)\.\d+\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""safetensors' names, in the order in which it stores tensors: its own list, from the end."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without header."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExportPlan:
    """The tensors of an export.

    Attributes:
        tensors: every tensor, by Hugging Face name.
        ignored: Hugging Face names of the linears that stay BF16, as engines want them listed, routers and the head
            included; () where it is the head alone, which every engine leaves alone.
        scale_dtype: of the scales.
    """

    tensors: Mapping[str, TensorSpec]
    ignored: tuple[str, ...]
    scale_dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def to_text(self) -> str:
        """A table of the tensors; those whose names differ in numbers alone share a line if they are alike."""
        alike: dict[tuple[str, TensorSpec], int] = {}
        for name, spec in self.tensors.items():
            key = _NUMBER.sub("*", name), spec
            alike[key] = alike.get(key, 0) + 1
        rows = [("tensor", "number", "dtype", "shape", "MB")]
        for (name, spec), count in alike.items():
            size = f"{count * spec.nbytes / 1e6:.3f}"
            rows.append((name, str(count), DTYPE_NAMES[spec.dtype], "x".join(map(str, spec.shape)), size))
        return text_table(rows, numbers=(1, 4))

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Checks one tensor that is about to be written.

        Raises:
            ValueError: the export has no such tensor, or another shape or dtype for it.
        """
        self._check(name, tensor, self._spec(name).dtype)

    def check_source(self, name: str, matrix: torch.Tensor) -> None:
        """Checks one logical matrix that is about to be quantised or passed on.

        Raises:
            ValueError: the export has no such tensor, or another shape or dtype for it.
        """
        dtype = self._spec(name).dtype
        self._check(name, matrix, torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype)

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.tensors:
            raise ValueError(
                f"{name} is no tensor of the Hugging Face model: pass the --hf-config of the trained model"
            )
        return self.tensors[name]

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        shape = self.tensors[name].shape
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, and the export wants {dtype} {list(shape)}: pass the "
                "--hf-config of the trained model"
            )

    def check_sources(self, names: Iterable[str]) -> None:
        """Checks, before anything is read, that the source has exactly the tensors of the model.

        Args:
            names: Hugging Face names that the source's parameters go into, without scales.

        Raises:
            ValueError: a tensor is missing or unknown.
        """
        names = set(names)
        unknown = sorted(names - set(self.tensors))
        if unknown:
            raise ValueError(
                f"the source has {len(unknown)} tensors that the Hugging Face model has not, {_some(unknown)}: pass "
                "the --hf-config of the trained model"
            )
        self.check_complete([*names, *map(scale_name, names)])

    def check_complete(self, names: Iterable[str]) -> None:
        """Checks that no tensor is missing.

        Raises:
            ValueError: some are; the message names the first ones.
        """
        missing = sorted(set(self.tensors) - set(names))
        if missing:
            raise ValueError(
                f"the source lacks {len(missing)} tensors of the Hugging Face model, {_some(missing)}: pass the "
                "--hf-config of the trained model, and a checkpoint that was saved whole"
            )


def plan_export(
    hf: HfModel, mapping: HfMapping, linears: Iterable[str], recipe: Fp8BlockRecipe, scale_dtype: str = "float32"
) -> ExportPlan:
    """Plans the export of a model.

    Args:
        linears: Megatron names of all decoder linears of the model.
        scale_dtype: in which scales are stored.

    Raises:
        ValueError: a pattern of recipe.ignore matches none of them, the recipe quantises none or a part of what engines
            make one layer of, or scale_dtype cannot hold the recipe's scales.
    """
    recipe.check_scale_dtype(scale_dtype)
    stored_scale = getattr(torch, scale_dtype)
    linears = sorted(set(linears))
    check_ignore(recipe, linears)
    fp8 = {module: recipe.quantizes(module, mapping.num_layers) for module in linears}
    _check_served_as_one(fp8)
    quantized = {name for module in linears if fp8[module] for name in mapping.targets(module + WEIGHT)}
    if linears and not quantized:
        raise ValueError(
            "the recipe keeps every linear in BF16, and nothing is left for an FP8 checkpoint: leave out ignore "
            "patterns or BF16 layers, or export the model in BF16 with Megatron-Bridge's save_hf_pretrained"
        )
    _check_merged_halves({name: hf.shapes[name] for name in quantized & hf.shapes.keys()}, recipe)
    tensors: dict[str, TensorSpec] = {}
    for name in mapping.untied_names(hf.shapes):
        shape = hf.shapes[name]
        if name not in quantized:
            tensors[name] = TensorSpec(shape, torch.float32 if mapping.keeps_float32(name) else torch.bfloat16)
            continue
        tensors[name] = TensorSpec(shape, torch.float8_e4m3fn)
        scale_shape = tuple(ceil_div(size, block) for size, block in zip(shape, recipe.weight_block, strict=True))
        tensors[scale_name(name)] = TensorSpec(scale_shape, stored_scale)
    return ExportPlan(tensors, _bf16_linears(tensors, mapping), stored_scale)


def bf16_modules(hf_config: PretrainedConfig, recipe: Fp8BlockRecipe) -> tuple[str, ...]:
    """Hugging Face names of the linears that an engine must hold in BF16: those of `ExportPlan.ignored`.

    Raises:
        ValueError: see `plan_export`.
    """
    hf = open_hf_model(hf_config)
    mapping = HfMapping(hf)
    modules = (mapping.from_hf(name, torch.empty(shape, device="meta")).module for name, shape in hf.shapes.items())
    return plan_export(hf, mapping, filter(is_decoder_linear, modules), recipe).ignored


def text_table(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Rows of equal length as lines of aligned columns.

    Args:
        numbers: columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def count_of(number: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _check_served_as_one(fp8: Mapping[str, bool]) -> None:
    """Refuses a recipe that keeps in BF16 a part of what engines make one layer of."""
    groups: dict[tuple[str, str], dict[bool, str]] = {}
    for module, quantized in fp8.items():
        for pattern, way_out in _SERVED_AS_ONE:
            match = pattern.match(module)
            if match:
                groups.setdefault((match[1], way_out), {}).setdefault(quantized, module)
    for (_, way_out), examples in groups.items():
        if len(examples) > 1:
            raise ValueError(
                f"{examples[True]} is FP8 and {examples[False]} stays BF16, and engines make one layer of both: ignore "
                f"all of them ({way_out}) or none"
            )


def _check_merged_halves(shapes: Mapping[str, tuple[int, ...]], recipe: Fp8BlockRecipe) -> None:
    """Refuses a matrix of gate above up in which a tile spans both: training quantises them apart."""
    for name, shape in shapes.items():
        width = shape[0] // 2
        if name.endswith(_MERGED_HALVES) and width % recipe.block:
            raise ValueError(
                f"{name} holds gate above up, {width} rows each, no multiple of the tile {recipe.block}: one scale "
                "would serve rows of both, which training does not compute with and vLLM cannot serve; keep it in BF16 "
                "(ignore '*.linear_fc1')"
            )


def _bf16_linears(tensors: Mapping[str, TensorSpec], mapping: HfMapping) -> tuple[str, ...]:
    # Routers among them: vLLM builds some families' routers as linears like any other, and would cast one to FP8.
    linears = [
        name.removesuffix(WEIGHT)
        for name, spec in tensors.items()
        if name.endswith(WEIGHT) and len(spec.shape) == 2 and spec.dtype != torch.float8_e4m3fn
    ]
    inner = [name for name in linears if name not in (mapping.embedding_module, mapping.head_module)]
    # transformers asks for the module of all experts, vLLM for the experts.
    experts = dict.fromkeys(match[1] for name in inner if (match := _EXPERT.match(name)))
    # transformers leaves the head alone by itself only as long as no list is given.
    return (*inner, *experts, mapping.head_module) if inner else ()
