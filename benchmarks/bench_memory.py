"""What one linear keeps from forward to backward: FP8 codes and scales of its input, against BF16.

Weights, their cached codes and main_grad are there anyway and do not count. Two measures: the storages that autograd
saves, and the growth of the allocator once input and output are gone.
"""

# Shape suffixes: M tokens, K columns of a weight.

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import Model, Run, require, start
from benchmarks.megatron_state import jetrl_linear, one_rank

TOKENS = 8192
Forward = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Measures every linear of every model asked for."""
    run = start("bench_memory", "Bytes that a linear saves for backward, against BF16 torch.")
    m = 64 if run.dry else TOKENS
    with one_rank(run.device):
        for model in run.models:
            for name in model.linears:
                measure(run, model, name, m)
            run.write()


def measure(run: Run, model: Model, name: str, m: int) -> None:
    """Rows of one linear."""
    rows, columns = model.linears[name]
    shape = f"{name} N={rows} K={columns}"
    layer: Any = jetrl_linear(model, name, run.device)
    weight = torch.nn.Parameter(layer.weight.detach().clone())
    operand = layer.quantized_weight()
    prepared = operand.rows, operand.columns
    constant = [weight, layer.weight, layer.weight.main_grad, *tensors_in((operand, prepared))]
    forwards: dict[str, Forward] = {"jetrl": lambda x: layer(x)[0], "bf16_torch": lambda x: F.linear(x, weight)}
    saved = {key: saved_bytes(forward, m, columns, run.device, constant) for key, forward in forwards.items()}
    require(saved["bf16_torch"] == 2 * m * columns, f"BF16 saves {saved['bf16_torch']} bytes, not its input")
    _report(run, model, shape, m, "saved for backward", saved)
    if run.device.type == "cuda":
        grown = {key: allocated_bytes(forward, m, columns, run.device) for key, forward in forwards.items()}
        _report(run, model, shape, m, "allocated until backward", grown)


def saved_bytes(forward: Forward, m: int, columns: int, device: torch.device, constant: list[torch.Tensor]) -> int:
    """Bytes of the storages that the graph holds, each once, without those of `constant`."""
    counted = {tensor.untyped_storage().data_ptr() for tensor in constant}
    found: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = _input(m, columns, device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        y = forward(x)
    for node in _nodes(y.grad_fn):
        # A custom Function can keep tensors as plain attributes, which the hooks do not see.
        for tensor in tensors_in(getattr(node, "__dict__", {})):
            count(tensor)
    return sum(found.values())


def allocated_bytes(forward: Forward, m: int, columns: int, device: torch.device) -> int:
    """How much more is allocated after a forward whose input and output are gone than before it."""
    forward(_input(m, columns, device)).sum().backward()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = forward(_input(m, columns, device)).grad_fn
    gc.collect()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    del kept
    return grown


def _input(m: int, columns: int, device: torch.device) -> torch.Tensor:
    # No leaf, because autograd itself holds on to leaves.
    anchor = torch.zeros(1, dtype=torch.bfloat16, device=device, requires_grad=True)
    return torch.randn(m, columns, dtype=torch.bfloat16, device=device) + anchor


def _nodes(root: Any) -> Iterable[Any]:
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor that can be reached from a value through containers and attributes."""
    found: list[torch.Tensor] = []
    waiting, seen = [value], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            found.append(part)
            waiting += vars(part).values()
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, (list, tuple, set)):
            waiting += part
        elif type(part).__module__.startswith("jetrl_megatron"):
            waiting += getattr(part, "__dict__", {}).values()
    return found


def _report(run: Run, model: Model, shape: str, m: int, what: str, found: dict[str, int]) -> None:
    for key, value in found.items():
        compared = {"peer": "bf16_torch", "ratio": value / found["bf16_torch"]} if key == "jetrl" else {}
        run.add(model, shape, m, f"{key}/{what}", value, "bytes", **compared)


if __name__ == "__main__":
    main()
