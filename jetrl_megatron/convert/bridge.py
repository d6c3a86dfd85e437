"""Megatron-Bridge, importable on a machine without TransformerEngine.

Megatron-Bridge maps Hugging Face tensors to Megatron parameters and back. Release 0.6 imports TransformerEngine
unconditionally in one module, its LoRA layers, which conversion never runs. `import_bridge` gives that one module an
inert stand-in, through the module's own `__import__`: nothing enters `sys.modules`, `importlib.util.find_spec` still
answers None, and Megatron-core, vLLM and transformers go on seeing that TransformerEngine is absent.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl_megatron.convert.own_bridges import register_own_bridges

SUPPORTED_BRIDGE = (0, 6)
"""Release series of Megatron-Bridge whose imports and mappings this module knows: (major, minor)."""

_TE = "transformer_engine"
_NEEDS_TE_TO_IMPORT = "megatron.bridge.peft.lora_layers"
_INSTALL = "install it with: pip install megatron-core omegaconf einops; pip install --no-deps 'megatron-bridge==0.6.*'"
_JETRL_MODULE_TYPES = {
    "JetRLColumnParallelLinear": "column",
    "JetRLRowParallelLinear": "row",
    # Bridge sends a fused class's layer_norm_weight to the replicated mapping by the class name's ending.
    "JetRLLayerNormColumnParallelLinear": "column",
    "JetRLOutputLayer": "column",
    "JetRLRMSNorm": "replicated",
}
_HARMLESS_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "absl.logging is not installed",
    "Only transformer-engine>=",
    # Docstrings of Megatron-core 0.19, compiled for the first time.
    "invalid escape sequence",
)
_TALKATIVE_LOGGERS = (
    # Says with a traceback which optional symbol of TransformerEngine it did without.
    "megatron.bridge.utils.import_utils",
    # Says that the CUDA toolkit is there and a CUDA device is not.
    "torch.utils.cpp_extension",
)


def import_bridge() -> ModuleType:
    """Imports `megatron.bridge` and registers our linears and bridges with it; calling it again costs nothing.

    Returns:
        The module `megatron.bridge`.

    Raises:
        ImportError: Megatron-core or Megatron-Bridge is not installed, or one of its own imports fails.
        ValueError: Megatron-Bridge is another release than `SUPPORTED_BRIDGE`.
    """
    if "megatron.bridge" not in sys.modules:
        _check_installed()
        with quiet_megatron_imports(), _stand_in_for_transformer_engine():
            _import_megatron_bridge()
    _register_module_types()
    register_own_bridges()
    return sys.modules["megatron.bridge"]


@contextlib.contextmanager
def quiet_megatron_imports() -> Iterator[None]:
    """Keeps Megatron's imports, while entered, from warning of absent accelerators and from setting up logging."""
    # megatron.training calls logging.basicConfig(INFO, stdout) at import: with a handler on the root it does nothing.
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    loggers = [logging.getLogger(name) for name in _TALKATIVE_LOGGERS]
    for logger in loggers:
        logger.addFilter(_says_nothing)
    try:
        with warnings.catch_warnings():
            for message in _HARMLESS_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logging.root.removeHandler(handler)
        for logger in loggers:
            logger.removeFilter(_says_nothing)


def _says_nothing(record: logging.LogRecord) -> bool:
    return False


def release_of(package: str) -> tuple[int, int, int]:
    """The release of a Megatron package, read without importing it.

    Args:
        package: "megatron.core" or "megatron.bridge".

    Returns:
        (major, minor, patch).

    Raises:
        ImportError: the package is not installed.
    """
    spec = importlib.util.find_spec(package) if importlib.util.find_spec("megatron") else None
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed; {_INSTALL}")
    # Read from the file that would be imported: a source tree on the path may have no installed metadata.
    path = Path(spec.submodule_search_locations[0]) / "package_info.py"
    info_spec = importlib.util.spec_from_file_location("_megatron_package_info", path)
    assert info_spec is not None and info_spec.loader is not None
    info = importlib.util.module_from_spec(info_spec)
    info_spec.loader.exec_module(info)
    return info.MAJOR, info.MINOR, info.PATCH


def _check_installed() -> None:
    release_of("megatron.core")
    release = release_of("megatron.bridge")
    if release[:2] != SUPPORTED_BRIDGE:
        found, known = ".".join(map(str, release)), ".".join(map(str, SUPPORTED_BRIDGE))
        raise ValueError(f"megatron-bridge {found} is installed; release {known}.x is supported: {_INSTALL}")


def _import_megatron_bridge() -> None:
    try:
        # Core first: it decides once, at import, whether TransformerEngine is there.
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.bridge")
    except ImportError as error:
        raise ImportError(
            f"megatron.bridge is installed but does not import ({error}): it pins its dependencies exactly "
            "(0.6.2 needs transformers 5.11 or 5.12, omegaconf and einops); install what its metadata names"
        ) from error


def _register_module_types() -> None:
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping
    for name, parallelism in _JETRL_MODULE_TYPES.items():
        mapping.register_module_type(name, parallelism)


class RewiredImports(importlib.abc.MetaPathFinder):
    """Finds modules as ever, and has their own import statements call another function than the built-in `__import__`.

    Args:
        concerns: says by a module's full name whether it is one of them.
        import_: what their import statements call, with the arguments of `__import__`.
    """

    def __init__(self, concerns: Callable[[str], bool], import_: Callable[..., Any]) -> None:
        self._concerns = concerns
        # An import statement looks `__import__` up in the globals of the module that it stands in.
        self._builtins = {**vars(builtins), "__import__": import_}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec, with a loader that executes the module with these builtins; None for other modules."""
        if not self._concerns(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithBuiltins(spec.loader, self._builtins)
        return spec


class _LoaderWithBuiltins(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, module_builtins: dict[str, Any]) -> None:
        self._loader = loader
        self._builtins = module_builtins

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        # Sources and resources, which loaders offer beyond the interface.
        return getattr(self._loader, name)


@contextlib.contextmanager
def _stand_in_for_transformer_engine() -> Iterator[None]:
    if importlib.util.find_spec(_TE) is not None:
        yield
        return
    finder = RewiredImports(lambda fullname: fullname == _NEEDS_TE_TO_IMPORT, _import_or_stand_in)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _import_or_stand_in(name: str, *args: Any, **kwargs: Any) -> Any:
    return _Absent if name.partition(".")[0] == _TE else builtins.__import__(name, *args, **kwargs)


class _AbsentType(type):
    """Metaclass of the stand-in: every attribute is another absent class, and making an instance is an error."""

    def __getattr__(cls, name: str) -> _AbsentType:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentType(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise ImportError(f"{cls.__name__} needs TransformerEngine, which is not installed")


_Absent = _AbsentType(_TE, (), {})
