"""A `TileLayout` at work: data between stored and aligned order, amaxes over the ranks that share tiles."""

# Shape suffixes: R and C rows and columns; Rt and Ct the same counted in tiles that the rank holds.

from __future__ import annotations

import torch
import torch.distributed as dist

from jetrl_megatron.layout import TileLayout


class Alignment:
    """Moves one dimension of a tensor between a rank's stored order and the aligned operand.

    Args:
        layout: where the stored rows lie in tiles.
        group: ranks among which the layout cuts, None when they are not known or only one.
        device: where the index tensors live.
    """

    def __init__(self, layout: TileLayout, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.layout = layout
        self.group = group
        self.tiles = torch.tensor(layout.tiles, dtype=torch.long, device=device)
        self.position = None
        if layout.position is not None:
            self.position = torch.tensor(layout.position, dtype=torch.long, device=device)

    @property
    def direct(self) -> bool:
        """Whether quantisers can work on stored data by themselves: nothing moves and no tile is shared."""
        return self.position is None and not self.layout.shared

    def align(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Stored order to aligned order along `dim`; rows that other ranks hold become zero."""
        if self.position is None:
            return x
        shape = list(x.shape)
        shape[dim] = self.layout.aligned
        return x.new_zeros(shape).index_copy_(dim, self.position, x)

    def restore(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Aligned order back to stored order along `dim`."""
        return x if self.position is None else x.index_select(dim, self.position)

    def reduce_columns(self, amax_MCt: torch.Tensor) -> torch.Tensor:
        """Amax of activation groups whose elements lie on several ranks: float32 [M, Ct] in and out."""
        if not self.layout.shared:
            return amax_MCt
        grid = amax_MCt.new_zeros(amax_MCt.shape[0], self.layout.total_tiles)
        grid[:, self.tiles] = amax_MCt
        return _max_over_ranks(grid, self.group)[:, self.tiles]


def reduce_tiles(amax_RtCt: torch.Tensor, rows: Alignment, columns: Alignment) -> torch.Tensor:
    """Amax of weight tiles whose elements lie on several ranks: float32 [Rt, Ct] in and out.

    A collective over the group of the dimension that is cut; every rank of it must call.
    """
    if not (rows.layout.shared or columns.layout.shared):
        return amax_RtCt
    group = rows.group if rows.layout.shared else columns.group
    grid = amax_RtCt.new_zeros(rows.layout.total_tiles, columns.layout.total_tiles)
    held = rows.tiles[:, None], columns.tiles[None, :]
    grid[held] = amax_RtCt
    return _max_over_ranks(grid, group)[held]


def _max_over_ranks(grid: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    # A maximum may drop NaN on its way; an infinite scale does not, it makes the whole tile NaN.
    grid = torch.where(torch.isnan(grid), torch.inf, grid)
    dist.all_reduce(grid, op=dist.ReduceOp.MAX, group=group)
    return grid
