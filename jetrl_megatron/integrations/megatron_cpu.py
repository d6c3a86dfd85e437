"""Megatron-core 0.19 on CPU ranks over gloo: for tests, demos and conversion on a machine without a GPU.

Megatron-core takes CUDA for granted in some sixty places, and in nothing that matters for the mathematics. `install`
gives Megatron's own modules (`megatron.core`, `megatron.training`, `megatron.bridge`) another `torch`: a view of the
real module whose device is the CPU. The real `torch`, and every other library of the process, stay untouched, so vLLM
can run in the same process.

What that view replaces, and why:
    `torch.cuda.current_device`, `device="cuda"` literals    buffers, flags and losses are made on them
    streams, events, synchronize                             one CPU queue is always in order
    `torch.cuda` random state                                the CPU's generator is the device's generator
    `torch.compile`                                          costs seconds of imports and a C++ compiler at first use
    collectives of `torch.distributed` on float8 tensors     gloo knows no float8: it moves the same bytes as uint8
What is patched by name: see `_patch_random`, `_patch_type_names`, `_patch_norm` and `_patch_moe`.

Not covered: context parallelism, CUDA graphs, FSDP, offloading, and anything of TransformerEngine or Apex.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jetrl_megatron.convert.bridge import RewiredImports, quiet_megatron_imports, release_of

SUPPORTED_CORE = (0, 19)
"""Release series of Megatron-core that the patches were made for: (major, minor)."""

_CPU = torch.device("cpu")
_MEGATRON = ("megatron.core", "megatron.training", "megatron.bridge")
# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "rand_like", "randint", "randn", "randn_like", "tensor", "zeros", "zeros_like",
)
# fmt: on
_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "broadcast", "gather", "recv", "scatter", "send")
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu})


def install() -> None:
    """Makes Megatron-core, Megatron-Bridge and megatron.training run on the CPU; calling it again changes nothing.

    Call it before anything imports `megatron.core`: Megatron then skips the imports that only compilation needs, more
    than half of its import time. Calling it later works too. Models need `use_cpu_initialization=True`, no fusions, and
    `gradient_accumulation_fusion=False`; `jetrl_megatron.integrations.megatron_bridge.build_model` sets them.

    Raises:
        ValueError: the machine has a CUDA device, or Megatron-core is another release than `SUPPORTED_CORE`.
        ImportError: Megatron-core is not installed.
    """
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    if torch.cuda.is_available():
        raise ValueError(
            "torch.cuda.is_available() is True, and megatron_cpu.install() would keep Megatron off that device: "
            "run Megatron as it is, or hide the device with CUDA_VISIBLE_DEVICES="
        )
    _check_release()
    megatron_torch = _MegatronTorch()
    sys.meta_path.insert(0, _MegatronFinder(megatron_torch))
    for name, module in list(sys.modules.items()):
        if name.startswith(_MEGATRON):
            _give_torch(module, megatron_torch)
    with quiet_megatron_imports():
        importlib.import_module("megatron.core")
        _patch_random()
        _patch_type_names()
        _patch_norm()
        _patch_moe()


def _check_release() -> None:
    release = release_of("megatron.core")
    if release[:2] != SUPPORTED_CORE:
        found, known = ".".join(map(str, release)), ".".join(map(str, SUPPORTED_CORE))
        raise ValueError(
            f"megatron-core {found} is installed and the CPU patches know {known}.x: "
            f"pip install 'megatron-core=={known}.*'"
        )


# The torch that Megatron sees


class _View(ModuleType):
    """A module that shows another one, with some names replaced."""

    def __init__(self, shown: ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(shown.__name__, shown.__doc__)
        self.__dict__.update(replaced)
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


class _MegatronTorch(_View):
    """`torch` with the CPU in the place of the CUDA device."""

    def __init__(self) -> None:
        factories = {name: _made_on_cpu(getattr(torch, name)) for name in _FACTORIES}
        collectives = {name: _moving_float8_as_bytes(getattr(torch.distributed, name)) for name in _COLLECTIVES}
        distributed = _View(torch.distributed, collectives)
        super().__init__(torch, {**factories, "compile": _leave_eager, "cuda": _cuda(), "distributed": distributed})


def _cuda() -> _View:
    return _View(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "set_device": _nothing,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "Stream": _Stream,
            "Event": _Event,
            "current_stream": _Stream,
            "default_stream": _Stream,
            "stream": contextlib.nullcontext,
            "is_current_stream_capturing": lambda: False,
            "manual_seed": torch.manual_seed,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
        },
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a CUDA call is where everything runs in order on the CPU."""


class _Event:
    """A CUDA event whose work is done."""

    record = wait = synchronize = _nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """The CPU's one stream: all instances are equal, and none has anything to wait for."""

    wait_stream = wait_event = synchronize = _nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return hash(_Stream)


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _made_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        # An integer device is the index of a CUDA device.
        if str(kwargs.get("device")).startswith("cuda") or isinstance(kwargs.get("device"), int):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _leave_eager(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return function if function is not None else _leave_eager


def _moving_float8_as_bytes(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def move(*args: Any, **kwargs: Any) -> Any:
        return collective(*map(_as_bytes, args), **{name: _as_bytes(value) for name, value in kwargs.items()})

    return move


def _as_bytes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_bytes(item) for item in value]
    if isinstance(value, torch.Tensor) and value.dtype in _FLOAT8:
        return value.view(torch.uint8)
    return value


# How Megatron comes to see it


class _MegatronFinder(RewiredImports):
    """Finds Megatron's modules, and has their import statements bind the given `torch`."""

    def __init__(self, megatron_torch: _MegatronTorch) -> None:
        def import_(*args: Any, **kwargs: Any) -> Any:
            module = builtins.__import__(*args, **kwargs)
            return megatron_torch if module is torch else module

        super().__init__(lambda fullname: fullname.startswith(_MEGATRON), import_)


def _give_torch(module: ModuleType, megatron_torch: _MegatronTorch) -> None:
    """Gives a module that was imported before `install` what it would have got from its import statements."""
    for name, value in list(vars(module).items()):
        if value is torch:
            setattr(module, name, megatron_torch)
        elif value is torch.distributed:
            setattr(module, name, megatron_torch.distributed)
        elif value is torch.distributed.all_gather_into_tensor:
            setattr(module, name, megatron_torch.distributed.all_gather_into_tensor)
        elif hasattr(value, "_torchdynamo_orig_callable"):
            setattr(module, name, value._torchdynamo_orig_callable)
    if module.__name__ == "megatron.core.jit":
        module.disable_jit_fuser()


# What is patched by name


def _replace(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise ValueError(
            f"{owner!r} has no {name}: this build of Megatron-core differs from the release that the CPU patches know"
        )
    setattr(owner, name, value)


def _patch_random() -> None:
    """The two functions of the random-state tracker that reach below `torch.cuda`."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    _replace(random, "_get_cuda_rng_state", _get_rng_state)
    _replace(random, "_set_cuda_rng_state", _set_rng_state)
    # Drawing from a tracked state is bound to move the CPU's: here that is the device's.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


class _SeenAsCuda(TorchFunctionMode):
    """While entered, CPU tensors give the type names of CUDA tensors, and `.cuda()` leaves them where they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _patch_type_names() -> None:
    """Functions that sort parameters by the strings "torch.cuda.FloatTensor" and the like, or call `.cuda()`."""
    for module, path in (
        ("models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
        ("optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
        ("optimizer.optimizer", "clip_grad_by_total_norm_fp32"),
        ("optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
        ("optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero"),
        ("optimizer.grad_scaler", "DynamicGradScaler.load_state_dict"),
        ("tensor_parallel", "broadcast_data"),
        ("dist_checkpointing.exchange_utils", "exchange_loaded_tensors_gather_rounds"),
        ("dist_checkpointing.exchange_utils", "exchange_loaded_tensors_broadcast"),
    ):
        *classes, name = path.split(".")
        owner = functools.reduce(getattr, classes, importlib.import_module(f"megatron.core.{module}"))
        _replace(owner, name, _seeing_cuda(getattr(owner, name)))


def _seeing_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _SeenAsCuda():
            return function(*args, **kwargs)

    return call


def _patch_norm() -> None:
    """torch's norm under sequence parallelism, which Megatron refuses.

    Nothing is wrong with it there, once its parameters are marked as those of TransformerEngine's and Apex's norms are,
    so that `finalize_model_grads` sums their gradients over the tensor-parallel ranks.
    """
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    build = norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        without_sp = copy.copy(config)
        without_sp.sequence_parallel = False
        module: torch.nn.Module = build(cls, without_sp, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module

    norm.__new__ = new


def _patch_moe() -> None:
    """The split sizes of an expert all-to-all, which become a list of integers only where they come from the GPU."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    _replace(dispatcher, "maybe_move_tensor_to_cpu", move_to_cpu)
