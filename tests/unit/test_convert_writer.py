from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jetrl_megatron import JETRL_FP8
from jetrl_megatron.convert.plan import ExportPlan, TensorSpec
from jetrl_megatron.convert.writer import check_out, exported_recipe, write_export

CONFIG = {"jetrl": {"version": 1, "recipe": JETRL_FP8.to_dict(), "fingerprint": JETRL_FP8.fingerprint}}
TENSORS = {
    "a.weight": torch.ones(128, 4).to(torch.float8_e4m3fn),
    "a.weight_scale_inv": torch.ones(1, 1),
    "a.bias": torch.arange(100, dtype=torch.bfloat16)[10:14],
    "b.weight": torch.arange(64, dtype=torch.bfloat16).view(8, 8).t(),
}
PLAN = ExportPlan({name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}, ())


def test_write_export_shards_with_index_exact(tmp_path: Path) -> None:
    out = write_export(TENSORS.items(), tmp_path / "out", plan=PLAN, config=CONFIG, shard_bytes=520)
    files = sorted(path.name for path in out.iterdir())
    parts = [f"model-{index:05d}-of-00002.safetensors" for index in (1, 2)]
    assert files == ["config.json", *parts, "model.safetensors.index.json"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 128 * 4 + 4 + 8 + 128}
    assert index["weight_map"] == {
        "a.bias": parts[1],
        "a.weight": parts[0],
        "a.weight_scale_inv": parts[0],
        "b.weight": parts[1],
    }
    for name, tensor in TENSORS.items():
        written = load_file(out / index["weight_map"][name])[name]
        assert written.dtype == tensor.dtype and torch.equal(written.float(), tensor.float()), name
    assert exported_recipe(out) == JETRL_FP8


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("c.weight", torch.ones(2), r"c\.weight is no tensor of the Hugging Face model"),
        ("b.weight", torch.ones(8, 8), r"b\.weight is torch\.float32 \[8, 8\], and the export wants torch\.bfloat16"),
        ("a.weight_scale_inv", None, r"lacks 1 tensors of the Hugging Face model, a\.weight_scale_inv"),
        ("a.weight", torch.ones(128, 4, dtype=torch.bfloat16), r"the export wants torch\.float8_e4m3fn \[128, 4\]"),
    ],
)
def test_write_export_refuses_what_was_not_planned(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = {**TENSORS, name: tensor}
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    with pytest.raises(ValueError, match=message):
        write_export(given, tmp_path / "out", plan=PLAN, config=CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_write_export_refuses_a_tensor_that_arrives_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.bias arrives twice"):
        write_export([*TENSORS.items(), ("a.bias", TENSORS["a.bias"])], tmp_path / "out", plan=PLAN, config=CONFIG)


def test_write_export_keeps_the_old_export_when_interrupted(tmp_path: Path) -> None:
    out = write_export(TENSORS.items(), tmp_path / "out", plan=PLAN, config=CONFIG)
    before = (out / "model.safetensors").read_bytes()

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(TENSORS.items()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_export(interrupted(), out, plan=PLAN, config=CONFIG, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors").read_bytes() == before


def test_write_export_needs_the_folder_above(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing is no folder: create it"):
        write_export(TENSORS.items(), tmp_path / "nothing/out", plan=PLAN, config=CONFIG)


@pytest.mark.parametrize("out", [".", "/"])
def test_check_out_refuses_a_place_without_a_name(out: str) -> None:
    with pytest.raises(ValueError, match=r"names no folder to make: choose a name for the export, e\.g\."):
        check_out(Path(out), force=True)
