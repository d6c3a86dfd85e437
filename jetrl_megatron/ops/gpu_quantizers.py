"""Quantisers on a Hopper GPU: Triton's, and the CUDA extension's where it was built and is faster."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from jetrl_megatron.ops.hopper import hopper_refusal
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor

_KERNELS = "jetrl_megatron.kernels"


@functools.cache
def _kernel(module: str) -> Any:
    # Imported when first called: Triton is not there on every machine, and its import takes a second.
    return importlib.import_module(f"{_KERNELS}.{module}")


class TritonQuantizer:
    """The kernels of `jetrl_megatron.kernels`."""

    name = "triton"
    fused = True

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        reason = hopper_refusal(device)
        if reason is None and importlib.util.find_spec("triton") is None:
            reason = "triton is not installed"
        return reason

    def weight(
        self, w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
    ) -> tuple[BlockScaledTensor, BlockScaledTensor | None]:
        pair: tuple[BlockScaledTensor, BlockScaledTensor] = _kernel("quantize_weight").quantize_weight(
            w_NK, recipe, amax=amax
        )
        return pair

    def activation(
        self, x_MK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
    ) -> BlockScaledTensor:
        codes: BlockScaledTensor = _kernel("quantize_activation").quantize_activation(x_MK, recipe, amax=amax)
        return codes

    def both(self, x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        pair: tuple[BlockScaledTensor, BlockScaledTensor] = _kernel("quantize_both").quantize_both(x_MC, recipe)
        return pair

    def along_tokens(self, x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
        codes: BlockScaledTensor = _kernel("quantize_both").quantize_along_tokens(x_MC, recipe)
        return codes

    def requantize_along_tokens(self, codes: BlockScaledTensor) -> BlockScaledTensor:
        columns: BlockScaledTensor = _kernel("requantize_along_tokens").requantize_along_tokens(codes)
        return columns

    def rms_norm(
        self, x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, torch.Tensor]:
        codes, rstd_M, _ = _kernel("rms_norm").rms_norm_quantize(x_MK, weight_K, eps, recipe)
        return codes, rstd_M

    def rms_norm_backward(
        self, dy_MK: torch.Tensor, x_MK: torch.Tensor, weight_K: torch.Tensor, rstd_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pair: tuple[torch.Tensor, torch.Tensor] = _kernel("rms_norm").rms_norm_backward(dy_MK, x_MK, weight_K, rstd_M)
        return pair

    def swiglu(self, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
        codes: BlockScaledTensor = _kernel("swiglu").swiglu_quantize(y_M2F, recipe)
        return codes

    def swiglu_backward(
        self, dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        pair: tuple[BlockScaledTensor, BlockScaledTensor] = _kernel("swiglu").swiglu_backward_quantize(
            dh_MF, y_M2F, recipe
        )
        return pair


class CudaQuantizer(TritonQuantizer):
    """The extension `jetrl_megatron._C` for the operators that it has, Triton for the others."""

    name = "cuda"

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        reason = super().refusal(recipe, device)
        if reason is None and importlib.util.find_spec("jetrl_megatron._C") is None:
            reason = "the CUDA extension was not built: install with CUDA torch and nvcc present"
        if reason is None and (recipe.block, recipe.element_max) != (128, 448.0):
            reason = f"it is built for blocks of 128 and codes up to 448, not {recipe.block} and {recipe.element_max}"
        return reason

    def weight(
        self, w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
    ) -> tuple[BlockScaledTensor, BlockScaledTensor | None]:
        pair: tuple[BlockScaledTensor, BlockScaledTensor]
        (pair,) = _kernel("extension").quantize_weights([bf16_rows(w_NK)], recipe, amax=amax)
        return pair

    def both(self, x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        pair: tuple[BlockScaledTensor, BlockScaledTensor] = _kernel("extension").quantize_both(bf16_rows(x_MC), recipe)
        return pair

    def along_tokens(self, x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
        if x_MC.dtype != torch.bfloat16:
            # Dequantised fp32-scaled codes have more digits than BF16.
            return super().along_tokens(x_MC, recipe)
        codes: BlockScaledTensor = _kernel("extension").quantize_along_tokens(bf16_rows(x_MC), recipe)
        return codes

    def requantize_along_tokens(self, codes: BlockScaledTensor) -> BlockScaledTensor:
        columns: BlockScaledTensor = _kernel("extension").requantize_along_tokens(codes)
        return columns

    def rms_norm(
        self, x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, torch.Tensor]:
        extension = _kernel("extension")
        if not extension.takes_norm(x_MK, weight_K):
            return super().rms_norm(x_MK, weight_K, eps, recipe)
        codes, rstd_M, _ = extension.rms_norm_quantize(x_MK.contiguous(), weight_K, eps, recipe)
        return codes, rstd_M

    def rms_norm_backward(
        self, dy_MK: torch.Tensor, x_MK: torch.Tensor, weight_K: torch.Tensor, rstd_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        extension = _kernel("extension")
        if not extension.takes_norm(x_MK, weight_K):
            return super().rms_norm_backward(dy_MK, x_MK, weight_K, rstd_M)
        pair: tuple[torch.Tensor, torch.Tensor] = extension.rms_norm_backward(
            dy_MK.contiguous(), x_MK.contiguous(), weight_K, rstd_M
        )
        return pair

    def swiglu(self, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
        if y_M2F.shape[1] % (2 * recipe.block):
            return super().swiglu(y_M2F, recipe)
        codes: BlockScaledTensor = _kernel("extension").swiglu_quantize(y_M2F.contiguous(), recipe)
        return codes

    def swiglu_backward(
        self, dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        pair: tuple[BlockScaledTensor, BlockScaledTensor] = _kernel("extension").swiglu_backward_quantize(
            dh_MF.contiguous(), y_M2F.contiguous(), recipe
        )
        return pair


def bf16_rows(x: torch.Tensor) -> torch.Tensor:
    """The matrix in BF16 with contiguous rows; itself where it is so already."""
    rows: torch.Tensor = _kernel("outputs").rows_contiguous(x.to(torch.bfloat16))
    return rows
