"""Layouts: stored rows against the tiles of the logical matrices, checked by quantising."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_megatron import JETRL_FP8, quantize_weight
from jetrl_megatron.layout import TileLayout, gated_layout, plain_layout, qkv_layout, qkv_runs
from jetrl_megatron.ops.alignment import Alignment
from jetrl_megatron.reference import block_amax

BLOCK = JETRL_FP8.block


def aligned(layout: TileLayout, stored: torch.Tensor) -> torch.Tensor:
    return Alignment(layout, None, torch.device("cpu")).align(stored, 0)


def interleave(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Megatron's linear_qkv, written down independently of the layout: per group its q heads, k head, v head."""
    parts = zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)
    return torch.cat([torch.cat(part) for part in parts])


def assert_ranks_reproduce_logical_scales(matrices: list[torch.Tensor], layouts: list[TileLayout], stored) -> None:
    """The amax grid put together from all ranks equals that of the logical matrices, and so do the values."""
    expected = torch.cat([block_amax(m, (BLOCK, BLOCK)) for m in matrices])
    grid = torch.zeros_like(expected)
    for layout, part in zip(layouts, stored, strict=True):
        assert layout.total_tiles == expected.shape[0]
        amax = block_amax(aligned(layout, part), (BLOCK, BLOCK))
        grid[list(layout.tiles)] = torch.maximum(grid[list(layout.tiles)], amax)
    assert torch.equal(grid, expected)


def test_qkv_layout_interleave_is_a_permutation_of_tiles():
    layout = qkv_layout(4, 2, 128, rank=0, world=1, block=BLOCK)
    names = "abcdefgh"  # stored: q0 q1 k0 v0 q2 q3 k1 v1
    stored = torch.arange(8.0).repeat_interleave(128)[:, None]
    assert layout.position is None and torch.equal(aligned(layout, stored), stored), "nothing has to move"
    order = "".join(names[layout.tiles.index(tile)] for tile in range(8))
    assert order == "abef" + "cg" + "dh"
    assert not layout.shared


def test_qkv_layout_few_kv_heads_over_more_ranks():
    layouts = [qkv_layout(12, 2, 128, rank=r, world=4, block=BLOCK) for r in range(4)]
    assert layouts[0].total_tiles == 12 + 2 + 2
    assert sorted(tile for layout in layouts for tile in layout.tiles) == list(range(16))
    assert not any(layout.shared for layout in layouts)


def test_qkv_layout_head_dim_64_cut_mid_tile():
    layouts = [qkv_layout(14, 2, 64, rank=r, world=2, block=BLOCK) for r in range(2)]
    assert all(layout.shared and layout.total_tiles == 7 + 1 + 1 for layout in layouts)
    assert layouts[0].tiles == (0, 1, 2, 3, 7, 8) and layouts[1].tiles == (3, 4, 5, 6, 7, 8)
    q, k, v = torch.randn(896, 256), torch.randn(128, 256), torch.randn(128, 256)
    assert_ranks_reproduce_logical_scales([q, k, v], layouts, interleave(q, k, v, 2).chunk(2))


def test_gated_layout_halves_over_ranks():
    gate, up = torch.randn(512, 128), torch.randn(512, 128)
    layouts = [gated_layout(512, rank=r, world=2, block=BLOCK) for r in range(2)]
    stored = [torch.cat([gate[:256], up[:256]]), torch.cat([gate[256:], up[256:]])]
    assert [layout.tiles for layout in layouts] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert_ranks_reproduce_logical_scales([gate, up], layouts, stored)


def test_plain_layout_column_three_and_a_half_tiles():
    layouts = [plain_layout(896, rank=r, world=2, block=BLOCK) for r in range(2)]
    assert [layout.tiles for layout in layouts] == [(0, 1, 2, 3), (3, 4, 5, 6)]
    assert all(layout.shared for layout in layouts)
    assert layouts[1].position[0] == 64  # the first half of tile 3 is rank 0's


def test_plain_layout_aligned_is_identity():
    layout = plain_layout(1000, rank=0, world=1, block=BLOCK)
    assert layout.position is None and not layout.shared and layout.aligned == 1000


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["qkv", "gated", "plain"]),
    world=st.sampled_from([1, 2, 4]),
    heads_per_group=st.integers(1, 4),
    groups=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    width=st.integers(1, 150),
)
def test_layouts_reproduce_logical_scales(kind, world, heads_per_group, groups, head_dim, width):
    generator = torch.Generator().manual_seed(width)
    if kind == "qkv":
        heads = heads_per_group * groups
        rows = [heads * head_dim, groups * head_dim, groups * head_dim]
        if sum(rows) % world:
            return
        matrices = [torch.randn(n, 8, generator=generator) for n in rows]
        stored = interleave(*matrices, groups).chunk(world)
        layouts = [qkv_layout(heads, groups, head_dim, rank=r, world=world, block=BLOCK) for r in range(world)]
    elif kind == "gated":
        matrices = [torch.randn(width * world, 8, generator=generator) for _ in range(2)]
        parts = [m.chunk(world) for m in matrices]
        stored = [torch.cat([gate, up]) for gate, up in zip(*parts, strict=True)]
        layouts = [gated_layout(width * world, rank=r, world=world, block=BLOCK) for r in range(world)]
    else:
        matrices = [torch.randn(width * world, 8, generator=generator)]
        stored = matrices[0].chunk(world)
        layouts = [plain_layout(width * world, rank=r, world=world, block=BLOCK) for r in range(world)]
    assert_ranks_reproduce_logical_scales(matrices, layouts, stored)
    for layout, part in zip(layouts, stored, strict=True):
        alignment = Alignment(layout, None, torch.device("cpu"))
        assert torch.equal(alignment.restore(alignment.align(part, 0), 0), part)


def test_qkv_runs_cover_every_logical_row_once():
    runs = qkv_runs(6, 3, 32)
    rows = sorted((matrix, first + i) for matrix, first, length in runs for i in range(length))
    assert rows == [(0, i) for i in range(192)] + [(1, i) for i in range(96)] + [(2, i) for i in range(96)]


def test_aligned_codes_equal_logical_codes_exact():
    q, k, v = torch.randn(256, 256), torch.randn(128, 256), torch.randn(128, 256)
    layout = qkv_layout(4, 2, 64, rank=0, world=1, block=BLOCK)
    whole = quantize_weight(aligned(layout, interleave(q, k, v, 2)))
    for matrix, start in ((q, 0), (k, 256), (v, 384)):
        assert whole.narrow(0, start, matrix.shape[0]).equal(quantize_weight(matrix))


@pytest.mark.parametrize("world", [2, 4])
def test_layouts_agree_on_shared_over_ranks(world):
    # `shared` decides whether a rank enters a collective: all ranks must decide alike.
    layouts = [plain_layout(128 * world + 64 * world, rank=r, world=world, block=BLOCK) for r in range(world)]
    assert len({layout.shared for layout in layouts}) == 1 and layouts[0].shared
