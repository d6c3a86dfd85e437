"""The public quantisers, and the GEMM over what they return."""

# Shape suffixes: M rows of an activation, N and K rows and columns of a weight.

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from jetrl_megatron.ops.backends import Gemm
from jetrl_megatron.ops.selection import select_gemm, select_quantizer
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor


def quantize_weight(
    w_NK: torch.Tensor, recipe: Fp8BlockRecipe = JETRL_FP8, *, amax: torch.Tensor | None = None
) -> BlockScaledTensor:
    """Quantises a weight in tiles of block x block; ragged edges count as padded with zero.

    What is quantised is the BF16 weight: other dtypes are rounded to BF16 first, so that an FP32 master and its BF16
    copy give the same codes.

    Args:
        w_NK: any float dtype [N, K], any strides, N or K may be zero. NaN gives NaN codes, not an error.
        amax: float32 [ceil(N/block), ceil(K/block)] to use instead of w's own, where other ranks hold parts of a tile.

    Returns:
        data float8_e4m3fn [N, K], scale float32 [ceil(N/block), ceil(K/block)].

    Raises:
        ValueError: w is no matrix, or no float.
    """
    if w_NK.dim() != 2 or not w_NK.is_floating_point():
        raise ValueError(f"w is {w_NK.dtype} {list(w_NK.shape)}: quantize_weight takes a float matrix [N, K]")
    codes, _ = select_quantizer(recipe, w_NK.device).weight(w_NK, recipe, amax=amax)
    return codes


def quantize_activation(
    x: torch.Tensor, recipe: Fp8BlockRecipe = JETRL_FP8, *, amax: torch.Tensor | None = None
) -> BlockScaledTensor:
    """Quantises activations or gradients in groups of 1 x block along the last axis.

    Args:
        x: float [..., K], any strides; leading axes are flattened in order, so row 2*s + b belongs to x[s, b] of an
            [S, 2, K] input. Zero rows are allowed. NaN gives NaN codes for its group, not an error.
        amax: float32 [M, ceil(K/block)] to use instead of x's own, where other ranks hold parts of a group.

    Returns:
        data float8_e4m3fn [M, K], scale float32 [M, ceil(K/block)].

    Raises:
        ValueError: x has no axis, or is no float.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: quantize_activation takes a float tensor [..., K]")
    return select_quantizer(recipe, x.device).activation(as_matrix(x), recipe, amax=amax)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [M, K]; a view where strides allow."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


class LinearOperand:
    """A quantised matrix with the prepared forms that GEMMs read, made on first use and kept.

    Args:
        tensor: [R, C] codes and scales.
        transposed: [C, R], the same codes and scales, where the quantiser wrote them in one go.
    """

    def __init__(
        self, tensor: BlockScaledTensor, transposed: BlockScaledTensor | None = None, gemm: Gemm | None = None
    ) -> None:
        self.tensor = tensor
        self.transposed = transposed
        self.gemm = gemm or select_gemm(tensor.recipe, tensor.data.device)

    @cached_property
    def rows(self) -> Any:
        """Prepared [R, C]: contracts over C."""
        return self.gemm.prepare(self.tensor)

    @cached_property
    def columns(self) -> Any:
        """Prepared [C, R], from the same codes and scales: contracts over R."""
        if self.transposed is not None:
            return self.gemm.prepare(self.transposed)
        return self.gemm.prepare_transposed(self.tensor, self.rows)
