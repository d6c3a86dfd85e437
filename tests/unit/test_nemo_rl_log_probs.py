"""Log-probs for NeMo-RL: vLLM's numbers, for whole sequences and in chunks, with a gradient."""

from __future__ import annotations

import types

import pytest
import torch

from jetrl_megatron.integrations.nemo_rl.log_probs import ParityLogProb, use_parity_log_probs
from jetrl_megatron.ops.log_prob import token_log_probs

VOCABULARY = 1000


@pytest.fixture
def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    # Padded, as Megatron pads a vocabulary.
    return torch.randn(2, 9, 1024, generator=generator).mul(3).bfloat16()


@pytest.fixture
def targets() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parity_log_prob_equals_the_rollouts_exact(logits, targets, dtype):
    expected = token_log_probs(logits.flatten(0, 1), targets.flatten(), vocabulary=VOCABULARY)
    found = ParityLogProb(VOCABULARY).apply(logits.to(dtype), targets, 0, 1024, None, True)
    assert torch.equal(found, expected.view(2, 9)) and found.dtype == torch.float32


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
def test_parity_log_prob_in_chunks_is_the_same_exact(logits, targets, chunk):
    whole = ParityLogProb(VOCABULARY).apply(logits, targets, 0, 1024, None)
    found = ParityLogProb(VOCABULARY, chunked=True).apply(logits, targets, 0, 1024, chunk, None, True)
    assert torch.equal(found, whole)


def test_parity_log_prob_has_the_gradient_of_log_softmax(logits, targets):
    ours, theirs = (logits.float().requires_grad_() for _ in range(2))
    weights = torch.linspace(-1, 1, 18).view(2, 9)
    (ParityLogProb(VOCABULARY, chunked=True).apply(ours, targets, 0, 1024, 4, None) * weights).sum().backward()
    reference = torch.log_softmax(theirs[..., :VOCABULARY], -1).gather(-1, targets[..., None])[..., 0]
    (reference * weights).sum().backward()
    # dlogits are BF16, as the logits are.
    torch.testing.assert_close(ours.grad, theirs.grad, atol=2**-9, rtol=2**-7)
    assert not ours.grad[..., VOCABULARY:].any()


def test_use_parity_log_probs_replaces_both():
    module = types.ModuleType("model_utils")
    use_parity_log_probs(module, VOCABULARY)
    assert isinstance(module.DistributedLogprob, ParityLogProb)
    assert isinstance(module.ChunkedDistributedLogprob, ParityLogProb)


def test_nemo_rls_functions_use_it(megatron, logits, targets):
    """NeMo-RL's own functions, for sequences that are packed and for those that are not, end in our numbers."""
    model_utils = pytest.importorskip("nemo_rl.distributed.model_utils", exc_type=ImportError)
    before = model_utils.DistributedLogprob, model_utils.ChunkedDistributedLogprob
    use_parity_log_probs(model_utils, VOCABULARY)
    try:
        expected = token_log_probs(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), vocabulary=VOCABULARY)
        group = torch.distributed.group.WORLD
        for chunk in (None, 4):
            found = model_utils.get_next_token_logprobs_from_logits(
                targets, logits, vocab_parallel_rank=0, vocab_parallel_group=group, chunk_size=chunk
            )
            assert torch.equal(found, expected.view(2, 8))
            packed = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
                logits.view(1, 18, -1), targets.view(1, 18), torch.tensor([0, 9, 18]), 9, 0, 1024, group, True,
                chunk_size=chunk,
            )  # fmt: skip
            assert torch.equal(packed, expected.view(2, 8))
    finally:
        model_utils.DistributedLogprob, model_utils.ChunkedDistributedLogprob = before


def test_importance_sampling_correction_changes_nothing_at_zero_mismatch():
    """NeMo-RL's loss with the correction that it asks for with FP8 rollouts, and without: the same bits."""
    losses = pytest.importorskip("nemo_rl.algorithms.loss.loss_functions", exc_type=ImportError)
    generator = torch.Generator().manual_seed(2)
    logp = -torch.rand(4, 17, generator=generator) * 5
    data = {
        "advantages": torch.randn(4, 17, generator=generator),
        "prev_logprobs": logp,
        "generation_logprobs": logp.clone(),
        "reference_policy_logprobs": logp - 0.1,
        "token_mask": (torch.rand(4, 17, generator=generator) > 0.2).float(),
        "sample_mask": torch.ones(4),
    }
    results = []
    for corrected in (False, True):
        config = losses.ClippedPGLossConfig(**_loss_config(corrected))
        current = (logp[:, 1:] + 0.01).requires_grad_()
        loss, metrics = losses.ClippedPGLossFn(config)(
            next_token_logprobs=current,
            data=data,
            global_valid_seqs=torch.tensor(4.0),
            global_valid_toks=data["token_mask"][:, 1:].sum(),
        )
        loss.backward()
        assert metrics["token_mult_prob_error"] == 1.0
        results.append((loss.detach(), current.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def _loss_config(corrected: bool) -> dict[str, object]:
    from pathlib import Path

    from jetrl_megatron.integrations.nemo_rl.command import read_config

    values = read_config(Path(__file__).parents[2] / "conf" / "grpo_smoke_1n1g.yaml").values["loss_fn"]
    assert values["use_importance_sampling_correction"] is True
    return {**values, "use_importance_sampling_correction": corrected}
