"""silu(gate) * up and its gradient, with codes instead of BF16 where a linear reads or wrote the other side.

silu is rounded to BF16 before the product, as vLLM does. Fused and plain kernels share their formulas, and are compiled
without contraction of products and sums, so that a fused kernel gives the bytes of its parts.
"""

# Shape suffixes: M tokens, F features of a half, Mp tokens padded with zero to whole groups.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.reference import quantize_activation as reference_quantize
from jetrl_megatron.reference import swiglu as swiglu_twin
from jetrl_megatron.reference import swiglu_backward as swiglu_backward_twin
from jetrl_megatron.tensor import BlockScaledTensor

from .device_functions import constants, quantize_groups
from .outputs import FEWEST_ROWS, empty_along_tokens, empty_codes
from .quantize_both import quantize_both_twin, store_along_features, store_along_tokens
from .rules import activation_rule

__all__ = [
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_backward_quantize_twin",
    "swiglu_backward_twin",
    "swiglu_quantize",
    "swiglu_quantize_twin",
    "swiglu_twin",
]


def swiglu_quantize_twin(y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
    """Plain torch: one after the other."""
    return reference_quantize(swiglu_twin(y_M2F), recipe)


def swiglu_backward_quantize_twin(
    dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Plain torch: one after the other."""
    return quantize_both_twin(swiglu_backward_twin(dh_MF, y_M2F), recipe)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _forward(gate, up):
    silu = (gate * _sigmoid(gate)).to(tl.bfloat16).to(tl.float32)
    return (silu * up).to(tl.bfloat16)


@triton.jit
def _gradients(dh, gate, up):
    sigmoid = _sigmoid(gate)
    silu = (gate * sigmoid).to(tl.bfloat16).to(tl.float32)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return (dh * up * slope).to(tl.bfloat16), (dh * silu).to(tl.bfloat16)


@triton.jit
def _forward_kernel(
    y, h, scales, M, F, scale_stride,
    QUANTIZE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    # Programs next to each other work on the same rows, which keeps memory pages open.
    parts = tl.cdiv(F, GROUPS * BLOCK)
    part = tl.program_id(0) % parts
    rows = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = part * GROUPS * BLOCK + tl.arange(0, GROUPS * BLOCK)
    inside = (rows < M)[:, None] & (columns < F)[None, :]
    source = y + rows[:, None] * 2 * F + columns[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=inside, other=0.0).to(tl.float32)
    value = _forward(gate, up)
    target = h + rows[:, None] * F + columns[None, :]
    if QUANTIZE:
        code, scale = quantize_groups(
            value.to(tl.float32), ROWS, GROUPS, BLOCK, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, ELEMENT_MAX, POWER_OF_TWO
        )
        tl.store(target, code, mask=inside)
        groups = part * GROUPS + tl.arange(0, GROUPS)
        held = (rows < M)[:, None] & (groups * BLOCK < F)[None, :]
        tl.store(scales + rows[:, None] + groups[None, :].to(tl.int64) * scale_stride, scale, mask=held)
    else:
        tl.store(target, value, mask=inside)


def _launch_forward(
    y_M2F: torch.Tensor, h: torch.Tensor, scale: torch.Tensor, recipe: Fp8BlockRecipe, num_warps: int
) -> None:
    tokens, features = h.shape
    if h.numel() == 0:
        return
    rows, groups = 8, 2
    _forward_kernel[(triton.cdiv(tokens, rows) * triton.cdiv(features, groups * recipe.block),)](
        y_M2F.contiguous(),
        h,
        scale,
        tokens,
        features,
        scale.stride(-1),
        QUANTIZE=h.dtype == torch.float8_e4m3fn,
        ROWS=rows,
        GROUPS=groups,
        num_warps=num_warps,
        enable_fp_fusion=False,
        **constants(activation_rule(recipe)),
    )


def swiglu(y_M2F: torch.Tensor, recipe: Fp8BlockRecipe, *, num_warps: int = 4) -> torch.Tensor:
    """silu(gate) * up: BF16 [M, F]; gate is the first half of y, BF16 [M, 2F]."""
    h_MF = torch.empty(y_M2F.shape[0], y_M2F.shape[1] // 2, dtype=torch.bfloat16, device=y_M2F.device)
    _launch_forward(y_M2F, h_MF, h_MF, recipe, num_warps)
    return h_MF


def swiglu_quantize(
    y_M2F: torch.Tensor, recipe: Fp8BlockRecipe, *, fewest_rows: int = FEWEST_ROWS, num_warps: int = 4
) -> BlockScaledTensor:
    """`quantize_activation` of `swiglu`: [M, F], in memory for `fewest_rows` at least."""
    out = empty_codes(y_M2F.shape[0], y_M2F.shape[1] // 2, recipe, y_M2F.device, fewest_rows=fewest_rows)
    _launch_forward(y_M2F, out.data, out.scale, recipe, num_warps)
    return out


@triton.jit
def _backward_kernel(
    dh, y, dy, row_scales, column_codes, column_scales, M, F, row_scale_stride, column_scale_stride, padded,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVISOR: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ELEMENT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < F)[None, :]
    gradient = tl.load(dh + rows[:, None] * F + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    source = y + rows[:, None] * 2 * F + columns[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up = _gradients(gradient, gate, up)
    for half in tl.static_range(2):
        value = of_gate if half == 0 else of_up
        place = columns + half * F
        if QUANTIZE:
            store_along_features(
                value.to(tl.float32), dy, row_scales, rows, place, M, 2 * F, row_scale_stride,
                BLOCK, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, ELEMENT_MAX, POWER_OF_TWO,
            )  # fmt: skip
            store_along_tokens(
                value.to(tl.float32), column_codes, column_scales, rows, place, 2 * F, padded, column_scale_stride,
                BLOCK, AMAX_FLOOR, DIVISOR, SCALE_FLOOR, ELEMENT_MAX, POWER_OF_TWO,
            )  # fmt: skip
        else:
            tl.store(dy + rows[:, None] * 2 * F + place[None, :], value, mask=inside)


def _launch_backward(
    dh_MF: torch.Tensor,
    y_M2F: torch.Tensor,
    dy: torch.Tensor,
    row_scale: torch.Tensor,
    columns: BlockScaledTensor | None,
    recipe: Fp8BlockRecipe,
    num_warps: int,
) -> None:
    tokens, features = dh_MF.shape
    if dh_MF.numel() == 0:
        return
    quantize = columns is not None
    _backward_kernel[(triton.cdiv(features, recipe.block), triton.cdiv(tokens, recipe.block))](
        dh_MF.contiguous(),
        y_M2F.contiguous(),
        dy,
        row_scale,
        columns.data if quantize else dy,
        columns.scale if quantize else dy,
        tokens,
        features,
        row_scale.stride(-1),
        columns.scale.stride(1) if quantize else 0,
        columns.data.shape[1] if quantize else 0,
        QUANTIZE=quantize,
        num_warps=num_warps,
        enable_fp_fusion=False,
        **constants(activation_rule(recipe)),
    )


def swiglu_backward(
    dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe, *, num_warps: int = 8
) -> torch.Tensor:
    """Gradient of `swiglu`: BF16 [M, 2F]."""
    dy_M2F = torch.empty(y_M2F.shape, dtype=torch.bfloat16, device=y_M2F.device)
    _launch_backward(dh_MF, y_M2F, dy_M2F, dy_M2F, None, recipe, num_warps)
    return dy_M2F


def swiglu_backward_quantize(
    dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe, *, num_warps: int = 8
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """`quantize_both` of `swiglu_backward`: [M, 2F] and [2F, Mp].

    Raises:
        ValueError: F is no multiple of the block, so that a group would hold elements of gate and up.
    """
    tokens, features = y_M2F.shape
    if features % (2 * recipe.block):
        raise ValueError(
            f"F={features // 2} is no multiple of {recipe.block}: a group would hold elements of gate and up; "
            "quantise the BF16 gradient instead"
        )
    rows = empty_codes(tokens, features, recipe, y_M2F.device)
    columns = empty_along_tokens(tokens, features, recipe, y_M2F.device)
    _launch_backward(dh_MF, y_M2F, rows.data, rows.scale, columns, recipe, num_warps)
    return rows, columns
