"""The CUDA sources compile for Hopper on their own, and kernels on the fast path keep their tiles in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc").glob("*.cu"))
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
MOST_SPILLED_BYTES = 16
"""Of a kernel on the fast path: what passing by cache hides. A tile in local memory would be hundreds of bytes."""
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_90a'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@pytest.fixture(scope="module")
def nvcc(cuda_toolkit) -> Path:
    return cuda_toolkit / "bin/nvcc"


def spills(report: str) -> dict[str, int]:
    """Bytes that each kernel of a compiler's report spills, by its mangled name."""
    found: dict[str, int] = {}
    name = None
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif (spill := _SPILL.search(line)) and name:
            found[name] = max(int(spill[1]), int(spill[2]))
            name = None
    return found


def on_fast_path(name: str) -> bool:
    """Whether a kernel moves 16 bytes at once: a bool as last template argument says so, without one it always does."""
    *_, last = re.findall(r"L([bi])(\d+)E", name)
    return last != ("b", "0")


def test_spills_reads_each_kernel_of_a_report():
    report = """ptxas info    : Compiling entry function '_Z1aILb1EEvv' for 'sm_90a'
ptxas info    : Function properties for _Z1aILb1EEvv
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Compiling entry function '_Z1bILb0EEvv' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"""
    found = spills(report)
    assert found == {"_Z1aILb1EEvv": 20, "_Z1bILb0EEvv": 0}
    assert [on_fast_path(name) for name in found] == [True, False]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_source_compiles_without_torch_and_without_spilled_tiles(source, nvcc, tmp_path):
    command = [str(nvcc), "-O3", "-std=c++17", "-Xptxas=-v", "-Werror=all-warnings", ARCHITECTURE, "-c", str(source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "kernel.o")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: size for name, size in spills(done.stdout + done.stderr).items() if on_fast_path(name)}
    assert found, "the compiler reported no kernel"
    assert {name: size for name, size in found.items() if size > MOST_SPILLED_BYTES} == {}
