"""Problems as the batches that training steps take."""

# Shape suffixes: B sequences of a microbatch, S token positions, T = S + 1.

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from jetrl_megatron.demo.options import DemoFolder
from jetrl_megatron.demo.problems import Example, examples

_SPARE = 3
"""Problems that are generated for each one that is used."""


def fitting_examples(count: int, seed: int, folder: DemoFolder) -> list[Example]:
    """The first `count` problems of a seed that are no longer than the run's sequence length.

    Raises:
        ValueError: too few are.
    """
    length = folder.options.sequence_length
    fitting = [example for example in examples(_SPARE * count, seed, folder.model) if len(example.tokens) <= length]
    if len(fitting) < count:
        raise ValueError(
            f"sequence_length={length} fits {len(fitting)} of {_SPARE * count} problems, and {count} are needed: "
            "raise it"
        )
    return fitting[:count]


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Examples padded on the right to one length.

    Attributes:
        tokens: int64 [B, S].
        labels: int64 [B, S], the token that follows.
        mask: float32 [B, S], 1 where the label belongs to an answer.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, batch: Sequence[Example], length: int) -> Microbatch:
        """Pads examples to `length` tokens."""
        ids_BT = torch.zeros(len(batch), length + 1, dtype=torch.long)
        mask_BT = torch.zeros(len(batch), length + 1)
        for row, example in enumerate(batch):
            ids_BT[row, : len(example.tokens)] = torch.tensor(example.tokens)
            mask_BT[row, : len(example.tokens)] = torch.tensor(example.loss_mask).float()
        return cls(ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous(), mask_BT[:, 1:].contiguous())


def batches(folder: DemoFolder) -> Iterator[list[Microbatch]]:
    """The microbatches of each training step."""
    options = folder.options
    step, size = options.sequences_per_step, options.sequences_per_microbatch
    data = fitting_examples(options.steps * step, options.seed, folder)
    for first in range(0, len(data), step):
        starts = range(first, first + step, size)
        yield [Microbatch.of(data[start : start + size], options.sequence_length) for start in starts]
