"""Quantisers and fused operators against a device copy that moves as many bytes: every input read once, every output
written once. Every implementation is checked against the reference on the inputs that are timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.common import MODELS, Contender, Model, Run, require, start
from benchmarks.quantize_operators import OPERATORS, RECIPE, TWINS, Functions, Operator, weight_correct
from jetrl_megatron import BlockScaledTensor

SETS = 2
SHAPES = ((32768, 4096), (16384, 8192), (8192, 28672))
LARGEST_NORM = 8192
"""The widest hidden size among the models; wider matrices are normed nowhere."""
MODULES = ("quantize_activation", "quantize_both", "quantize_weight", "requantize_along_tokens", "rms_norm", "swiglu")


def main() -> None:
    """Measures every operator at every shape, then all linear weights of the 8B model at once."""
    run = start("bench_quantize", "Quantisers against a device copy.")
    found = implementations(run)
    for m, features in ((300, 256), (128, 384)) if run.dry else SHAPES:
        for operator in OPERATORS:
            if not operator.norm or features <= LARGEST_NORM:
                measure(run, operator, found, m, features)
        run.write()
    for model in run.models:
        if run.dry or model == MODELS["8b"]:
            measure_model(run, model, found)
    run.write()


def implementations(run: Run) -> dict[str, Functions]:
    """Triton's kernels and the CUDA extension's; on a CPU the reference alone."""
    if run.dry:
        return {"reference": TWINS}
    kernels: dict[str, Any] = {}
    for module in MODULES:
        kernels |= vars(importlib.import_module(f"jetrl_megatron.kernels.{module}"))
    found = {"triton": {name: kernels[name] for name in TWINS}}
    if importlib.util.find_spec("jetrl_megatron._C") is None:
        run.add(None, "", None, "cuda/all operators", None, "not measured: the extension was not built")
        return found
    extension = vars(importlib.import_module("jetrl_megatron.kernels.extension"))
    names = {**{name: name for name in TWINS}, "quantize_activation": "quantize_along_features"}
    found["cuda"] = {name: extension[its] for name, its in names.items() if its in extension}
    return found


def measure(run: Run, operator: Operator, found: Mapping[str, Functions], m: int, features: int) -> None:
    """GB/s of one operator at one shape by implementation, and of the copy beside them."""
    arguments = [operator.inputs(m, features, run.device) for _ in range(SETS)]
    contenders: dict[str, Contender] = {}
    moved = 0
    for name, functions in found.items():
        if operator.name not in functions:
            continue
        function = functions[operator.name]
        result = function(*arguments[0])
        require(operator.correct(functions, arguments[0], result), f"{name} {operator.name} [{m}, {features}]")
        moved = moved or size((arguments[0], result))
        del result
        contenders[name] = {"run": lambda i, function=function: function(*arguments[i % SETS])}
    times = run.clock.race({**contenders, "copy": copy_of(moved, run.device)})
    report(run, None, f"{operator.label} C={features}", m, times, moved)


def measure_model(run: Run, model: Model, found: Mapping[str, Functions]) -> None:
    """Milliseconds to quantise every linear weight of a model, W and W transposed."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": run.device}
    shapes = list(model.linears.values())
    weights = [0.02 * torch.randn(shape, **options) for _ in range(model.layers) for shape in shapes]
    contenders: dict[str, Contender] = {}
    moved = 0
    for name, functions in found.items():
        quantize = functions.get("quantize_weights")
        if quantize is None:
            continue
        results = quantize(weights, RECIPE)
        moved = size((weights, results))
        right = all(weight_correct({}, (weights[i], RECIPE), results[i]) for i in range(-len(shapes), 0))
        require(right, f"{name} quantize_weights of {model.name}")
        del results
        contenders[name] = {"run": lambda i, quantize=quantize: quantize(weights, RECIPE)}
    times = run.clock.race(contenders)
    # A second copy of everything would not fit beside it, and a quarter is far more than the L2 holds.
    quarter = run.clock.race({"copy": copy_of(moved // 4, run.device)})["copy"]["total"]
    shape = f"all linear weights, {len(weights)} matrices"
    for name, spans in times.items():
        run.add(model, shape, None, f"{name}/quantize_weights", spans["total"], "ms")
    report(run, model, shape, None, {**times, "copy": {"total": 4 * quarter}}, moved)


def report(
    run: Run, model: Model | None, shape: str, m: int | None, times: Mapping[str, Mapping[str, float]], moved: int
) -> None:
    """Rows of GB/s; `moved` is in bytes."""
    rates = {name: moved / 1e6 / spans["total"] for name, spans in times.items()}
    for name, rate in rates.items():
        ours = name != "copy"
        compared: dict[str, Any] = {"peer": "copy", "ratio": rate / rates["copy"]} if ours else {}
        run.add(model, shape, m, f"{name}/bandwidth", rate, "GB/s", **compared)


def copy_of(moved: int, device: torch.device) -> Contender:
    """A device copy that reads and writes `moved` bytes in sum."""
    pairs = [torch.randint(256, (2, moved // 2), dtype=torch.uint8, device=device) for _ in range(SETS)]
    return {"run": lambda i: pairs[i % SETS][0].copy_(pairs[i % SETS][1])}


def size(value: Any) -> int:
    """Bytes of all tensors in nested arguments and results; views of the same memory count once."""
    found: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found[part.data_ptr()] = part.numel() * part.element_size()
        elif isinstance(part, BlockScaledTensor):
            visit((part.data, part.scale))
        elif isinstance(part, (tuple, list)):
            for item in part:
                visit(item)

    visit(value)
    return sum(found.values())


if __name__ == "__main__":
    main()
