"""Generated tokens with the log-probs that the engine recorded, and the file that carries them between processes."""

# Shape suffixes: B sequences, n tokens of all sequences one after the other (prompts and outputs), o output tokens of
# all sequences one after the other, T output positions.

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

_SEPARATOR = "/"


class ScoredSequence(NamedTuple):
    """One sequence and the log-probs of its output tokens.

    Attributes:
        prompt, output: token ids.
        logprobs: as the engine recorded them while it generated.
        prefill_logprobs: the same from a prefill of prompt and output by the engine; None where that was not asked for.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    logprobs: Sequence[float]
    prefill_logprobs: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Sequences of any lengths, without padding.

    Attributes:
        ids_n: token ids, int64; of each sequence the prompt, then the output.
        prompts_B, outputs_B: lengths, int64.
        logprobs_o: float32.
        prefill_logprobs_o: float32, or None.
    """

    ids_n: torch.Tensor
    prompts_B: torch.Tensor
    outputs_B: torch.Tensor
    logprobs_o: torch.Tensor
    prefill_logprobs_o: torch.Tensor | None = None

    @classmethod
    def of(cls, sequences: Sequence[ScoredSequence]) -> Rollout:
        """Packs sequences.

        Raises:
            ValueError: a sequence has another number of log-probs than of output tokens.
        """
        for index, sequence in enumerate(sequences):
            counts = {len(values) for values in sequence[1:] if values is not None}
            if len(counts) != 1:
                raise ValueError(f"sequence {index}: {sorted(counts)} output tokens and log-probs must be one number")
        prefill = [value for sequence in sequences for value in sequence.prefill_logprobs or ()]
        return cls(
            ids_n=torch.tensor([token for s in sequences for part in (s.prompt, s.output) for token in part]).long(),
            prompts_B=torch.tensor([len(sequence.prompt) for sequence in sequences]).long(),
            outputs_B=torch.tensor([len(sequence.output) for sequence in sequences]).long(),
            logprobs_o=torch.tensor([value for sequence in sequences for value in sequence.logprobs]).float(),
            prefill_logprobs_o=torch.tensor(prefill).float() if prefill else None,
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, prompt and output."""
        lengths: list[int] = (self.prompts_B + self.outputs_B).tolist()
        return lengths

    def ids(self) -> Iterator[torch.Tensor]:
        """Token ids of each sequence, prompt and output: int64."""
        yield from torch.split(self.ids_n, self.lengths)

    def mask(self) -> torch.Tensor:
        """bool [B, T]: whether a sequence has a t-th output token."""
        longest = int(self.outputs_B.max()) if len(self.outputs_B) else 0
        return torch.arange(longest) < self.outputs_B[:, None]

    def padded(self, values_o: torch.Tensor) -> torch.Tensor:
        """One value for each output token as float64 [B, T], 0 where `mask` is false.

        Raises:
            ValueError: there is another number of values than of output tokens.
        """
        mask_BT = self.mask()
        if values_o.shape != self.logprobs_o.shape:
            raise ValueError(
                f"{list(values_o.shape)} log-probs for {len(self.logprobs_o)} output tokens: score them all"
            )
        values_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
        values_BT[mask_BT] = values_o.double()
        return values_BT


def save_rollouts(rollouts: Mapping[str, Rollout], path: Path) -> None:
    """Writes rollouts, by name, to a safetensors file."""
    tensors = {}
    for name, rollout in rollouts.items():
        for field in dataclasses.fields(rollout):
            value = getattr(rollout, field.name)
            if value is not None:
                tensors[name + _SEPARATOR + field.name] = value.contiguous()
    save_file(tensors, path)


def load_rollouts(path: Path) -> dict[str, Rollout]:
    """The inverse of `save_rollouts`."""
    fields: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(path).items():
        name, _, field = key.rpartition(_SEPARATOR)
        fields.setdefault(name, {})[field] = tensor
    return {name: Rollout(**tensors) for name, tensors in fields.items()}
