"""Weights of a rollout that has other bytes than training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from jetrl_megatron.convert.fp8_weights import iter_fp8_weights
from jetrl_megatron.integrations.requantized import RequantizedSource, _with_one_scale
from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.reference import saturating_cast

FP32 = dataclasses.replace(JETRL_FP8, scale_format="fp32")


def test_one_scale_is_that_of_the_largest_magnitude_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(256, 384, generator=generator).bfloat16() for _ in range(2)]
    weights[0][:128] *= 8
    norm = torch.ones(384).bfloat16()
    matrices = [
        ("decoder.layers.0.mlp.linear_fc2", "a.weight", weights[0]),
        ("decoder.final_layernorm", "norm.weight", norm),
        ("decoder.layers.1.mlp.linear_fc2", "b.weight", weights[1]),
    ]
    found, tiles = _with_one_scale(matrices, FP32, 2), dict(iter_fp8_weights(matrices, FP32, 2))
    assert list(found) == list(tiles) and found["norm.weight"] is norm
    for name, weight in zip("ab", weights, strict=True):
        scale = found[f"{name}.weight_scale_inv"]
        assert scale.shape == tiles[f"{name}.weight_scale_inv"].shape
        assert scale.unique().tolist() == [weight.float().abs().max().item() / torch.tensor(448.0)]
        expected = saturating_cast(weight.float() / scale[0, 0], FP32)
        assert torch.equal(found[f"{name}.weight"].view(torch.uint8), expected.view(torch.uint8))


def test_one_scale_with_powers_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="one_scale=True with scale_format='ue8m0'.*use 'fp32'"):
        RequantizedSource([], hf_config="x", recipe=JETRL_FP8, one_scale=True)
