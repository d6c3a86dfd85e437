"""The weights of a live Megatron model, in the very codes and scales that its FP8 layers compute with.

Each rank writes its own parts of a bucket where they belong, everything else is zero, and a maximum over ranks of the
bytes puts them together: a layout of tensor, pipeline, virtual pipeline and expert parallelism is then nothing but a
list of rectangles. Aligned operands have zeros where other ranks hold a tile's rows, so shared tiles need no more.
"""

# Shape suffixes: R and C rows and columns of a part of a weight.

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.utils import get_pg_rank, get_pg_size
from transformers import PretrainedConfig

from jetrl_megatron.convert.fp8_weights import scale_name
from jetrl_megatron.convert.hf_model import open_hf_model
from jetrl_megatron.convert.live import (
    check_model_recipe,
    gather_linears,
    named_parameters,
    unwrapped,
    wait_for_parameters,
)
from jetrl_megatron.convert.mapping import HfMapping
from jetrl_megatron.convert.plan import TensorSpec, plan_export
from jetrl_megatron.layers.fp8_linear import Fp8LinearMixin
from jetrl_megatron.layout import Run, TileLayout, clip_runs, qkv_runs, tile_runs
from jetrl_megatron.ops import LinearOperand
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync.manifest import Bucket, view_of
from jetrl_megatron.sync.source import not_finite


class _Span(NamedTuple):
    """Rows or columns of what a rank stores, and where they belong in logical matrix number `matrix`."""

    stored: int
    matrix: int
    first: int
    length: int


class _Part(NamedTuple):
    """A rectangle of what a rank stores and its place in a tensor of the manifest."""

    read: Callable[[], torch.Tensor]
    rows: _Span
    columns: _Span


class MegatronSource:
    """A live Megatron model with JetRL's linears. Every rank makes one, at the same time.

    Nothing is quantised for an update: layers keep the codes and scales of the weights as they are, and quantise anew
    when an optimizer step changed them, for the next forward as much as for this.

    Args:
        model: the rank's model, or its list of virtual pipeline stages, wrapped or not.
        hf_config: the Hugging Face model that is trained: its folder, config.json or configuration object.
        recipe: None takes the recipe of the model's FP8 layers; another one is refused.

    Raises:
        ValueError: the model has no FP8 layers or mixes recipes, a layer does not run in the precision that the recipe
            says, or the model is not that of `hf_config`.
    """

    distributed = True

    def __init__(
        self,
        model: torch.nn.Module | list[Any],
        *,
        hf_config: PretrainedConfig | str | os.PathLike[str],
        recipe: Fp8BlockRecipe | None = None,
    ) -> None:
        self._chunks = model if isinstance(model, list) else [model]
        self._models = [unwrapped(chunk) for chunk in self._chunks]
        linears = gather_linears(self._models)
        self.recipe = check_model_recipe(linears, recipe, self._models[0].config.num_layers)
        hf = open_hf_model(hf_config)
        self._mapping = HfMapping(hf)
        plan = plan_export(hf, self._mapping, {state.name for state in linears}, self.recipe)
        self.tensors: Mapping[str, TensorSpec] = plan.tensors
        self.device = next(self._models[0].parameters()).device
        self._operands: dict[torch.nn.Module, LinearOperand] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._checked: dict[str, torch.Tensor] = {}
        owned = self._owned()
        for name, module, parameter in self._parameters():
            self._checked[name] = parameter
            if name in owned:
                self._add(name, module, parameter)
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, sorted(self._parts))
        plan.check_complete({name for names in held for name in names})

    def refresh(self) -> list[str]:
        """See `WeightSource`. Quantises the weights that changed; a collective where ranks share tiles."""
        for chunk in self._chunks:
            wait_for_parameters(chunk)
        problems = not_finite({name: parameter.detach() for name, parameter in self._checked.items()})
        for model in self._models:
            for module in model.modules():
                if isinstance(module, Fp8LinearMixin) and module.quantized:
                    self._operands[module] = module.quantized_weight()
        return problems

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """See `WeightSource`."""
        alone = dist.get_world_size() == 1
        if not alone:
            buffer.zero_()
        for part in bucket.slices:
            view_RC = view_of(buffer, part, self.tensors[part.name])
            for held in self._parts.get(part.name, ()):
                _write(view_RC, part.first_row, held)
        if not alone:
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX)

    def release(self) -> None:
        """See `WeightSource`."""
        self._operands.clear()

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
        for model in self._models:
            yield from named_parameters(model)

    def _owned(self) -> set[str]:
        """The parameters that this rank sends; those that several ranks hold alike are sent by the first of them."""
        held = {name: _cut(module, parameter)[:2] for name, module, parameter in self._parameters()}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, held)
        first: dict[tuple[Any, ...], int] = {}
        for rank, names in reversed(list(enumerate(everywhere))):
            first |= dict.fromkeys(names.items(), rank)
        return {name for name, part in held.items() if first[name, part] == dist.get_rank()}

    def _add(self, name: str, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        targets = [target for target in self._mapping.targets(name) if target in self.tensors]
        if not targets:
            # A tied head, which engines take from the embedding.
            return
        sizes = [self.tensors[target].shape for target in targets]
        if isinstance(module, Fp8LinearMixin) and module.quantized and parameter is module.weight:
            self._add_quantized(targets, sizes, module)
            return
        dtype = self.tensors[targets[0]].dtype
        rows, columns = self._spans(name, module, parameter, sizes)

        def read() -> torch.Tensor:
            return parameter.detach().reshape(parameter.shape[0], -1).to(dtype)

        self._add_parts(targets, read, rows, columns)

    def _add_quantized(self, targets: list[str], sizes: list[tuple[int, ...]], module: Fp8LinearMixin) -> None:
        row_layout, column_layout = module.layouts
        heights, (width,) = [size[0] for size in sizes], {size[1] for size in sizes}
        block = self.recipe.block

        def codes() -> torch.Tensor:
            return self._operands[module].tensor.data

        def scale() -> torch.Tensor:
            return self._operands[module].tensor.scale

        row_tiles, column_tiles = tile_runs(row_layout, heights, block), tile_runs(column_layout, [width], block)
        rows = [_elements(run, row_layout, heights, block) for run in row_tiles]
        columns = [_elements(run, column_layout, [width], block) for run in column_tiles]
        self._add_parts(targets, codes, rows, columns)
        scales = [scale_name(target) for target in targets]
        self._add_parts(scales, scale, [_Span(*run) for run in row_tiles], [_Span(*run) for run in column_tiles])

    def _add_parts(
        self, targets: Sequence[str], read: Callable[[], torch.Tensor], rows: list[_Span], columns: list[_Span]
    ) -> None:
        for span in rows:
            parts = self._parts.setdefault(targets[span.matrix], [])
            parts += [_Part(read, span, column) for column in columns]

    def _spans(
        self, name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, sizes: list[tuple[int, ...]]
    ) -> tuple[list[_Span], list[_Span]]:
        """Where the rows and columns of a parameter that is sent as it is belong."""
        rank, world, dim = _cut(module, parameter)
        stored, width = parameter.shape[0], parameter.shape[1:].numel()
        row_rank, row_world = (rank, world) if dim == 0 else (0, 1)
        first_column = rank * width if dim == 1 else 0
        kind = self._mapping.kind(name)
        if kind == "qkv":
            first = row_rank * stored
            runs = clip_runs(qkv_runs(*self._mapping.heads), first, first + stored)
        elif kind == "gated":
            half = stored // 2
            runs = [(0, row_rank * half, half), (1, row_rank * half, half)]
        else:
            runs = [(0, row_rank * stored, stored)]
        assert row_world * stored >= sum(size[0] for size in sizes), f"{name}: {row_world} x {stored} rows for {sizes}"
        return _without_padding(runs, [size[0] for size in sizes]), [_Span(0, 0, first_column, width)]


def _cut(module: Any, parameter: torch.nn.Parameter) -> tuple[int, int, int]:
    """Which of how many parts a rank holds of a parameter, and along which dimension; (0, 1, 0) where it holds all."""
    if isinstance(module, RowParallelLinear):
        dim = 1 if parameter is module.weight else None
    elif isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
        dim = None if parameter is getattr(module, "layer_norm_weight", None) else 0
    else:
        dim = getattr(parameter, "partition_dim", 0) if getattr(parameter, "tensor_model_parallel", False) else None
    if dim is None:
        return 0, 1, 0
    return get_pg_rank(module.tp_group), get_pg_size(module.tp_group), dim


def _elements(run: tuple[int, int, int, int], layout: TileLayout, sizes: list[int], block: int) -> _Span:
    """A run of tiles in elements; the last tile of a matrix, and of what a rank holds, may be a part of one."""
    stored, matrix, first, count = run
    most = min(sizes[matrix] - first * block, layout.aligned - stored * block)
    return _Span(stored * block, matrix, first * block, min(count * block, most))


def _without_padding(runs: Sequence[Run], sizes: list[int]) -> list[_Span]:
    """Runs of stored rows one after the other, cut where a vocabulary is padded."""
    spans, stored = [], 0
    for matrix, first, length in runs:
        count = min(length, sizes[matrix] - first)
        if count > 0:
            spans.append(_Span(stored, matrix, first, count))
        stored += length
    return spans


def _write(view_RC: torch.Tensor, first_row: int, part: _Part) -> None:
    """Writes the rows of a part that a slice, which starts at `first_row`, has."""
    rows, columns = part.rows, part.columns
    low, high = max(rows.first, first_row), min(rows.first + rows.length, first_row + len(view_RC))
    if low >= high:
        return
    stored = rows.stored + low - rows.first
    source_RC = part.read()[stored : stored + high - low, columns.stored : columns.stored + columns.length]
    view_RC[low - first_row : high - first_row, columns.first : columns.first + columns.length].copy_(source_RC)
