"""Reads NeMo-RL configuration files: inheritance as NeMo-RL does it, and for every key the file that it came from.

NeMo-RL's own loader gives the same values, and needs the whole of NeMo-RL. This one needs omegaconf alone, so that a
configuration can be looked at on any machine; without a checkout, NeMo-RL's own defaults are missing in what it shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jetrl_megatron.integrations.nemo_rl.checkout import CONFIGS, nemo_rl_checkout

REFERENCE = "${nemo_rl:grpo_math_1B.yaml}"
"""How a file inherits from one of NeMo-RL's examples/configs, wherever the checkout lies."""

_REFERENCE = re.compile(r"^\$\{nemo_rl:(.+)\}$")
_REPLACE = "_override_"
_RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}


@dataclass
class LoadedConfig:
    """A configuration before it is resolved.

    Attributes:
        values: all files merged; interpolations are not resolved yet.
        origins: for each key that holds a value ("policy.precision"), the file that set it.
        defaults: origins whose values are mere defaults: NeMo-RL's files that inherit from no other.
        missing: references to NeMo-RL's files that could not be followed, because there is no checkout.
    """

    values: DictConfig
    origins: dict[str, str] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, origin: str) -> None:
        """Sets one key; a mapping sets each of its keys."""
        for path, leaf in leaves({key: value}):
            OmegaConf.update(self.values, path, leaf, force_add=True)
            self._forget(path)
            self.origins[path] = origin

    def remove(self, key: str) -> None:
        """Removes a key and everything below it."""
        section, _, name = key.rpartition(".")
        holder = OmegaConf.select(self.values, section) if section else self.values
        if isinstance(holder, DictConfig):
            holder.pop(name, None)
        self.origins = {path: origin for path, origin in self.origins.items() if not _lies_in(path, key)}

    def get(self, key: str) -> Any:
        """The resolved value, as plain lists and dictionaries; None where there is none.

        Raises:
            ValueError: it refers to something that is not there.
        """
        try:
            value = OmegaConf.select(self.values, key)
        except OmegaConfBaseException as error:
            raise ValueError(f"{key} cannot be resolved: {str(error).splitlines()[0]}") from error
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def origin(self, key: str) -> str | None:
        """The file that set the key, or something below it; None where nobody did."""
        below = (name for name in self.origins if name.startswith(f"{key}."))
        return self.origins.get(key) or next((self.origins[name] for name in below), None)

    def merge(self, over: LoadedConfig) -> None:
        """Puts another configuration on top, as NeMo-RL does."""
        for name in list(over.values):
            section = over.values._get_node(name)
            if isinstance(section, DictConfig) and not section._is_none() and section.pop(_REPLACE, False):
                self.values.pop(name, None)
                self.origins = {key: origin for key, origin in self.origins.items() if not _lies_in(key, str(name))}
                over.origins.pop(f"{name}.{_REPLACE}", None)
        self.values = OmegaConf.merge(self.values, over.values)
        for key, origin in over.origins.items():
            self._forget(key)
            self.origins[key] = origin
        self.defaults |= over.defaults
        self.missing += over.missing

    def _forget(self, key: str) -> None:
        # A mapping that replaces a value, or the other way round.
        self.origins = {
            name: origin for name, origin in self.origins.items() if not (_lies_in(name, key) or _lies_in(key, name))
        }


def _lies_in(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def load_config(path: str | Path, overlays: Sequence[str | Path] = ()) -> LoadedConfig:
    """Reads a file with everything that it inherits, and overlays on top of it.

    Args:
        path: YAML file; `defaults` names files relative to it, or one of NeMo-RL's as in `REFERENCE`.
        overlays: further files, each on top of those before.

    Raises:
        ValueError: a file is no YAML mapping, does not exist, or inherits from itself.
    """
    register_resolvers()
    loaded = _load(Path(path), ())
    for overlay in overlays:
        loaded.merge(_load(Path(overlay), ()))
    return loaded


def register_resolvers() -> None:
    """Makes the interpolations of NeMo-RL's files, and the reference to them, known to omegaconf."""
    # The second name is that of omegaconf before 2.4.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    for name, function in {**_RESOLVERS, "nemo_rl": _resolve_reference}.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)


def _resolve_reference(name: str) -> str:
    root = nemo_rl_checkout()
    if root is None:
        raise ValueError(f"${{nemo_rl:{name}}}: there is no NeMo-RL checkout on PYTHONPATH")
    return str(root / CONFIGS / name)


def _load(path: Path, above: tuple[Path, ...]) -> LoadedConfig:
    if path.resolve() in above:
        raise ValueError(f"{path} inherits from itself: take it out of the `defaults` of {above[-1]}")
    values = _read(path)
    label = _label(path)
    parents = values._get_node("defaults")
    if parents is not None:
        del values["defaults"]
    own = LoadedConfig(values, dict.fromkeys((key for key, _ in leaves(_plain(values))), label))
    if parents is None:
        own.defaults = {label} if label.startswith("nemo_rl:") else set()
        return own
    loaded = LoadedConfig(OmegaConf.create({}))
    for name in _names(parents, path):
        reference = _REFERENCE.match(name)
        root = nemo_rl_checkout() if reference else None
        if reference and root is None:
            loaded.missing.append(reference[1])
            continue
        parent = root / CONFIGS / reference[1] if reference and root else path.parent / name
        loaded.merge(_load(parent, (*above, path.resolve())))
    loaded.merge(own)
    return loaded


def _read(path: Path) -> DictConfig:
    if not path.is_file():
        raise ValueError(f"config={path} is no file: name a YAML file, e.g. conf/grpo_qwen3_8b_1n8g.yaml")
    try:
        values = OmegaConf.load(path)
    except Exception as error:  # yaml's and omegaconf's errors have no common base
        raise ValueError(f"{path} is no YAML that omegaconf reads: {error}") from error
    if not isinstance(values, DictConfig):
        raise ValueError(f"{path} must hold a mapping of sections (policy, grpo, ...), and holds a list")
    return values


def _names(parents: Any, path: Path) -> list[str]:
    plain = OmegaConf.to_container(parents, resolve=False) if isinstance(parents, ListConfig) else parents._value()
    names = [plain] if isinstance(plain, str) else plain
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: defaults={names!r} must be a file's name or a list of them")
    return names


def _label(path: Path) -> str:
    root = nemo_rl_checkout()
    resolved = path.resolve()
    if root is not None and resolved.is_relative_to((root / CONFIGS).resolve()):
        return f"nemo_rl:{resolved.relative_to((root / CONFIGS).resolve())}"
    return str(path)


def _plain(values: DictConfig) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(values, resolve=False)
    return plain


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no mapping with keys of its own."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
