"""What follows the layers in training: output layer and log-probs of the tokens, forward and backward.

"megatron" is Megatron's output layer and the log-probs of its vocabulary-parallel cross entropy, in float32;
"jetrl_parity" gives vLLM's bytes (`use_parity_head` and `token_log_probs`). With `bench_layer` this is all of a model
in which parity operators take the place of others.
"""

# Shape suffixes of Megatron: S sequence, B batch, H hidden, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Contender, Model, Run, relative_error, require, start
from benchmarks.megatron_state import accumulate_into_main_grad, drop_gradients, one_rank, transformer_config
from jetrl_megatron.ops.bf16_linear import row_invariant_refusal
from jetrl_megatron.ops.log_prob import token_log_probs

SEQUENCE, VOCABULARY = 8192, 151936
"""Tokens, and Qwen3's vocabulary as it is padded."""
LogProbs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Measures the head of every model asked for."""
    run = start("bench_head", "Output layer and log-probs with parity operators against Megatron's.")
    with one_rank(run.device):
        for model in run.models:
            measure(run, model)
            run.write()


def measure(run: Run, model: Model) -> None:
    """Rows of one head."""
    sequence, vocabulary = (64, 512) if run.dry else (SEQUENCE, VOCABULARY)
    heads: dict[str, tuple[torch.nn.Module, LogProbs]] = {
        "megatron": (output_layer(run, model, vocabulary), megatron_log_probs)
    }
    if row_invariant_refusal(run.device) is None:
        from jetrl_megatron.layers import JetRLOutputLayer

        parity = output_layer(run, model, vocabulary)
        parity.load_state_dict(heads["megatron"][0].state_dict())
        parity.__class__ = JetRLOutputLayer
        heads["jetrl_parity"] = parity, lambda logits, targets: token_log_probs(logits.flatten(0, 1), targets)
    x_SBH = torch.randn(sequence, 1, model.hidden, dtype=torch.bfloat16, device=run.device).requires_grad_()
    targets = torch.randint(vocabulary, (sequence,), device=run.device)
    for layer, _ in heads.values():
        accumulate_into_main_grad(layer)
    check(heads, x_SBH.detach(), targets)
    drop_gradients(x_SBH)
    times = run.clock.race({name: phases(*head, x_SBH, targets) for name, head in heads.items()})
    for what, phase in (("forward+backward", "total"), ("forward", "forward"), ("backward", "backward")):
        spans = {name: parts[phase] for name, parts in times.items()}
        run.add_times(model, f"head V={vocabulary}", sequence, spans, what, peers=("megatron",))


def output_layer(run: Run, model: Model, vocabulary: int) -> torch.nn.Module:
    """As GPTModel builds it where Apex is not installed: the weight's gradient is added to main_grad afterwards."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config: Any = transformer_config(model, run.device, gradient_accumulation_fusion=False)
    layer: torch.nn.Module = ColumnParallelLinear(
        model.hidden, vocabulary, config=config, init_method=config.init_method, bias=False
    )
    return layer


def megatron_log_probs(logits_SBV: torch.Tensor, targets_S: torch.Tensor) -> torch.Tensor:
    """Of the targets, [S]."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    log_probs: torch.Tensor = -vocab_parallel_cross_entropy(logits_SBV.float(), targets_S[:, None])[:, 0]
    return log_probs


def phases(layer: torch.nn.Module, log_probs: LogProbs, x_SBH: torch.Tensor, targets_S: torch.Tensor) -> Contender:
    """Forward and backward of one head."""
    output: dict[str, torch.Tensor] = {}

    def forward(i: int) -> None:
        output["y"] = log_probs(layer(x_SBH)[0], targets_S)

    def backward(i: int) -> None:
        output.pop("y").sum().backward()

    return {"forward": forward, "backward": backward}


def check(heads: dict[str, tuple[torch.nn.Module, LogProbs]], x_SBH: torch.Tensor, targets_S: torch.Tensor) -> None:
    """Log-probs and gradients of the heads are near each other.

    Raises:
        SystemExit: they are not.
    """
    found = {}
    for name, (layer, log_probs) in heads.items():
        x = x_SBH.clone().requires_grad_()
        y = log_probs(layer(x)[0], targets_S)
        y.sum().backward()
        (weight,) = layer.parameters()
        found[name] = y.detach(), x.grad, weight.main_grad.clone()
    for name, parts in found.items():
        errors = [relative_error(a, b) for a, b in zip(parts, found["megatron"], strict=True)]
        require(max(errors) < 0.01, f"{name}: log-probs, dx, dW differ from Megatron's by {errors}")


if __name__ == "__main__":
    main()
