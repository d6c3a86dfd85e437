"""What an update consists of, agreed on before its first byte: tensors in order, their place in buckets, the recipe."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from jetrl_megatron.convert.fp8_weights import SCALE, WEIGHT, scale_name
from jetrl_megatron.convert.plan import DTYPE_NAMES, TensorSpec
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import ceil_div

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ALIGNMENT = 256
"""Bytes; every dtype may be viewed at such an offset, and copies are vectorised."""


class WeightSyncError(RuntimeError):
    """An update that did not happen; the engine serves the version that it served before.

    Attributes:
        problems: one line for each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Slice(NamedTuple):
    """Some rows of a tensor in a bucket.

    Attributes:
        name: of the tensor.
        first_row, rows: rows of the tensor; elements of a tensor with one dimension.
        offset, nbytes: in the bucket.
    """

    name: str
    first_row: int
    rows: int
    offset: int
    nbytes: int


class Bucket(NamedTuple):
    """What is sent at once: slices, and the bytes from the first to the last one's end."""

    slices: tuple[Slice, ...]
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """The tensors of an update, as a checkpoint would hold them.

    Attributes:
        tensors: shape and dtype by Hugging Face name, in the order in which they are sent.
        recipe: by which they are quantised.
        bucket_bytes: largest bucket. A tensor that is larger is cut along its rows.
    """

    tensors: Mapping[str, TensorSpec]
    recipe: Fp8BlockRecipe
    bucket_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in order.

        Raises:
            ValueError: a row is larger than a bucket.
        """
        buckets: list[Bucket] = []
        slices: list[Slice] = []
        used = 0
        for name, first, rows, nbytes in self._cut():
            if slices and used + nbytes > self.bucket_bytes:
                buckets.append(Bucket(tuple(slices), slices[-1].offset + slices[-1].nbytes))
                slices, used = [], 0
            slices.append(Slice(name, first, rows, used, nbytes))
            used += ceil_div(nbytes, _ALIGNMENT) * _ALIGNMENT
        if slices:
            buckets.append(Bucket(tuple(slices), slices[-1].offset + slices[-1].nbytes))
        return tuple(buckets)

    def _cut(self) -> Iterator[tuple[str, int, int, int]]:
        for name, spec in self.tensors.items():
            rows, row_bytes = _rows(spec), spec.nbytes // max(_rows(spec), 1)
            most = self.bucket_bytes // max(row_bytes, 1)
            if most == 0:
                raise ValueError(
                    f"bucket_bytes={self.bucket_bytes} holds no row of {name}, which has {row_bytes} bytes: use more"
                )
            for first in range(0, rows, most):
                count = min(most, rows - first)
                yield name, first, count, count * row_bytes

    @cached_property
    def digest(self) -> str:
        """Hash of everything in the manifest."""
        return hashlib.sha256(json.dumps(self.to_message()).encode()).hexdigest()

    def to_message(self) -> dict[str, Any]:
        """Ready for JSON."""
        tensors = [[name, DTYPE_NAMES[spec.dtype], list(spec.shape)] for name, spec in self.tensors.items()]
        return {"tensors": tensors, "recipe": self.recipe.to_stamp(), "bucket_bytes": self.bucket_bytes}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_message`.

        Raises:
            ValueError: the recipe does not have the fingerprint beside it, or a field is missing.
        """
        recipe = Fp8BlockRecipe.from_stamp(message["recipe"], "the sender's manifest")
        tensors = {name: TensorSpec(tuple(shape), _DTYPES[dtype]) for name, dtype, shape in message["tensors"]}
        return cls(tensors, recipe, message["bucket_bytes"])

    def problems(self) -> list[str]:
        """Codes without scales, scales without codes, and scales of a wrong shape or dtype; one line for each."""
        lines = []
        for name, spec in self.tensors.items():
            if spec.dtype == torch.float8_e4m3fn:
                lines += self._scale_problems(name, spec)
            elif name.endswith(SCALE) and name.removesuffix(SCALE) + WEIGHT not in self.tensors:
                lines.append(f"{name} is a scale without codes: send {name.removesuffix(SCALE) + WEIGHT} beside it")
        return lines

    def _scale_problems(self, name: str, spec: TensorSpec) -> list[str]:
        scale = self.tensors.get(scale_name(name))
        if scale is None:
            return [f"{scale_name(name)} is missing: {name} holds codes, which mean nothing without their scales"]
        shape = tuple(ceil_div(size, block) for size, block in zip(spec.shape, self.recipe.weight_block, strict=True))
        if scale == TensorSpec(shape, torch.float32):
            return []
        return [
            f"{scale_name(name)} is {text_of(scale)}: codes {list(spec.shape)} in tiles of "
            f"{list(self.recipe.weight_block)} have scales F32 {list(shape)}"
        ]


def view_of(buffer: torch.Tensor, part: Slice, spec: TensorSpec) -> torch.Tensor:
    """A slice inside its bucket, as a matrix [rows, columns]; one column for a tensor with one dimension."""
    view = buffer[part.offset : part.offset + part.nbytes].view(spec.dtype)
    return view.view(part.rows, -1) if part.nbytes else view.view(part.rows, 0)


def text_of(spec: TensorSpec) -> str:
    """ "F8_E4M3 [512, 256]"."""
    return f"{DTYPE_NAMES[spec.dtype]} {list(spec.shape)}"


def _rows(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else math.prod(spec.shape)
