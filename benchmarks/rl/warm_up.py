"""Compiles the DeepGEMM kernels of a study in many processes at once: `python -m benchmarks.rl.warm_up MODEL`.

DeepGEMM compiles a kernel when it first meets it, in some ten seconds, and the kernel depends on the number of tokens
through its tile sizes. In RL that number is another one in every step, on both sides, so a study's first minutes would
go into compiling. MODEL is what --model of a run is; what is compiled is what steps of up to --tokens tokens can need.
"""

# Shape suffixes: M tokens, N and K rows and columns of a weight.

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.bench_verify import compile_head, linears
from benchmarks.common import require_hopper
from benchmarks.warm_up import Product, compile_product
from jetrl_megatron import JETRL_FP8
from jetrl_megatron.convert.stored import read_config
from jetrl_megatron.demo.models import WRITTEN

_FEW = (1, 2, 4, 8, 16, 24, 32, 48)
_STEP = 64
"""Tokens; tile sizes change at multiples of it."""
_ORDER = (0, 8, 4, 12, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15)


def main() -> None:
    """Compiles and says how long that took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl.warm_up", description=__doc__.splitlines()[0])
    parser.add_argument("model", help=f"Hugging Face folder, or {', '.join(WRITTEN)}")
    parser.add_argument("--tokens", type=int, default=8192, help="most of a step or a forward (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=12, help="processes (default: %(default)s)")
    options = parser.parse_args()
    require_hopper()
    config, started = _config(options.model), time.perf_counter()
    shapes = linears(config)
    head = (config["vocab_size"], config["hidden_size"])
    jobs = [(head, m) for m in rows(options.tokens)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        heads = pool.starmap_async(_head, jobs)
        for _ in pool.imap_unordered(compile_product, interleaved(shapes, options.tokens)):
            pass
        heads.get()
    print(f"{len(shapes)} shapes, up to {options.tokens} tokens: {time.perf_counter() - started:.0f} s")


def _config(model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return read_config(WRITTEN[model](Path(folder, model)) if model in WRITTEN else Path(model))


def rows(tokens: int) -> list[int]:
    """Numbers of tokens among which every tile size is met; neighbours, which need one kernel, come far apart."""
    found = [m for m in (*_FEW, *range(_STEP, tokens + 1, _STEP)) if m <= tokens]
    return [m for first in _ORDER for m in found[first :: len(_ORDER)]]


def interleaved(shapes: Iterable[tuple[int, int]], tokens: int) -> list[Product]:
    """Products of forward and both gradients; neighbours are of different weights."""
    by_tokens = []
    for m, (n, k) in itertools.product(rows(tokens), shapes):
        by_tokens += [Product(m, n, k, along_tokens=False), Product(m, k, n, along_tokens=False)]
        if m % JETRL_FP8.block == 0:
            by_tokens.append(Product(n, k, m, along_tokens=True))
    return list(dict.fromkeys(by_tokens))


def _head(shape: tuple[int, int], m: int) -> None:
    columns, depth = shape
    compile_head(m, columns, depth)


if __name__ == "__main__":
    main()
