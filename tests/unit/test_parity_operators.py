"""Operators around the linears on a CPU: gradients against float64, layouts, errors."""

import pytest
import torch
import torch.nn.functional as F

from jetrl_megatron.ops.attention import attention_refusal
from jetrl_megatron.ops.bf16_linear import row_invariant_linear, row_invariant_refusal
from jetrl_megatron.ops.log_prob import aligned_rows, token_log_probs
from jetrl_megatron.ops.norm import norm_forward, norm_kernel, rms_norm
from jetrl_megatron.ops.qkv import Rotation, split_heads
from jetrl_megatron.ops.rope import cos_sin_cache, rope
from jetrl_megatron.ops.swiglu import silu_and_mul
from tests.float64 import split_heads64

EPS = 1e-6
BF16_STEP = 2**-8


def assert_gradient(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within BF16's roundings of a gradient computed in float64."""
    assert (actual.double() - expected).norm() <= BF16_STEP * expected.norm()


@pytest.mark.parametrize("shape", [(3, 2, 96), (4, 1, 5, 64)])
def test_rms_norm_and_its_gradient(shape):
    x = torch.randn(shape).bfloat16().requires_grad_()
    weight = (1 + 0.1 * torch.randn(shape[-1])).bfloat16().requires_grad_()
    dy = torch.randn(shape).bfloat16()
    y = rms_norm(x, weight, EPS)
    y.backward(dy)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    y64 = F.rms_norm(x64, shape[-1:], weight64, EPS)
    y64.backward(dy.double())
    assert y.dtype == torch.bfloat16 and y.shape == x.shape
    for actual, expected in ((y, y64), (x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert_gradient(actual.detach(), expected.detach())


def test_norm_forward_rounds_the_residual_sum_first_exact():
    x, residual, weight = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16(), torch.ones(64).bfloat16()
    y, rstd, total = norm_forward(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, norm_forward(total, weight, EPS)[0]) and rstd.shape == (5,)
    assert norm_kernel(x, weight) == "torch"


def test_rope_matches_formula_and_gradient_turns_back_exact():
    angles = torch.outer(torch.arange(40).float(), torch.logspace(0, -3, 32))
    cos_sin = cos_sin_cache(torch.cat([angles, angles], dim=1)[:, None, None, :])
    assert torch.equal(cos_sin, torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16())
    x, positions = torch.randn(7, 3, 64).bfloat16().requires_grad_(), torch.tensor([0, 1, 2, 3, 39, 0, 1])
    y = rope(x, positions, cos_sin)
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, -1)
    a, b = x.detach().double().chunk(2, -1)
    assert torch.equal(y, torch.cat([a * cos - b * sin, b * cos + a * sin], -1).float().bfloat16())
    assert torch.equal(y[0], x[0]) and torch.equal(y[5], x[5]), "position 0 turns nothing"
    y.backward(y.detach())
    assert (x.grad.double() - x.detach().double()).abs().max() < 0.05


@pytest.mark.parametrize("normed", [True, False])
def test_split_heads_and_their_gradients_against_float64(normed):
    qkv = torch.randn(40, 2, 5, 64).bfloat16().requires_grad_()
    weights = [(1 + 0.1 * torch.randn(64)).bfloat16().requires_grad_() for _ in range(2 * normed)]
    angles = torch.outer(torch.arange(40).float(), torch.logspace(0, -3, 32))
    rotation = Rotation(torch.randperm(40), cos_sin_cache(torch.cat([angles, angles], dim=1)))
    options = {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS} if normed else {}
    parts = split_heads(qkv, rotation, **options)
    inputs64 = [tensor.detach().double().requires_grad_() for tensor in (qkv, *weights)]
    expected = split_heads64(inputs64[0], rotation, inputs64[1:], EPS)
    upstream = [torch.randn(part.shape).bfloat16() for part in parts]
    found = torch.autograd.grad(parts, [qkv, *weights], upstream)
    found64 = torch.autograd.grad(expected, inputs64, [each.double() for each in upstream])
    for actual, wanted in zip((*parts, *found), (*expected, *found64), strict=True):
        assert_gradient(actual.detach(), wanted.detach())


def test_silu_and_mul_rounds_twice_exact():
    gate_up = torch.randn(2, 3, 512).bfloat16()
    gate, up = gate_up.chunk(2, -1)
    assert torch.equal(silu_and_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("vocabulary", [None, 61])
def test_token_log_probs_and_their_gradient(vocabulary):
    logits, targets = torch.randn(9, 64).bfloat16().requires_grad_(), torch.arange(9) * 5
    weight = torch.randn(9)
    log_probs = token_log_probs(logits, targets, vocabulary=vocabulary)
    (log_probs * weight).sum().backward()
    logits64 = logits.detach().double().requires_grad_()
    expected = logits64[:, :vocabulary].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected * weight).sum().backward()
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-6)
    assert_gradient(logits.grad, logits64.grad)
    assert logits.grad[:, vocabulary or 64 :].abs().sum() == 0


def test_token_log_probs_of_no_token_are_not_a_number():
    logits = torch.randn(3, 64).bfloat16()
    log_probs = token_log_probs(logits, torch.tensor([5, -100, 62]), vocabulary=60)
    assert log_probs.isnan().tolist() == [False, True, True]


def test_token_log_probs_refuses_what_does_not_fit():
    logits = torch.zeros(4, 8).bfloat16()
    with pytest.raises(ValueError, match=r"logits \[4, 8\] and targets \[3\]"):
        token_log_probs(logits, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="vocabulary=9 is more than the 8 columns"):
        token_log_probs(logits, torch.zeros(4, dtype=torch.long), vocabulary=9)


def test_token_log_probs_refuses_gathered_logits(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match="vocabulary=8 leaves padding alone to the last of 2 ranks of 8 columns"):
        token_log_probs(torch.zeros(4, 8).bfloat16(), torch.zeros(4, dtype=torch.long), vocabulary=8, group=object())


def test_aligned_rows_are_the_logits_exact():
    logits = torch.randn(3, 48).bfloat16()
    assert aligned_rows(logits[:, :41]).data_ptr() == logits.data_ptr()
    odd = torch.randn(3, 40).bfloat16()[:, :37]
    rows = aligned_rows(odd)
    assert torch.equal(rows, odd) and rows.stride() == (48, 1)


def test_token_log_probs_refuses_widened_logits():
    with pytest.raises(ValueError, match="logits are torch.float32.*fp32_output=False"):
        token_log_probs(torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))


def test_refusals_name_the_device():
    cpu = torch.device("cpu")
    for refusal in (attention_refusal(cpu), row_invariant_refusal(cpu)):
        assert refusal == "it needs a Hopper GPU, not cpu"


def test_row_invariant_linear_refuses_odd_vocabularies():
    with pytest.raises(ValueError, match=r"weight \[12, 64\].*pad the vocabulary"):
        row_invariant_linear(torch.zeros(2, 64), torch.zeros(12, 64))
