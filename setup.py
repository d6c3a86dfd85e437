"""Maps top-level folders into the package and builds the optional CUDA extension; the rest is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = "jetrl_megatron"
# Installed below the package: a top-level `kernels` would hide another distribution's package of that name.
MAPPED_FOLDERS = ("kernels", "conf")
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


def packages() -> tuple[list[str], dict[str, str]]:
    """Names of all packages, and the folders of those that do not lie below jetrl_megatron/."""
    names = find_packages(str(ROOT), include=[PACKAGE, f"{PACKAGE}.*"])
    folders = {}
    for folder in MAPPED_FOLDERS:
        if (ROOT / folder / "__init__.py").exists():
            folders[f"{PACKAGE}.{folder}"] = folder
            names += [f"{PACKAGE}.{name}" for name in find_packages(str(ROOT), include=[folder, f"{folder}.*"])]
    return names, folders


def find_toolkit() -> Path | None:
    """Folder of the CUDA toolkit: $CUDA_HOME where it is set, else /usr/local/cuda, else the folder of nvcc on PATH."""
    home, nvcc = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    candidates = [Path(home)] if home else [Path("/usr/local/cuda")]
    if nvcc and not home:
        candidates.append(Path(nvcc).resolve().parents[1])
    # An nvcc alone may be a wrapper script that lies in another folder than the toolkit.
    return next((path for path in candidates if (path / "bin/nvcc").exists() and (path / "include").is_dir()), None)


def cuda_extension() -> dict[str, Any]:
    """Keyword arguments of `setup` that build jetrl_megatron._C, or none, with the reason printed."""
    sources = sorted(str(path.relative_to(ROOT)) for suffix in ("cu", "cpp") for path in ROOT.glob(f"csrc/*.{suffix}"))
    if not BUILD_COMMANDS.intersection(sys.argv):
        return {}
    if not sources:
        return skip("csrc/ holds no sources")
    if importlib.util.find_spec("torch") is None:
        return skip("torch is not installed here; install it first, then use --no-build-isolation")
    toolkit = find_toolkit()
    if toolkit is None:
        return skip("no CUDA toolkit with nvcc was found; set CUDA_HOME to its folder")
    os.environ["CUDA_HOME"] = str(toolkit)
    # Only now: importing torch takes seconds, most commands do not need it, and it reads CUDA_HOME when imported.
    import torch
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    if torch.version.cuda is None:
        return skip(f"torch {torch.__version__} is built without CUDA")
    flags = {"cxx": ["-O3"], "nvcc": ["-O3", "-gencode=arch=compute_90a,code=sm_90a"]}
    extension = CUDAExtension(f"{PACKAGE}._C", sources, extra_compile_args=flags)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


def skip(reason: str) -> dict[str, Any]:
    """Says why the extension is not built."""
    print(f"{PACKAGE}: building without the CUDA extension: {reason}")
    return {}


names, folders = packages()
setup(packages=names, package_dir=folders, **cuda_extension())
