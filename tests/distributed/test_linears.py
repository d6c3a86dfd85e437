"""Linears of real widths under tensor parallelism: outputs, gradients and scales against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.common import relative_error
from jetrl_megatron import quantize_weight
from tests.distributed.linear_bodies import LINEARS
from tests.distributed.ranks import launch

pytestmark = pytest.mark.distributed
CASES = pytest.mark.parametrize(("kind", "name", "tp"), [(kind, name, tp) for kind, name, _, tp in LINEARS])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[str, list[Any]]:
    return launch("tests.distributed.linear_bodies", 4, tmp_path_factory.mktemp("linears") / "results.pt")


def pair(ranks: dict[str, list[Any]], kind: str, name: str, tp: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return ranks[f"{kind}_{name}_tp1"][0], ranks[f"{kind}_{name}_tp{tp}"][:tp]


def halves(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """[gate_r; up_r] of each rank as [gate; up]."""
    return torch.cat([torch.cat(half, dim) for half in zip(*(p.chunk(2, dim) for p in parts), strict=True)], dim)


@CASES
def test_weight_scales_do_not_depend_on_tensor_parallelism_exact(ranks, kind, name, tp):
    whole, parts = pair(ranks, kind, name, tp)
    grid = {}
    for part in parts:
        rows, columns = part["layouts"]
        for i, row in enumerate(rows.tiles):
            for j, column in enumerate(columns.tiles):
                assert grid.setdefault((row, column), part["scale"][i, j].item()) == part["scale"][i, j].item()
    rows, columns = whole["layouts"]
    expected = whole["scale"].tolist()
    assert grid == {(r, c): expected[i][j] for i, r in enumerate(rows.tiles) for j, c in enumerate(columns.tiles)}


def test_scale_shapes_of_half_tiles(ranks):
    rows, columns = ranks["qkv_0.5b_tp2"][0]["layouts"]
    assert (rows.total_tiles, columns.total_tiles) == (7 + 1 + 1, 7) and rows.shared
    rows, columns = ranks["proj_0.5b_tp2"][0]["layouts"]
    assert (rows.total_tiles, columns.total_tiles) == (7, 7) and columns.shared
    rows, _ = ranks["qkv_few_kv_tp4"][0]["layouts"]
    assert rows.total_tiles == 12 + 2 + 2 and not rows.shared


def test_shared_column_tile_has_the_amax_of_both_ranks_exact(ranks):
    whole, parts = pair(ranks, "proj", "0.5b", 2)
    assert torch.equal(torch.cat([part["weight"] for part in parts], 1), whole["weight"])
    expected = quantize_weight(whole["weight"]).scale[:, 3]
    assert torch.equal(parts[0]["scale"][:, 3], expected) and torch.equal(parts[1]["scale"][:, 0], expected)
    alone = [quantize_weight(part["weight"]).scale for part in parts]
    assert not torch.equal(alone[0][:, 3], expected), "rank 0's half alone must give another scale"


@CASES
def test_fprop_and_dgrad_under_tensor_parallelism(ranks, kind, name, tp):
    whole, parts = pair(ranks, kind, name, tp)
    summed, joined = ("y", "dx") if kind in ("proj", "fc2") else ("dx", "y")
    together = halves([p[joined] for p in parts], 1) if kind == "fc1" else torch.cat([p[joined] for p in parts], 1)
    assert torch.equal(together, whole[joined])
    # The other one is a sum over ranks of partial results, each rounded to BF16 (8 bits): half a unit per part and sum.
    assert relative_error(parts[0][summed], whole[summed]) < 2**-8 * tp**0.5
    assert all(torch.equal(part[summed], parts[0][summed]) for part in parts)


@CASES
def test_wgrad_does_not_depend_on_tensor_parallelism_exact(ranks, kind, name, tp):
    whole, parts = pair(ranks, kind, name, tp)
    gradients = [part["dw"] for part in parts]
    dim = 1 if kind in ("proj", "fc2") else 0
    together = halves(gradients, 0) if kind == "fc1" else torch.cat(gradients, dim)
    assert torch.equal(together, whole["dw"])


def test_odd_token_count_under_sequence_parallelism_exact(ranks):
    for rank in ranks["odd_tokens"]:
        odd, padded = rank["odd"], rank["padded"]
        assert odd["rows"] == 5743 and padded["rows"] == 5760
        assert torch.equal(odd["column"], padded["column"]) and torch.equal(odd["row"], padded["row"])
        assert odd["dx"].shape == (5743, 128) and torch.isfinite(odd["dx"]).all()


def test_frozen_weight_gives_the_same_dx_exact(ranks):
    for rank in ranks["frozen"]:
        for trainable, frozen in rank.values():
            assert torch.equal(trainable, frozen)


@pytest.mark.parametrize("tp", [2, 4])
def test_log_probs_do_not_depend_on_tensor_parallelism_exact(ranks, tp):
    whole, parts = ranks["log_probs_tp1"][0], ranks[f"log_probs_tp{tp}"][:tp]
    assert all(torch.equal(part["log_probs"], whole["log_probs"]) for part in parts)
    assert torch.equal(torch.cat([part["gradient"] for part in parts], 1), whole["gradient"])


def test_fused_mlp_is_megatrons_mlp_close(ranks):
    fused, plain = ranks["mlp_tp1"][0], ranks["mlp_unfused"][0]
    assert torch.equal(fused["y"], plain["y"])
    assert torch.equal(fused["dw2"], plain["dw2"])
    for name in ("dx", "dnorm", "dw1"):
        # autograd rounds SwiGLU's gradient to BF16 after every operation, the fused one once; e4m3 magnifies that.
        assert relative_error(fused[name], plain[name]) < 0.03, name


def test_fused_mlp_under_tensor_parallelism_close(ranks):
    whole, parts = ranks["mlp_tp1"][0], ranks["mlp_tp2"][:2]
    for part in parts:
        # The ranks' partial sums are rounded to BF16.
        assert relative_error(part["y"], whole["y"]) < 5e-3
        assert relative_error(part["dx"], whole["dx"]) < 5e-3
        assert relative_error(part["dnorm"], whole["dnorm"]) < 5e-3
    assert torch.equal(halves([part["dw1"] for part in parts], 0), whole["dw1"])
    assert torch.equal(torch.cat([part["dw2"] for part in parts], 1), whole["dw2"])


def test_fused_mlp_under_sequence_parallelism_exact(ranks):
    whole, parts = ranks["mlp_tp2"][:2], ranks["mlp_tp2_sp"][:2]
    for name in ("y", "dx"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[0][name]), name
    for name in ("dw1", "dw2"):
        for one, other in zip(parts, whole, strict=True):
            assert torch.equal(one[name], other[name]), name
    # Megatron sums the norm's gradient over the parts of the sequence after the backward.
    summed = sum(part["dnorm"].float() for part in parts)
    assert relative_error(summed, whole[0]["dnorm"]) < 1e-2
