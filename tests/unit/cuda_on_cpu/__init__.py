"""The CUDA sources on a CPU: compiled by the host's compiler, with a fiber for each thread, and called with ctypes.

It shows what the kernels compute, every element and every bound of theirs. Speed, races between warps and the last bit
of `ex2.approx` and `rcp.approx` only a GPU shows.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent

_LAUNCH = re.compile(r"(\w+(?:<[^;{}]*?>)?)\s*<<<(.*?)>>>\((.*?)\);", re.S)
# Instructions that the sources name, and what a host computes instead.
_INSTRUCTIONS = {
    "max.NaN.f32": "larger = (a != a || b != b) ? NAN : std::max(a, b);",
    "max.NaN.xorsign.abs.bf16x2": "larger = max_nan_xorsign_abs(a, b) | max_nan_xorsign_abs(a >> 16, b >> 16) << 16;",
    "cvt.rn.bf16x2.f32": (
        "pair = bits_of<uint32_t>(__nv_bfloat162(__float2bfloat16_rn(low), __float2bfloat16_rn(high)));"
    ),
    "ex2.approx.ftz.f32": "power = flushed(exp2f(flushed(__fmul_rn(x, -kLog2E))));",
    "rcp.approx.ftz.f32": "inverse = flushed(1.f / flushed(x));",
}


class Codes(ctypes.Structure):
    """`jetrl::Codes`."""

    _fields_ = (("data", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("scale_stride", ctypes.c_int64))


class ScaleRule(ctypes.Structure):
    """`jetrl::ScaleRule`."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("amax_floor", "divisor", "scale_floor")),
        ("power_of_two", ctypes.c_bool),
    )


def host_source(source: str) -> str:
    """A CUDA source as C++ for the host: launches become calls, instructions what they compute.

    Raises:
        ValueError: the source names an instruction that is not known here.
    """
    source = _LAUNCH.sub(r"run_grid(\2, [=] { \1(\3); });", source)
    for name, computed in _INSTRUCTIONS.items():
        source = re.sub(rf'asm\("{re.escape(name)} [^;]*;[^;]*;', computed, source)
    source = re.sub(r'asm volatile\(""[^;]*;', ";", source)  # computes nothing
    unknown = re.findall(r'asm\b[^"]*"([\w.]+)', source)
    if unknown:
        raise ValueError(f"instructions {unknown} are unknown: say in {__name__} what they compute")
    return source


def build(include: Path, folder: Path) -> ctypes.CDLL:
    """Compiles csrc/ for the host into `folder`, and loads it.

    Args:
        include: folder of the CUDA headers.
    """
    sources = [path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cu", ".cuh", ".h")]
    for path in sources:
        name = path.stem + ".cpp" if path.suffix == ".cu" else path.name
        (folder / name).write_text(host_source(path.read_text()))
    shutil.copy(HERE / "entries.cpp", folder)
    library = folder / "kernels.so"
    flags = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    includes = ["-I", str(include), "-include", str(HERE / "shim.h"), "-I", str(folder)]
    compiler = ["g++", *flags, *includes, *map(str, sorted(folder.glob("*.cpp"))), "-o", str(library)]
    done = subprocess.run(compiler, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(library))
