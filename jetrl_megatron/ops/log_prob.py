"""Log-probs of tokens as vLLM computes them, with a gradient, and over a vocabulary that ranks share."""

# Shape suffixes: T tokens, V vocabulary, W the rank's columns of it.

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron import reference
from jetrl_megatron.ops.norm import kernel, runs_kernels

_ALIGNMENT = 16


def aligned_rows(logits_TV: torch.Tensor) -> torch.Tensor:
    """The logits in rows that start at multiples of 16 numbers; a copy where they do not.

    An engine pads its vocabulary to multiples of 64. From the alignment Triton derives how many neighbours a thread
    reads, and with that the order of summation.
    """
    tokens, vocabulary = logits_TV.shape
    if logits_TV.stride(0) % _ALIGNMENT == 0:
        return logits_TV
    rows = logits_TV.new_empty(tokens, vocabulary + -vocabulary % _ALIGNMENT)
    rows[:, :vocabulary] = logits_TV
    return rows[:, :vocabulary]


def _forward(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if runs_kernels(logits_TV.device):
        parts: tuple[torch.Tensor, ...] = kernel("log_prob").token_log_probs(aligned_rows(logits_TV), targets_T)
        return parts
    return reference.token_log_probs(logits_TV, targets_T)


def _backward(
    gradient_T: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor,
    first: int,
) -> torch.Tensor:  # fmt: skip
    if runs_kernels(logits.device):
        result: torch.Tensor = kernel("log_prob").token_log_probs_backward(
            gradient_T, logits, targets, maximum, total, first_column=first
        )
        return result
    return reference.token_log_probs_backward(gradient_T, logits, targets, maximum, total, first_column=first)


def _whole_rows(logits_TW: torch.Tensor, group: dist.ProcessGroup, vocabulary: int) -> torch.Tensor:
    """All columns of this rank's part of the tokens; T is a multiple of the ranks."""
    world = dist.get_world_size(group)
    tokens, columns = logits_TW.shape
    received = torch.empty(world, tokens // world, columns, dtype=logits_TW.dtype, device=logits_TW.device)
    parts = logits_TW.contiguous().view(world, tokens // world, columns)
    dist.all_to_all_single(received, parts, group=group)
    rows = received.transpose(0, 1).reshape(tokens // world, world * columns)
    return rows[:, :vocabulary]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TW: torch.Tensor, targets_T: torch.Tensor, vocabulary: int, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        world = 1 if group is None else dist.get_world_size(group)
        logits, first = logits_TW.detach(), 0
        if world == 1:
            parts = _forward(logits[:, :vocabulary], targets_T)
        else:
            assert group is not None
            first = dist.get_rank(group) * logits.shape[1]
            tokens = logits.shape[0]
            missing = -tokens % world
            padded = torch.nn.functional.pad(logits, (0, 0, 0, missing)) if missing else logits
            targets = torch.nn.functional.pad(targets_T, (0, missing)).chunk(world)[dist.get_rank(group)]
            mine = torch.stack(_forward(_whole_rows(padded, group, vocabulary), targets))
            gathered = mine.new_empty(world * 3, mine.shape[1])
            dist.all_gather_into_tensor(gathered, mine, group=group)
            parts = tuple(gathered.view(world, 3, -1).transpose(0, 1).reshape(3, -1)[:, :tokens].unbind())
        log_probs, maximum, total = parts
        ctx.save_for_backward(logits_TW, targets_T, maximum, total)
        ctx.first, ctx.vocabulary = first, vocabulary
        return log_probs

    @staticmethod
    def backward(ctx: Any, gradient_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_TW, targets_T, maximum, total = ctx.saved_tensors
        columns = max(min(ctx.vocabulary - ctx.first, logits_TW.shape[1]), 0)
        dlogits = _backward(gradient_T, logits_TW[:, :columns], targets_T, maximum, total, ctx.first)
        if columns < logits_TW.shape[1]:
            dlogits = torch.nn.functional.pad(dlogits, (0, logits_TW.shape[1] - columns))
        return dlogits, None, None, None


def token_log_probs(
    logits_TW: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocabulary: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """log softmax(logits)[target] of each row, summed in vLLM's order; temperature 1.

    Over tensor-parallel ranks, rows are exchanged so that each rank sums some rows whole: a sum over parts would round
    differently.

    Args:
        logits_TW: BF16 [T, W], this rank's columns of the vocabulary as Megatron's output layer leaves them, with its
            padding.
        targets_T: int64 [T], token ids of the whole vocabulary; the same on all ranks. The log-prob of one outside it,
            -100 for instance, is NaN.
        vocabulary: columns that are real, over all ranks; those behind them are padding, which vLLM cuts off. Without
            it every column is real.
        group: tensor-parallel group, None for a single rank.

    Returns:
        float32 [T], the same on all ranks.

    Raises:
        ValueError: shapes do not fit, the logits are not BF16, or the vocabulary is larger than all columns or so
            small that a rank has none of it.
    """
    world = 1 if group is None else dist.get_world_size(group)
    if logits_TW.dim() != 2 or targets_T.shape != logits_TW.shape[:1]:
        raise ValueError(f"logits {list(logits_TW.shape)} and targets {list(targets_T.shape)} must be [T, W] and [T]")
    if logits_TW.dtype != torch.bfloat16:
        # A Triton kernel adds numbers of another width in another order.
        raise ValueError(
            f"logits are {logits_TW.dtype}, the engine's are BF16: Megatron's Float16Module widens them, so call it "
            "with fp32_output=False, or pass logits.bfloat16(), which gives back what it widened"
        )
    columns = logits_TW.shape[1] * world
    vocabulary = columns if vocabulary is None else vocabulary
    if vocabulary > columns:
        raise ValueError(f"vocabulary={vocabulary} is more than the {columns} columns of all ranks")
    if vocabulary <= columns - logits_TW.shape[1]:
        # Gathered logits would pass otherwise, with a gradient on the first rank alone.
        raise ValueError(
            f"vocabulary={vocabulary} leaves padding alone to the last of {world} ranks of {logits_TW.shape[1]} "
            "columns: are the logits gathered (parallel_output=False)? Then pass group=None"
        )
    if logits_TW.stride(1) != 1:
        logits_TW = logits_TW.contiguous()
    result: torch.Tensor = _TokenLogProbs.apply(logits_TW, targets_T, vocabulary, group)  # type: ignore[no-untyped-call]
    return result
