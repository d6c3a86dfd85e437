"""The weights of one vLLM worker, written in place so that an update can be taken back.

Most parameters are copied into as they are: their bytes are those of the checkpoint, so the loaders' copies can be
redone from a bucket to the storage that CUDA graphs point at. What is overwritten goes to (pinned) host memory first,
on a stream of its own and ahead of the buckets, and comes back if the update fails. Layers whose parameters vLLM
transforms after loading are assembled in host memory, and go through vLLM's own processing at the end, one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta

from jetrl_megatron.convert.fp8_weights import SCALE
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync.manifest import Bucket, Manifest, Slice, WeightSyncError, view_of
from jetrl_megatron.sync.recorded import Copy, Parameter, Recording

# vLLM 0.26's processing after loading changes no byte of these: BF16 on a GPU, and block FP8 with these kernels, which
# requantise to powers of two at most, what a ue8m0 recipe has already.
_PLAIN_METHODS = ("UnquantizedEmbeddingMethod",)
_PLAIN_ON_GPU = ("UnquantizedLinearMethod",)
_PLAIN_KERNELS = (
    "CutlassFp8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "TritonFp8BlockScaledMMKernel",
    "W8A8BlockLinear",
)

_ALIGNMENT = 256
"""Bytes; every dtype may be viewed at such an offset."""


@dataclass(frozen=True)
class _Write:
    """A copy out of a bucket: rows and columns of a slice, and the view that gets them."""

    part: Slice
    first_row: int
    rows: int
    first_column: int
    columns: int
    target: torch.Tensor


@dataclass
class _Saved:
    """Old bytes of one view."""

    target: torch.Tensor
    old: torch.Tensor


@dataclass(frozen=True)
class _LayerState:
    """A layer before vLLM processed its new parameters."""

    layer: torch.nn.Module
    attributes: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    old: dict[str, torch.Tensor]


@dataclass
class EngineWeights:
    """The weights of a worker, prepared for updates of one manifest.

    Args:
        model: a loaded vLLM model.
        manifest: of the updates.
        recording: what its loaders do.
        device: where the parameters are.
    """

    model: torch.nn.Module
    manifest: Manifest
    recording: Recording
    device: torch.device
    _writes: list[list[_Write]] = field(default_factory=list)
    _direct: dict[Parameter, torch.Tensor] = field(default_factory=dict)
    _staged: dict[Parameter, torch.Tensor] = field(default_factory=dict)
    _saved_of_bucket: list[list[_Saved]] = field(default_factory=list)
    _events: list[Any] = field(default_factory=list)
    _states: list[_LayerState] = field(default_factory=list)
    _written: int = 0

    def __post_init__(self) -> None:
        self._layers = dict(self.model.named_modules())
        for parameter, loaded in self.recording.parameters.items():
            live = self._layers[parameter.layer]._parameters.get(parameter.name)
            if live is not None and _is_plain(self._layers[parameter.layer], live, loaded):
                self._direct[parameter] = live.detach()
            else:
                pinned = self.device.type == "cuda"
                self._staged[parameter] = torch.empty_strided(
                    loaded.shape, loaded.stride(), dtype=loaded.dtype, pin_memory=pinned
                )
        copies: dict[str, list[Copy]] = {}
        for copy in self.recording.copies:
            copies.setdefault(copy.tensor, []).append(copy)
        for bucket in self.manifest.buckets:
            self._writes.append([w for part in bucket.slices for w in self._writes_of(part, copies.get(part.name, []))])
        self._prepare_undo()

    @property
    def staged_layers(self) -> list[str]:
        """The layers that vLLM processes anew, by name."""
        return sorted({parameter.layer for parameter in self._staged})

    def is_current(self) -> bool:
        """Whether the parameters are still where they were."""
        for parameter, known in self._direct.items():
            live = self._layers[parameter.layer]._parameters.get(parameter.name)
            if live is None or live.data_ptr() != known.data_ptr():
                return False
        return True

    def save(self) -> None:
        """Starts to copy what an update will overwrite; `commit` and `roll_back` end what it started.

        Earlier than `begin`, because it takes longer than anything else: host memory is slow.
        """
        if self._events or self._written:
            # Of an update that was interrupted.
            self.roll_back()
        if self.device.type != "cuda":
            return
        # Steps that were started before this update still read the weights.
        torch.cuda.synchronize(self.device)
        events = []
        with torch.cuda.stream(self._side), torch.no_grad():
            for saved in self._saved_of_bucket:
                for entry in saved:
                    entry.old.copy_(entry.target, non_blocking=True)
                events.append(self._side.record_event())
        self._events = events

    def begin(self) -> None:
        """Buckets may be written from now on."""
        if self._written or not self._events:
            self.save()

    def write(self, index: int, buffer: torch.Tensor) -> None:
        """Writes bucket number `index`.

        Args:
            buffer: uint8 [bucket.nbytes], on any device.

        Raises:
            WeightSyncError: a scale in it is not finite or not greater than zero; nothing is written.
        """
        bucket = self.manifest.buckets[index]
        self._check_scales(bucket, buffer)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self._events[index])
        else:
            for saved in self._saved_of_bucket[index]:
                saved.old.copy_(saved.target)
        # From here on the bucket's targets are no longer the old ones, whatever happens.
        self._written = index + 1
        with torch.no_grad():
            for write in self._writes[index]:
                view = view_of(buffer, write.part, self.manifest.tensors[write.part.name])
                rows = view[write.first_row : write.first_row + write.rows]
                source = rows[:, write.first_column : write.first_column + write.columns]
                write.target.copy_(source.reshape(write.target.shape))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self) -> None:
        """Has vLLM process what depends on the new weights. Can still be taken back.

        Raises:
            Exception: what the processing raises, e.g. that a scale is none of the recipe.
        """
        for name in self.staged_layers:
            self._process_staged(name)
        for layer in self._derived_layers():
            layer.quant_method.process_weights_after_loading(layer)

    def roll_back(self) -> None:
        """Makes the weights those from before `save`."""
        for state in reversed(self._states):
            _restore(state)
        self._states.clear()
        with torch.no_grad():
            for saved in reversed(self._saved_of_bucket[: self._written]):
                for entry in saved:
                    entry.target.copy_(entry.old)
        if self.device.type == "cuda":
            # What `save` started reads memory that the engine may now give away.
            self._side.synchronize()
        self._events = []
        if self._written:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._written = 0
            for layer in self._derived_layers():
                layer.quant_method.process_weights_after_loading(layer)

    def commit(self) -> None:
        """Gives up the old weights."""
        self._states.clear()
        self._events = []
        self._written = 0

    def _derived_layers(self) -> Iterator[Any]:
        """Layers that keep something made from their parameters, as vLLM's do on a CPU."""
        if self.device.type != "cpu":
            return
        for name in sorted({parameter.layer for parameter in self._direct}):
            if isinstance(getattr(self._layers[name], "quant_method", None), QuantizeMethodBase):
                yield self._layers[name]

    def _writes_of(self, part: Slice, copies: list[Copy]) -> Iterator[_Write]:
        for copy in copies:
            low = max(copy.first_row, part.first_row)
            high = min(copy.first_row + copy.rows, part.first_row + part.rows)
            if low >= high:
                continue
            held = self._direct.get(copy.parameter)
            held = self._staged[copy.parameter] if held is None else held
            offset, size, stride = copy.place
            target = held.as_strided(size, stride, held.storage_offset() + offset)
            if high - low < copy.rows:
                target = target.narrow(0, low - copy.first_row, high - low)
            yield _Write(part, low - part.first_row, high - low, copy.first_column, copy.columns, target)

    def _prepare_undo(self) -> None:
        cuda = self.device.type == "cuda"
        direct = {tensor.untyped_storage()._cdata for tensor in self._direct.values()}
        targets = [
            [write.target for write in writes if write.target.untyped_storage()._cdata in direct]
            for writes in self._writes
        ]
        for bucket in targets:
            # An arena for each bucket, since torch rounds pinned memory up to a power of two.
            starts = list(accumulate((_aligned(target.nbytes) for target in bucket), initial=0))
            arena = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=cuda)
            self._saved_of_bucket.append(
                [
                    _Saved(target, arena[start : start + target.nbytes].view(target.dtype).view(target.shape))
                    for target, start in zip(bucket, starts, strict=False)
                ]
            )
        self._side: Any = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]

    def _check_scales(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        scales = [part for part in bucket.slices if part.name.endswith(SCALE)]
        if not scales:
            return
        values = torch.cat([view_of(buffer, part, self.manifest.tensors[part.name]).reshape(-1) for part in scales])
        if bool((values.isfinite() & (values > 0)).all()):
            return
        raise WeightSyncError(
            [
                line
                for part in scales
                for line in _bad_scale(part, view_of(buffer, part, self.manifest.tensors[part.name]))
            ]
        )

    def _process_staged(self, name: str) -> None:
        layer: Any = self._layers[name]
        parameters, buffers = dict(layer._parameters), dict(layer._buffers)
        kernel = {key: value for key, value in (parameters | buffers).items() if value is not None}
        old = {key: value.detach().cpu().clone() for key, value in kernel.items()}
        attributes = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
        self._states.append(_LayerState(layer, attributes, parameters, buffers, old))
        info = get_layerwise_info(layer)
        restore_layer_on_meta(layer, info)
        materialize_layer(layer, info)
        with torch.no_grad():
            for parameter, staged in self._staged.items():
                if parameter.layer == name:
                    getattr(layer, parameter.name).data.copy_(staged)
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            delattr(layer, "_already_called_process_weights_after_loading")
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)
        fresh = {**layer._parameters, **layer._buffers}
        with torch.no_grad():
            for key, value in kernel.items():
                if fresh.get(key) is not None:
                    value.data.copy_(fresh[key])
        _place(layer, parameters, buffers)


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _is_plain(layer: Any, live: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Whether the live parameter holds the bytes that the loaders wrote."""
    if (live.shape, live.stride(), live.dtype) != (loaded.shape, loaded.stride(), loaded.dtype):
        return False
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return True
    name = type(method).__name__
    if name in _PLAIN_METHODS or (name in _PLAIN_ON_GPU and live.is_cuda):
        return True
    return type(getattr(method, "fp8_linear", None)).__name__ in _PLAIN_KERNELS


def _place(layer: torch.nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> None:
    for held, values in ((layer._parameters, parameters), (layer._buffers, buffers)):
        held.clear()
        held.update(values)


def _restore(state: _LayerState) -> None:
    _place(state.layer, state.parameters, state.buffers)
    for key, value in state.attributes.items():
        setattr(state.layer, key, value)
    with torch.no_grad():
        for key, old in state.old.items():
            held: Any = state.parameters.get(key)
            held = state.buffers[key] if held is None else held
            held.data.copy_(old)


def _bad_scale(part: Slice, scale: torch.Tensor) -> list[str]:
    bad = ~(scale.isfinite() & (scale > 0))
    if not bad.any():
        return []
    row, column = bad.nonzero()[0].tolist()
    value = scale[row, column].item()
    return [f"{part.name}[{part.first_row + row}, {column}] is {value}: scales are finite and greater than zero"]


def engine_problems(model: torch.nn.Module, recipe: Fp8BlockRecipe) -> list[str]:
    """Settings of the engine under which it would change or misread the recipe's weights; one line for each."""
    powers_of_two = recipe.scale_format == "ue8m0"
    for name, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "fp8_linear", None)
        # FlashInfer's leaves the weights to DeepGEMM's.
        kernel = getattr(kernel, "fallback", kernel)
        rounds = getattr(kernel, "use_deep_gemm_e8m0", powers_of_two)
        if rounds != powers_of_two:
            return [
                f"{name} runs {type(kernel).__name__} with VLLM_USE_DEEP_GEMM_E8M0={int(rounds)}, the recipe has "
                f"scale_format={recipe.scale_format!r}: start the engine with the environment of recipe.to_vllm_env()"
            ]
    return []
