"""How far training and rollout are apart: log-probs of the same tokens, compared.

The metrics and their names are NeMo-RL's, so that a number here can be held against a number there. Means run over the
unmasked tokens, in float64.
"""

# Shape suffixes: B sequences, T token positions, n unmasked tokens.

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Difference between rollout log-probs g and training log-probs p of the same tokens.

    With d = p - g; 0 everywhere for an empty mask (`tokens` tells), as in NeMo-RL.

    Attributes:
        tokens: unmasked tokens.
        tokens_differing: those with p != g, to the bit.
        max_abs_dlogp: largest |d|.
        mean_abs_dlogp: mean |d|.
        token_mult_prob_error: mean exp|d|; 1 means equal. NeMo-RL draws a plot above 1.05.
        gen_kl_error: KL(rollout || training), estimator k3: mean exp(d) - 1 - d.
        policy_kl_error: KL(training || rollout), estimator k3: mean exp(-d) - 1 + d.
        js_divergence_error: mean of the k3 estimates of KL(p || m) and KL(g || m), m the mixture of both.
        sampling_importance_ratio: mean exp(d), where a ratio that overflows counts as 0.
        min_seq_mult_prob_error, mean_seq_mult_prob_error, max_seq_mult_prob_error: token_mult_prob_error of each
            sequence that has an unmasked token, then the smallest, mean and largest of them.
    """

    tokens: int
    tokens_differing: int
    max_abs_dlogp: float
    mean_abs_dlogp: float
    token_mult_prob_error: float
    gen_kl_error: float
    policy_kl_error: float
    js_divergence_error: float
    sampling_importance_ratio: float
    min_seq_mult_prob_error: float
    mean_seq_mult_prob_error: float
    max_seq_mult_prob_error: float

    def to_dict(self) -> dict[str, int | float]:
        """Every field, ready for JSON."""
        return dataclasses.asdict(self)


_NO_TOKENS = Mismatch(
    tokens=0,
    tokens_differing=0,
    max_abs_dlogp=0.0,
    mean_abs_dlogp=0.0,
    token_mult_prob_error=0.0,
    gen_kl_error=0.0,
    policy_kl_error=0.0,
    js_divergence_error=0.0,
    sampling_importance_ratio=0.0,
    min_seq_mult_prob_error=0.0,
    mean_seq_mult_prob_error=0.0,
    max_seq_mult_prob_error=0.0,
)


def mismatch(rollout_logprobs: torch.Tensor, train_logprobs: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Compares the log-probs that the rollout recorded with those that the training model gives the same tokens.

    Args:
        rollout_logprobs, train_logprobs: float [B, T] or [T], natural logarithms.
        mask: bool or 0/1, same shape; only tokens where it is true count. What stands elsewhere is never read.

    Raises:
        ValueError: the shapes differ, or an unmasked log-prob is NaN or +inf.
    """
    d_BT, mask_BT = _checked(rollout_logprobs, train_logprobs, mask)
    d_n = d_BT[mask_BT]
    if not d_n.numel():
        return _NO_TOKENS
    sequences = d_BT.abs().exp().where(mask_BT, 0.0).sum(-1) / mask_BT.sum(-1)
    sequences = sequences[mask_BT.any(-1)]
    return Mismatch(
        tokens=d_n.numel(),
        tokens_differing=int((d_n != 0).sum()),
        max_abs_dlogp=float(d_n.abs().max()),
        mean_abs_dlogp=float(d_n.abs().mean()),
        token_mult_prob_error=float(d_n.abs().exp().mean()),
        gen_kl_error=float(_k3(d_n).mean()),
        policy_kl_error=float(_k3(-d_n).mean()),
        js_divergence_error=float(_js(d_n).mean()),
        sampling_importance_ratio=float(torch.nan_to_num(d_n.exp(), posinf=0.0).mean()),
        min_seq_mult_prob_error=float(sequences.min()),
        mean_seq_mult_prob_error=float(sequences.mean()),
        max_seq_mult_prob_error=float(sequences.max()),
    )


def mismatch_by_position(
    rollout_logprobs: torch.Tensor, train_logprobs: torch.Tensor, mask: torch.Tensor, *, ranges: int = 64
) -> list[tuple[int, Mismatch]]:
    """`mismatch` of neighbouring token positions.

    Args:
        rollout_logprobs, train_logprobs, mask: as for `mismatch`, [B, T].
        ranges: into how many ranges of equal length the positions are cut at most; the last may be shorter.

    Returns:
        the first position of each range, and the mismatch of its tokens.

    Raises:
        ValueError: as for `mismatch`.
    """
    positions = mask.shape[1]
    width = max(1, -(-positions // ranges))
    return [
        (first, mismatch(rollout_logprobs[:, part], train_logprobs[:, part], mask[:, part]))
        for first in range(0, positions, width)
        for part in [slice(first, first + width)]
    ]


def _checked(
    rollout_logprobs: torch.Tensor, train_logprobs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """d = p - g, float64 [B, T], 0 where masked; mask, bool [B, T]."""
    shapes = [list(x.shape) for x in (rollout_logprobs, train_logprobs, mask)]
    if not shapes[0] == shapes[1] == shapes[2]:
        raise ValueError(
            f"rollout_logprobs {shapes[0]}, train_logprobs {shapes[1]} and mask {shapes[2]} must have one shape: index "
            "i, j is the same token in all three; is one of them shifted by a token?"
        )
    if mask.dim() not in (1, 2):
        raise ValueError(f"mask {shapes[2]}: log-probs are [B, T] or [T]")
    rows = (1, -1) if mask.dim() == 1 else mask.shape
    mask_BT = mask.bool().reshape(rows)
    g_BT, p_BT = (
        x.detach().double().reshape(rows).masked_fill(~mask_BT, 0.0) for x in (rollout_logprobs, train_logprobs)
    )
    for name, x_BT in (("rollout_logprobs", g_BT), ("train_logprobs", p_BT)):
        bad = x_BT.isnan() | x_BT.isposinf()
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name}[{row}, {column}] = {x_BT[row, column].item()} is unmasked: log-probs are at most 0; mask "
                "tokens that have none, such as prompts and padding"
            )
    # Equal values differ by 0, also where both are -inf.
    return (p_BT - g_BT).masked_fill(p_BT == g_BT, 0.0), mask_BT


def _k3(d: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d, without cancellation for small d; infinite where d is."""
    return torch.where(d.isinf(), torch.inf, torch.expm1(d) - d)


def _js(d: torch.Tensor) -> torch.Tensor:
    """k3 estimates of KL(p || m) and KL(g || m), averaged; log p - log m depends on d alone."""
    train_to_mixture = math.log(2) - F.softplus(-d)
    rollout_to_mixture = math.log(2) - F.softplus(d)
    return 0.5 * _k3(train_to_mixture) + 0.5 * _k3(rollout_to_mixture)
