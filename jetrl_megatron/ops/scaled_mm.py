"""torch's own blockwise FP8 product (cuBLASLt), for hosts without DeepGEMM."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jetrl_megatron.ops.deep_gemm import check_alignment, hopper_refusal
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor

_BLOCK = 128


class ScaledMm:
    """`torch.nn.functional.scaled_mm` with BlockWise1x128 against BlockWise128x128."""

    name = "scaled_mm"

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        if recipe.block != _BLOCK:
            return f"its scales cover {_BLOCK} elements, the recipe's {recipe.block}"
        return hopper_refusal(device)

    def prepare(self, operand: BlockScaledTensor) -> BlockScaledTensor:
        return check_alignment(operand)

    def prepare_transposed(self, operand: BlockScaledTensor, prepared: BlockScaledTensor) -> BlockScaledTensor:
        return check_alignment(operand.t())

    def nt(self, a: BlockScaledTensor, b: BlockScaledTensor) -> torch.Tensor:
        return self._product(a, b, torch.bfloat16)

    def accumulate_nt(self, a: BlockScaledTensor, b: BlockScaledTensor, out_NK: torch.Tensor) -> None:
        out_NK.add_(self._product(a, b, torch.float32))

    @staticmethod
    def _product(a: BlockScaledTensor, b: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
        kinds = {1: F.ScalingType.BlockWise1x128, _BLOCK: F.ScalingType.BlockWise128x128}
        product: torch.Tensor = F.scaled_mm(
            a.data,
            b.data.t(),
            a.scale,
            kinds[a.block[0]],
            b.scale.t(),
            kinds[b.block[0]],
            output_dtype=dtype,
        )
        return product
