"""The readable truth: quantisers and GEMM in plain torch, on any device.

Every kernel of the project is byte-equal to the quantisers here. The GEMM sums exactly: it forms the sum in float64 and
rounds once, so a row of the result does not depend on how many rows there are, nor on the machine.
"""

# Shape suffixes: M rows of an activation, N and K rows and columns of a weight, R and C rows and columns of either,
# Mb, Nb, Kb, Rb, Cb the same counted in blocks; Mp rows padded to whole blocks.

from __future__ import annotations

import torch
import torch.nn.functional as F

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor, ceil_div

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1


def round_up_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x, on the exponent bits: exact for every positive normal float32.

    float32 `ceil(log2(x))` is not: it takes 0x3c000001 to 2^-7 instead of 2^-6. NaN and infinity stay what they are.

    Args:
        x: float32, any shape, positive.
    """
    bits = x.view(torch.int32)
    raised = ((bits + _MANTISSA_MASK) >> _MANTISSA_BITS) << _MANTISSA_BITS
    return torch.where(torch.isfinite(x), raised.view(torch.float32), x)


def weight_scale(amax: torch.Tensor, recipe: Fp8BlockRecipe) -> torch.Tensor:
    """Scale of weight tiles from their amax, float32 in and out, any shape."""
    # A tensor divisor: with a Python scalar CUDA multiplies by the reciprocal, which is another number.
    floored = amax.clamp_min(recipe.weight_amax_floor)
    if recipe.scale_format == "fp32":
        return floored / torch.full_like(amax, recipe.element_max)
    return round_up_to_power_of_two(floored / torch.full_like(amax, recipe.ue8m0_weight_max))


def activation_scale(amax: torch.Tensor, recipe: Fp8BlockRecipe) -> torch.Tensor:
    """Scale of activation or gradient groups from their amax, float32 in and out, any shape.

    Bit for bit vLLM's CUDA operator `per_token_group_fp8_quant` for BF16 inputs.
    """
    scale = amax.clamp_min(recipe.activation_amax_floor) / torch.full_like(amax, recipe.element_max)
    if recipe.scale_format == "fp32":
        return scale
    return round_up_to_power_of_two(scale.clamp_min(recipe.activation_scale_floor))


def saturating_cast(x: torch.Tensor, recipe: Fp8BlockRecipe) -> torch.Tensor:
    """float8_e4m3fn codes of float32 values, nearest-even, clamped to +-element_max. NaN stays NaN."""
    return x.clamp(-recipe.element_max, recipe.element_max).to(torch.float8_e4m3fn)


def _blocked(x_RC: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32 [Rb, block[0], Cb, block[1]], ragged edges padded with zero."""
    rows, columns = x_RC.shape
    pad_rows = ceil_div(rows, block[0]) * block[0] - rows
    pad_columns = ceil_div(columns, block[1]) * block[1] - columns
    padded = F.pad(x_RC.to(torch.float32), (0, pad_columns, 0, pad_rows))
    return padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])


def block_amax(x_RC: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block, float32 [Rb, Cb]; NaN where the block holds one."""
    if x_RC.numel() == 0:
        rows, columns = ceil_div(x_RC.shape[0], block[0]), ceil_div(x_RC.shape[1], block[1])
        return x_RC.new_zeros(rows, columns, dtype=torch.float32)
    return _blocked(x_RC, block).abs().amax(dim=(1, 3))


def encode(
    x_RC: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], recipe: Fp8BlockRecipe
) -> BlockScaledTensor:
    """Codes of x for given scales: saturating cast of x / scale (true division).

    Args:
        x_RC: any float dtype [R, C].
        scale: float32 [ceil(R / block[0]), ceil(C / block[1])].
    """
    rows, columns = x_RC.shape
    scaled = _blocked(x_RC, block) / scale[:, None, :, None]
    codes = saturating_cast(scaled.flatten(2).flatten(0, 1), recipe)[:rows, :columns]
    return BlockScaledTensor(codes.contiguous(), scale, block, recipe)


def quantize_weight(
    w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
) -> BlockScaledTensor:
    """See `jetrl_megatron.ops.quantize_weight`."""
    w_NK = w_NK.detach().to(torch.bfloat16)
    if amax is None:
        amax = block_amax(w_NK, recipe.weight_block)
    return encode(w_NK, weight_scale(amax, recipe), recipe.weight_block, recipe)


def quantize_activation(
    x_MK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
) -> BlockScaledTensor:
    """See `jetrl_megatron.ops.quantize_activation`; x is a matrix here."""
    x_MK = x_MK.detach()
    if amax is None:
        amax = block_amax(x_MK, recipe.activation_block)
    return encode(x_MK, activation_scale(amax, recipe), recipe.activation_block, recipe)


def quantize_along_tokens(x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
    """x transposed, in groups along tokens, which are padded with zero to whole groups: [C, Mp]."""
    missing = -x_MC.shape[0] % recipe.block
    return quantize_activation(F.pad(x_MC, (0, 0, 0, missing)).t(), recipe)


def gemm_nt(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """a b^T, summed in float64 and rounded once to float32: float32 [M, N].

    A product of two codes is exact in float64 and so, for all practical ranges, is their sum, which makes the result
    independent of the order of summation, of M and of the machine.

    Args:
        a_MK, b_NK: dequantised operands, float64.
    """
    return (a_MK @ b_NK.t()).to(torch.float32)


def rms_norm(x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * weight in float32, rounded once: BF16 [M, K], and float32 [M] 1 / rms."""
    x = x_MK.float()
    rstd_M = torch.rsqrt(x.square().mean(dim=1) + eps)
    return (x * rstd_M[:, None] * weight_K.float()).to(torch.bfloat16), rstd_M


def rms_norm_backward(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, weight_K: torch.Tensor, rstd_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm`: of x, BF16 [M, K], and of the weight, float32 [K]."""
    normed = x_MK.float() * rstd_M[:, None]
    weighted = dy_MK.float() * weight_K.float()
    dx = (weighted - normed * (weighted * normed).mean(dim=1, keepdim=True)) * rstd_M[:, None]
    return dx.to(torch.bfloat16), (dy_MK.float() * normed).sum(dim=0)


def swiglu(y_M2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: BF16 [M, F]; gate is the first half of y. silu is rounded to BF16 before the product."""
    gate, up = y_M2F.to(torch.bfloat16).chunk(2, dim=1)
    return F.silu(gate) * up


def swiglu_backward(dh_MF: torch.Tensor, y_M2F: torch.Tensor) -> torch.Tensor:
    """Gradient of `swiglu`: BF16 [M, 2F], each half rounded once."""
    gate, up = (half.float() for half in y_M2F.to(torch.bfloat16).chunk(2, dim=1))
    dh = dh_MF.float()
    sigmoid = torch.sigmoid(gate)
    dgate = dh * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    dup = dh * (gate * sigmoid).to(torch.bfloat16).float()
    return torch.cat([dgate, dup], dim=1).to(torch.bfloat16)


def rope(
    x_THD: torch.Tensor, positions_T: torch.Tensor, cos_sin_RD: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """The halves of each head rotated by the cosines and sines of its position: BF16 [T, H, D], rounded once.

    Args:
        positions_T: integer [T], rows of the cache.
        cos_sin_RD: BF16 [R, D], D / 2 cosines, then as many sines.
        inverse: rotate back, which is the gradient.
    """
    cos, sin = cos_sin_RD[positions_T].float()[:, None].chunk(2, dim=-1)
    sin = -sin if inverse else sin
    first, second = x_THD.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(torch.bfloat16)


def norm_rope(
    x_TGRD: torch.Tensor,
    weight_D: torch.Tensor | None,
    eps: float,
    positions_T: torch.Tensor,
    cos_sin_RD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`rms_norm` of each head, where there is a weight, then `rope`: BF16 [T, G R, D], and float32 [T, G R] 1 / rms."""
    x_THD, rstd_TH = x_TGRD.flatten(1, 2), None
    if weight_D is not None:
        y, rstd = rms_norm(x_THD.flatten(0, 1), weight_D, eps)
        x_THD, rstd_TH = y.view(x_THD.shape), rstd.view(x_THD.shape[:2])
    return rope(x_THD, positions_T, cos_sin_RD), rstd_TH


def norm_rope_backward(
    dy_THD: torch.Tensor,
    x_TGRD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rstd_TH: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin_RD: torch.Tensor,
    dx_TGRD: torch.Tensor,
) -> torch.Tensor | None:
    """Gradients of `norm_rope`: of x into `dx`, of the weight, float32 [D], as the result."""
    dx, dweight_D = rope(dy_THD, positions_T, cos_sin_RD, inverse=True), None
    if weight_D is not None and rstd_TH is not None:
        rows = dx.flatten(0, 1), x_TGRD.flatten(0, 2)
        dx, dweight_D = rms_norm_backward(*rows, weight_D, rstd_TH.flatten())
    dx_TGRD.copy_(dx.view(x_TGRD.shape))
    return dweight_D


def token_log_probs(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """log softmax(logits)[target], maxima of the rows, and sums of exp(logit - maximum): float32 [T] each.

    The log-probs are those of torch's log_softmax, which a CPU rollout takes. Where a target is no column, NaN.
    """
    logits = logits_TV.float()
    maximum_T = logits.amax(dim=1)
    total_T = (logits - maximum_T[:, None]).exp().sum(dim=1)
    inside_T = (targets_T >= 0) & (targets_T < logits.shape[1])
    chosen_T = logits.log_softmax(-1).gather(1, targets_T.where(inside_T, 0)[:, None].long())[:, 0]
    return chosen_T.where(inside_T, torch.nan), maximum_T, total_T


def token_log_probs_backward(
    gradient_T: torch.Tensor,
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    maximum_T: torch.Tensor,
    total_T: torch.Tensor,
    *,
    first_column: int = 0,
) -> torch.Tensor:
    """Gradient of the log-probs with respect to columns of the logits, from `first_column` of the vocabulary on."""
    probability = (logits_TV.float() - maximum_T[:, None]).exp() / total_T[:, None]
    columns = torch.arange(first_column, first_column + logits_TV.shape[1], device=logits_TV.device)
    chosen = (columns == targets_T[:, None]).float()
    return ((chosen - probability) * gradient_T[:, None]).to(logits_TV.dtype)
