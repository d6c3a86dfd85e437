from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.reference import quantize_weight
from jetrl_megatron.verify.folder import check_rollout_folder

DOWN = "model.layers.0.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"
GATE = "model.layers.0.mlp.gate.weight"


def _tensors() -> dict[str, torch.Tensor]:
    tensors = {
        "model.embed_tokens.weight": torch.ones(8, 256).bfloat16(),
        "model.layers.0.input_layernorm.weight": torch.ones(256).bfloat16(),
        GATE: torch.ones(4, 256).bfloat16(),
    }
    for index, name in enumerate((DOWN, Q)):
        quantized = quantize_weight(torch.full((200, 256), index + 1.0).bfloat16(), JETRL_FP8)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantized.data, quantized.scale
    return tensors


def _config(**changes: Any) -> dict[str, Any]:
    stamp = JETRL_FP8.to_stamp()
    return {
        "model_type": "llama",
        "quantization_config": JETRL_FP8.to_vllm_quantization_config(),
        "jetrl": stamp,
    } | changes


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or _config()))
    return folder


def test_check_rollout_folder_sound_folder_passes(tmp_path: Path) -> None:
    folder = check_rollout_folder(_write(tmp_path, _tensors()))
    assert folder.recipe == JETRL_FP8 and folder.fp8_weights == 2
    # The linear of an MTP layer that engines never quantise.
    mtp = {"model.layers.1.eh_proj.weight": torch.ones(256, 512).bfloat16()}
    assert check_rollout_folder(_write(tmp_path, _tensors() | mtp)).fp8_weights == 2
    foreign = {key: value for key, value in _config().items() if key != "jetrl"}
    assert check_rollout_folder(_write(tmp_path, _tensors(), foreign)).recipe is None


def _without_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{DOWN}.weight_scale_inv"]


def _without_weight(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{DOWN}.weight"]


def _bf16_beside_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].bfloat16()


def _bf16_unlisted(tensors: dict[str, torch.Tensor]) -> None:
    _bf16_beside_scale(tensors)
    _without_scale(tensors)


def _cut_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight_scale_inv"] = tensors[f"{DOWN}.weight_scale_inv"][:1].contiguous()


def _narrow_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight_scale_inv"] = tensors[f"{DOWN}.weight_scale_inv"].bfloat16()


def _static_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.input_scale"] = torch.ones(1)


def _fp8_embedding(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_scale, rf"{DOWN}.weight: is FP8 and has no scale {DOWN}.weight_scale_inv"),
        (_without_weight, rf"{DOWN}.weight_scale_inv: a scale that nobody reads: there is no {DOWN}.weight"),
        (_bf16_beside_scale, rf"{DOWN}.weight_scale_inv: a scale that nobody reads: {DOWN}.weight is BF16"),
        (_bf16_unlisted, rf"{DOWN}.weight: is BF16, and no entry of ignored_layers says so"),
        (_cut_scale, rf"{DOWN}.weight: needs a scale F32 or F8_E8M0 \[2, 2\], and .*_scale_inv is F32 \[1, 2\]"),
        (_narrow_scale, rf"{DOWN}.weight_scale_inv is BF16 \[2, 2\]"),
        (_static_scale, rf"{DOWN}.input_scale: a scale that nobody reads"),
        (_fp8_embedding, "model.embed_tokens.weight: is FP8, but engines quantise the linears of decoder layers alone"),
    ],
)  # fmt: skip
def test_check_rollout_folder_names_each_fault(
    tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    """vllm#46311, vllm#45835, vllm#47116."""
    tensors = _tensors()
    spoil(tensors)
    with pytest.raises(ValueError, match=message):
        check_rollout_folder(_write(tmp_path, tensors))


def test_check_rollout_folder_ignored_layers_decide(tmp_path: Path) -> None:
    config = _config(quantization_config=JETRL_FP8.to_vllm_quantization_config((DOWN, "lm_head")))
    with pytest.raises(ValueError, match=f"{DOWN}.weight: is FP8, but ignored_layers says BF16"):
        check_rollout_folder(_write(tmp_path, _tensors(), config))
    tensors = _tensors()
    _bf16_unlisted(tensors)
    assert check_rollout_folder(_write(tmp_path, tensors, config)).fp8_weights == 1


@pytest.mark.parametrize("names", [[["lm_head"]], "lm_head", {"lm_head": 1}])
def test_check_rollout_folder_ignored_layers_that_are_no_names(tmp_path: Path, names: Any) -> None:
    config = _config(quantization_config={**JETRL_FP8.to_vllm_quantization_config(()), "ignored_layers": names})
    with pytest.raises(ValueError, match="ignored_layers=.* must be a list of modules' names"):
        check_rollout_folder(_write(tmp_path, _tensors(), config))


def test_check_rollout_folder_many_faults_are_counted(tmp_path: Path) -> None:
    tensors = _tensors() | {f"model.layers.0.extra{index}.scale": torch.ones(1) for index in range(11)}
    with pytest.raises(ValueError, match="and 3 more"):
        check_rollout_folder(_write(tmp_path, tensors))


def test_check_rollout_folder_bf16_folder_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no block FP8 checkpoint.*jetrl convert CHECKPOINT OUT"):
        check_rollout_folder(_write(tmp_path, _tensors(), {"model_type": "llama"}))
    with pytest.raises(ValueError, match="has no config.json"):
        check_rollout_folder(tmp_path / "elsewhere")


def test_check_rollout_folder_edited_recipe_is_refused(tmp_path: Path) -> None:
    stamp = JETRL_FP8.to_stamp()
    stamp["recipe"] = {**stamp["recipe"], "scale_format": "fp32"}
    with pytest.raises(ValueError, match="one of them was edited"):
        check_rollout_folder(_write(tmp_path, _tensors(), _config(jetrl=stamp)))


def test_check_rollout_folder_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, _tensors())
    index = {"weight_map": dict.fromkeys(_tensors(), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00001.safetensors is missing, and the index places 7 tensors"):
        check_rollout_folder(folder)
    shard = folder / "model-00001-of-00001.safetensors"
    shard.write_bytes((folder / "model.safetensors").read_bytes()[:500])
    with pytest.raises(ValueError, match="is damaged"):
        check_rollout_folder(folder)
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(ValueError, match="lacks model.embed_tokens.weight"):
        check_rollout_folder(folder)


def test_check_rollout_folder_damaged_single_file_is_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, _tensors())
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:40])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        check_rollout_folder(folder)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": {"a": 3}}'])
def test_check_rollout_folder_index_without_files_is_named(tmp_path: Path, content: str) -> None:
    folder = _write(tmp_path, _tensors())
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="index.json (is no JSON file|has no .weight_map|holds list)"):
        check_rollout_folder(folder)


@pytest.mark.parametrize("block", [None, [128], "128", [0, 128], [None, 128], [128, 128, 1]])
def test_check_rollout_folder_block_that_is_none(tmp_path: Path, block: Any) -> None:
    config = _config(quantization_config={"quant_method": "fp8", "weight_block_size": block})
    with pytest.raises(ValueError, match="weight_block_size of two numbers"):
        check_rollout_folder(_write(tmp_path, _tensors(), config))
    with pytest.raises(ValueError, match="is no block FP8 checkpoint"):
        check_rollout_folder(_write(tmp_path, _tensors(), _config(quantization_config=[block])))
