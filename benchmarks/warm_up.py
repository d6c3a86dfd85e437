"""Compiles every DeepGEMM kernel that the benchmarks need, in many processes at once.

DeepGEMM compiles a kernel at its first call, in about ten seconds each, one after the other within a process. All
processes here, and the benchmarks afterwards, share its cache: $DG_JIT_CACHE_DIR, by default ~/.deep_gemm.

    python -m benchmarks.warm_up [--models 8b,32b,70b] [--workers 12]
"""

# Shape suffixes: M tokens, N and K rows and columns of a weight.

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks import bench_decode_linear, bench_linear
from benchmarks.common import MEASURED, MODELS, Model, require_hopper
from jetrl_megatron import JETRL_FP8, BlockScaledTensor
from jetrl_megatron.ops import select_gemm


class Product(NamedTuple):
    """rows x columns of a product that contracts `depth`; it accumulates along tokens where `along_tokens` is set."""

    rows: int
    columns: int
    depth: int
    along_tokens: bool


def main() -> None:
    """Compiles and prints each product with the seconds it took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_up", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MEASURED, help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--workers", type=int, default=12, help="processes")
    parser.add_argument("--no-decode", action="store_true", help="training shapes alone")
    options = parser.parse_args()
    require_hopper()
    wanted = {
        product
        for key in options.models.split(",")
        for product in itertools.chain(training(MODELS[key]), () if options.no_decode else decoding(MODELS[key]))
    }
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for product, seconds in pool.imap_unordered(compile_product, order(wanted)):
            print(f"{time.perf_counter() - start:6.1f} s  {product}  {seconds:.1f} s", flush=True)


def training(model: Model) -> Iterator[Product]:
    """Products of fprop, dgrad and wgrad at every number of tokens that benchmarks of training use."""
    for (n, k), m in itertools.product(model.linears.values(), bench_linear.TOKENS):
        yield Product(m, n, k, along_tokens=False)
        yield Product(m, k, n, along_tokens=False)
        yield Product(n, k, m, along_tokens=True)


def decoding(model: Model) -> Iterator[Product]:
    """Products of fprop at every number of tokens that the benchmark of decoding uses."""
    for (n, k), m in itertools.product(model.linears.values(), bench_decode_linear.TOKENS):
        yield Product(m, n, k, along_tokens=False)


def order(products: set[Product]) -> list[Product]:
    """Such that products which need the same kernel come late after each other.

    The kernel depends on the weight's shape, and on the number of tokens through the tile sizes alone, so the second of
    two numbers of tokens usually finds its kernel compiled, if the first one is through by then.
    """
    by_tokens: dict[int, list[Product]] = {}
    for product in sorted(products):
        by_tokens.setdefault(product.depth if product.along_tokens else product.rows, []).append(product)
    return [product for tokens in sorted(by_tokens, reverse=True) for product in by_tokens[tokens]]


def compile_product(product: Product) -> tuple[Product, float]:
    """Runs the product once on arbitrary codes; seconds that took."""
    device = torch.device("cuda")
    gemm = select_gemm(JETRL_FP8, device)
    start = time.perf_counter()
    if product.along_tokens:
        out = torch.zeros(product.rows, product.columns, dtype=torch.float32, device=device)
        operands = (_groups(size, product.depth, device) for size in (product.rows, product.columns))
        gemm.accumulate_nt(*map(gemm.prepare, operands), out)
    else:
        a, b = _groups(product.rows, product.depth, device), _tiles(product.columns, product.depth, device)
        gemm.nt(gemm.prepare(a), gemm.prepare(b))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return product, time.perf_counter() - start


def _codes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)


def _groups(rows: int, columns: int, device: torch.device) -> BlockScaledTensor:
    stride = -(-rows // 4) * 4
    groups = -(-columns // JETRL_FP8.block)
    scale = torch.empty_strided((rows, groups), (1, stride), dtype=torch.float32, device=device).fill_(1)
    return BlockScaledTensor(_codes(rows, columns, device), scale, JETRL_FP8.activation_block, JETRL_FP8)


def _tiles(rows: int, columns: int, device: torch.device) -> BlockScaledTensor:
    block = JETRL_FP8.block
    scale = torch.ones(-(-rows // block), -(-columns // block), device=device)
    return BlockScaledTensor(_codes(rows, columns, device), scale, JETRL_FP8.weight_block, JETRL_FP8)


if __name__ == "__main__":
    main()
