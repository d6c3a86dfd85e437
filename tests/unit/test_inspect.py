"""`jetrl inspect` on sound folders, ours and others', and on folders that contradict themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.cli import main
from jetrl_megatron.convert.export import convert_checkpoint
from jetrl_megatron.convert.inspect import inspect_folder
from tests.unit.convert_cases import make_source

UP = "model.layers.1.mlp.up_proj.weight"
SCALE = UP + "_scale_inv"
INDEX = "model.safetensors.index.json"

type Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export in several files; tests copy it."""
    root = tmp_path_factory.mktemp("inspect")
    source, hf = make_source(root)
    return convert_checkpoint(source, root / "out", hf_config=hf, max_shard_size=300_000)


def changed(folder: Path, change: Callable[[Tensors], object], name: str = UP) -> None:
    """Changes the tensors of the file that holds one of them."""
    index = json.loads((folder / INDEX).read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def reindexed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_inspect_prints_a_sound_export(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(export)]) == 0
    text = capsys.readouterr().out
    assert f"quantisation fp8, tiles of 128x128, recipe {JETRL_FP8.fingerprint}" in text
    rows = [line.split() for line in text.splitlines()]
    up = next(row for row in rows if row[0] == "model.layers.*.mlp.up_proj.weight")
    assert up[1:8] == ["2", "F8_E4M3", "384x256", "tile", "3x2", "F32", up[7]] and 0 < float(up[7]) <= float(up[8])
    assert "nothing contradicts itself" in text and "14 in FP8" in text


def test_inspect_json_holds_every_tensor(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(export), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fingerprint"] == JETRL_FP8.fingerprint and found["faults"] == []
    index = json.loads((export / INDEX).read_text())["weight_map"]
    assert {row["name"]: row["file"] for row in found["tensors"]} == index
    row = next(row for row in found["tensors"] if row["name"] == UP)
    scale = load_file(export / index[SCALE])[SCALE]
    assert (row["dtype"], row["shape"]) == ("F8_E4M3", [384, 256])
    assert row["scale"] == {
        "name": SCALE, "dtype": "F32", "shape": [3, 2], "kind": "tile",
        "low": scale.min().item(), "high": scale.max().item(),
    }  # fmt: skip


def _set(value: float) -> Callable[[Path], None]:
    return lambda folder: changed(folder, lambda tensors: tensors[SCALE].__setitem__((1, 0), value), SCALE)


def _without(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        changed(folder, lambda tensors: tensors.pop(name), name)
        reindexed(folder, lambda index: index["weight_map"].pop(name))

    return spoil


def _file_of(folder: Path) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][UP]


def _cut_file(folder: Path) -> None:
    _file_of(folder).write_bytes(_file_of(folder).read_bytes()[:-1])


def _edited_recipe(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["jetrl"]["recipe"]["block"] = 64
    (folder / "config.json").write_text(json.dumps(config))


def _moved(folder: Path) -> None:
    other = next(file.name for file in sorted(folder.glob("*.safetensors")) if file != _file_of(folder))
    reindexed(folder, lambda index: index["weight_map"].update({UP: other}))


@pytest.mark.parametrize(
    ("spoil", "faults"),
    [
        (_without(SCALE), [f"{UP}: is FP8 and has no scale {SCALE}"]),
        (_without(UP), [f"{SCALE}: a scale that nobody reads: there is no {UP}"]),
        (_set(0.0), [f"{SCALE}[1, 0]: 0.0 is zero; 1 of 6 scales"]),
        (_set(float("nan")), [f"{SCALE}[1, 0]: nan is not finite; 1 of 6 scales"]),
        (_set(-1.0), [f"{SCALE}[1, 0]: -1.0 is negative; 1 of 6 scales"]),
        (_set(0.3), [f"{SCALE}[1, 0]: 0.30000001192092896 is no power of two, as the format wants; 1 of 6 scales"]),
        (
            lambda folder: changed(folder, lambda t: t.update({SCALE: t[SCALE].t().contiguous()}), SCALE),
            [f"F8_E8M0 [3, 2], and {SCALE} is F32 [2, 3]", "grid 2x3 does not fit", "expected 3x2"],
        ),
        (_cut_file, [".safetensors is damaged"]),
        (lambda folder: _file_of(folder).unlink(), [".safetensors: missing, and model.safetensors.index.json places"]),
        (_moved, [f"{UP}: {INDEX} places it in model-0000"]),
        (
            lambda folder: reindexed(folder, lambda index: index["weight_map"].pop(UP)),
            [f"and {INDEX} does not name it"],
        ),
        (
            lambda folder: reindexed(folder, lambda index: index["weight_map"].update(ghost=index["weight_map"][UP])),
            [f"ghost: {INDEX} places it in model-0000", "and it is nowhere"],
        ),
        (
            lambda folder: reindexed(folder, lambda index: index["metadata"].update(total_size=7)),
            [f"{INDEX}: total_size is 7, and the tensors have"],
        ),
        (
            lambda folder: save_file({"extra": torch.ones(1)}, folder / "model-other.safetensors"),
            [f"model-other.safetensors: {INDEX} does not name it"],
        ),
        (_edited_recipe, ["one of them was edited"]),
    ],
)  # fmt: skip
def test_inspect_names_each_contradiction(
    tmp_path: Path,
    export: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    faults: list[str],
) -> None:
    """vllm#46311, vllm#45835, vllm#47116, verl#7224."""
    folder = Path(shutil.copytree(export, tmp_path / "out"))
    spoil(folder)
    assert main(["inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    for fault in faults:
        assert fault in text
    assert main(["inspect", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["faults"]
    assert any(faults[0] in line for line in told)


def foreign(folder: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    """A folder as others write it."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": quantization}))
    return folder


CODES = torch.ones(300, 256).to(torch.float8_e4m3fn)
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BLOCKS_OF_COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [128, 128]}}},
}


@pytest.mark.parametrize(
    ("scale_name", "scale", "quantization", "kind"),
    [
        # DeepSeek-V3; Qwen3's own FP8 checkpoints, with scales in BF16; scales in E8M0.
        ("weight_scale_inv", torch.ones(3, 2), BLOCK, "tile"),
        ("weight_scale_inv", torch.ones(3, 2).bfloat16(), BLOCK, "tile"),
        ("weight_scale_inv", torch.ones(3, 2).to(torch.float8_e8m0fnu), {**BLOCK, "scale_fmt": "ue8m0"}, "tile"),
        # compressed-tensors by channel; a single scale for the tensor.
        ("weight_scale", torch.ones(300, 1).bfloat16(), {"quant_method": "compressed-tensors"}, "channel"),
        ("weight_scale", torch.ones(1), {"quant_method": "fp8", "activation_scheme": "static"}, "tensor"),
        ("weight_scale", torch.ones(()), {"quant_method": "modelopt"}, "tensor"),
        ("weight_scale", torch.ones(3, 2).bfloat16(), BLOCKS_OF_COMPRESSED_TENSORS, "tile"),
    ],
)
def test_inspect_reads_checkpoints_of_others(
    tmp_path: Path, scale_name: str, scale: torch.Tensor, quantization: dict[str, Any], kind: str
) -> None:
    module = "model.layers.0.mlp.experts.3.down_proj"
    tensors = {
        f"{module}.weight": CODES,
        f"{module}.{scale_name}": scale,
        f"{module}.input_scale": torch.ones(1),
        "model.layers.0.mlp.gate.weight": torch.ones(4, 4).bfloat16(),
    }
    found = inspect_folder(foreign(tmp_path / "out", tensors, quantization))
    assert found.faults == () and found.fingerprint is None
    assert {name: grid.kind for name, grid in found.grids.items()} == {f"{module}.weight": kind}


@pytest.mark.parametrize(
    ("tensors", "quantization", "fault"),
    [
        ({"a.weight": CODES}, BLOCK, "a.weight: is FP8 and has no scale a.weight_scale_inv"),
        ({"a.weight": CODES, "a.weight_scale_inv": torch.ones(2, 3)}, BLOCK, "grid 2x3 does not fit a.weight 300x256"),
        ({"a.weight": CODES, "a.weight_scale": torch.zeros(1)}, {"quant_method": "fp8"}, "a.weight_scale[0]: 0.0 is"),
        ({"a.weight": CODES, "a.weight_scale": torch.ones(7)}, {"quant_method": "fp8"}, "grid 7 does not fit"),
        (
            {"a.weight": CODES, "a.weight_scale_inv": torch.ones(3, 2, dtype=torch.int32)},
            BLOCK,
            "a.weight_scale_inv: is I32, and scales are one of",
        ),
        ({"a.weight": CODES, "a.weight_scale_inv": torch.ones(3, 2)}, None, "has no quantization_config"),
        ({"a.weight": CODES.bfloat16()}, BLOCK, "quant_method is fp8, and there is no FP8 tensor"),
        (
            {"a.weight": CODES, "a.weight_scale_inv": torch.ones(3, 2)},
            {**BLOCK, "weight_block_size": [128]},
            "weight_block_size is [128], not [rows, columns]",
        ),
        (
            {"a.weight": CODES.flatten(), "a.weight_scale": torch.ones(3)},
            {"quant_method": "fp8"},
            "grid 3 does not fit",
        ),
    ],
)
def test_inspect_names_contradictions_of_others(
    tmp_path: Path, tensors: Tensors, quantization: dict[str, Any] | None, fault: str
) -> None:
    found = inspect_folder(foreign(tmp_path / "out", tensors, quantization))
    assert any(fault in line for line in found.faults), found.faults


def test_inspect_takes_the_scales_of_fp4_weights_for_scales(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(256, 64, dtype=torch.uint8),
        "a.weight_scale": torch.ones(256, 8).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.ones(()),
    }
    assert inspect_folder(foreign(tmp_path / "out", tensors, {"quant_method": "modelopt"})).faults == ()


@pytest.mark.parametrize("place", ["hf_quant_config.json", "text_config"])
def test_inspect_finds_the_quantisation_elsewhere(tmp_path: Path, place: str) -> None:
    folder = foreign(tmp_path / "out", {"a.weight": CODES, "a.weight_scale_inv": torch.ones(3, 2)}, None)
    if place == "text_config":
        (folder / "config.json").write_text(json.dumps({"text_config": {"quantization_config": BLOCK}}))
    else:
        quantization = {"quant_algo": "FP8_PB_WO", "weight_block_size": [128, 128]}
        (folder / place).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    found = inspect_folder(folder)
    assert found.faults == () and found.grids["a.weight"].kind == "tile"


def test_inspect_refuses_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "has neither model.safetensors.index.json nor model.safetensors" in capsys.readouterr().err
    (tmp_path / INDEX).write_text("[]")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "an index is an object" in capsys.readouterr().err
    (tmp_path / INDEX).write_text('{"weight_map": {"a": 1}}')
    assert main(["inspect", str(tmp_path)]) == 2
    assert 'has no "weight_map"' in capsys.readouterr().err
    (tmp_path / INDEX).write_text('{"weight_map": {}, "metadata": [1]}')
    assert main(["inspect", str(tmp_path)]) == 2
    assert '"metadata" is [1], not an object' in capsys.readouterr().err


def test_inspect_accepts_any_scale_of_the_other_recipe(tmp_path: Path) -> None:
    source, hf = make_source(tmp_path)
    recipe = Fp8BlockRecipe(scale_format="fp32", ignore=("*.linear_fc2",))
    found = inspect_folder(convert_checkpoint(source, tmp_path / "out", hf_config=hf, recipe=recipe))
    assert found.faults == () and found.fingerprint == recipe.fingerprint and len(found.grids) == 12
