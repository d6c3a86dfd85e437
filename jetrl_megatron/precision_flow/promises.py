"""What has no proof of equal bytes, on either side: it is refused by name, never passed over."""

from __future__ import annotations

from collections.abc import Iterable

from jetrl_megatron.precision_flow.graph import Node, NotPromised, Side

EXACT_TENSOR_PARALLEL = 2
"""Most ranks whose sum does not depend on the order: a + b = b + a, but (a + b) + c is not a + (b + c)."""

KNOWN_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Dense decoders whose operators, and what lies between them, are known."""

EXPERTS = "routed experts"
"""How `module_note` is told of experts."""

_MEASURE = "measure the mismatch (jetrl verify) instead of expecting zero"


def tensor_parallel_note(ranks: int, side: Side) -> NotPromised | None:
    """Row-parallel sums over many ranks."""
    if ranks <= EXACT_TENSOR_PARALLEL:
        return None
    reason = f"a sum over {ranks} tensor-parallel ranks depends on its order, which each library chooses for itself"
    return NotPromised(node="model", side=side, reason=reason, setting=f"{side}: use TP 1 or 2, or {_MEASURE}")


def scaling_note(scaling: str, side: Side) -> NotPromised | None:
    """RoPE with frequencies that are neither plain nor Llama 3's."""
    if scaling == "default" or scaling.startswith("llama3 "):
        return None
    reason = f"RoPE scaling {scaling!r} is computed by each library in its own way"
    return NotPromised(node="model", side=side, reason=reason, setting=f"{side}: {_MEASURE}")


def activation_note(activation: str, side: Side) -> NotPromised | None:
    """MLPs that are no SwiGLU."""
    if activation in ("silu", "swish"):
        return None
    reason = f"activation {activation!r}: SwiGLU alone has one kernel for both sides"
    return NotPromised(node="model", side=side, reason=reason, setting=f"{side}: {_MEASURE}")


def dropout_note(rate: float, side: Side) -> NotPromised | None:
    """Dropout between the layers."""
    if not rate:
        return None
    reason = f"hidden_dropout={rate} drops at random in a training forward, and never in a rollout"
    return NotPromised(node="model", side=side, reason=reason, setting=f"{side}: hidden_dropout=0.0")


def architecture_note(architecture: str, side: Side) -> NotPromised | None:
    """Models that may do between their operators what no node tells, such as scaling logits or residuals."""
    if architecture in KNOWN_ARCHITECTURES:
        return None
    names = ", ".join(sorted(KNOWN_ARCHITECTURES))
    reason = f"{architecture} is none of {names}, whose operators and what lies between them are known"
    return NotPromised(node="model", side=side, reason=reason, setting=f"{side}: {_MEASURE}")


def module_note(name: str, implementation: str, side: Side) -> NotPromised:
    """A module that is none of the known operators."""
    reason = f"{implementation} is no operator that has been compared between Megatron and vLLM"
    return NotPromised(node=name, side=side, reason=reason, setting=f"{side}: {_MEASURE}")


def bf16_linear_notes(nodes: Iterable[Node], side: Side) -> list[NotPromised]:
    """Linears that the recipe keeps in BF16: libraries choose their GEMM by the number of rows."""
    reason = "a BF16 GEMM of the vendor's library, whose sums depend on the number of tokens"
    setting = f"{side}: quantise it (recipe.ignore, num_layers_at_start_in_bf16), or {_MEASURE}"
    return [
        NotPromised(node=node.name, side=side, reason=reason, setting=setting)
        for node in nodes
        if node.operator == "linear" and not node.quantized
    ]
