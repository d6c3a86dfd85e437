from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jetrl_megatron.demo import scales
from jetrl_megatron.demo.report import PAIRINGS, DemoReport
from jetrl_megatron.layout import TileLayout, gated_layout, plain_layout, qkv_layout
from jetrl_megatron.ops import LinearOperand, quantize_weight
from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.verify.logprobs import LogProbs, curve

BLOCK = JETRL_FP8.block


def _matrices(seed: int = 0) -> scales.Matrices:
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, shape in (("a", (256, 384)), ("b", (200, 130))):
        quantized = quantize_weight(torch.randn(shape, generator=generator))
        matrices[f"{name}.weight"] = quantized.data.view(torch.uint8)
        matrices[f"{name}.weight_scale_inv"] = quantized.scale
    return matrices


def _copy(matrices: scales.Matrices) -> scales.Matrices:
    return {name: tensor.clone() for name, tensor in matrices.items()}


def test_compare_same_bytes_is_equal() -> None:
    result = scales.compare(_matrices(), _matrices())
    assert result.equal and result.first is None
    assert (result.matrices, result.scales, result.codes) == (2, 2 * 3 + 2 * 2, 256 * 384 + 200 * 130)


def test_compare_names_first_difference() -> None:
    changed = _copy(_matrices())
    changed["b.weight_scale_inv"][1, 0] *= 2
    result = scales.compare(_matrices(), changed)
    assert not result.equal
    assert (result.scales_differing, result.codes_differing) == (1, 0)
    assert result.first is not None and result.first.startswith("b.weight_scale_inv[1, 0]: ")
    changed["a.weight"][3, 5] ^= 0x80
    result = scales.compare(_matrices(), changed)
    assert (result.scales_differing, result.codes_differing) == (1, 1)
    assert result.first is not None and result.first.startswith("a.weight[3, 5]: ")


def test_compare_missing_matrix_is_unequal() -> None:
    partial = {name: tensor for name, tensor in _matrices().items() if name.startswith("a")}
    result = scales.compare(_matrices(), partial)
    assert not result.equal and result.only_one_side == ("b.weight", "b.weight_scale_inv")
    assert not scales.compare({}, {}).equal, "nothing compared proves nothing"


def test_read_checkpoint_takes_fp8_linears_alone_exact(tmp_path: Path) -> None:
    expected = _matrices()
    stored = {name: x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x for name, x in expected.items()}
    save_file({**stored, "norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert scales.compare(expected, scales.read_checkpoint(tmp_path)).equal
    assert "norm.weight" not in scales.read_checkpoint(tmp_path)


@dataclass
class _Linear:
    """Stands in for a parallel linear: the whole stored weight, cut for one rank."""

    whole: torch.Tensor
    rows: TileLayout
    columns: TileLayout
    cut: tuple[slice, slice]
    quantized: bool = True
    input_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.layouts, self.input_size = (self.rows, self.columns), self.whole.shape[1]

    def quantized_weight(self) -> LinearOperand:
        aligned = torch.zeros(self.rows.aligned, self.columns.aligned)
        places = [
            torch.arange(layout.stored) if layout.position is None else torch.tensor(layout.position)
            for layout in self.layouts
        ]
        aligned[places[0][:, None], places[1]] = self.whole[self.cut]
        # One amax for all tiles: what ranks that share a tile agree on is beside the point here.
        amax = torch.ones(len(self.rows.tiles), len(self.columns.tiles))
        return LinearOperand(quantize_weight(aligned, amax=amax))


HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN = 6, 2, 64, 256, 384


def _layer(rank: int, world: int) -> Any:
    generator = torch.Generator().manual_seed(7)
    q, kv = HEADS * HEAD_DIM, GROUPS * HEAD_DIM

    def linear(rows: int, columns: int, layout: TileLayout, *, row_parallel: bool = False) -> _Linear:
        whole = torch.rand(rows, columns, generator=generator) * 2 - 1
        size = columns if row_parallel else rows
        part = slice(rank * size // world, (rank + 1) * size // world)
        full = plain_layout(rows if row_parallel else columns, rank=0, world=1, block=BLOCK)
        if row_parallel:
            return _Linear(whole, full, layout, (slice(None), part))
        return _Linear(whole, layout, full, (part, slice(None)))

    cut = {"rank": rank, "world": world, "block": BLOCK}
    fc1 = linear(2 * FFN, HIDDEN, gated_layout(FFN, **cut))
    if world == 2:
        # Each rank stores its half of gate, then its half of up.
        gate, up = fc1.whole.chunk(2)
        fc1.whole = torch.cat([gate[: FFN // 2], up[: FFN // 2], gate[FFN // 2 :], up[FFN // 2 :]])
    return SimpleNamespace(
        layer_number=5,
        config=SimpleNamespace(
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            kv_channels=HEAD_DIM,
            hidden_size=HIDDEN,
            ffn_hidden_size=FFN,
        ),
        self_attention=SimpleNamespace(
            linear_qkv=linear(q + 2 * kv, HIDDEN, qkv_layout(HEADS, GROUPS, HEAD_DIM, **cut)),
            linear_proj=linear(HIDDEN, q, plain_layout(q, **cut), row_parallel=True),
        ),
        mlp=SimpleNamespace(
            linear_fc1=fc1, linear_fc2=linear(HIDDEN, FFN, plain_layout(FFN, **cut), row_parallel=True)
        ),
    )


def _joined(folder: Path, world: int) -> scales.Matrices:
    for rank in range(world):
        scales.write_layers([_layer(rank, world)], folder, rank)
    return scales.join_layers(folder)


def test_join_layers_does_not_depend_on_tensor_parallelism_exact(tmp_path: Path) -> None:
    """kv is 128 rows and FFN 384: with two ranks both cut a tile."""
    whole, halves = _joined(tmp_path / "tp1", 1), _joined(tmp_path / "tp2", 2)
    assert scales.compare(whole, halves).equal
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    assert shapes["model.layers.4.self_attn.q_proj.weight"] == (384, 256)
    assert shapes["model.layers.4.self_attn.k_proj.weight_scale_inv"] == (1, 2)
    assert shapes["model.layers.4.mlp.down_proj.weight"] == (256, 384)
    assert len(shapes) == 2 * 7


def test_join_layers_restores_logical_rows_exact(tmp_path: Path) -> None:
    """The second key head lies behind the second group's query heads in Megatron's storage."""
    joined = _joined(tmp_path / "tp1", 1)
    stored = _layer(0, 1).self_attention.linear_qkv.whole
    per_group = (HEADS // GROUPS + 2) * HEAD_DIM
    start = per_group + HEADS // GROUPS * HEAD_DIM
    expected = quantize_weight(stored[start : start + HEAD_DIM], amax=torch.ones(1, 2)).data.view(torch.uint8)
    assert torch.equal(joined["model.layers.4.self_attn.k_proj.weight"][HEAD_DIM:], expected)


def test_join_layers_missing_rank_raises(tmp_path: Path) -> None:
    scales.write_layers([_layer(1, 2)], tmp_path, 1)
    with pytest.raises(ValueError, match="on no rank"):
        scales.join_layers(tmp_path)


def test_logprobs_pads_and_masks() -> None:
    logprobs = LogProbs.of([[-1.0], [-2.0, -3.0]], [[-1.0], [-2.0, -2.5]])
    assert logprobs.mask.tolist() == [[True, False], [True, True]]
    assert (logprobs.mismatch.tokens, logprobs.mismatch.tokens_differing) == (3, 1)
    rows = logprobs.rows_by_position()
    assert [(row["position"], row["mean_abs_dlogp"], row["tokens"]) for row in rows] == [(0, 0.0, 2), (1, 0.5, 1)]
    assert curve(rows, "mean_abs_dlogp") == ([0, 1], [0.0, 0.5])
    with pytest.raises(ValueError, match=r"\[1\] log-probs from the rollout, \[2\] from training"):
        LogProbs.of([[-1.0]], [[-1.0, -2.0]])


def _report(**changes: Any) -> DemoReport:
    logprobs = {key: LogProbs.of([[-1.0, -2.0]], [[-1.1, -1.8]]) for key in PAIRINGS}
    fields: dict[str, Any] = {
        "options": {"steps": 2, "tp": 2, "pp": 1},
        "recipe": JETRL_FP8,
        "versions": {"torch": "2.11.0"},
        "loss": [2.5, 2.25],
        "scales": {"training_tp2/export": scales.compare(_matrices(), _matrices())},
        "logprobs": logprobs,
        "answers": {"fp8": "The capital of France\nis Paris.", "bf16": "Paris | France"},
        "seconds": {"train": 10.0, "rollout": 20.4},
    }
    return DemoReport(**{**fields, **changes})


def test_report_writes_json_markdown_and_plot(tmp_path: Path) -> None:
    _report().write(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["scales_equal"] == {"training_tp2/export": True}
    assert set(report["mismatch"]) == set(PAIRINGS)
    assert report["mismatch"]["fp8_train_fp8_rollout"]["gen_kl_error"] == pytest.approx(0.013120, abs=1e-6)
    assert [row["tokens"] for row in report["by_position"]["bf16_train_bf16_rollout"]] == [1, 1]
    assert report["loss"] == [2.5, 2.25]
    assert "Paris" in report["answer"]
    assert report["recipe"]["fingerprint"] == JETRL_FP8.fingerprint
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    markdown = (tmp_path / "report.md").read_text()
    assert "All 1 pairs hold the same scales and codes" in markdown
    assert "| FP8 training, FP8 rollout | 2 | 2 | 0.01312 | 1.163 | 0.2 |" in markdown
    assert "| bf16 | Paris \\| France |" in markdown
    assert "| total | 30 |" in markdown


def test_report_says_which_pair_is_unequal() -> None:
    changed = _copy(_matrices())
    changed["a.weight_scale_inv"][0, 0] *= 2
    pair = {"export/vllm_tp1": scales.compare(_matrices(), changed)}
    report = _report(scales=pair)
    assert not report.scales_equal
    assert report.to_dict()["scales_equal"] == {"export/vllm_tp1": False}
    assert "1 of 1 pairs do not hold the same scales and codes: export/vllm_tp1" in report.to_markdown()
    assert "a.weight_scale_inv[0, 0]" in report.to_markdown()
    assert not _report(scales={}).scales_equal
