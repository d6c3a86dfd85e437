"""One small GPT under TP, SP, PP, VPP, DP and recompute: the same codes and scales, the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetrl_megatron import JETRL_FP8, quantize_weight
from jetrl_megatron.layout import qkv_runs
from tests.distributed.gpt_bodies import join
from tests.distributed.ranks import launch

pytestmark = pytest.mark.distributed
HEADS, GROUPS, HEAD_DIM = 6, 2, 64


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[str, list[Any]]:
    return launch("tests.distributed.gpt_bodies", 4, tmp_path_factory.mktemp("gpt") / "results.pt")


def loss(ranks: dict[str, list[Any]], name: str) -> float:
    return next(result["loss"] for result in ranks[name] if result["loss"] is not None)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def tile_grid(ranks: list[dict[str, Any]], linear: str) -> dict[tuple[int, int], float]:
    """Scale of each tile of the logical matrices, from every rank that holds a part; they must agree."""
    grid: dict[tuple[int, int], float] = {}
    for rank in ranks:
        if linear not in rank["codes"]:
            continue
        _, scale, rows, columns = rank["codes"][linear]
        for i, row in enumerate(rows.tiles):
            for j, column in enumerate(columns.tiles):
                value = scale[i, j].item()
                assert grid.setdefault((row, column), value) == value, (linear, row, column)
    return grid


def whole_tensors(ranks: list[dict[str, Any]], field: str) -> dict[str, torch.Tensor]:
    """Global tensors from the parts of the first data-parallel replica's ranks; the others return none."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for name, value in rank[field].items():
            parts.setdefault(name, {})[rank["rank"]] = stored_codes(value) if field == "codes" else value
    return {
        name: join(f"{name}.weight" if field == "codes" else name, [p[r] for r in sorted(p)])
        for name, p in parts.items()
    }


def stored_codes(entry: tuple[torch.Tensor, Any, Any, Any]) -> torch.Tensor:
    """Codes in stored order, put back from aligned order."""
    codes, _, rows, columns = entry
    if rows.position is not None:
        codes = codes[list(rows.position)]
    return codes if columns.position is None else codes[:, list(columns.position)]


LINEARS = [
    f"decoder.layers.{layer}.{name}"
    for layer in range(4)
    for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]
OTHERS = ["tp2", "tp2_sp", "pp2", "tp2_pp2", "pp2_vpp2", "pp2_recompute", "tp2_sp_recompute"]


@pytest.mark.parametrize("name", OTHERS)
def test_scales_do_not_depend_on_the_layout_exact(ranks, name):
    for linear in LINEARS:
        grid = tile_grid(ranks[name], linear)
        assert grid == tile_grid(ranks["tp1"], linear), linear
        assert len(set(grid.values())) > 1, "tiles must differ for this test to see a misplaced scale"


@pytest.mark.parametrize("name", OTHERS)
def test_codes_do_not_depend_on_the_layout_exact(ranks, name):
    ours, theirs = whole_tensors(ranks[name], "codes"), whole_tensors(ranks["tp1"], "codes")
    assert set(ours) == set(theirs) == set(LINEARS)
    for linear in LINEARS:
        assert torch.equal(ours[linear], theirs[linear]), linear


def test_training_scales_are_those_of_the_logical_matrices_exact(ranks):
    weight = ranks["initial_weights"][0]["decoder.layers.0.self_attention.linear_qkv.weight"]
    logical = [torch.empty(n * HEAD_DIM, weight.shape[1], dtype=weight.dtype) for n in (HEADS, GROUPS, GROUPS)]
    offset = 0
    for matrix, first, length in qkv_runs(HEADS, GROUPS, HEAD_DIM):
        logical[matrix][first : first + length] = weight[offset : offset + length]
        offset += length
    expected = torch.cat([quantize_weight(matrix, JETRL_FP8).scale for matrix in logical])
    grid = tile_grid(ranks["tp2"], LINEARS[0])
    assert grid == {(i, j): expected[i, j].item() for i in range(expected.shape[0]) for j in range(expected.shape[1])}


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("pp2", "tp1"),
        ("pp2_vpp2", "tp1"),
        ("tp2_pp2", "tp2"),
        ("pp2_recompute", "tp1"),
        ("tp2_sp_recompute", "tp2_sp"),
    ],
)
def test_pipeline_and_recompute_change_nothing_exact(ranks, name, twin):
    assert loss(ranks, name) == loss(ranks, twin)
    ours, theirs = whole_tensors(ranks[name], "gradients"), whole_tensors(ranks[twin], "gradients")
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key


def test_sequence_parallel_linears_change_nothing_exact(ranks):
    assert loss(ranks, "tp2_sp") == loss(ranks, "tp2")
    ours, theirs = whole_tensors(ranks["tp2_sp"], "gradients"), whole_tensors(ranks["tp2"], "gradients")
    for key in theirs:
        if "linear" in key and "norm" not in key:
            assert torch.equal(ours[key], theirs[key]), key
        else:
            # Norm gradients are summed over the halves of the sequence in another order, in FP32.
            assert relative_error(ours[key], theirs[key]) < 1e-2, key


def test_tensor_parallel_differs_by_the_rounding_of_partial_sums_alone(ranks):
    # TP 2 rounds two partial sums to BF16 where TP 1 rounds one, and e4m3 turns some of that into other codes, layer
    # upon layer. One rank that rounds the same partial sums must give TP 2's loss and, up to the vocabulary-parallel
    # softmax (FP32, summed in two parts), its gradients.
    assert loss(ranks, "tp2") == pytest.approx(loss(ranks, "tp1_summing_as_tp2"), rel=1e-6)
    assert loss(ranks, "tp2") == pytest.approx(loss(ranks, "tp1"), rel=1e-3)
    tp1, emulated, tp2 = (whole_tensors(ranks[n], "gradients") for n in ("tp1", "tp1_summing_as_tp2", "tp2"))
    errors = {key: (relative_error(tp2[key], tp1[key]), relative_error(tp2[key], emulated[key])) for key in tp1}
    assert max(against_emulated for _, against_emulated in errors.values()) < 1e-2, errors
    assert max(against_tp1 for against_tp1, _ in errors.values()) < 0.25, errors


def test_main_grad_over_equal_microbatches_exact(ranks):
    for result in ranks["equal_microbatches"]:
        for key, gradient in result[1].items():
            # Megatron divides each loss by the number of microbatches: 4 x (g / 4), and division by 4 is exact.
            assert torch.equal(result[4][key], gradient), key


def test_ten_steps_with_cache_equal_ten_without_exact(ranks):
    for rank in ranks["ten_steps"]:
        cached, uncached = rank["cached"], rank["uncached"]
        assert cached["losses"] == uncached["losses"]
        assert all(torch.equal(cached["weights"][key], value) for key, value in uncached["weights"].items())
        for name, (codes, scale, *_) in uncached["codes"].items():
            assert torch.equal(cached["codes"][name][0], codes) and torch.equal(cached["codes"][name][1], scale)
        # Once per optimizer step, not per microbatch: 10 steps; 2 microbatches each without the cache.
        assert cached["quantisations"] == 10 * cached["linears"]
        assert uncached["quantisations"] == 20 * cached["linears"]
        assert cached["losses"][-1] < cached["losses"][0] - 0.5


def test_distributed_optimizer_trains_as_the_plain_one_close(ranks):
    # Gradient norms are summed in another order, which moves the clipping factor and now and then a BF16 weight.
    for rank in ranks["ten_steps"]:
        assert rank["cached"]["losses"] == pytest.approx(rank["plain_optimizer"]["losses"], rel=0.05)
        for key, value in rank["plain_optimizer"]["weights"].items():
            assert relative_error(rank["cached"]["weights"][key], value) < 0.1, key


def test_data_parallel_replicas_stay_equal_exact(ranks):
    for name in ("cached", "plain_optimizer"):
        for tensor_parallel in (0, 1):  # ranks 0, 1 and 2, 3 are the two replicas
            first, second = (ranks["ten_steps"][tensor_parallel + replica][name] for replica in (0, 2))
            for key, value in first["weights"].items():
                assert torch.equal(second["weights"][key], value), key
