"""Quantisers on a GPU against the readable reference, byte for byte, and against vLLM's own operator."""

import importlib

import pytest
import torch

from jetrl_megatron import JETRL_FP8, BlockScaledTensor, Fp8BlockRecipe
from jetrl_megatron.kernels import rms_norm as triton_norm
from jetrl_megatron.kernels import swiglu as swiglu_kernels
from jetrl_megatron.ops import QUANTIZERS
from jetrl_megatron.ops.backends import ReferenceQuantizer
from jetrl_megatron.reference import rms_norm_backward, swiglu, swiglu_backward

REFERENCE = ReferenceQuantizer()
RECIPES = {"ue8m0": JETRL_FP8, "fp32": Fp8BlockRecipe(scale_format="fp32")}
SHAPES = [(1, 128), (3, 200), (127, 136), (128, 256), (129, 1000), (1000, 1029), (333, 4096)]


@pytest.fixture(params=["cuda", "triton"])
def quantizer(request, device):
    (found,) = [candidate for candidate in QUANTIZERS if candidate.name == request.param]
    reason = found.refusal(JETRL_FP8, device)
    if reason is not None:
        pytest.skip(reason)
    return found


def module_of(quantizer, triton_module):
    """Where the parts of the quantiser's fused operators are."""
    return importlib.import_module("jetrl_megatron.kernels.extension") if quantizer.name == "cuda" else triton_module


@pytest.fixture(params=RECIPES)
def recipe(request) -> Fp8BlockRecipe:
    return RECIPES[request.param]


def test_requantize_scales_that_differ_by_more_than_half_precision_holds_exact(quantizer, device):
    x = torch.randn(256, 384) * torch.logspace(-8, 8, 256)[:, None]
    x[:, 100:140] = 0
    x[7], x[9, 5], x[200, 300] = 0, float("nan"), float("inf")
    for rows, columns in ((slice(None), slice(None)), (slice(0, 200), slice(0, 130)), (slice(60, 90), slice(90, 150))):
        codes = REFERENCE.activation(x[rows, columns].bfloat16(), JETRL_FP8)
        there = BlockScaledTensor(codes.data.to(device), codes.scale.to(device), codes.block, JETRL_FP8)
        assert_same(quantizer.requantize_along_tokens(there), REFERENCE.requantize_along_tokens(codes))


def poison(device) -> None:
    """Fills the memory that the next outputs get, so that what a kernel leaves out shows."""
    blocks = [torch.full((1 << 22,), 0xFF, dtype=torch.uint8, device=device) for _ in range(8)]
    del blocks


def assert_same(actual: BlockScaledTensor, expected: BlockScaledTensor) -> None:
    """Equal bytes, on the CPU's word; NaN equals NaN whatever its sign."""
    assert actual.block == expected.block and actual.shape == expected.shape
    for name in ("scale", "data"):
        a, b = (getattr(side, name).to(torch.float32).cpu() for side in (actual, expected))
        differing = (a != b) & ~(a.isnan() & b.isnan())
        if differing.any():
            at = tuple(differing.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}{list(at)}: {a[at].item()!r} != {b[at].item()!r}, {int(differing.sum())} differ"
            )
    a, b = (side.data.view(torch.uint8).cpu() for side in (actual, expected))
    zeros = (a & 0x7F) == 0
    assert torch.equal(a[zeros], b[zeros]), "the sign of zero"


def all_bf16() -> torch.Tensor:
    """[65536, 128]: each BF16 value, NaN and infinity among them, as the amax of a group of many values."""
    amax = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = amax[:, None].float() * torch.linspace(1, -1, 128)[None]
    return torch.where(torch.isnan(amax)[:, None], amax[:, None].float(), x).bfloat16()


def edges() -> torch.Tensor:
    x = torch.randn(256, 512)
    x[:, 128:256] = 0
    x[:, 256:384] *= 1e-12
    x[0, :128], x[1, :128], x[2, 5], x[3, 6] = 448, -448, float("nan"), float("inf")
    x[4, 384:], x[5, 384:] = torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max
    return x.bfloat16()


INPUTS = {"all_bf16": all_bf16, "all_bf16_down": lambda: all_bf16().t().contiguous(), "edges": edges}
INPUTS |= {f"{m}x{k}": (lambda m=m, k=k: (torch.randn(m, k) * 3).bfloat16()) for m, k in SHAPES}
INPUTS["strided"] = lambda: torch.randn(300, 640).bfloat16()[:, 128:384]
INPUTS["misaligned"] = lambda: torch.randn(300, 259).bfloat16()[:, 3:]


@pytest.fixture(params=INPUTS)
def x(request, device) -> torch.Tensor:
    return INPUTS[request.param]().to(device)


def test_activation_exact(quantizer, recipe, x, device):
    poison(device)
    assert_same(quantizer.activation(x, recipe), REFERENCE.activation(x.cpu(), recipe))


def test_both_exact(quantizer, recipe, x, device):
    poison(device)
    for actual, expected in zip(quantizer.both(x, recipe), REFERENCE.both(x.cpu(), recipe), strict=True):
        assert_same(actual, expected)


def test_along_tokens_exact(quantizer, recipe, x, device):
    poison(device)
    assert_same(quantizer.along_tokens(x, recipe), REFERENCE.along_tokens(x.cpu(), recipe))


def test_requantize_along_tokens_exact(quantizer, recipe, x, device):
    codes = REFERENCE.activation(x.cpu(), recipe)
    expected = REFERENCE.requantize_along_tokens(codes)
    for scale in (codes.scale.to(device), codes.scale.t().contiguous().to(device).t()):
        poison(device)
        there = BlockScaledTensor(codes.data.to(device), scale, codes.block, recipe)
        assert_same(quantizer.requantize_along_tokens(there), expected)


def test_weight_exact(quantizer, recipe, x, device):
    poison(device)
    codes, transposed = quantizer.weight(x, recipe)
    expected, _ = REFERENCE.weight(x.cpu(), recipe)
    assert_same(codes, expected)
    assert_same(transposed, expected.t())


def test_given_amax_exact(quantizer, recipe, device):
    x = torch.randn(300, 640).bfloat16()
    of_rows, of_tiles = torch.rand(300, 5) * 4, torch.rand(3, 5) * 4
    assert_same(
        quantizer.activation(x.to(device), recipe, amax=of_rows.to(device)),
        REFERENCE.activation(x, recipe, amax=of_rows),
    )
    codes, _ = quantizer.weight(x.to(device), recipe, amax=of_tiles.to(device))
    assert_same(codes, REFERENCE.weight(x, recipe, amax=of_tiles)[0])


def test_many_weights_in_few_launches_exact(recipe, device):
    extension = pytest.importorskip("jetrl_megatron.kernels.extension")
    weights = [torch.randn(128 + 8 * i, 264 - 8 * (i % 4), device=device).bfloat16() for i in range(90)]
    for w, (codes, transposed) in zip(weights, extension.quantize_weights(weights, recipe), strict=True):
        expected, _ = REFERENCE.weight(w.cpu(), recipe)
        assert_same(codes, expected)
        assert_same(transposed, expected.t())


@pytest.mark.parametrize("shape", [(0, 256), (256, 0)])
def test_empty(quantizer, recipe, shape, device):
    x = torch.zeros(shape, device=device).bfloat16()
    assert quantizer.activation(x, recipe).shape == shape
    rows, columns = quantizer.both(x, recipe)
    assert rows.shape == shape and columns.shape == (shape[1], -(-shape[0] // 128) * 128)
    assert quantizer.requantize_along_tokens(rows).shape == columns.shape
    assert quantizer.weight(x, recipe)[1].shape == shape[::-1]


def test_repeats_are_identical_and_rows_do_not_depend_on_their_number_exact(quantizer, recipe, device):
    x, weight = torch.randn(6000, 4096, device=device).bfloat16(), torch.rand(4096, device=device).bfloat16()
    whole = quantizer.activation(x, recipe)
    normed, _ = quantizer.rms_norm(x, weight, 1e-6, recipe)
    hidden = quantizer.swiglu(x, recipe)
    for repeat in range(20):
        assert_same(quantizer.both(x[:1000], recipe)[1], quantizer.both(x[:1000], recipe)[1])
        rows = (1, 2, 3, 7, 8, 16, 31, 64, 100, 127, 128, 129, 255, 256, 257, 512, 1000, 2048, 4095, 6000)[repeat]
        assert quantizer.activation(x[:rows], recipe).equal(whole.narrow(0, 0, rows))
        assert quantizer.rms_norm(x[:rows], weight, 1e-6, recipe)[0].equal(normed.narrow(0, 0, rows))
        assert quantizer.swiglu(x[:rows], recipe).equal(hidden.narrow(0, 0, rows))


@pytest.mark.parametrize("shape", [(1, 128), (130, 1000), (257, 4096), (64, 5120), (33, 8192)])
def test_rms_norm_fused_equals_parts_exact(quantizer, recipe, shape, device):
    x, residual = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(shape[1], device=device).bfloat16()
    norms = module_of(quantizer, triton_norm)
    for added in (None, residual):
        y, rstd, sums = norms.rms_norm(x, weight, 1e-6, added)
        codes, fused_rstd, fused_sums = norms.rms_norm_quantize(x, weight, 1e-6, recipe, added)
        assert codes.equal(quantizer.activation(y, recipe)) and torch.equal(rstd, fused_rstd)
        twin, twin_rstd, twin_sums = triton_norm.rms_norm_twin(x, weight, 1e-6, added)
        torch.testing.assert_close(y, twin, rtol=8e-3, atol=1e-3)  # one rounding of BF16
        torch.testing.assert_close(rstd, twin_rstd, rtol=1e-5, atol=0)
        if added is not None:
            assert torch.equal(sums, fused_sums) and torch.equal(sums, twin_sums)


def test_rms_norm_backward_close(quantizer, device):
    x, dy = (torch.randn(3001, 5120, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(5120, device=device).bfloat16()
    _, rstd, _ = triton_norm.rms_norm(x, weight, 1e-6)
    dx, dweight = quantizer.rms_norm_backward(dy, x, weight, rstd)
    expected_dx, expected_dweight = rms_norm_backward(dy.double(), x.double(), weight.double(), rstd.double())
    torch.testing.assert_close(dx, expected_dx, rtol=1.6e-2, atol=1e-3)
    torch.testing.assert_close(dweight.double(), expected_dweight, rtol=1e-3, atol=1e-3)
    again = quantizer.rms_norm_backward(dy, x, weight, rstd)
    assert torch.equal(again[0], dx) and torch.equal(again[1], dweight)


@pytest.mark.parametrize("shape", [(1, 128), (130, 256), (300, 1024)])
def test_swiglu_fused_equals_parts_exact(quantizer, recipe, shape, device):
    y = (torch.randn(shape[0], 2 * shape[1], device=device) * 4).bfloat16()
    dh = torch.randn(shape, device=device).bfloat16()
    h = module_of(quantizer, swiglu_kernels).swiglu(y, recipe)
    assert quantizer.swiglu(y, recipe).equal(quantizer.activation(h, recipe))
    torch.testing.assert_close(h, swiglu(y), rtol=1.6e-2, atol=1e-6)
    dy = module_of(quantizer, swiglu_kernels).swiglu_backward(dh, y, recipe)
    torch.testing.assert_close(dy, swiglu_backward(dh, y), rtol=1.6e-2, atol=1e-3)
    poison(device)
    for fused, part in zip(quantizer.swiglu_backward(dh, y, recipe), quantizer.both(dy, recipe), strict=True):
        assert_same(fused, part)


def test_activation_equals_vllm_exact(quantizer, recipe, x):
    pytest.importorskip("vllm")
    import vllm._custom_ops  # noqa: F401 - registers torch.ops._C

    if x.shape[1] % recipe.block:
        pytest.skip("the operator takes whole groups")
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[0], x.shape[1] // recipe.block, device=x.device)
    torch.ops._C.per_token_group_fp8_quant(
        x, codes, scale, recipe.block, 1e-10, -448.0, 448.0, recipe.scale_format == "ue8m0", False, False
    )
    finite = x.isfinite().view(*scale.shape, recipe.block).all(-1)
    ours = quantizer.activation(x, recipe)
    assert torch.equal(ours.scale[finite], scale[finite])
    same = ours.data.view(torch.uint8) == codes.view(torch.uint8)
    assert same.view(*scale.shape, recipe.block)[finite].all()
