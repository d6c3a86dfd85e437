"""Every Triton kernel against its twin on the CPU, in Triton's interpreter, which chooses itself at import only.

`TRITON_INTERPRET=1 python -m tests.unit.kernel_cases` runs CASES and prints a JSON line for each: {"case": its name,
"failure": null or what differs}. Outputs start as NaN, every address is checked against the kernel's arguments.
"""

from __future__ import annotations

import functools
import itertools
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from jetrl_megatron.kernels import device_functions, rules
from jetrl_megatron.kernels import quantize_activation as activation_kernel
from jetrl_megatron.kernels import quantize_both as both_kernel
from jetrl_megatron.kernels import quantize_weight as weight_kernel
from jetrl_megatron.kernels import requantize_along_tokens as requantize_kernel
from jetrl_megatron.kernels import rms_norm as norm_kernel
from jetrl_megatron.kernels import swiglu as swiglu_kernel
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.reference import activation_scale, saturating_cast, weight_scale
from jetrl_megatron.tensor import BlockScaledTensor, ceil_div

KERNEL_MODULES = (activation_kernel, both_kernel, weight_kernel, requantize_kernel, norm_kernel, swiglu_kernel)
KNOWN_TRITON = "3.6."
RECIPES = {"ue8m0": JETRL_FP8, "fp32": Fp8BlockRecipe(scale_format="fp32")}
BF16 = torch.finfo(torch.bfloat16)
EPS = 1e-6
Pair = tuple[BlockScaledTensor, BlockScaledTensor]
Make = Callable[[], torch.Tensor]
Case = Callable[[], None]


def _convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Bits of `values` in another format, rounded to nearest even, as GPUs do; the interpreter's own cuts bits off."""
    if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        raise ValueError(f"rounding={rounding} is not to nearest even, the only one that is replaced")
    floats = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
    floats[tl.float8e4nv] = torch.float8_e4m3fn
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}"))
    converted = bits.view(floats[source]).to(torch.float32).to(floats[target])
    of_target = getattr(torch, f"int{target.primitive_bitwidth}")
    return converted.view(of_target).numpy().view(f"uint{target.primitive_bitwidth}").reshape(values.shape)


def correct_interpreter() -> None:
    """Replaces the interpreter's conversions between number formats, and makes it check every address.

    Raises:
        RuntimeError: no interpreter was chosen, or one of another version of Triton.
        AttributeError: the interpreter lacks what is replaced.
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is not set: kernels would be compiled for a GPU; set TRITON_INTERPRET=1")
    if not triton.__version__.startswith(KNOWN_TRITON):
        raise RuntimeError(
            f"triton {triton.__version__}: the interpreter of {KNOWN_TRITON}x is known to convert wrongly, and is "
            "corrected here; see whether this one still needs it"
        )
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    prepare, _ = executor._init_args_hst, interpreter._convert_float
    spans: list[tuple[int, int]] = []

    def prepare_and_note(self: Any, args: Any, kwargs: Any) -> Any:
        hosts = prepare(self, args, kwargs)
        storages = [arg.untyped_storage() for arg in hosts[0] if isinstance(arg, torch.Tensor)]
        spans[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return hosts

    def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def access_inside(self: Any, pointers: Any, *rest: Any) -> Any:
            first = pointers.data[np.broadcast_to(rest[mask_at].data, pointers.data.shape)]
            last = first + np.uint64(pointers.get_element_ty().primitive_bitwidth // 8 - 1)
            inside = np.logical_or.reduce([(first >= start) & (last < end) for start, end in spans])
            if not np.all(inside):
                raise IndexError(f"{np.count_nonzero(~inside)} of {first.size} addresses lie outside every argument")
            return access(self, pointers, *rest)

        return access_inside

    interpreter._convert_float, executor._init_args_hst = _convert, prepare_and_note
    builder.create_masked_load = checked(builder.create_masked_load, mask_at=0)
    builder.create_masked_store = checked(builder.create_masked_store, mask_at=1)


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal dtype, shape and bytes; NaN equals NaN, whatever its sign."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {list(actual.shape)} != {list(expected.shape)}"
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    differing = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    _assert_none(name, actual, expected, differing & ~(actual.isnan() & expected.isnan()))


def assert_within(name: str, actual: torch.Tensor, expected: torch.Tensor, steps: int) -> None:
    """BF16 values at most so many neighbours apart, and few that differ at all; NaN where NaN is expected."""
    assert actual.dtype == expected.dtype == torch.bfloat16 and actual.shape == expected.shape, name
    bits = [side.contiguous().view(torch.int16).int() for side in (actual, expected)]
    a, b = (torch.where(side < 0, -(side & 0x7FFF), side) for side in bits)
    apart = (a - b).abs() * ~(actual.isnan() & expected.isnan())
    few = (apart > 0).sum() <= 1 + apart.numel() // 100
    _assert_none(name, actual, expected, apart > (steps if few else 0))


def _assert_none(name: str, actual: torch.Tensor, expected: torch.Tensor, differing: torch.Tensor) -> None:
    if not differing.any():
        return
    at = tuple(differing.nonzero()[0].tolist())
    values = " != ".join(repr(side[at].item()) for side in (actual, expected))
    raise AssertionError(f"{name}{list(at)}: {values}, {int(differing.sum())} of {differing.numel()} differ")


def assert_equal(name: str, actual: BlockScaledTensor, expected: BlockScaledTensor) -> None:
    """Equal codes and scales, for the same recipe."""
    assert (actual.block, actual.recipe) == (expected.block, expected.recipe), f"{name}: {actual.block}"
    assert_same(f"{name}.scale", actual.scale, expected.scale)
    assert_same(f"{name}.data", actual.data, expected.data)


def assert_pair(actual: Pair, expected: Pair) -> None:
    """`assert_equal` of an operator's two results."""
    assert_equal("first", actual[0], expected[0])
    assert_equal("second", actual[1], expected[1])


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative error of the whole."""
    assert actual.shape == expected.shape, f"{name}: {list(actual.shape)} != {list(expected.shape)}"
    distance, size = (actual.double() - expected.double()).norm(), expected.double().norm()
    assert distance <= tolerance * size, f"{name}: relative error {distance / size:.2e} > {tolerance:.0e}"


def random(rows: int, columns: int) -> torch.Tensor:
    """BF16 whose magnitudes change from row to row and column to column, so that another group's scale shows."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
    return (x * torch.logspace(-3, 3, rows)[:, None] * torch.logspace(2, -2, columns)).bfloat16()


def graded(amaxes: torch.Tensor, columns: int) -> torch.Tensor:
    """BF16 [amaxes, columns]: from an amax down to its negative."""
    return (amaxes.float()[:, None] * torch.linspace(1, -1, columns)).bfloat16()


def every_bf16() -> torch.Tensor:
    """All 65,536, NaN and infinity among them."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def not_finite() -> torch.Tensor:
    x = random(130, 256)
    x[0, 0], x[1, 130], x[2, 5], x[129, 200] = torch.nan, torch.inf, -torch.inf, -torch.nan
    x[3, 7], x[3, 9] = torch.inf, torch.nan
    return x


def strided() -> torch.Tensor:
    """[129, 200] amid NaN."""
    whole = torch.full((140, 300), torch.nan, dtype=torch.bfloat16)
    whole[5:134, 33:233] = random(129, 200)
    return whole[5:134, 33:233]


INPUTS: dict[str, Make] = {
    "zeros": lambda: torch.zeros(3, 200).bfloat16(),
    "signed_zeros": lambda: random(3, 200) * -0.0,
    "below_floor": lambda: graded(torch.tensor([1e-12, 1e-30, 1e-40, 9.9e-11, 1.01e-10, 9.9e-5, 1.01e-4]), 256),
    "each_below_floor": lambda: random(129, 200) * 1e-20,
    "largest": lambda: graded(torch.tensor([BF16.max, -BF16.max, BF16.max / 2]), 256),
    "all_largest": lambda: torch.full((3, 256), BF16.max).bfloat16() * torch.tensor([1, -1, 1])[:, None],
    "edges": lambda: graded(torch.tensor([446.0, 448, 450, 462, 464, 466, 896, 28, 28.125, 29]), 256),
    "full_codes": lambda: torch.tensor([448.0, -448, 1]).repeat(2, 100).bfloat16(),
    "every_exponent": lambda: graded(every_bf16()[: 1 << 15 : 1 << 7], 128).t(),
    "not_finite": not_finite,
    "strided": strided,
    "transposed": lambda: random(200, 129).t(),
    "float32": lambda: random(129, 200).float() * 1.001,
    "float16": lambda: (random(129, 200) / 64).half(),
    **{
        f"{m}x{k}": functools.partial(random, m, k)
        for m, k in ((1, 1), (1, 127), (127, 129), (129, 200), (200, 1), (3, 640), (9, 640), (0, 256), (256, 0))
    },
}
GATED_INPUTS: dict[str, Make] = {
    **{f"{m}x{f}": functools.partial(random, m, 2 * f) for m, f in ((1, 1), (1, 64), (129, 300), (3, 256), (0, 128))},
    "whole": lambda: random(129, 512) * 0.2,
    "zeros": lambda: torch.zeros(3, 256).bfloat16(),
    "far_gates": lambda: torch.cat([graded(torch.tensor([1.0, 20, 80, 88, 89, 100, BF16.max]), 128)] * 2, 1),
    "not_finite": not_finite,
    "strided": lambda: strided()[:, :200],
    "transposed": lambda: random(256, 129).t(),
}
NORM_INPUTS: dict[str, Make] = {
    **{f"{m}x{k}": functools.partial(random, m, k) for m, k in ((1, 127), (5, 200), (9, 128), (0, 128))},
    **{name: INPUTS[name] for name in ("zeros", "below_floor", "largest")},
    "not_finite": lambda: not_finite()[:5],
    "transposed": lambda: random(200, 5).t(),
}


@triton.jit
def _rule_kernel(
    amaxes, x, scales, codes, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SIZE)
    amax = tl.load(amaxes + at)
    scale = device_functions.scale_of(amax, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, POWER_OF_TWO)
    tl.store(scales + at, scale)
    tl.store(codes + at, device_functions.encode(tl.load(x + at), scale, ELEMENT_MAX, POWER_OF_TWO))


def rule(recipe: Fp8BlockRecipe, of_weights: bool) -> None:
    """Scale and code for every BF16 amax, and for as many float32 ones of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    amax = torch.randint(0x7F800002, (1 << 16,), generator=generator, dtype=torch.int32).view(torch.float32)
    amax = torch.cat([every_bf16().float().abs(), amax])
    x = amax * (torch.rand(amax.shape, generator=generator) * 2.2 - 1.1)
    scale, codes = torch.empty_like(amax), torch.empty(amax.shape, dtype=torch.float8_e4m3fn)
    constants = device_functions.constants((rules.weight_rule if of_weights else rules.activation_rule)(recipe))
    _rule_kernel[(1,)](amax, x, scale, codes, SIZE=amax.numel(), **constants)
    expected = (weight_scale if of_weights else activation_scale)(amax, recipe)
    assert_same("scale", scale, expected)
    assert_same("codes", codes, saturating_cast(x / expected, recipe))


def activation(x: torch.Tensor, recipe: Fp8BlockRecipe, **options: Any) -> None:
    actual = activation_kernel.quantize_activation(x, recipe, **options)
    assert_equal("codes", actual, activation_kernel.quantize_activation_twin(x, recipe))


def both(x: torch.Tensor, recipe: Fp8BlockRecipe) -> None:
    expected = both_kernel.quantize_both_twin(x, recipe)
    assert_pair(both_kernel.quantize_both(x, recipe), expected)
    assert_equal("alone", both_kernel.quantize_along_tokens(x, recipe), expected[1])


def requantize(x: torch.Tensor, recipe: Fp8BlockRecipe) -> None:
    """With scales as torch lays them out, and with their rows next to each other."""
    codes = activation_kernel.quantize_activation_twin(x, recipe)
    expected = requantize_kernel.requantize_along_tokens_twin(codes)
    for scale in (codes.scale.contiguous(), codes.scale.t().contiguous().t()):
        there = BlockScaledTensor(codes.data, scale, codes.block, recipe)
        assert_equal(f"strides {scale.stride()}", requantize_kernel.requantize_along_tokens(there), expected)


def weight(w: torch.Tensor, recipe: Fp8BlockRecipe) -> None:
    assert_pair(weight_kernel.quantize_weight(w, recipe), weight_kernel.quantize_weight_twin(w, recipe))


def weights(recipe: Fp8BlockRecipe) -> None:
    several = [random(129, 200), random(1, 127), random(0, 128), strided()]
    for w, pair in zip(several, weight_kernel.quantize_weights(several, recipe), strict=True):
        assert_pair(pair, weight_kernel.quantize_weight_twin(w, recipe))


def given_amax(recipe: Fp8BlockRecipe) -> None:
    """Amaxes that are not the groups' own: too small, so that codes saturate, below the floor, not finite, strided."""
    x = random(130, 300)
    groups, tiles = ceil_div(300, recipe.block), ceil_div(130, recipe.block)
    of_rows = torch.logspace(-12, 12, 130 * groups).view(130, groups)
    of_rows[0], of_rows[1, 0], of_rows[1, 1] = 0, torch.nan, torch.inf
    of_tiles = torch.logspace(-6, 3, tiles * groups).view(tiles, groups)
    of_tiles[0, 1], of_tiles[1, 0], of_tiles[1, 1] = 0, torch.nan, torch.inf
    for amax in (of_rows, of_rows.t().contiguous().t(), of_rows[:, :1].expand(130, groups)):
        expected = activation_kernel.quantize_activation_twin(x, recipe, amax=amax)
        assert_equal("activation", activation_kernel.quantize_activation(x, recipe, amax=amax), expected)
    for amax in (of_tiles, of_tiles.t().contiguous().t()):
        actual = weight_kernel.quantize_weight(x, recipe, amax=amax)
        assert_pair(actual, weight_kernel.quantize_weight_twin(x, recipe, amax=amax))


def every_activation_amax(recipe: Fp8BlockRecipe) -> None:
    """Every BF16 as a group's amax. Groups are short, because the interpreter is slow."""
    short = Fp8BlockRecipe(scale_format=recipe.scale_format, block=16)
    activation(graded(every_bf16(), short.block).view(1024, -1), short, rows=256, groups=16)


def weight_amaxes(recipe: Fp8BlockRecipe) -> None:
    """Every other exponent as a tile's amax, and each mantissa of one exponent. Tiles are small, as above."""
    small = Fp8BlockRecipe(scale_format=recipe.scale_format, block=4)
    amaxes = torch.cat([every_bf16()[::128][:256:2], every_bf16()[0x4380:0x4400]])
    tiles = graded(amaxes, small.block**2).view(16, 16, small.block, small.block)
    weight(tiles.transpose(1, 2).reshape(16 * small.block, -1), small)


def swiglu(y: torch.Tensor, recipe: Fp8BlockRecipe) -> None:
    """silu and product round, and libraries differ in the last bit of exp: two BF16 roundings."""
    h = swiglu_kernel.swiglu(y, recipe)
    assert_within("h", h, swiglu_kernel.swiglu_twin(y), steps=2)
    expected = activation_kernel.quantize_activation_twin(h, recipe)
    assert_equal("fused", swiglu_kernel.swiglu_quantize(y, recipe), expected)


def swiglu_backward(y: torch.Tensor, recipe: Fp8BlockRecipe) -> None:
    """As above. Fused where no group holds elements of both halves."""
    dh = random(y.shape[0], y.shape[1] // 2).flip(0)
    dy = swiglu_kernel.swiglu_backward(dh, y, recipe)
    assert_within("dy", dy, swiglu_kernel.swiglu_backward_twin(dh, y), steps=2)
    if dh.shape[1] % recipe.block == 0:
        fused = swiglu_kernel.swiglu_backward_quantize(dh, y, recipe)
        assert_pair(fused, both_kernel.quantize_both_twin(dy, recipe))
        return
    with pytest.raises(ValueError, match=f"F={dh.shape[1]} is no multiple of {recipe.block}"):
        swiglu_kernel.swiglu_backward_quantize(dh, y, recipe)


def rms_norm(x: torch.Tensor, recipe: Fp8BlockRecipe, with_residual: bool) -> None:
    """The order of summation is the kernel's own: one BF16 rounding. The sum with the residual is exact."""
    gain = random(1, x.shape[1])[0].to(torch.bfloat16 if with_residual else torch.float32)
    residual = random(*x.shape).flip(0) if with_residual else None
    y, rstd, sums = norm_kernel.rms_norm(x, gain, EPS, residual)
    expected_y, expected_rstd, expected_sums = norm_kernel.rms_norm_twin(x, gain, EPS, residual)
    assert_within("y", y, expected_y, steps=1)
    torch.testing.assert_close(rstd, expected_rstd, rtol=1e-6, atol=0, equal_nan=True)
    codes, *rest = norm_kernel.rms_norm_quantize(x, gain, EPS, recipe, residual)
    assert_equal("codes", codes, activation_kernel.quantize_activation_twin(y, recipe))
    assert_same("fused rstd", rest[0], rstd)
    assert (sums is None) == (rest[1] is None) == (residual is None)
    if residual is not None:
        assert_same("sums", sums, expected_sums)
        assert_same("fused sums", rest[1], sums)


def rms_norm_backward(x: torch.Tensor) -> None:
    """dx is rounded to BF16, and sums have another order than the twin's."""
    dy, gain = random(*x.shape).flip(0) * 0.01, random(1, x.shape[1])[0]
    _, rstd, _ = norm_kernel.rms_norm_twin(x, gain, EPS)
    dx, of_weight = norm_kernel.rms_norm_backward(dy, x, gain, rstd)
    expected_dx, expected_of_weight = norm_kernel.rms_norm_backward_twin(dy, x, gain, rstd)
    assert dx.dtype == torch.bfloat16 and of_weight.dtype == torch.float32
    assert_close("dx", dx, expected_dx, 5e-3)
    assert_close("dweight", of_weight, expected_of_weight, 1e-5)


def _quantizing_cases(name: str, recipe: Fp8BlockRecipe) -> Iterator[tuple[str, Case]]:
    bodies = {
        "quantize_activation": activation,
        "quantize_both+quantize_along_tokens": both,
        "requantize_along_tokens": requantize,
        "quantize_weight": weight,
    }
    for (kernel, body), (given, make) in itertools.product(bodies.items(), INPUTS.items()):
        yield f"{kernel}-{name}-{given}", lambda body=body, make=make: body(make(), recipe)
    for kernel, of_weights in (("quantize_activation", False), ("quantize_weight", True)):
        yield f"{kernel}-{name}-rule", functools.partial(rule, recipe, of_weights)
    yield f"quantize_activation-{name}-every_amax", functools.partial(every_activation_amax, recipe)
    yield f"quantize_weight-{name}-amaxes", functools.partial(weight_amaxes, recipe)
    yield f"quantize_activation+quantize_weight-{name}-given_amax", functools.partial(given_amax, recipe)
    yield f"quantize_weights-{name}-several", functools.partial(weights, recipe)


def _fused_cases(name: str, recipe: Fp8BlockRecipe) -> Iterator[tuple[str, Case]]:
    bodies = {"swiglu+swiglu_quantize": swiglu, "swiglu_backward+swiglu_backward_quantize": swiglu_backward}
    for (kernels, body), (given, make) in itertools.product(bodies.items(), GATED_INPUTS.items()):
        yield f"{kernels}-{name}-{given}", lambda body=body, make=make: body(make(), recipe)
    for (given, make), residual in itertools.product(NORM_INPUTS.items(), (False, True)):
        case = f"rms_norm+rms_norm_quantize-{name}-{given}-{'residual' if residual else 'plain'}"
        yield case, lambda make=make, residual=residual: rms_norm(make(), recipe, residual)


def _all_cases() -> Iterator[tuple[str, Case]]:
    for name, recipe in RECIPES.items():
        yield from _quantizing_cases(name, recipe)
        yield from _fused_cases(name, recipe)
    # Without quantisation. 530 rows are more than the kernel has programs, so that each takes two.
    for rows, features in ((0, 128), (1, 127), (5, 200), (530, 32)):
        yield f"rms_norm_backward-{rows}x{features}", lambda m=rows, k=features: rms_norm_backward(random(m, k))


CASES: dict[str, Case] = dict(_all_cases())


def run(cases: Mapping[str, Case]) -> None:
    """Runs every case, and says of each what came out."""
    correct_interpreter()
    torch.set_num_threads(1)
    # Also fills what is allocated with NaN, so that what a kernel leaves out shows.
    torch.use_deterministic_algorithms(True)
    for name, body in cases.items():
        failure = None
        try:
            body()
        except (Exception, pytest.fail.Exception) as error:
            failure = "".join(traceback.format_exception(error))
        print(json.dumps({"case": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    run(CASES)
