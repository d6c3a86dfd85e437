"""Log-probs of the same tokens from both sides, and how tables and plots show them."""

# Shape suffixes: B sequences, T token positions, o output tokens of all sequences one after the other.

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jetrl_megatron.precision_flow import Mismatch, mismatch, mismatch_by_position
from jetrl_megatron.verify.rollouts import Rollout


@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Log-probs of the same generated tokens: `rollout` by the engine that drew them, `train` by a training forward.

    Attributes:
        rollout, train: float [B, T]; column t is the t-th generated token.
        mask: bool [B, T], false after the end of a sequence.
    """

    rollout: torch.Tensor
    train: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, rollout: Sequence[Sequence[float]], train: Sequence[Sequence[float]]) -> LogProbs:
        """Pads sequences of different lengths.

        Raises:
            ValueError: the two sides do not hold the same number of tokens.
        """
        lengths = [len(sequence) for sequence in rollout]
        if lengths != [len(sequence) for sequence in train]:
            raise ValueError(f"{lengths} log-probs from the rollout, {[len(s) for s in train]} from training")
        mask_BT = torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]
        return cls(_padded(rollout, mask_BT), _padded(train, mask_BT), mask_BT)

    @classmethod
    def of_rollout(cls, rollout: Rollout, train_o: torch.Tensor) -> LogProbs:
        """A rollout beside what training says about its output tokens, in their order.

        Raises:
            ValueError: the two sides do not hold the same number of tokens.
        """
        return cls(rollout.padded(rollout.logprobs_o), rollout.padded(train_o), rollout.mask())

    @property
    def mismatch(self) -> Mismatch:
        """The metrics over all tokens."""
        return mismatch(self.rollout, self.train, self.mask)

    def rows_by_position(self, ranges: int = 64) -> list[dict[str, Any]]:
        """Metrics in up to so many ranges of token positions, with their first positions; empty ones are left out."""
        found = mismatch_by_position(self.rollout, self.train, self.mask, ranges=ranges)
        return [{"position": position, **metrics.to_dict()} for position, metrics in found if metrics.tokens]


def _padded(sequences: Sequence[Sequence[float]], mask_BT: torch.Tensor) -> torch.Tensor:
    values_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    flat = [value for sequence in sequences for value in sequence]
    values_BT[mask_BT] = torch.tensor(flat, dtype=torch.float64)
    return values_BT


def curve(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Positions and values of one metric, for a plot.

    Args:
        rows: what `LogProbs.rows_by_position` returns.
        metric: a field of `Mismatch`.
    """
    return [row["position"] for row in rows], [row[metric] for row in rows]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
