"""What vLLM's own weight loaders do with a checkpoint's tensors, recorded once and then done without them.

A loader knows how q, k and v are merged, which rows a tensor-parallel rank takes, on which rank an expert or a layer
lives. It is run once on tensors without storage, on parameters without storage, and every copy that it makes is written
down: rows and columns of which tensor, to which place of which parameter. An update then needs no loader, and what no
tensor goes into, or what goes nowhere, is known before the first byte is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

from jetrl_megatron.convert.plan import DTYPE_NAMES, TensorSpec
from jetrl_megatron.sync.manifest import text_of

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


class Parameter(NamedTuple):
    """A parameter of a layer, by the layer's name in the model."""

    layer: str
    name: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}" if self.layer else self.name


class Place(NamedTuple):
    """A view of a parameter: arguments of `as_strided`, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Copy(NamedTuple):
    """One copy: a rectangle of a tensor of the checkpoint, and where it goes."""

    tensor: str
    first_row: int
    rows: int
    first_column: int
    columns: int
    parameter: Parameter
    place: Place


class Recording(NamedTuple):
    """What the loaders of a rank did.

    Attributes:
        copies: in order.
        parameters: a parameter without storage, as the loaders see it, for each that tensors go into.
        problems: tensors that do not fit and parameters that are not filled, one line for each.
    """

    copies: list[Copy]
    parameters: dict[Parameter, torch.Tensor]
    problems: list[str]


def record(model: torch.nn.Module, tensors: Mapping[str, TensorSpec]) -> Recording:
    """Runs the loaders of a model; the model is as it was afterwards, and its weights are not touched.

    Args:
        model: a loaded vLLM model.
        tensors: those of an update.
    """
    # Also looked up by storage, so that a head that is the embedding counts as filled with it.
    live = dict(_parameters(model))
    with _on_meta(model), torch.no_grad():
        parameters = dict(_parameters(model))
        recorder = _Recorder(parameters)
        problems = _load(model, tensors, recorder)
    problems += recorder.problems
    problems += _unfilled(recorder, parameters, live)
    filled = {copy.parameter for copy in recorder.copies}
    return Recording(recorder.copies, {name: parameters[name] for name in filled}, list(dict.fromkeys(problems)))


def boxes_of(copies: list[Copy]) -> dict[str, list[tuple[int, int, int, int]]]:
    """The rectangles (first row, rows, first column, columns) that are taken of each tensor."""
    boxes: dict[str, set[tuple[int, int, int, int]]] = {}
    for copy in copies:
        boxes.setdefault(copy.tensor, set()).add((copy.first_row, copy.rows, copy.first_column, copy.columns))
    return {name: sorted(found) for name, found in boxes.items()}


def not_taken(tensors: Mapping[str, TensorSpec], boxes: list[dict[str, list[Any]]]) -> list[str]:
    """Tensors that no rank takes, or of which all ranks together take a part alone; one line for each.

    Args:
        boxes: `boxes_of` of every rank of the engine.
    """
    lines = []
    for name, spec in tensors.items():
        found = {tuple(box) for rank in boxes for box in rank.get(name, ())}
        taken = sum(rows * columns for _, rows, _, columns in found)
        total = spec.nbytes // spec.dtype.itemsize
        if not found and total:
            lines.append(f"{name} is no tensor of the engine's model: it was not to be sent")
        elif taken != total:
            lines.append(f"{name} is {text_of(spec)}, of which the engine takes {taken} elements: its shape is wrong")
    return lines


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down copies from sources into parameters."""

    def __init__(self, parameters: Mapping[Parameter, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self.filled: dict[Parameter, set[Place]] = {}
        self.problems: list[str] = []
        self._parameters = {_storage(tensor): name for name, tensor in parameters.items()}
        self._sources: dict[int, tuple[str, TensorSpec, torch.Tensor]] = {}

    def source(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """A tensor without storage that stands for one of the checkpoint."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._sources[_storage(tensor)] = name, spec, tensor
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY:
            self._copied(args[0], args[1])
        elif func in _FILLS and _storage(args[0]) in self._parameters:
            self._fill(self._parameters[_storage(args[0])], args[0])
        return func(*args, **(kwargs or {}))

    def _fill(self, parameter: Parameter, view: torch.Tensor) -> Place:
        place = Place(int(view.storage_offset()), tuple(view.shape), view.stride())
        self.filled.setdefault(parameter, set()).add(place)
        return place

    def _copied(self, target: torch.Tensor, value: torch.Tensor) -> None:
        parameter = self._parameters.get(_storage(target))
        if parameter is None:
            return
        place = self._fill(parameter, target)
        if _storage(value) not in self._sources:
            self.problems.append(f"{parameter}: vLLM's loader computes what it stores, and copies alone can be redone")
            return
        name, spec, _ = self._sources[_storage(value)]
        if spec.dtype != target.dtype:
            wanted = DTYPE_NAMES.get(target.dtype, str(target.dtype))
            self.problems.append(f"{name} is {text_of(spec)}, and the engine keeps {parameter} in {wanted}")
            return
        box = _box(value, spec)
        if box is None or value.shape != target.shape:
            self.problems.append(f"{name}: vLLM's loader rearranges it, and copies of rows and columns can be redone")
            return
        self.copies.append(Copy(name, *box, parameter, place))


def _box(view: torch.Tensor, spec: TensorSpec) -> tuple[int, int, int, int] | None:
    """First row, rows, first column and columns of a view; None where it is no rectangle of the tensor."""
    width = 1
    for size in spec.shape[1:]:
        width *= size
    offset, shape = int(view.storage_offset()), tuple(view.shape)
    if len(spec.shape) < 2:
        return (offset, view.numel(), 0, 1) if view.is_contiguous() else None
    first, column = divmod(offset, width)
    if len(spec.shape) > 2:
        # Rows of a stack of matrices are whole.
        return (first, shape[0], 0, width) if view.is_contiguous() and shape[1:] == spec.shape[1:] else None
    if view.dim() != 2 or (shape[0] > 1 and view.stride(0) != width) or (shape[1] > 1 and view.stride(1) != 1):
        return None
    return first, shape[0], column, shape[1]


def _load(model: Any, tensors: Mapping[str, TensorSpec], recorder: _Recorder) -> list[str]:
    """Runs the loaders, and again behind each tensor that they refuse; returns what was refused."""
    problems: list[str] = []
    names = list(tensors)
    done = 0

    def sources() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal done
        while done < len(names):
            name = names[done]
            done += 1
            yield name, recorder.source(name, tensors[name])

    while done < len(names):
        try:
            with recorder:
                model.load_weights(sources())
        except Exception as error:
            # Loaders are third-party code and raise what they like; which tensor it was is known.
            name = names[done - 1]
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            problems.append(f"{name} is {text_of(tensors[name])}, and the engine's loader refuses it ({said})")
    return problems


def _unfilled(
    recorder: _Recorder, parameters: Mapping[Parameter, torch.Tensor], live: Mapping[Parameter, torch.Tensor]
) -> list[str]:
    shared = {_storage(live[name]) for name in recorder.filled if name in live and live[name].numel()}
    lines = []
    for name, parameter in parameters.items():
        filled = sum(torch.Size(place.size).numel() for place in recorder.filled.get(name, ()))
        if filled == parameter.numel() or (name in live and _storage(live[name]) in shared and not filled):
            continue
        lines.append(
            f"{name}: {parameter.numel() - filled} of {parameter.numel()} elements come from no tensor that is sent"
        )
    return lines


@contextlib.contextmanager
def _on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Gives every layer the parameters that its loaders know, without storage, while entered."""
    kept = [
        (layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in model.modules()
    ]
    try:
        for layer, _, _, _ in kept:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
        yield
    finally:
        for layer, parameters, buffers, non_persistent in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(non_persistent)


def _parameters(model: torch.nn.Module) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """Every parameter; those of attention are scales of its cache, which have defaults."""
    for layer_name, layer in model.named_modules():
        if isinstance(layer, (Attention, MLAAttention)):
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            yield Parameter(layer_name, name), parameter


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
