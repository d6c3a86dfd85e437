"""NeMo-RL's log-probs, summed as the rollout sums them."""

# Shape suffixes: B sequences, S tokens of each, W the rank's columns of the vocabulary.

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from jetrl_megatron.ops.log_prob import token_log_probs


class ParityLogProb:
    """Stands in for NeMo-RL's `DistributedLogprob`, and for the one that works in chunks.

    Args:
        vocabulary: `vocab_size` of the Hugging Face model; Megatron may pad it.
        chunked: whether it is called with a chunk size.
    """

    def __init__(self, vocabulary: int, *, chunked: bool = False) -> None:
        self._vocabulary = vocabulary
        self._chunked = chunked

    def apply(
        self,
        logits_BSW: torch.Tensor,
        target_BS: torch.Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        *arguments: Any,
    ) -> torch.Tensor:
        """Log-probs of the targets.

        Args:
            logits_BSW: BF16, or BF16 values that were widened to float32.
            target_BS: int64 token ids of the whole vocabulary.
            vocab_start_index, vocab_end_index: not read: they follow from the group.
            arguments: the chunk size where it is chunked; then the tensor-parallel group and NeMo-RL's inference_only,
                which is not read: autograd knows.

        Returns:
            float32 [B, S], the same on all ranks of the group.
        """
        chunk, group = arguments[:2] if self._chunked else (logits_BSW.shape[1], arguments[0])
        parts = [
            self._part(logits, target, group)
            for logits, target in zip(torch.split(logits_BSW, chunk, 1), torch.split(target_BS, chunk, 1), strict=True)
        ]
        return torch.cat(parts, 1)

    def _part(self, logits_BSW: torch.Tensor, target_BS: torch.Tensor, group: Any) -> torch.Tensor:
        logits_TW = logits_BSW.flatten(0, 1).bfloat16()
        return token_log_probs(
            logits_TW, target_BS.flatten(), vocabulary=self._vocabulary, group=group
        ).view(target_BS.shape)  # fmt: skip


def use_parity_log_probs(model_utils: ModuleType, vocabulary: int) -> None:
    """Has this process's NeMo-RL take log-probs of tokens with `ParityLogProb`.

    Args:
        model_utils: `nemo_rl.distributed.model_utils`, whose functions all use one of these two.
        vocabulary: see `ParityLogProb`.
    """
    model_utils.DistributedLogprob = ParityLogProb(vocabulary)  # type: ignore[attr-defined]
    model_utils.ChunkedDistributedLogprob = ParityLogProb(vocabulary, chunked=True)  # type: ignore[attr-defined]
