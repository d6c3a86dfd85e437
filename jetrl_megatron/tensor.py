"""Codes and scales of one quantised matrix, with their shapes checked."""

# Shape suffixes: M rows of an activation, N and K rows and columns of a weight, R and C rows and columns of either.

from __future__ import annotations

from dataclasses import dataclass

import torch

from jetrl_megatron.recipe import Fp8BlockRecipe


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer >= value / divisor."""
    return -(-value // divisor)


@dataclass(frozen=True)
class BlockScaledTensor:
    """A matrix in FP8: value[r, c] = data[r, c] * scale[r // block[0], c // block[1]].

    Attributes:
        data: codes, float8_e4m3fn [R, C].
        scale: float32 [ceil(R / block[0]), ceil(C / block[1])], the multiplier that dequantises.
        block: rows and columns that share one scale: recipe.weight_block or recipe.activation_block. It is stated,
            never guessed from the shapes: 1000 rows with 8 scale rows are tiles of 128, not of 125.
        recipe: the recipe that made the codes.

    Raises:
        ValueError: a dtype or the scale's shape is wrong, e.g. because the scale is transposed.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    recipe: Fp8BlockRecipe

    def __post_init__(self) -> None:
        if self.data.dtype != torch.float8_e4m3fn or self.data.dim() != 2:
            raise ValueError(f"data is {self.data.dtype} {tuple(self.data.shape)}: codes are float8_e4m3fn [R, C]")
        rows, columns = self.data.shape
        expected = (ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1]))
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"scale is {list(self.scale.shape)} for data {list(self.data.shape)} in blocks of {list(self.block)}: "
                f"expected {list(expected)}; scale[i, j] belongs to rows and columns in that order, not transposed"
            )
        if self.scale.dtype != torch.float32:
            raise ValueError(f"scale is {self.scale.dtype}: scales are float32")

    @property
    def shape(self) -> torch.Size:
        """[R, C]."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values, `dtype` [R, C]. With ue8m0 scales float32 and bfloat16 are exact."""
        rows, columns = self.data.shape
        spread_RC = self.scale.repeat_interleave(self.block[0], 0)[:rows]
        spread_RC = spread_RC.repeat_interleave(self.block[1], 1)[:, :columns]
        return (self.data.to(torch.float32) * spread_RC).to(dtype)

    def t(self) -> BlockScaledTensor:
        """The transposed matrix, from the same codes and scales, K-major: data [C, R], scale transposed with it."""
        return BlockScaledTensor(
            self.data.t().contiguous(), self.scale.t().contiguous(), (self.block[1], self.block[0]), self.recipe
        )

    def narrow(self, dim: int, start: int, length: int) -> BlockScaledTensor:
        """Rows (dim 0) or columns (dim 1) start .. start + length, as views.

        Raises:
            ValueError: the cut starts inside a block, so that its first scale would be misplaced.
        """
        block = self.block[dim]
        if start % block:
            raise ValueError(
                f"narrow(dim={dim}, start={start}) cuts a block of {block}: start at a multiple of {block}, or "
                "quantise the part that you need"
            )
        first, count = start // block, ceil_div(length, block)
        return BlockScaledTensor(
            self.data.narrow(dim, start, length), self.scale.narrow(dim, first, count), self.block, self.recipe
        )

    def equal(self, other: BlockScaledTensor) -> bool:
        """Whether codes and scales are the same bytes."""
        return (
            self.block == other.block
            and self.data.shape == other.data.shape
            and torch.equal(self.data.view(torch.uint8), other.data.view(torch.uint8))
            and torch.equal(self.scale.view(torch.int32), other.scale.view(torch.int32))
        )
