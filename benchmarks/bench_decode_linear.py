"""Linears while decoding: quantise the activation, multiply with the cached weight, under CUDA graphs.

One graph runs many distinct weights, more than the L2 holds, as the layers of a model do; a time is that of one linear.
"""

# Shape suffixes: M tokens, N and K rows and columns of a weight.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import Model, Run, relative_error, require, start
from jetrl_megatron import JETRL_FP8, reference
from jetrl_megatron.ops import LinearOperand, select_gemm, select_quantizer

TOKENS = (1, 8, 32, 128)
BYTES = 1 << 30
"""Codes of the weights in one graph, at least: many times the L2."""


def main() -> None:
    """Measures every linear of every model asked for."""
    run = start("bench_decode_linear", "Linears of few tokens under CUDA graphs, against BF16 torch.")
    for model in run.models:
        totals: dict[int, Counter[str]] = {m: Counter() for m in TOKENS}
        for name in model.linears:
            measure(run, model, name, totals)
        for m, times in totals.items():
            run.add_times(model, "all four linears", m, times, "fprop", peers=("bf16_torch",))
        run.write()


def measure(run: Run, model: Model, name: str, totals: dict[int, Counter[str]]) -> None:
    """Rows of one linear for every number of tokens."""
    rows, columns = model.linears[name]
    copies = 2 if run.dry else min(model.layers, max(2, -(-BYTES // (rows * columns))))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": run.device}
    weights = [0.02 * torch.randn(rows, columns, **options) for _ in range(copies)]
    quantizer, gemm = select_quantizer(JETRL_FP8, run.device), select_gemm(JETRL_FP8, run.device)
    operands = [LinearOperand(quantizer.weight(w, JETRL_FP8)[0], gemm=gemm).rows for w in weights]
    for m in totals:
        x = torch.randn(m, columns, **options)

        def fp8(x: torch.Tensor = x) -> list[torch.Tensor]:
            return [gemm.nt(gemm.prepare(quantizer.activation(x, JETRL_FP8)), operand) for operand in operands]

        def bf16(x: torch.Tensor = x) -> list[torch.Tensor]:
            return [F.linear(x, weight) for weight in weights]

        check(x, weights[-1], fp8()[-1], gemm)
        captured = {"jetrl": capture(fp8, run), "bf16_torch": capture(bf16, run)}
        times = run.clock.race({key: {"replay": call} for key, call in captured.items()})
        each = {key: spans["total"] / copies for key, spans in times.items()}
        totals[m].update(each)
        run.add_times(model, f"{name} N={rows} K={columns}", m, each, "fprop", peers=("bf16_torch",), show=False)


def check(x_MK: torch.Tensor, weight_NK: torch.Tensor, y_MN: torch.Tensor, gemm: Any) -> None:
    """The result is the reference's quantisers around the GEMM, byte for byte, and near the dequantised product."""
    a, w = reference.quantize_activation(x_MK, JETRL_FP8), reference.quantize_weight(weight_NK, JETRL_FP8)
    require(torch.equal(y_MN, gemm.nt(gemm.prepare(a), gemm.prepare(w))), "the result is not its parts")
    error = relative_error(y_MN, a.dequantize() @ w.dequantize().t())
    require(error < 4e-3, f"the result differs from the dequantised product by {error:.2e}")


def capture(call: Callable[[], object], run: Run) -> Callable[[int], object]:
    """The call as a CUDA graph, or itself on a CPU."""
    if run.dry:
        return lambda _: call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The outputs live in the graph's own memory for as long as the graph does.
        call()
    return lambda _: graph.replay()


if __name__ == "__main__":
    main()
