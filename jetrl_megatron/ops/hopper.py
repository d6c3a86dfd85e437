"""What the GEMMs of a Hopper GPU (H100, H200) have in common."""

from __future__ import annotations

import torch

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor

_HOPPER = (9, 0)
_BLOCK = 128
"""Elements that a scale covers, in every blockwise FP8 GEMM for this chip."""
_ALIGNMENT = 16
"""Bytes: what TMA asks of a row's length."""


def hopper_refusal(device: torch.device) -> str | None:
    """None on a GPU of compute capability 9.0, else what the device is."""
    if device.type != "cuda":
        return f"it needs a Hopper GPU, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOPPER:
        major, minor = capability
        return f"it needs a Hopper GPU (9.0); {torch.cuda.get_device_name(device)} is {major}.{minor}"
    return None


def check_alignment(operand: BlockScaledTensor) -> BlockScaledTensor:
    """The operand itself.

    Raises:
        ValueError: a row of codes is no multiple of 16 bytes long.
    """
    columns = operand.shape[1]
    if columns % _ALIGNMENT:
        raise ValueError(
            f"an FP8 GEMM contracts over {columns} elements, which is no multiple of {_ALIGNMENT}: pad the layer, or "
            "put it into the recipe's ignore list"
        )
    return operand


class HopperGemm:
    """Where such a GEMM serves, and what it reads: codes and scales as the quantisers leave them."""

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        if recipe.block != _BLOCK:
            return f"its scales cover {_BLOCK} elements, the recipe's {recipe.block}"
        return hopper_refusal(device)

    def prepare(self, operand: BlockScaledTensor) -> BlockScaledTensor:
        return check_alignment(operand)

    def prepare_transposed(self, operand: BlockScaledTensor, prepared: BlockScaledTensor) -> BlockScaledTensor:
        return check_alignment(operand.t())
