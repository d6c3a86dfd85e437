"""Kernels of the operators around the linears against their twins; see kernel_cases.py, whose rules hold here."""

# Shape suffixes: T tokens, H heads, D head size, V vocabulary.

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from jetrl_megatron.kernels import head_norm, log_prob, norm_rope, rope
from tests.unit.kernel_cases import EPS, Case, assert_close, assert_same, assert_within, random, run

PARITY_MODULES = (head_norm, log_prob, norm_rope, rope)


def heads(tokens: int, count: int, size: int) -> torch.Tensor:
    """BF16 [T, H, D] between other columns, as heads lie in a fused projection."""
    whole = random(tokens, (count + 2) * size) if tokens else torch.zeros(0, (count + 2) * size).bfloat16()
    return whole.view(tokens, count + 2, size)[:, 1:-1]


def norm(tokens: int, count: int, size: int) -> None:
    """The order of summation is the kernel's own: one BF16 rounding."""
    x, gain = heads(tokens, count, size), random(1, size)[0]
    y, rstd = head_norm.head_norm(x, gain, EPS)
    expected_y, expected_rstd = head_norm.head_norm_twin(x, gain, EPS)
    assert_within("y", y, expected_y, steps=1)
    torch.testing.assert_close(rstd, expected_rstd, rtol=1e-6, atol=0)
    few, _ = head_norm.head_norm(x[:1].contiguous(), gain, EPS)
    assert_same("a row alone", few, y[:1])


def norm_backward(tokens: int, count: int, size: int) -> None:
    x, gain = heads(tokens, count, size), random(1, size)[0]
    dy = heads(tokens, count, size).flip(0) * 0.01
    _, rstd = head_norm.head_norm_twin(x, gain, EPS)
    dx, dgain = head_norm.head_norm_backward(dy, x, gain, rstd)
    expected_dx, expected_dgain = head_norm.head_norm_backward_twin(dy, x, gain, rstd)
    assert_close("dx", dx, expected_dx, 5e-3)
    assert_close("dgain", dgain, expected_dgain, 1e-5)


def places(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions that are not in order, and a cache of their angles."""
    angles = torch.outer(torch.arange(3 * tokens + 1).float(), torch.logspace(0, -3, size // 2))
    return torch.arange(tokens).flip(0) * 3, torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16()


def rotate(tokens: int, count: int, size: int) -> None:
    """Exact: products of BF16 are, and one addition rounds."""
    x, (positions, cos_sin) = heads(tokens, count, size), places(tokens, size)
    for inverse in (False, True):
        actual = rope.rope(x, positions, cos_sin, inverse=inverse)
        assert_same(f"inverse={inverse}", actual, rope.rope_twin(x, positions, cos_sin, inverse=inverse))


def norm_and_rotate(tokens: int, groups: int, members: int, size: int, normed: bool) -> None:
    """Byte-equal to the kernels of its parts; the gradient's row is summed by halves."""
    qkv = random(tokens, groups * (members + 2) * size).view(tokens, groups, members + 2, size)
    gain, (positions, cos_sin) = random(1, size)[0] if normed else None, places(tokens, size)
    dqkv = torch.full_like(qkv, torch.nan)
    for part in (slice(members), slice(members, members + 1)):
        x, dx = qkv[:, :, part], dqkv[:, :, part]
        y, rstd = norm_rope.norm_rope(x, gain, EPS, positions, cos_sin)
        heads_alone = x.flatten(1, 2)
        expected, expected_rstd = head_norm.head_norm(heads_alone, gain, EPS) if normed else (heads_alone, None)
        assert_same("y", y, rope.rope(expected, positions, cos_sin))
        assert (rstd is None) == (not normed)
        dy = heads(tokens, y.shape[1], size).flip(0) * 0.01
        dgain = norm_rope.norm_rope_backward(dy, x, gain, rstd, positions, cos_sin, dx)
        expected_dx = torch.empty_like(dx)
        arguments = dy, x, gain, rstd, positions, cos_sin, expected_dx
        expected_dgain = norm_rope.norm_rope_backward_twin(*arguments)
        if normed:
            assert_same("rstd", rstd, expected_rstd)
            assert_close("dx", dx, expected_dx, 5e-3)
            assert_close("dgain", dgain, expected_dgain, 1e-5)
        else:
            assert_same("dx", dx, expected_dx)
    assert dqkv[:, :, -1].isnan().all(), "the gradient of v is not this kernel's"


def log_probs(tokens: int, vocabulary: int, dtype: torch.dtype) -> None:
    """exp, log and the sum's order differ from torch's in last bits."""
    generator = torch.Generator().manual_seed(vocabulary)
    padded = (torch.randn(tokens, vocabulary + 24, generator=generator) * 4).to(dtype)
    padded[:, vocabulary:] = 1000
    logits = padded[:, :vocabulary]
    # A column of a larger tensor, as labels of a batch may be.
    targets = torch.randint(vocabulary, (tokens, 2), generator=generator)[:, 0]
    targets[-1] = -100 if vocabulary == 2500 else targets[-1]
    actual, expected = log_prob.token_log_probs(logits, targets), log_prob.token_log_probs_twin(logits, targets)
    for name, a, b in zip(("log_probs", "maxima", "totals"), actual, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-6, atol=2e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    gradient = torch.randn(tokens, generator=generator)
    for first in (0, vocabulary // 2):
        arguments = gradient, logits[:, first:], targets, *expected[1:]
        a = log_prob.token_log_probs_backward(*arguments, first_column=first)
        b = log_prob.token_log_probs_backward_twin(*arguments, first_column=first)
        assert a.dtype == dtype
        assert_close(f"gradient from {first}", a, b, 1e-2 if dtype == torch.bfloat16 else 1e-5)


def _cases() -> Iterator[tuple[str, Case]]:
    for tokens, count, size in ((1, 1, 64), (5, 3, 128), (40, 2, 96), (3, 5, 256)):
        sizes = f"{tokens}x{count}x{size}"
        yield f"head_norm-{sizes}", functools.partial(norm, tokens, count, size)
        yield f"head_norm_backward-{sizes}", functools.partial(norm_backward, tokens, count, size)
        yield f"rope-{sizes}", functools.partial(rotate, tokens, count, size)
    for tokens, groups, members, size in ((1, 1, 1, 64), (9, 2, 3, 128), (5, 3, 1, 96), (7, 2, 4, 256)):
        for normed in (True, False):
            case = f"norm_rope+norm_rope_backward-{tokens}x{groups}x{members}x{size}-{normed}"
            yield case, functools.partial(norm_and_rotate, tokens, groups, members, size, normed)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, vocabulary in ((1, 7), (3, 1024), (2, 2500)):
            case = f"token_log_probs+token_log_probs_backward-{tokens}x{vocabulary}-{dtype}"
            yield case, functools.partial(log_probs, tokens, vocabulary, dtype)


PARITY_CASES: dict[str, Case] = dict(_cases())


if __name__ == "__main__":
    run(PARITY_CASES)
