"""Quantisers: scales and codes to the bit, every shape, the failures that others had."""

import math
from fractions import Fraction

import pytest
import torch

from jetrl_megatron import JETRL_FP8, BlockScaledTensor, Fp8BlockRecipe, quantize_activation, quantize_weight
from jetrl_megatron.reference import activation_scale, round_up_to_power_of_two, saturating_cast, weight_scale

FP32 = Fp8BlockRecipe(scale_format="fp32")
RECIPES = pytest.mark.parametrize("recipe", [JETRL_FP8, FP32], ids=["ue8m0", "fp32"])


def every_positive_bf16() -> torch.Tensor:
    bits = torch.arange(0, 0x7F80, dtype=torch.int32)
    return (bits << 16).view(torch.float32)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.uint8)


def test_round_up_to_power_of_two_next_to_powers_exact():
    """ao#4725."""
    x = torch.tensor([0x3C000001, 0x3C000000, 0x3BFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_up_to_power_of_two(x).tolist() == [2**-6, 2**-7, 2**-7]


def test_round_up_to_power_of_two_keeps_nan_and_infinity():
    out = round_up_to_power_of_two(torch.tensor([math.inf, math.nan]))
    assert out[0] == math.inf and out[1].isnan()


def test_weight_scale_ue8m0_exact_for_every_bf16_amax():
    amax = every_positive_bf16()
    scale = weight_scale(amax, JETRL_FP8).double()
    floored = amax.clamp_min(1e-4).double()
    # Independent of the implementation: the smallest power of two that is >= amax / 464, in exact float64 arithmetic.
    expected = torch.tensor([2.0 ** math.ceil(math.log2(a / 464.0) - 1e-13) for a in floored.tolist()])
    assert torch.equal(scale, expected.double())
    assert torch.all(floored / scale <= 464)


def test_weight_codes_survive_requantisation_for_every_bf16_amax_exact():
    # What vLLM 0.26 does to a weight at load: dequantise, amax / 448 with its floor, round the scale up, cast again.
    amax = every_positive_bf16()
    amax = amax[(amax > 1e-4) & (amax < 3e38)]  # the topmost values round up to 2^128, which float32 does not hold
    scale = weight_scale(amax, JETRL_FP8)
    code = saturating_cast(amax / scale, JETRL_FP8)
    value = code.float() * scale
    again = round_up_to_power_of_two(value.clamp_min(1e-4) / torch.full_like(value, 448.0))
    assert torch.equal(bits(again), bits(scale))
    assert torch.equal(bits(saturating_cast(value / again, JETRL_FP8)), bits(code))


def test_weight_requantised_on_load_keeps_scale_and_code():
    """Megatron-LM#6666."""
    w = torch.zeros(128, 128)
    w[0, 0] = 3.59375
    q = quantize_weight(w)
    assert q.scale.item() == 2**-7
    assert q.data[0, 0].float().item() == 448
    assert quantize_weight(q.dequantize(torch.bfloat16)).equal(q)


def test_weight_edge_tiles_are_padded_with_zero():
    w = torch.full((129, 129), 0.25)
    w[128, 128] = 8
    scale = quantize_weight(w, FP32).scale
    assert scale.shape == (2, 2)
    assert scale[1, 0].item() == pytest.approx(5.5804e-4, rel=1e-4)
    assert scale[1, 1].item() == pytest.approx(1.7857e-2, rel=1e-4)


def test_weight_scale_shape_is_of_tiles():
    """DeepSeek-V3#661."""
    q = quantize_weight(torch.randn(256, 384))
    assert q.scale.shape == (2, 3) and q.scale.dtype == torch.float32
    assert q.data.shape == (256, 384) and q.data.dtype == torch.float8_e4m3fn


def test_weight_fp32_recipe_is_not_rounded_to_a_power_of_two():
    """miles#2034."""
    w = torch.full((128, 128), 3.0)
    assert quantize_weight(w, FP32).scale.item() == pytest.approx(0.00669643, abs=1e-8)
    assert quantize_weight(w, JETRL_FP8).scale.item() == 0.0078125


def test_scale_is_a_true_division_exact():
    # 0.00799560546875 / 448 lies nearest to 0x3795B6DB; 1 / (448 / amax) and amax * (1 / 448) give 0x3795B6DC.
    amax = torch.tensor([0.00799561], dtype=torch.bfloat16).float()
    neighbours = [0x3795B6DA, 0x3795B6DB, 0x3795B6DC]
    values = torch.tensor(neighbours, dtype=torch.int32).view(torch.float32).tolist()
    distances = [abs(Fraction(value) - Fraction(amax.item()) / 448) for value in values]
    assert neighbours[distances.index(min(distances))] == 0x3795B6DB
    assert bits(weight_scale(amax, FP32)).item() == 0x3795B6DB
    assert bits(activation_scale(amax, FP32)).item() == 0x3795B6DB


def test_weight_fp32_master_and_bf16_copy_give_the_same_codes_exact():
    """xtuner#2044."""
    master = torch.full((128, 128), 1.0059062)
    assert master.bfloat16()[0, 0].item() == 1.0078125
    assert quantize_weight(master, FP32).equal(quantize_weight(master.bfloat16(), FP32))


@RECIPES
def test_weight_of_zeros_has_finite_positive_scales(recipe):
    """slime#2256."""
    w = torch.zeros(256, 256)
    w[0, 0] = 1
    q = quantize_weight(w, recipe)
    assert torch.all(torch.isfinite(q.scale)) and torch.all(q.scale > 0)
    assert torch.equal(q.dequantize()[128:], torch.zeros(128, 256))
    assert q.dequantize()[0, 0].item() == pytest.approx(1, rel=0.04)


def test_activation_zero_group_scale_is_a_power_of_two():
    """vllm#58032."""
    scale = quantize_activation(torch.zeros(1, 128)).scale
    assert scale.item() > 0
    assert bits(scale).item() & 0x7FFFFF == 0


def test_activation_scale_ue8m0_for_every_bf16_amax_exact():
    amax = every_positive_bf16()
    expected = [2.0 ** math.ceil(math.log2(max(max(a, 1e-10) / 448.0, 1e-10)) - 1e-13) for a in amax.double().tolist()]
    assert torch.equal(activation_scale(amax, JETRL_FP8).double(), torch.tensor(expected, dtype=torch.float64))


def test_cast_saturates_exact():
    """transformers#42775."""
    codes = saturating_cast(torch.tensor([464.0, 465.0, 500.0, -1000.0]), JETRL_FP8)
    assert codes.float().tolist() == [448.0, 448.0, 448.0, -448.0]


@RECIPES
def test_codes_are_nearest_within_rounding(recipe):
    x = torch.randn(50, 384).bfloat16()
    q = quantize_activation(x, recipe)
    error = (q.dequantize() - x.float()).abs()
    # Half a unit in the last of 3 mantissa bits, or half of the smallest subnormal.
    step = q.scale.repeat_interleave(128, 1)
    bound = torch.maximum(x.float().abs() / 16, step * 2**-10)
    # ue8m0 scales may put a value between 448 and the saturation bound only for weights; here none saturates.
    assert torch.all(error <= bound * (1 + 1e-6))


@RECIPES
def test_quantize_nan_in_gives_nan_out(recipe):
    x = torch.randn(3, 256)
    x[1, 130] = math.nan
    values = quantize_activation(x, recipe).dequantize()
    assert values[1, 128:].isnan().all()
    assert not values[1, :128].isnan().any() and not values[[0, 2]].isnan().any()
    w = torch.randn(256, 256)
    w[200, 3] = math.nan
    tiles = quantize_weight(w, recipe).dequantize().isnan()
    assert tiles[128:, :128].all() and tiles.sum() == 128 * 128


@RECIPES
def test_quantize_infinity_does_not_pass_as_a_number(recipe):
    x = torch.randn(1, 128)
    x[0, 5] = math.inf
    assert quantize_activation(x, recipe).dequantize()[0].isnan().any()


@RECIPES
def test_quantize_strided_inputs_exact(recipe):
    x = torch.randn(256, 128).t()
    assert quantize_activation(x, recipe).equal(quantize_activation(x.contiguous(), recipe))
    assert quantize_weight(x, recipe).equal(quantize_weight(x.contiguous(), recipe))
    sliced = torch.randn(64, 512)[::2, 100:356]
    assert quantize_activation(sliced, recipe).equal(quantize_activation(sliced.contiguous(), recipe))


def test_quantize_activation_3d_rows_in_order():
    x = torch.randn(3, 2, 256)
    q = quantize_activation(x)
    assert q.scale.shape == (6, 2)
    for s in range(3):
        for b in range(2):
            assert q.narrow(0, 2 * s + b, 1).equal(quantize_activation(x[s, b]))


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0), (2, 0, 256)])
def test_quantize_activation_empty(shape):
    q = quantize_activation(torch.zeros(shape))
    rows = math.prod(shape[:-1])
    assert q.data.shape == (rows, shape[-1])
    assert q.scale.shape == (rows, -(-shape[-1] // 128))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_quantize_weight_empty(shape):
    q = quantize_weight(torch.zeros(shape))
    assert q.data.shape == shape and q.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (300, 200), (513, 640)])
def test_quantize_weight_ragged_equals_padded_exact(shape):
    w = torch.randn(shape).bfloat16()
    rows, columns = (-(-n // 128) * 128 for n in shape)
    padded = torch.zeros(rows, columns, dtype=torch.bfloat16)
    padded[: shape[0], : shape[1]] = w
    q, whole = quantize_weight(w), quantize_weight(padded)
    assert torch.equal(bits(q.scale), bits(whole.scale))
    assert torch.equal(bits(q.data), bits(whole.data[: shape[0], : shape[1]].contiguous()))


def test_quantize_rejects_what_is_no_float_matrix():
    with pytest.raises(ValueError, match=r"float matrix \[N, K\]"):
        quantize_weight(torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match="torch.int64"):
        quantize_activation(torch.zeros(2, 2, dtype=torch.long))


def test_tensor_block_is_stated_not_guessed():
    """1000 rows with 8 rows of scales: a tile that is guessed from shapes would have 125."""
    scale = torch.arange(1.0, 9.0)[:, None]
    q = BlockScaledTensor(torch.ones(1000, 128).to(torch.float8_e4m3fn), scale, (128, 128), JETRL_FP8)
    values = q.dequantize()[:, 0]
    assert values[127] == 1 and values[128] == 2


def test_tensor_transposed_scale_raises():
    """vllm#47116."""
    w = torch.randn(512, 6144).to(torch.float8_e4m3fn)
    assert BlockScaledTensor(w, torch.ones(4, 48), (128, 128), JETRL_FP8).scale.shape == (4, 48)
    with pytest.raises(ValueError, match=r"scale is \[48, 4\].*expected \[4, 48\].*not transposed"):
        BlockScaledTensor(w, torch.ones(48, 4), (128, 128), JETRL_FP8)


def test_tensor_wrong_dtypes_raise():
    codes = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scales are float32"):
        BlockScaledTensor(codes, torch.ones(1, 1, dtype=torch.bfloat16), (128, 128), JETRL_FP8)
    with pytest.raises(ValueError, match="codes are float8_e4m3fn"):
        BlockScaledTensor(codes.float(), torch.ones(1, 1), (128, 128), JETRL_FP8)


def test_tensor_transpose_moves_scales_with_tiles():
    """unsloth#8953."""
    codes = torch.ones(250, 256).to(torch.float8_e4m3fn)
    q = BlockScaledTensor(codes, torch.tensor([[1.0, 2.0], [4.0, 8.0]]), (128, 128), JETRL_FP8)
    assert q.t().dequantize()[0, 200] == 4
    assert torch.equal(q.t().dequantize(), q.dequantize().t())


def test_tensor_narrow_cuts_at_blocks_only():
    q = quantize_weight(torch.randn(512, 256))
    assert torch.equal(q.narrow(0, 128, 200).dequantize(), q.dequantize()[128:328])
    with pytest.raises(ValueError, match=r"start=64\) cuts a block of 128"):
        q.narrow(1, 64, 128)
