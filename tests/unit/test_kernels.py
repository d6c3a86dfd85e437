"""Triton kernels against their twins, byte for byte, in Triton's interpreter; the cases are in *kernel_cases.py."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.unit.kernel_cases import CASES, KERNEL_MODULES
from tests.unit.parity_kernel_cases import PARITY_CASES, PARITY_MODULES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    """What each case says, None where it holds: all of them run once, in a process with the interpreter."""
    return {**_run("kernel_cases", CASES), **_run("parity_kernel_cases", PARITY_CASES)}


def _run(module: str, cases: Iterable[str]) -> dict[str, str | None]:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.unit.{module}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    told = {line["case"]: line["failure"] for line in map(json.loads, run.stdout.splitlines())}
    ended = f"the process ended with {run.returncode} before this case: {run.stderr[-4000:]}"
    return {case: told.get(case, ended) for case in cases}


@pytest.mark.parametrize("case", [*CASES, *PARITY_CASES])
def test_kernel_equals_its_twin_exact(failures, case):
    assert failures[case] is None, failures[case]


def test_every_kernel_has_cases():
    modules = (*KERNEL_MODULES, *PARITY_MODULES)
    operators = {
        name
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_") and not name.endswith("_twin")
    }
    tested = {kernel for case in (*CASES, *PARITY_CASES) for kernel in case.split("-")[0].split("+")}
    assert tested == operators
    folder = Path(KERNEL_MODULES[0].__file__).parent
    without_kernels = {"__init__", "device_functions", "extension", "outputs", "rules"}
    assert {path.stem for path in folder.glob("*.py")} - without_kernels == {
        Path(module.__file__).stem for module in modules
    }
