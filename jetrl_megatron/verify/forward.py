"""Log-probs of a rollout's tokens by a Megatron model: packed sequences on a GPU, one by one elsewhere."""

# Shape suffixes: S token positions of a sequence, T token positions of packed sequences, o their output tokens,
# V vocabulary, W the rank's columns of it, B sequences side by side.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention

from jetrl_megatron.ops.log_prob import token_log_probs
from jetrl_megatron.verify.model import causal_mask, gpt_model
from jetrl_megatron.verify.progress import report_progress
from jetrl_megatron.verify.rollouts import Rollout


def score(model: Sequence[Any], rollout: Rollout, *, vocabulary: int, tokens_per_forward: int) -> torch.Tensor:
    """Log-probs of the output tokens as an engine records them: float32, from BF16 logits, temperature 1.

    Args:
        model: what `build_model` returned, without pipeline stages.
        vocabulary: tokens of the Hugging Face model; what Megatron pads it with has no probability.
        tokens_per_forward: tokens that are packed into one forward; a longer sequence has one of its own.

    Returns:
        float32, one for each output token of the rollout in its order; the same on every rank.
    """
    module = gpt_model(model).eval()
    sequences, prompts = list(rollout.ids()), rollout.prompts_B.tolist()
    limit = tokens_per_forward if packs_sequences(module) else 0
    scored = []
    for pack in packs(rollout.lengths, limit):
        members = [(sequences[index], prompts[index]) for index in pack]
        scored.append(score_pack(module, members, vocabulary).cpu())
        if dist.get_rank() == 0:
            report_progress(pack[-1] + 1, len(sequences), "scored")
    return torch.cat(scored) if scored else torch.zeros(0)


def packs(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of neighbouring sequences that make at most `limit` tokens together; at least one each time."""
    pack: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if pack and tokens + length > limit:
            yield pack
            pack, tokens = [], 0
        pack.append(index)
        tokens += length
    if pack:
        yield pack


def packs_sequences(module: Any) -> bool:
    """Whether the model's attention takes packed sequences; Megatron's own does not, nor is there one on a CPU."""
    on_cpu = next(module.parameters()).device.type == "cpu"
    return not on_cpu and not any(isinstance(part, DotProductAttention) for part in module.modules())


def on_gpu(module: Any) -> bool:
    """Whether a model is on a GPU, and `pack_log_probs` then takes several sequences at once, packed or padded."""
    return bool(next(module.parameters()).is_cuda)


def _batch_arguments(module: Any, sequences: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Arguments of a GPTModel's forward for sequences side by side, each padded with zeros behind its end.

    Nothing looks ahead, so a padded sequence has the outputs of one that is not.
    """
    where = next(module.parameters()).device
    ranks = parallel_state.get_tensor_model_parallel_world_size() if module.config.sequence_parallel else 1
    longest = max(map(len, sequences))
    ids_BS = torch.zeros(len(sequences), longest + -longest % ranks, dtype=torch.long)
    for row_S, ids_S in zip(ids_BS, sequences, strict=True):
        row_S[: len(ids_S)] = ids_S
    length = ids_BS.shape[1]
    return {
        "input_ids": ids_BS.to(where),
        "position_ids": torch.arange(length).expand_as(ids_BS).to(where),
        "attention_mask": causal_mask(length).to(where),
    }


def forward_arguments(module: Any, sequences: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Arguments of a GPTModel's forward for sequences one after the other, on the model's device.

    Raises:
        ValueError: there are several and the model's attention cannot keep them apart.
    """
    where = next(module.parameters()).device
    sequences = _padded(module, sequences)
    ids_T = torch.cat(list(sequences)).to(where)
    positions_T = torch.cat([torch.arange(len(ids_S)) for ids_S in sequences]).to(where)
    arguments = {"input_ids": ids_T[None], "position_ids": positions_T[None], "attention_mask": None}
    if packs_sequences(module):
        return {**arguments, "packed_seq_params": _packing([len(ids_S) for ids_S in sequences], where)}
    return {**arguments, "attention_mask": causal_mask(len(ids_T)).to(where)}


def _padded(module: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sequences, and one more of zeros behind them where sequence parallelism wants a multiple of its ranks.

    Where sequences are not packed, the zeros follow in the same one: nothing looks ahead.
    """
    packs = packs_sequences(module)
    if not packs and len(sequences) != 1:
        raise ValueError(f"{len(sequences)} sequences in one forward: this model's attention takes one at a time")
    ranks = parallel_state.get_tensor_model_parallel_world_size() if module.config.sequence_parallel else 1
    padding = torch.zeros(-sum(map(len, sequences)) % ranks, dtype=torch.long)
    if not len(padding):
        return list(sequences)
    return [*sequences, padding] if packs else [torch.cat([sequences[0], padding])]


def _packing(lengths: Sequence[int], where: torch.device) -> PackedSeqParams:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(where)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


@torch.no_grad()
def score_pack(module: Any, members: Sequence[tuple[torch.Tensor, int]], vocabulary: int) -> torch.Tensor:
    """`pack_log_probs` without a gradient."""
    return pack_log_probs(module, members, vocabulary)


def pack_log_probs(module: Any, members: Sequence[tuple[torch.Tensor, int]], vocabulary: int) -> torch.Tensor:
    """Log-probs of the output tokens of some sequences, in one forward of a GPTModel.

    Args:
        members: token ids of each sequence, prompt and output, and the length of its prompt.
        vocabulary: as for `score`.

    Returns:
        float32, one for each output token, on the model's device; differentiable.
    """
    sequences = [ids_S for ids_S, _ in members]
    side_by_side = len(members) > 1 and on_gpu(module) and not packs_sequences(module)
    arguments = (_batch_arguments if side_by_side else forward_arguments)(module, sequences)
    ids_T = arguments["input_ids"].flatten()
    logits_TW: torch.Tensor = module(**arguments).flatten(0, 1)
    rows, start = [], 0
    for ids_S, prompt in members:
        # The token before predicts: the last one of the prompt predicts the first one of the output.
        rows.append(torch.arange(start + prompt - 1, start + len(ids_S) - 1))
        start += arguments["input_ids"].shape[1] if side_by_side else len(ids_S)
    rows_o = torch.cat(rows).to(ids_T.device)
    return token_log_probs(logits_TW[rows_o], ids_T[rows_o + 1], vocabulary=vocabulary, group=_tensor_group())


def _tensor_group() -> Any:
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_group() if ranks > 1 else None
