"""What the CUDA kernels compute, byte for byte against the reference, without a GPU: see `cuda_on_cpu`."""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import pytest
import torch

from jetrl_megatron import JETRL_FP8, BlockScaledTensor, Fp8BlockRecipe, reference
from jetrl_megatron.kernels.rules import activation_rule, weight_rule
from jetrl_megatron.ops.backends import ReferenceQuantizer
from jetrl_megatron.tensor import ceil_div
from tests.unit.cuda_on_cpu import Codes, ScaleRule, build, host_source

REFERENCE = ReferenceQuantizer()
RECIPES = {"ue8m0": JETRL_FP8, "fp32": Fp8BlockRecipe(scale_format="fp32")}
SHAPES = [(1, 1), (3, 128), (129, 144), (130, 200), (127, 129), (300, 136)]
GUARD = 64


@pytest.fixture(scope="module")
def kernels(cuda_toolkit, tmp_path_factory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ was not found")
    return build(cuda_toolkit / "include", tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture(params=RECIPES)
def recipe(request) -> Fp8BlockRecipe:
    return RECIPES[request.param]


class Output:
    """Codes [rows, columns] and their scales, stored group by group, with guards around both."""

    def __init__(self, rows: int, columns: int, recipe: Fp8BlockRecipe) -> None:
        self.rows, self.columns, self.recipe = rows, columns, recipe
        self.stride, self.groups = ceil_div(rows, 4) * 4, ceil_div(columns, recipe.block)
        self.codes = torch.full((rows * columns + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        self.scale = torch.full((self.stride * self.groups + 2 * GUARD,), -7.0)

    @property
    def argument(self) -> Codes:
        return Codes(self.codes.data_ptr() + GUARD, self.scale.data_ptr() + 4 * GUARD, self.stride)

    def result(self) -> BlockScaledTensor:
        scale = self.scale[GUARD:-GUARD].view(self.groups, self.stride).t()
        untouched = [part[edge] for part in (self.codes, self.scale) for edge in (slice(GUARD), slice(-GUARD, None))]
        assert all((part == fill).all() for part, fill in zip(untouched, (0xA5, 0xA5, -7, -7), strict=True)), "bounds"
        assert (scale[self.rows :] == -7).all(), "scales of rows that are not there"
        codes = self.codes[GUARD:-GUARD].view(self.rows, self.columns).view(torch.float8_e4m3fn)
        return BlockScaledTensor(codes, scale[: self.rows], self.recipe.activation_block, self.recipe)


NOTHING = Codes(None, None, 0)


def scale_rule(fields: dict[str, Any]) -> ScaleRule:
    return ScaleRule(*(fields[name] for name in ("amax_floor", "divisor", "scale_floor", "power_of_two")))


def rule(recipe: Fp8BlockRecipe) -> ScaleRule:
    return scale_rule(activation_rule(recipe))


def pointer(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def assert_same(actual: BlockScaledTensor, expected: BlockScaledTensor) -> None:
    """Equal bytes; NaN equals NaN whatever its sign."""
    nan = actual.scale.isnan()
    assert torch.equal(nan, expected.scale.isnan())
    assert torch.equal(actual.scale[~nan], expected.scale[~nan])
    ours, theirs = (side.data.view(torch.uint8).clone() for side in (actual, expected))
    for codes in (ours, theirs):
        codes[(codes & 0x7F) == 0x7F] = 0x7F
    differing = (ours != theirs).nonzero()
    assert not len(differing), (differing[0].tolist(), len(differing))


def edges(rows: int, columns: int, *, special: bool) -> torch.Tensor:
    """BF16 rows of very different magnitude, and NaN, infinity, zeros and the largest values among them."""
    torch.manual_seed(rows + columns)
    x = (torch.randn(rows, columns) * torch.exp2(torch.randint(-20, 20, (rows, 1)).float())).bfloat16()
    if special:
        values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.38e38, -3.38e38, 1e-40, 448.0, 464.0, 449.0]
        for value in values:
            x.view(-1)[torch.randint(x.numel(), (max(x.numel() // 9000, 1),))] = value
    if rows > 4:
        x[rows // 2], x[1] = 0, 1e-12
    return x


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_both_exact(kernels, recipe, shape, special):
    m, c = shape
    x = edges(m, c, special=special)
    wide = torch.full((m, c + 8), float("nan")).bfloat16()
    wide[:, :c] = x
    expected = REFERENCE.both(x, recipe)
    for vectorized in {0, int(c % 8 == 0)}:
        for source in (x, wide[:, :c]):
            for wanted in ((True, True), (True, False), (False, True)):
                outputs = Output(m, c, recipe), Output(c, ceil_div(m, 128) * 128, recipe)
                arguments = [out.argument if asked else NOTHING for out, asked in zip(outputs, wanted, strict=True)]
                stride = long(source.stride(0))
                kernels.quantize_both(pointer(source), stride, m, c, *arguments, rule(recipe), vectorized)
                for out, part, asked in zip(outputs, expected, wanted, strict=True):
                    if asked:
                        assert_same(out.result(), part)


@pytest.mark.parametrize("shape", SHAPES)
def test_requantize_along_tokens_exact(kernels, recipe, shape):
    m, c = shape
    codes = REFERENCE.activation(edges(m, c, special=True), recipe)
    for scale in (codes.scale.contiguous(), codes.scale.t().contiguous().t()):
        for vectorized in {0, int(c % 16 == 0)}:
            out = Output(c, ceil_div(m, 128) * 128, recipe)
            strides = map(long, scale.stride())
            kernels.requantize_along_tokens(
                pointer(codes.data), pointer(scale), *strides, m, c, out.argument, rule(recipe), vectorized
            )
            assert_same(out.result(), REFERENCE.requantize_along_tokens(codes))


@pytest.mark.parametrize("spread", [0, 1, 7, 14, 15, 16, 40])
@pytest.mark.parametrize("sparse", [False, True])
def test_requantize_scales_within_and_beyond_half_precision_exact(kernels, spread, sparse):
    torch.manual_seed(spread)
    m, c = 200, 144
    codes = torch.randint(0, 256, (m, c), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    if sparse:
        codes[torch.rand(m, c) < 0.97] = 0
        codes[torch.rand(m, c) < 0.5] |= 0x80  # minus zero among them
    for base in (-33, 0, 100):
        exponent = base + torch.randint(0, spread + 1, (m, 2))
        exponent[0], exponent[-1] = base, base + spread
        scale = torch.exp2(exponent.double()).float()
        given = BlockScaledTensor(codes.view(torch.float8_e4m3fn), scale, (1, 128), JETRL_FP8)
        out = Output(c, 256, JETRL_FP8)
        kernels.requantize_along_tokens(
            pointer(codes), pointer(scale), long(2), long(1), m, c, out.argument, rule(JETRL_FP8), 1
        )
        assert_same(out.result(), REFERENCE.requantize_along_tokens(given))


@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_weight_exact(kernels, recipe, shape):
    n, k = shape
    w = edges(n, k, special=True)
    tiles = ceil_div(n, 128), ceil_div(k, 128)
    for vectorized in {0, int(n % 8 == 0 and k % 8 == 0)}:
        for amax in (None, torch.rand(tiles) * 100):
            codes, transposed = (torch.full((n * k + GUARD,), 0xA5, dtype=torch.uint8) for _ in range(2))
            scale = torch.full((*tiles,), -7.0)
            outputs = map(pointer, (codes, transposed, scale))
            kernels.quantize_weight(
                pointer(w),
                long(w.stride(0)),
                pointer(amax),
                *outputs,
                n,
                k,
                scale_rule(weight_rule(recipe)),
                vectorized,
            )
            assert (codes[n * k :] == 0xA5).all() and (transposed[n * k :] == 0xA5).all()
            expected = reference.quantize_weight(w, recipe, amax=amax)
            for data, grid, side in ((codes, scale, expected), (transposed, scale.t(), expected.t())):
                data = data[: n * k].view(side.shape).view(torch.float8_e4m3fn)
                assert_same(BlockScaledTensor(data, grid, recipe.weight_block, recipe), side)


@pytest.mark.parametrize("shape", [(1, 128), (130, 256)])
def test_swiglu_and_its_gradient_fused_equal_parts_exact(kernels, recipe, shape):
    m, f = shape
    torch.manual_seed(m)
    y, dh = (torch.randn(m, 2 * f) * 4).bfloat16(), torch.randn(m, f).bfloat16()
    h, dy = torch.empty(m, f).bfloat16(), torch.empty(m, 2 * f).bfloat16()
    codes, rows, columns = (Output(*size, recipe) for size in ((m, f), (m, 2 * f), (2 * f, ceil_div(m, 128) * 128)))
    kernels.swiglu(pointer(y), m, f, pointer(h), NOTHING, rule(recipe))
    kernels.swiglu(pointer(y), m, f, pointer(None), codes.argument, rule(recipe))
    torch.testing.assert_close(h, reference.swiglu(y), rtol=1.6e-2, atol=1e-6)
    assert_same(codes.result(), REFERENCE.activation(h, recipe))
    given = pointer(dh), pointer(y), m, f
    kernels.swiglu_backward(*given, pointer(dy), NOTHING, NOTHING, rule(recipe), 1)
    torch.testing.assert_close(dy, reference.swiglu_backward(dh, y), rtol=1.6e-2, atol=1e-3)
    kernels.swiglu_backward(*given, pointer(None), rows.argument, columns.argument, rule(recipe), 1)
    for out, part in zip((rows, columns), REFERENCE.both(dy, recipe), strict=True):
        assert_same(out.result(), part)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 128), (9, 2048), (5, 2056), (3, 5120), (2, 8192)])
def test_rms_norm_fused_equals_parts_exact(kernels, recipe, shape, residual):
    m, k = shape
    torch.manual_seed(k)
    x, added, weight = (torch.randn(size).bfloat16() for size in ((m, k), (m, k), (k,)))
    expected_sum = (x.float() + added.float()).bfloat16() if residual else x
    expected, expected_rstd = reference.rms_norm(expected_sum, weight, 1e-6)
    # One multiprocessor: blocks that take several rows each, with rows loaded ahead.
    for multiprocessors in (1, 132):
        y, sums, rstd = torch.full((m, k), float("nan")).bfloat16(), torch.empty(m, k).bfloat16(), torch.empty(2, m)
        out = Output(m, k, recipe)
        given = pointer(x), pointer(added if residual else None), pointer(weight), m, k, ctypes.c_float(1e-6)
        kept = pointer(sums if residual else None), rule(recipe), multiprocessors
        kernels.rms_norm(*given, pointer(y), NOTHING, pointer(rstd[0]), *kept)
        kernels.rms_norm(*given, pointer(None), out.argument, pointer(rstd[1]), *kept)
        assert torch.equal(rstd[0], rstd[1])
        assert not residual or torch.equal(sums, expected_sum)
        torch.testing.assert_close(rstd[0], expected_rstd, rtol=1e-6, atol=0)
        torch.testing.assert_close(y, expected, rtol=8e-3, atol=1e-6)
        assert_same(out.result(), REFERENCE.activation(y, recipe))


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("shape", [(6, 136), (5, 2056)])
def test_rms_norm_backward_close(kernels, shape, programs):
    m, k = shape
    torch.manual_seed(k)
    x, dy, weight = (torch.randn(size).bfloat16() for size in ((m, k), (m, k), (k,)))
    _, rstd = reference.rms_norm(x, weight, 1e-6)
    dx, partial = torch.full((m, k), float("nan")).bfloat16(), torch.full((programs, k), float("nan"))
    kernels.rms_norm_backward(*map(pointer, (dy, x, weight, rstd)), m, k, programs, pointer(dx), pointer(partial))
    expected, expected_weight = reference.rms_norm_backward(dy, x, weight, rstd)
    torch.testing.assert_close(dx, expected, rtol=8e-3, atol=1e-4)
    torch.testing.assert_close(partial.sum(0), expected_weight, rtol=1e-4, atol=1e-5)


def test_host_source_refuses_an_instruction_it_does_not_know():
    with pytest.raises(ValueError, match=r"\['mma.sync'\] are unknown"):
        host_source('asm("mma.sync %0, %1;" : : );')
