"""Where the rows or columns that a rank stores lie in the tiles of the logical matrices.

A scale belongs to a tile of a *logical* matrix, one that the checkpoint names (q_proj, gate_proj, ...). Megatron stores
several of them in one weight, interleaved (q, k, v by group), in halves (gate, up) or cut by tensor parallelism. A
`TileLayout` says, for one dimension of a rank's weight, where each stored row goes in an *aligned operand*: the logical
matrices one after the other, each starting at a multiple of `block`, so that row r of the operand belongs to tile
r // block. Rows of a tile that other ranks hold stay zero. GEMMs and quantisers see aligned operands only.

The words are for rows; a layout serves columns of row-parallel weights just as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from jetrl_megatron.tensor import ceil_div

Run = tuple[int, int, int]
"""(matrix, first logical row, rows): stored rows that follow each other in logical matrix number `matrix`."""


@dataclass(frozen=True)
class TileLayout:
    """One dimension of a rank's stored weight against the tiles of the logical matrices.

    Attributes:
        stored: rows that the rank stores.
        aligned: rows of the aligned operand.
        position: row of the aligned operand for each stored row, or None when the stored rows are an aligned operand:
            whole tiles, each starting at a multiple of the block, in whatever order.
        tiles: for each tile row of the aligned operand, its number among the tile rows of all logical matrices.
        total_tiles: tile rows of all logical matrices together.
        shared: whether any rank holds only a part of a tile, so that amaxes must be reduced over the ranks.
    """

    stored: int
    aligned: int
    position: tuple[int, ...] | None
    tiles: tuple[int, ...]
    total_tiles: int
    shared: bool


def _spans(runs: Iterable[Run], matrices: int) -> list[tuple[int, int]]:
    """First and last + 1 logical row that the runs hold of each matrix; (0, 0) where they hold none."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(matrices)]
    for matrix, start, length in runs:
        held[matrix].append((start, start + length))
    for intervals in held:
        intervals.sort()
        assert all(before[1] == after[0] for before, after in pairwise(intervals)), intervals
    return [(intervals[0][0], intervals[-1][1]) if intervals else (0, 0) for intervals in held]


def _cuts_tile(span: tuple[int, int], size: int, block: int) -> bool:
    start, stop = span
    return start % block != 0 or (stop % block != 0 and stop != size)


def clip_runs(runs: Iterable[Run], start: int, stop: int) -> list[Run]:
    """The part of the runs that lies in rows start .. stop of the storage that they describe."""
    clipped, offset = [], 0
    for matrix, first, length in runs:
        low, high = max(start, offset), min(stop, offset + length)
        if low < high:
            clipped.append((matrix, first + low - offset, high - low))
        offset += length
    return clipped


def _layout(runs_of_rank: list[list[Run]], rank: int, sizes: tuple[int, ...], block: int) -> TileLayout:
    spans = [_spans(runs, len(sizes)) for runs in runs_of_rank]
    shared = any(_cuts_tile(span, size, block) for held in spans for span, size in zip(held, sizes, strict=True))
    bases: list[int] = []
    tiles: list[int] = []
    aligned, first_tile = 0, 0
    for (start, stop), size in zip(spans[rank], sizes, strict=True):
        aligned = ceil_div(aligned, block) * block
        base = aligned - start // block * block
        bases.append(base)
        if stop > start:
            tiles += range(first_tile + start // block, first_tile + ceil_div(stop, block))
            aligned = base + stop
        first_tile += ceil_div(size, block)
    position = [bases[matrix] + first + i for matrix, first, length in runs_of_rank[rank] for i in range(length)]
    in_place = _tiles_in_place(position, block)
    if in_place is not None:
        return TileLayout(len(position), len(position), None, tuple(tiles[t] for t in in_place), first_tile, shared)
    return TileLayout(len(position), aligned, tuple(position), tuple(tiles), first_tile, shared)


def _tiles_in_place(position: list[int], block: int) -> list[int] | None:
    """Which aligned tile each stored tile is, or None where stored tiles are no whole tiles of the operand."""
    starts = position[::block]
    if any(position[row] != starts[row // block] + row % block for row in range(len(position))):
        return None
    if any(start % block for start in starts) or len(set(starts)) < len(starts):
        return None
    # A tile cut by another rank may hold fewer rows than it has; they must be its last stored ones.
    return [start // block for start in starts]


@lru_cache(maxsize=256)
def plain_layout(size: int, *, rank: int, world: int, block: int) -> TileLayout:
    """One logical matrix of `size` rows, cut into `world` equal parts."""
    part = size // world
    return _layout([[(0, r * part, part)] for r in range(world)], rank, (size,), block)


@lru_cache(maxsize=256)
def gated_layout(size: int, *, rank: int, world: int, block: int) -> TileLayout:
    """Two logical matrices of `size` rows, gate and up; a rank stores its part of gate, then its part of up."""
    part = size // world
    runs = [[(0, r * part, part), (1, r * part, part)] for r in range(world)]
    return _layout(runs, rank, (size, size), block)


@lru_cache(maxsize=256)
def qkv_layout(heads: int, groups: int, head_dim: int, *, rank: int, world: int, block: int) -> TileLayout:
    """q, k and v, stored group by group: the group's query heads, its key head, its value head.

    The storage is cut into `world` equal parts, wherever the cuts fall (Megatron does so with more ranks than groups).
    """
    rows = (heads + 2 * groups) * head_dim
    runs = [
        clip_runs(qkv_runs(heads, groups, head_dim), r * rows // world, (r + 1) * rows // world) for r in range(world)
    ]
    return _layout(runs, rank, (heads * head_dim, groups * head_dim, groups * head_dim), block)


def qkv_runs(heads: int, groups: int, head_dim: int) -> list[Run]:
    """Megatron's stored order of a whole linear_qkv as runs of q (0), k (1) and v (2)."""
    per_group = heads // groups * head_dim
    runs: list[Run] = []
    for group in range(groups):
        runs += [
            (0, group * per_group, per_group),
            (1, group * head_dim, head_dim),
            (2, group * head_dim, head_dim),
        ]
    return runs


def tile_runs(layout: TileLayout, sizes: Sequence[int], block: int) -> list[tuple[int, int, int, int]]:
    """Which tiles of the logical matrices a rank's aligned operand holds.

    Args:
        sizes: rows of each logical matrix.

    Returns:
        (tile of the operand, matrix, tile of the matrix, tiles): runs that follow each other in both.
    """
    first_tiles = list(accumulate((ceil_div(size, block) for size in sizes), initial=0))
    runs: list[tuple[int, int, int, int]] = []
    for held, number in enumerate(layout.tiles):
        matrix = bisect_right(first_tiles, number) - 1
        tile = number - first_tiles[matrix]
        if runs and runs[-1][1:3] == (matrix, tile - runs[-1][3]):
            runs[-1] = (*runs[-1][:3], runs[-1][3] + 1)
        else:
            runs.append((held, matrix, tile, 1))
    return runs
