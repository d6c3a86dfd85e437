"""Outputs of quantising kernels, with scales laid out as GEMMs read them."""

from __future__ import annotations

import torch

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor, ceil_div

_TMA_FLOATS = 4
"""float32 values in 16 bytes: TMA wants every column of scales to start at a multiple of that."""


FEWEST_ROWS = 8
"""Rows that are allocated at least: DeepGEMM is slower for fewer, and computes the same rows."""


def empty_codes(
    rows: int, columns: int, recipe: Fp8BlockRecipe, device: torch.device, *, fewest_rows: int = FEWEST_ROWS
) -> BlockScaledTensor:
    """Uninitialised codes [rows, columns] in groups along columns; scales with their rows next to each other.

    Args:
        fewest_rows: rows that are allocated at least.
    """
    held = max(rows, fewest_rows)
    stride = ceil_div(held, _TMA_FLOATS) * _TMA_FLOATS
    groups = ceil_div(columns, recipe.block)
    codes = torch.empty(held, columns, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty_strided((held, groups), (1, stride), dtype=torch.float32, device=device)
    if held > rows:
        codes, scale = codes[:rows], scale[:rows]
    return BlockScaledTensor(codes, scale, recipe.activation_block, recipe)


def empty_along_tokens(tokens: int, features: int, recipe: Fp8BlockRecipe, device: torch.device) -> BlockScaledTensor:
    """Uninitialised codes [features, tokens], tokens rounded up to whole groups."""
    return empty_codes(features, ceil_div(tokens, recipe.block) * recipe.block, recipe, device)


def empty_weight(
    rows: int, columns: int, recipe: Fp8BlockRecipe, device: torch.device
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Uninitialised codes [rows, columns] and [columns, rows] over one set of scales."""
    block = recipe.block
    scale = torch.empty(ceil_div(rows, block), ceil_div(columns, block), dtype=torch.float32, device=device)
    codes, transposed = (
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device) for shape in ((rows, columns), (columns, rows))
    )
    return (
        BlockScaledTensor(codes, scale, recipe.weight_block, recipe),
        BlockScaledTensor(transposed, scale.t(), recipe.weight_block, recipe),
    )


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The matrix itself where its rows are contiguous, else a copy."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
