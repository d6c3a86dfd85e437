"""The operators of the CUDA extension, with outputs allocated and wrapped.

They are those that transpose: registers do that faster than Triton's way through shared memory. The twins are the
Triton kernels of the same names, and `jetrl_megatron.reference`.
"""

# Shape suffixes: M tokens, N and K rows and columns of a weight, C features, F features of a gated pair's half,
# Mp tokens padded with zero to whole groups.

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor

from .outputs import FEWEST_ROWS, empty_along_tokens, empty_codes, empty_weight
from .rules import activation_rule, weight_rule

_C: Any = importlib.import_module("jetrl_megatron._C")


@functools.lru_cache(maxsize=64)
def _activation_rule(recipe: Fp8BlockRecipe) -> Any:
    return _C.Recipe(**activation_rule(recipe))


@functools.lru_cache(maxsize=64)
def _weight_rule(recipe: Fp8BlockRecipe) -> Any:
    return _C.Recipe(**weight_rule(recipe))


def quantize_both(x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """x in groups along features [M, C], and transposed in groups along tokens [C, Mp], from one read.

    Args:
        x_MC: BF16, rows contiguous.
    """
    rows = empty_codes(*x_MC.shape, recipe, x_MC.device)
    columns = empty_along_tokens(*x_MC.shape, recipe, x_MC.device)
    _C.quantize_both(x_MC, rows.data, rows.scale, columns.data, columns.scale, _activation_rule(recipe))
    return rows, columns


def quantize_along_tokens(x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
    """x transposed in groups along tokens: [C, Mp].

    Args:
        x_MC: BF16, rows contiguous.
    """
    columns = empty_along_tokens(*x_MC.shape, recipe, x_MC.device)
    _C.quantize_both(x_MC, None, None, columns.data, columns.scale, _activation_rule(recipe))
    return columns


def quantize_along_features(x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
    """x in groups along features: [M, C].

    Args:
        x_MC: BF16, rows contiguous.
    """
    rows = empty_codes(*x_MC.shape, recipe, x_MC.device)
    _C.quantize_both(x_MC, rows.data, rows.scale, None, None, _activation_rule(recipe))
    return rows


def requantize_along_tokens(codes: BlockScaledTensor) -> BlockScaledTensor:
    """What codes [M, C] stand for, transposed in groups along tokens: [C, Mp].

    Args:
        codes: of a quantiser here: a code is NaN only where its group's scale is not finite.
    """
    columns = empty_along_tokens(*codes.shape, codes.recipe, codes.data.device)
    _C.requantize_along_tokens(
        codes.data.contiguous(), codes.scale, columns.data, columns.scale, _activation_rule(codes.recipe)
    )
    return columns


def swiglu(y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> torch.Tensor:
    """silu(gate) * up, silu rounded to BF16 first: BF16 [M, F].

    Args:
        y_M2F: BF16, contiguous; gate is the first half. F is a multiple of the block.
    """
    h_MF = torch.empty(y_M2F.shape[0], y_M2F.shape[1] // 2, dtype=torch.bfloat16, device=y_M2F.device)
    _C.swiglu(y_M2F, h_MF, None, None, _activation_rule(recipe))
    return h_MF


def swiglu_quantize(
    y_M2F: torch.Tensor, recipe: Fp8BlockRecipe, *, fewest_rows: int = FEWEST_ROWS
) -> BlockScaledTensor:
    """`swiglu` in codes in groups along features: [M, F], in memory for `fewest_rows` at least."""
    out = empty_codes(y_M2F.shape[0], y_M2F.shape[1] // 2, recipe, y_M2F.device, fewest_rows=fewest_rows)
    _C.swiglu(y_M2F, None, out.data, out.scale, _activation_rule(recipe))
    return out


def swiglu_backward(dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> torch.Tensor:
    """Gradient of silu(gate) * up: BF16 [M, 2F].

    Args:
        dh_MF, y_M2F: BF16, contiguous; gate is the first half of y.
    """
    dy_M2F = torch.empty_like(y_M2F)
    _C.swiglu_backward(dh_MF, y_M2F, dy_M2F, None, None, None, None, _activation_rule(recipe))
    return dy_M2F


def swiglu_backward_quantize(
    dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """`quantize_both` of `swiglu_backward`, without BF16 in memory: [M, 2F] and [2F, Mp].

    Raises:
        ValueError: F is no multiple of the block.
    """
    rows = empty_codes(*y_M2F.shape, recipe, y_M2F.device)
    columns = empty_along_tokens(*y_M2F.shape, recipe, y_M2F.device)
    _C.swiglu_backward(dh_MF, y_M2F, None, rows.data, rows.scale, columns.data, columns.scale, _activation_rule(recipe))
    return rows, columns


def quantize_weights(
    weights: Sequence[torch.Tensor], recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
) -> list[tuple[BlockScaledTensor, BlockScaledTensor]]:
    """Codes of weights [N, K] and of their transposes [K, N], in few launches.

    Args:
        weights: BF16, rows contiguous.
        amax: see `jetrl_megatron.ops.quantize_weight`; for a single weight.
    """
    pairs = [empty_weight(*w_NK.shape, recipe, w_NK.device) for w_NK in weights]
    codes, transposed = ([pair[side].data for pair in pairs] for side in (0, 1))
    _C.quantize_weights(list(weights), codes, transposed, [w.scale for w, _ in pairs], amax, _weight_rule(recipe))
    return pairs


def rms_norm(
    x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x / rms(x) * weight, of x + residual where one is given.

    Args:
        x_MK, residual: BF16 [M, K], contiguous; their sum is rounded to BF16 before it is normed.
        weight_K: BF16 [K].

    Returns:
        y BF16 [M, K], float32 [M] 1 / rms, and the rounded sum or None.
    """
    y_MK = torch.empty_like(x_MK)
    rstd_M, sums = _norm_outputs(x_MK, residual)
    _C.rms_norm(x_MK, residual, weight_K, eps, y_MK, None, None, rstd_M, sums, None)
    return y_MK, rstd_M, sums


def rms_norm_quantize(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor,
    eps: float,
    recipe: Fp8BlockRecipe,
    residual: torch.Tensor | None = None,
    *,
    fewest_rows: int = FEWEST_ROWS,
) -> tuple[BlockScaledTensor, torch.Tensor, torch.Tensor | None]:
    """`rms_norm` with codes [M, K] in groups along features instead of y, in memory for `fewest_rows` at least."""
    out = empty_codes(*x_MK.shape, recipe, x_MK.device, fewest_rows=fewest_rows)
    rstd_M, sums = _norm_outputs(x_MK, residual)
    rule = _activation_rule(recipe)
    _C.rms_norm(x_MK, residual, weight_K, eps, None, out.data, out.scale, rstd_M, sums, rule)
    return out, rstd_M, sums


def _norm_outputs(x_MK: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    rstd_M = torch.empty(x_MK.shape[0], dtype=torch.float32, device=x_MK.device)
    return rstd_M, None if residual is None else torch.empty_like(x_MK)


def rms_norm_backward(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, weight_K: torch.Tensor, rstd_M: torch.Tensor, *, programs: int = 264
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm`: of x, BF16 [M, K], and of the weight, float32 [K]. Repeats give the same bytes.

    Args:
        dy_MK, x_MK: BF16 [M, K], contiguous.
        programs: parts in which the weight's gradient is summed first.
    """
    dx_MK = torch.empty_like(x_MK)
    partial_PK = torch.empty(programs, x_MK.shape[1], dtype=torch.float32, device=x_MK.device)
    if x_MK.shape[0] == 0:
        return dx_MK, partial_PK.new_zeros(x_MK.shape[1])
    _C.rms_norm_backward(dy_MK, x_MK, weight_K, rstd_M, dx_MK, partial_PK)
    return dx_MK, partial_PK.sum(dim=0)


def takes_norm(x_MK: torch.Tensor, weight_K: torch.Tensor) -> bool:
    """Whether the extension's RMSNorm handles the shape and dtypes."""
    features = x_MK.shape[1]
    both_bf16 = x_MK.dtype == weight_K.dtype == torch.bfloat16
    return both_bf16 and features % 8 == 0 and features <= _C.MOST_FEATURES and weight_K.is_contiguous()
