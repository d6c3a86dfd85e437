"""Log-probs of chosen tokens from logits, summed in the order in which vLLM sums them, and their gradient.

vLLM (0.26, v1/worker/gpu/sample/logprob.py) subtracts the row's maximum, adds the exponentials in blocks of 1024
columns one block after the other, and returns logit - maximum - log(sum). A block is one tile of four warps whose
layout Triton derives from the loads, so the kernel here reads as that one does: same block, dtype and alignment.
"""

# Shape suffixes: T tokens, V vocabulary.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jetrl_megatron.reference import token_log_probs as token_log_probs_twin
from jetrl_megatron.reference import token_log_probs_backward as token_log_probs_backward_twin

__all__ = ["token_log_probs", "token_log_probs_backward", "token_log_probs_backward_twin", "token_log_probs_twin"]

_BLOCK = 1024
"""Columns added at once: a part of the order of summation."""


@triton.jit
def _forward_kernel(logits, stride, targets, V, log_probs, maxima, totals, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    maximum = float("-inf")
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source + columns, mask=columns < V, other=float("-inf"))
        maximum = tl.max(tl.maximum(values, maximum))
    maximum = maximum.to(tl.float32)
    total = 0.0
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source + columns, mask=columns < V, other=0.0).to(tl.float32)
        powers = tl.where(columns < V, tl.exp(values - maximum), 0.0)
        total += tl.sum(powers)
    target = tl.load(targets + row)
    # A target that is no token (-100 where nothing is to be scored) reads nothing, and its log-prob is NaN.
    inside = (target >= 0) & (target < V)
    chosen = tl.load(source + target, mask=inside, other=float("nan")).to(tl.float32)
    # The logarithm has no other use: storing it could keep the compiler from contracting it with the subtraction, which
    # it may do in vLLM's kernel.
    tl.store(log_probs + row, chosen - maximum - tl.log(total))
    tl.store(maxima + row, maximum)
    tl.store(totals + row, total)


@triton.jit
def _backward_kernel(
    gradient, logits, stride, targets, first_column, maxima, totals, V, out, out_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    upstream = tl.load(gradient + row)
    target = tl.load(targets + row) - first_column
    values = tl.load(logits + row * stride + columns, mask=columns < V, other=0.0).to(tl.float32)
    probability = tl.exp(values - tl.load(maxima + row)) / tl.load(totals + row)
    chosen = tl.where(columns == target, 1.0, 0.0)
    result = ((chosen - probability) * upstream).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, result, mask=columns < V)


def token_log_probs(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """log softmax(logits)[target] for each row.

    Args:
        logits_TV: BF16 or float32 [T, V], the last axis contiguous.
        targets_T: int64 [T]; the log-prob of one outside [0, V) is NaN.

    Returns:
        float32 [T] log-probs, [T] maxima and [T] sums of exp(logit - maximum).
    """
    tokens, vocabulary = logits_TV.shape
    log_probs, maxima, totals = torch.empty(3, tokens, dtype=torch.float32, device=logits_TV.device)
    if tokens > 0:
        _forward_kernel[(tokens,)](
            logits_TV, logits_TV.stride(0), targets_T.contiguous(), vocabulary, log_probs, maxima, totals, BLOCK=_BLOCK
        )
    return log_probs, maxima, totals


def token_log_probs_backward(
    gradient_T: torch.Tensor,
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    maximum_T: torch.Tensor,
    total_T: torch.Tensor,
    *,
    first_column: int = 0,
) -> torch.Tensor:
    """Gradient of `token_log_probs` with respect to (a rank's columns of) the logits.

    Args:
        gradient_T: float32 [T].
        logits_TV: BF16 or float32 [T, V], the last axis contiguous.
        first_column: vocabulary index of the first column.

    Returns:
        [T, V] in the logits' dtype.
    """
    tokens, vocabulary = logits_TV.shape
    out_TV = torch.empty(logits_TV.shape, dtype=logits_TV.dtype, device=logits_TV.device)
    if logits_TV.numel() > 0:
        _backward_kernel[(tokens, triton.cdiv(vocabulary, _BLOCK))](
            gradient_T.contiguous(), logits_TV, logits_TV.stride(0), targets_T.contiguous(), first_column, maximum_T,
            total_T, vocabulary, out_TV, out_TV.stride(0), BLOCK=_BLOCK,
        )  # fmt: skip
    return out_TV
