"""Triton kernels on a GPU where size or number matters: every amax, beyond 2^31 elements, any M, vLLM's layouts."""

import pytest
import torch

from jetrl_megatron.kernels import swiglu as swiglu_kernels
from jetrl_megatron.kernels.quantize_activation import quantize_activation, quantize_activation_twin
from jetrl_megatron.kernels.quantize_both import quantize_along_tokens, quantize_both, quantize_both_twin
from jetrl_megatron.kernels.quantize_weight import quantize_weight, quantize_weight_twin
from jetrl_megatron.kernels.requantize_along_tokens import requantize_along_tokens, requantize_along_tokens_twin
from jetrl_megatron.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_quantize
from tests.unit.kernel_inputs import RECIPES, all_bf16, assert_bytes, assert_same, groups_of_every_amax

MS = (1, 2, 3, 7, 8, 16, 31, 64, 100, 127, 128, 129, 255, 256, 257, 512, 1000, 2048, 3333, 4095, 6000)


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """New tensors come filled with NaN, so that what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def every_amax(recipe, device) -> torch.Tensor:
    return groups_of_every_amax(recipe.block).to(device)


def test_activation_of_every_amax_exact(recipe, every_amax):
    assert_same(quantize_activation(every_amax, recipe), quantize_activation_twin(every_amax, recipe))


@pytest.mark.parametrize("down", [False, True])
def test_both_of_every_amax_exact(recipe, every_amax, down):
    x = every_amax.t().contiguous() if down else every_amax
    expected = quantize_both_twin(x, recipe)
    for actual, twin in zip(quantize_both(x, recipe), expected, strict=True):
        assert_same(actual, twin)
    assert_same(quantize_along_tokens(x, recipe), expected[1])
    assert_same(requantize_along_tokens(expected[0]), requantize_along_tokens_twin(expected[0]))


def test_weight_tiles_of_every_amax_exact(recipe, device):
    block = recipe.block
    w = torch.zeros(256 * block, 256 * block, dtype=torch.bfloat16, device=device)
    amax = all_bf16().view(256, 256).to(device)
    w[77::block, 5::block] = amax
    w[8::block, 9::block] = amax * -0.7
    for actual, twin in zip(quantize_weight(w, recipe), quantize_weight_twin(w, recipe), strict=True):
        assert_same(actual, twin)


def test_given_amax_of_every_value_exact(recipe, device):
    x = torch.randn(65536, recipe.block, device=device).bfloat16()
    amax = all_bf16()[:, None].float().to(device)
    # NaN of either sign; other negative values are no amax.
    amax = torch.where(amax < 0, -amax, amax)
    assert_same(quantize_activation(x, recipe, amax=amax), quantize_activation_twin(x, recipe, amax=amax))


@pytest.mark.parametrize("shape", [(131_200, 16_520), (8_388_480, 264)])
def test_more_than_2_to_31_elements_exact(recipe, shape, device):
    tokens, features = shape
    assert tokens * features > 2**31
    x = torch.randn(shape[0], 8, device=device).bfloat16().repeat(1, features // 8)
    x[-1, -1] = 300
    # From a group's start to the end, in both directions.
    m, c = (tokens - 1) // 128 * 128, (features - 1) // 128 * 128
    corner = x[m:, c:]
    rows, columns = quantize_both_twin(corner, recipe)
    codes, codes_columns = quantize_both(x, recipe)
    for one in (codes, quantize_activation(x, recipe)):
        assert_bytes("codes", one.data[m:, c:], rows.data)
        assert_bytes("scale", one.scale[m:, -1:], rows.scale)
    again, again_expected = requantize_along_tokens(codes), requantize_along_tokens_twin(rows)
    for actual, expected in ((codes_columns, columns), (again, again_expected)):
        assert_bytes("codes", actual.data[c:, m:], expected.data)
        assert_bytes("scale", actual.scale[c:, -1:], expected.scale)


def test_rows_do_not_depend_on_their_number_exact(recipe, device):
    x, weight = torch.randn(6000, 5120, device=device).bfloat16(), torch.randn(5120, device=device).bfloat16()

    def results(rows: int):
        part = x[:rows]
        y, rstd, _ = rms_norm(part, weight, 1e-6)
        codes = (
            quantize_activation(part, recipe),
            rms_norm_quantize(part, weight, 1e-6, recipe)[0],
            swiglu_kernels.swiglu_quantize(part, recipe),
        )
        plain = y, rstd, swiglu_kernels.swiglu(part, recipe), rms_norm_backward(part, part, weight, rstd)[0]
        return codes, plain

    whole_codes, whole_plain = results(6000)
    for rows in MS:
        codes, plain = results(rows)
        for part, whole in zip(codes, whole_codes, strict=True):
            assert_same(part, whole.narrow(0, 0, rows))
        for part, whole in zip(plain, whole_plain, strict=True):
            assert_bytes(f"M={rows}", part, whole[:rows])


def test_twenty_repeats_are_identical_exact(recipe, device):
    x, dy, weight = (torch.randn(*shape, device=device).bfloat16() for shape in ((3001, 4096), (3001, 4096), (4096,)))

    def results() -> list[torch.Tensor]:
        rows, columns = quantize_both(x, recipe)
        _, rstd, _ = rms_norm(x, weight, 1e-6)
        gated = swiglu_kernels.swiglu_backward_quantize(dy[:, :2048].contiguous(), x, recipe)
        w, transposed = quantize_weight(x, recipe)
        codes = [rows, columns, requantize_along_tokens(rows), *gated, w, transposed]
        return [t for one in codes for t in (one.data.view(torch.uint8), one.scale)] + [
            rstd,
            *rms_norm_backward(dy, x, weight, rstd),
        ]

    first = results()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(results(), first, strict=True))


@pytest.mark.parametrize("tokens", [1, 5, 128, 1001])
def test_activation_equals_vllm_in_its_layout_for_tma_exact(recipe, tokens, device):
    fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    x = (torch.randn(tokens, 4096, device=device) * torch.randn(tokens, 1, device=device).exp()).bfloat16()
    codes, scale = fp8_utils.per_token_group_quant_fp8(
        x,
        recipe.block,
        column_major_scales=True,
        tma_aligned_scales=True,
        use_ue8m0=recipe.scale_format == "ue8m0",
    )
    ours = quantize_activation(x, recipe)
    assert_bytes("codes", ours.data, codes)
    assert_bytes("scale", ours.scale, scale)
    # torch leaves the stride of a single row to whoever makes the tensor.
    assert tokens == 1 or ours.scale.stride() == scale.stride()
