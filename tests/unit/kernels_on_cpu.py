"""Runs checks of Triton kernels without a GPU: compiled for Hopper but not launched.

`python -m tests.unit.kernels_on_cpu MODULE OUT` runs MODULE.CASES (a dict of functions), and writes {name: None, or how
it failed} to OUT. It is a process of its own because Triton reads TRITON_INTERPRET when it is first imported, which
another test may have done, and because some settings below hold for a whole process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def launch(module: str, out: Path, *, timeout: int = 300) -> dict[str, str | None]:
    """Runs a module's cases in a fresh process: None for each that passed, a traceback for each that did not."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.kernels_on_cpu", module, str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-6000:]
    results: dict[str, str | None] = json.loads(out.read_text())
    return results


def compile_instead_of_launching() -> None:
    """Makes a launch compile for sm_90 with its arguments' specialisation, and append the kernel to `compiled`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class HopperWithoutDevice:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    def launcher(kernel: JITFunction, grid: Any) -> Any:
        return lambda *args, **kwargs: compiled.append(kernel.run(*args, grid=grid, warmup=True, **kwargs))

    triton.runtime.driver.set_active(HopperWithoutDevice())
    JITFunction.__getitem__ = launcher


compiled: list[Any] = []
"""Kernels of this process, in the order of their launches; filled after `compile_instead_of_launching`."""


def main(module: str, out: str) -> int:
    compile_instead_of_launching()
    results: dict[str, str | None] = {}
    for name, case in importlib.import_module(module).CASES.items():
        try:
            torch.manual_seed(0)
            case()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    Path(out).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    # Cases import this module by name; as __main__ it would be another one, with a list of its own.
    sys.exit(importlib.import_module("tests.unit.kernels_on_cpu").main(*sys.argv[1:]))
