from __future__ import annotations

import math

import pytest
import torch

from jetrl_megatron.precision_flow import mismatch, mismatch_by_position

INF, NAN = math.inf, math.nan


def _metrics(rollout: list[list[float]], train: list[list[float]], mask: list[list[int]]) -> dict[str, float]:
    return mismatch(torch.tensor(rollout), torch.tensor(train), torch.tensor(mask)).to_dict()


def test_mismatch_values_close() -> None:
    """Close: the expected values are written to six digits."""
    got = _metrics([[-1.0, -2.0]], [[-1.1, -1.8]], [[1, 1]])
    assert got["tokens"] == got["tokens_differing"] == 2
    assert got["token_mult_prob_error"] == pytest.approx(1.163287, abs=1e-6)
    assert got["gen_kl_error"] == pytest.approx(0.013120, abs=1e-6)
    # r = g - p: (exp(0.1) - 1 - 0.1 + exp(-0.2) - 1 + 0.2) / 2
    assert got["policy_kl_error"] == pytest.approx(0.011951, abs=1e-6)
    assert got["sampling_importance_ratio"] == pytest.approx((math.exp(-0.1) + math.exp(0.2)) / 2, abs=1e-6)
    assert got["max_abs_dlogp"] == pytest.approx(0.2, abs=1e-6)
    assert got["mean_abs_dlogp"] == pytest.approx(0.15, abs=1e-6)


def test_mismatch_js_is_formula_over_mixture_close() -> None:
    """Close: the formula as published needs exp and log of the log-probs, this module the difference alone."""
    rollout, train = torch.tensor([-1.0, -2.0, -0.3]).double(), torch.tensor([-1.1, -1.2, -3.0]).double()
    mixture = (0.5 * train.exp() + 0.5 * rollout.exp()).log()
    train_part = (train - mixture).exp() - (train - mixture) - 1
    rollout_part = (rollout - mixture).exp() - (rollout - mixture) - 1
    expected = (0.5 * train_part + 0.5 * rollout_part).mean().item()
    got = mismatch(rollout, train, torch.ones(3, dtype=torch.bool))
    assert got.js_divergence_error == pytest.approx(expected, rel=1e-12)


def test_mismatch_sequences_skip_masked_rows_close() -> None:
    """Close: exponentials of decimal fractions."""
    got = _metrics([[-1, -1], [-1, -1], [-1, -1]], [[-1.1, -1.3], [-1.5, -1], [0, 0]], [[1, 1], [1, 0], [0, 0]])
    first, second = (math.exp(0.1) + math.exp(0.3)) / 2, math.exp(0.5)
    assert got["min_seq_mult_prob_error"] == pytest.approx(first, rel=1e-6)
    assert got["max_seq_mult_prob_error"] == pytest.approx(second, rel=1e-6)
    assert got["mean_seq_mult_prob_error"] == pytest.approx((first + second) / 2, rel=1e-6)


@pytest.mark.parametrize("masked", [-INF, INF, NAN, 0.0])
def test_mismatch_masked_values_change_nothing_exact(masked: float) -> None:
    expected = _metrics([[-1.0, -2.0]], [[-1.1, -1.8]], [[1, 1]])
    assert _metrics([[-1.0, masked, -2.0]], [[-1.1, -0.5, -1.8]], [[1, 0, 1]]) == expected
    assert _metrics([[-1.0, -0.5, -2.0]], [[-1.1, masked, -1.8]], [[1, 0, 1]]) == expected
    assert _metrics([[-1.0, masked, -2.0]], [[-1.1, masked, -1.8]], [[1, 0, 1]]) == expected


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_mismatch_empty_mask_is_zero(rows: int) -> None:
    empty = torch.full((rows, 4), -INF)
    got = mismatch(empty, empty, torch.zeros(rows, 4, dtype=torch.bool))
    assert set(got.to_dict().values()) == {0}


def test_mismatch_equal_logprobs_are_neutral_exact() -> None:
    same = torch.tensor([[-0.1, -7.25, -INF]])
    got = mismatch(same, same.clone(), torch.ones(1, 3))
    assert (got.tokens, got.tokens_differing) == (3, 0)
    assert got.gen_kl_error == got.policy_kl_error == got.js_divergence_error == got.max_abs_dlogp == 0
    assert got.token_mult_prob_error == got.sampling_importance_ratio == got.max_seq_mult_prob_error == 1


def test_mismatch_counts_last_bit() -> None:
    rollout = torch.tensor([-1.0, -2.0])
    train = torch.nextafter(rollout, torch.tensor(-INF))
    got = mismatch(rollout, train, torch.ones(2))
    assert got.tokens_differing == 2
    assert 0 < got.gen_kl_error < 1e-13


def test_mismatch_unmasked_minus_inf_is_infinite_not_nan() -> None:
    got = _metrics([[-1.0]], [[-INF]], [[1]])
    assert got["gen_kl_error"] == got["policy_kl_error"] == got["token_mult_prob_error"] == INF
    assert got["sampling_importance_ratio"] == 0
    overflow = _metrics([[-INF]], [[-1.0]], [[1]])
    assert overflow["sampling_importance_ratio"] == 0, "an overflowing ratio counts as 0"
    assert not any(math.isnan(value) for value in {**got, **overflow}.values())


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("side", ["rollout_logprobs", "train_logprobs"])
def test_mismatch_unmasked_bad_value_raises(bad: float, side: str) -> None:
    values = {"rollout_logprobs": torch.tensor([[-1.0, -2.0]]), "train_logprobs": torch.tensor([[-1.0, -2.0]])}
    values[side] = torch.tensor([[-1.0, bad]])
    with pytest.raises(ValueError, match=rf"{side}\[0, 1\]"):
        mismatch(**values, mask=torch.ones(1, 2))


def test_mismatch_shapes_differ_raises() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 4\].*\[2, 3\].*shifted"):
        mismatch(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
    with pytest.raises(ValueError, match="one shape"):
        mismatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        mismatch(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1, 2, 3))


@pytest.mark.parametrize(("ranges", "firsts"), [(1, [0]), (2, [0, 3]), (4, [0, 2, 4]), (64, [0, 1, 2, 3, 4])])
def test_mismatch_by_position_is_the_mismatch_of_each_range_exact(ranges: int, firsts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, train = -torch.rand(2, 3, 5, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    found = mismatch_by_position(rollout, train, mask, ranges=ranges)
    assert [first for first, _ in found] == firsts
    for (first, part), end in zip(found, [*firsts[1:], 5], strict=True):
        assert part == mismatch(rollout[:, first:end], train[:, first:end], mask[:, first:end])
    assert sum(part.tokens for _, part in found) == 11


def test_mismatch_by_position_of_no_tokens_is_empty() -> None:
    assert mismatch_by_position(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0)) == []
