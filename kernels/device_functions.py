"""What the kernels share on the device: amax, scale and codes, to the bit as in `jetrl_megatron.reference`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def constants(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule as the `constexpr` arguments of a kernel."""
    return {name.upper(): value for name, value in rule.items()}


_ELEMENTS_OF_HEADS = 2048


def head_tile(features: int) -> tuple[int, int]:
    """Rows and columns of the tile in which a program norms heads; on them depends in which order a row is summed."""
    width: int = triton.next_power_of_2(features)
    return _ELEMENTS_OF_HEADS // width, width


@triton.jit
def amax_bits(x):
    """|x| as integers that compare like the values, with NaN above infinity: float32 in, int32 out."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(
    amax,
    AMAX_FLOOR: tl.constexpr,
    DIVISOR: tl.constexpr,
    SCALE_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Scale of groups from their amax, float32. NaN stays NaN."""
    floored = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    # A true division: `/` is an approximation on a GPU.
    scale = tl.div_rn(floored, tl.full(floored.shape, DIVISOR, tl.float32))
    if POWER_OF_TWO:
        scale = tl.where(scale < SCALE_FLOOR, SCALE_FLOOR, scale)
        bits = scale.to(tl.int32, bitcast=True)
        raised = (bits + 0x007FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, raised, bits).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def encode(x, scale, ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Codes of float32 x for scales of the same or a broadcastable shape."""
    if POWER_OF_TWO:
        # The reciprocal of a power of two is exact, and so is the product.
        bits = scale.to(tl.int32, bitcast=True)
        inverse = tl.where(bits < 0x7F800000, 0x7F000000 - bits, tl.where(bits == 0x7F800000, 0, bits))
        scaled = x * inverse.to(tl.float32, bitcast=True)
    else:
        scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    # Comparisons, not min and max, which lose NaN.
    scaled = tl.where(scaled > ELEMENT_MAX, ELEMENT_MAX, scaled)
    scaled = tl.where(scaled < -ELEMENT_MAX, -ELEMENT_MAX, scaled)
    return scaled.to(tl.float8e4nv)


@triton.jit
def quantize_groups(
    x,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    DIVISOR: tl.constexpr,
    SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Codes [ROWS, GROUPS * BLOCK] and scales [ROWS, GROUPS] of float32 x, in groups along its last axis."""
    grouped = tl.reshape(x, (ROWS, GROUPS, BLOCK))
    amax = tl.max(amax_bits(grouped), 2).to(tl.float32, bitcast=True)
    scale = scale_of(amax, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, POWER_OF_TWO)
    codes = encode(grouped, tl.expand_dims(scale, 2), ELEMENT_MAX, POWER_OF_TWO)
    return tl.reshape(codes, (ROWS, GROUPS * BLOCK)), scale
