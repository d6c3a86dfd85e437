"""Causal attention of packed sequences: FlashAttention 3 as vLLM runs it, and a gradient.

vLLM's build of FlashAttention 3 has no backward kernel. The gradient is taken from the saved output and log-sum-exp by
torch's own kernels: cuDNN's for sequences of one length, FlashAttention 2's for others.

The kernel adds up the keys in blocks, and a sum's last bits depend on the blocks. Their length is chosen in
hopper/tile_size.h of vLLM's FlashAttention, by head size, by the number of queries and by whether keys lie in pages:

| head size  | packed sequences | pages, many queries | pages, few queries                    |
|------------|------------------|---------------------|---------------------------------------|
| up to 64   | 128              | 128                 | 192, hence `fewest_queries`           |
| up to 96   | 144              | 128                 | 128: refused by `head_size_refusal`   |
| up to 128  | 128              | 128                 | 128                                   |
| up to 192  | 96               | 96                  | 96                                    |
| up to 256  | 80               | 80                  | 80                                    |
"""

# Shape suffixes: T tokens of all sequences, H query heads, G key and value heads, D head size, B sequences.

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from jetrl_megatron.ops.hopper import hopper_refusal

_HOME = "vllm.vllm_flash_attn"
_SHORT_HEAD, _MIDDLE_HEAD, _LONGEST_HEAD = 64, 96, 256
# More than the rows of the kernel for few queries, however many query heads share a key.
_MANY_QUERIES = 65
_DENSE_LENGTHS = 64


@functools.cache
def attention_refusal(device: torch.device) -> str | None:
    """None where `flash_attention` runs, else why it does not."""
    reason = hopper_refusal(device)
    if reason is None and importlib.util.find_spec("vllm") is None:
        reason = "vllm is not installed, whose FlashAttention 3 the rollout runs"
    return reason


def head_size_refusal(size: int) -> str | None:
    """None where packed sequences and pages are walked in blocks of one length, else why no parity is to be had."""
    if size <= _SHORT_HEAD or _MIDDLE_HEAD < size <= _LONGEST_HEAD:
        return None
    if size > _LONGEST_HEAD:
        return f"FlashAttention 3 takes heads of {_LONGEST_HEAD} elements at most, not {size}"
    return f"FlashAttention 3 adds up keys in other blocks for pages than for packed sequences at head size {size}"


def fewest_queries(head_size: int) -> int:
    """The least `max_seqlen_q` with which FlashAttention 3 takes pages in the blocks of packed sequences.

    A larger number than the batch has costs time alone: it bounds the grid, and the lengths say what is there.
    """
    return _MANY_QUERIES if head_size <= _SHORT_HEAD else 1


@functools.cache
def _forward_function() -> Any:
    return importlib.import_module(_HOME).flash_attn_varlen_func


@dataclass(frozen=True)
class Packing:
    """How sequences lie in the packed tokens.

    Attributes:
        starts: int32 [B + 1] on the device, where each sequence starts, and the end of the last one.
        longest: tokens of the longest sequence.
        equal: whether all have that length; cuDNN then takes the gradient, in half the time.
    """

    starts: torch.Tensor
    longest: int
    equal: bool = False


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float) -> Any:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.detach(), k.detach(), v.detach()))
        out, lse_HT = _forward_function()(
            q, k, v, max_seqlen_q=packing.longest, cu_seqlens_q=packing.starts, max_seqlen_k=packing.longest,
            cu_seqlens_k=packing.starts, softmax_scale=scale, causal=True, num_splits=1, fa_version=3,
            return_softmax_lse=True,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse_HT)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse_HT = ctx.saved_tensors
        # cuDNN prepares itself anew for every length, and in RL an answer that is alone in a pack has any length.
        dense = ctx.packing.equal and ctx.packing.longest % _DENSE_LENGTHS == 0
        backward = _dense_backward if dense else _packed_backward
        dq, dk, dv = backward(dout.contiguous(), q, k, v, out, lse_HT, ctx.packing, ctx.scale)
        return dq, dk, dv, None, None


def _no_dropout(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=device)


def _packed_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse_HT: torch.Tensor,
    packing: Packing, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    starts, longest, none = packing.starts, packing.longest, _no_dropout(q.device)
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse_HT, starts, starts, longest, longest, 0.0, True, none, none, scale=scale
    )
    return gradients


def _dense_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse_HT: torch.Tensor,
    packing: Packing, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    def batched(x_THD: torch.Tensor) -> torch.Tensor:
        return x_THD.view(-1, packing.longest, *x_THD.shape[1:]).transpose(1, 2)

    heads, length = lse_HT.shape[0], packing.longest
    lse = lse_HT.view(heads, -1, length).transpose(0, 1).contiguous()[..., None]
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    # No bias and no starts: undefined tensors, which Python spells None.
    gradients = torch.ops.aten._cudnn_attention_backward(
        *map(batched, (dout, q, k, v, out)), lse, none, none, None, None, None, length, length, 0.0, True, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in gradients)
    return dq, dk, dv


def flash_attention(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, packing: Packing, *, scale: float
) -> torch.Tensor:
    """softmax(scale q k^T) v within each sequence, causal, the KV axis never split.

    Args:
        q_THD: BF16 [T, H, D]; k_TGD, v_TGD: BF16 [T, G, D], G dividing H.
        scale: multiplier of the scores.

    Returns:
        BF16 [T, H, D].
    """
    out: torch.Tensor = _FlashAttention.apply(q_THD, k_TGD, v_TGD, packing, scale)  # type: ignore[no-untyped-call]
    return out
