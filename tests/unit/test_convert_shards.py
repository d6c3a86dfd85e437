from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.convert.recipe_file import choose_recipe, load_recipe, save_recipe
from jetrl_megatron.convert.shards import ShardedCheckpoint, checkpoint_folder


def save_torch_dist(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A torch_dist folder, written without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "decoder.layers.mlp.linear_fc2.weight": torch.arange(12 * 6, dtype=torch.bfloat16).view(12, 2, 3),
        "decoder.layers.input_layernorm.weight": torch.arange(24, dtype=torch.bfloat16).view(12, 2),
        "decoder.final_layernorm.weight": torch.ones(2, dtype=torch.bfloat16),
        "mtp.layers.0.eh_proj.weight": torch.ones(2, 2, dtype=torch.bfloat16),
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(2),
        "chained_1.optimizer.state.exp_avg.decoder.layers.input_layernorm.weight": torch.zeros(12, 2),
    }


def test_checkpoint_unstacks_layers_exact(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = ShardedCheckpoint(save_torch_dist(tmp_path / "ck", tensors))
    read = {parameter.name: checkpoint.read(parameter) for parameter in checkpoint.parameters}
    assert len(read) == 12 + 12 + 2
    for layer in range(12):
        for name in ("mlp.linear_fc2.weight", "input_layernorm.weight"):
            assert torch.equal(read[f"decoder.layers.{layer}.{name}"], tensors[f"decoder.layers.{name}"][layer])
    assert torch.equal(read["mtp.layers.0.eh_proj.weight"], tensors["mtp.layers.0.eh_proj.weight"])
    first, *_, last, mtp = checkpoint.parameters
    assert (first.name, last.name) == ("decoder.final_layernorm.weight", "decoder.layers.11.mlp.linear_fc2.weight")
    assert (last.shape, last.dtype, last.index) == ((2, 3), torch.bfloat16, (11,))


def test_checkpoint_reads_unstacked_layers(tmp_path: Path) -> None:
    saved = {f"decoder.layers.{layer}.mlp.linear_fc2.weight": torch.full((2, 2), float(layer)) for layer in range(3)}
    checkpoint = ShardedCheckpoint(save_torch_dist(tmp_path / "ck", saved))
    assert {parameter.name for parameter in checkpoint.parameters} == set(saved)
    for parameter in checkpoint.parameters:
        assert torch.equal(checkpoint.read(parameter), saved[parameter.name])


@pytest.mark.parametrize(
    ("text", "folder"), [("1000", "iter_0001000"), ("release\n", "release"), (None, "iter_0000007")]
)
def test_checkpoint_finds_the_iteration(
    tmp_path: Path, tensors: dict[str, torch.Tensor], text: str | None, folder: str
) -> None:
    save_torch_dist(tmp_path / folder, tensors)
    if text is not None:
        save_torch_dist(tmp_path / "iter_0000001", tensors)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert ShardedCheckpoint(tmp_path).folder == tmp_path / folder


def test_checkpoint_refuses_to_choose_an_iteration(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for folder in ("iter_0000001", "iter_0000002"):
        save_torch_dist(tmp_path / folder, tensors)
    with pytest.raises(ValueError, match=r"several checkpoints.*pass one of iter_0000001, iter_0000002"):
        ShardedCheckpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ValueError, match=r"names '3', but .*iter_0000003 has no \.metadata"):
        ShardedCheckpoint(tmp_path)


def test_checkpoint_names_the_missing_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Megatron-LM#5844."""
    folder = save_torch_dist(tmp_path / "ck", tensors)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"ck/__0_0\.distcp is missing"):
        ShardedCheckpoint(folder)


def test_checkpoint_names_the_truncated_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder = save_torch_dist(tmp_path / "ck", tensors)
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"ck/__0_0\.distcp has 100 bytes, the index wants \d+: it was cut off"):
        ShardedCheckpoint(folder)


def test_read_names_the_damaged_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder = save_torch_dist(tmp_path / "ck", tensors)
    shard = folder / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    checkpoint = ShardedCheckpoint(folder)
    with pytest.raises(ValueError, match=r"decoder\.final_layernorm\.weight cannot be read from .*ck/__0_0\.distcp"):
        checkpoint.read(checkpoint.parameters[0])


def test_checkpoint_says_what_a_foreign_folder_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        ShardedCheckpoint(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"no \.metadata and no mp_rank_\* folder: pass the folder that"):
        ShardedCheckpoint(tmp_path)
    (tmp_path / "iter_0000001/mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError, match="legacy format"):
        checkpoint_folder(tmp_path)
    with pytest.raises(ValueError, match=r"mp_rank_00/model_optim_rng\.pt is missing"):
        ShardedCheckpoint(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000001")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="looks like a Hugging Face model"):
        ShardedCheckpoint(tmp_path)
    (tmp_path / ".metadata").write_text("no pickle")
    with pytest.raises(ValueError, match=r"\.metadata is no index of torch\.distributed\.checkpoint"):
        ShardedCheckpoint(tmp_path)


class _Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._called = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._called


@pytest.mark.parametrize("whole", [True, False], ids=["the_index", "part_of_it"])
def test_no_function_of_an_index_is_called(tmp_path: Path, tensors: dict[str, torch.Tensor], whole: bool) -> None:
    folder, made = save_torch_dist(tmp_path / "ck", tensors), tmp_path / "made"
    call = _Calls(os.mkdir, str(made))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = call
    (folder / ".metadata").write_bytes(pickle.dumps(call if whole else metadata))
    if whole:
        with pytest.raises(ValueError, match=r"\.metadata is no index of .*: it holds mkdir"):
            ShardedCheckpoint(folder)
    else:
        checkpoint = ShardedCheckpoint(folder)
        assert all(checkpoint.read(parameter).isfinite().all() for parameter in checkpoint.parameters)
    assert not made.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert made.exists()


def test_checkpoint_of_a_wrapped_model_has_the_same_names(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    wrapped = {key if "optimizer" in key else f"module.{key}": tensor for key, tensor in tensors.items()}
    plain, other = (
        ShardedCheckpoint(save_torch_dist(tmp_path / name, saved))
        for name, saved in (("plain", tensors), ("wrapped", wrapped))
    )
    assert [parameter.name for parameter in plain.parameters] == [parameter.name for parameter in other.parameters]
    for ours, theirs in zip(plain.parameters, other.parameters, strict=True):
        assert torch.equal(plain.read(ours), other.read(theirs)), ours.name


def test_checkpoint_without_model_raises(tmp_path: Path) -> None:
    folder = save_torch_dist(tmp_path / "ck", {"optimizer.state.exp_avg.x": torch.zeros(2)})
    with pytest.raises(ValueError, match="holds no model tensor"):
        ShardedCheckpoint(folder)


def test_choose_recipe_takes_the_saved_one(tmp_path: Path) -> None:
    iteration = tmp_path / "iter_0000001"
    iteration.mkdir()
    assert choose_recipe(iteration, None) == JETRL_FP8
    assert choose_recipe(iteration, None, {"scale_format": "fp32"}).scale_format == "fp32"
    trained = Fp8BlockRecipe(ignore=("*.linear_fc2",), dgrad="bf16")
    save_recipe(tmp_path, trained)
    assert choose_recipe(iteration, None) == trained
    assert choose_recipe(iteration, trained, {"ignore": ("*.linear_fc2",)}) == trained
    inner = Fp8BlockRecipe(num_layers_at_start_in_bf16=1)
    assert load_recipe(save_recipe(iteration, inner)) == inner
    assert choose_recipe(iteration, None) == inner


def test_choose_recipe_names_the_contradicting_field(tmp_path: Path) -> None:
    save_recipe(tmp_path, JETRL_FP8)
    with pytest.raises(ValueError, match=r"scale_format: 'fp32' != 'ue8m0'"):
        choose_recipe(tmp_path, None, {"scale_format": "fp32"})
    with pytest.raises(ValueError, match=r"num_layers_at_end_in_bf16: 2 != 0"):
        choose_recipe(tmp_path, Fp8BlockRecipe(num_layers_at_end_in_bf16=2))


def test_load_recipe_refuses_what_it_cannot_trust(tmp_path: Path) -> None:
    path = save_recipe(tmp_path, JETRL_FP8)
    path.write_text(path.read_text().replace("464.0", "448.0"))
    with pytest.raises(ValueError, match=r"stored fingerprint is \w{16}, .* has \w{16}: one of them was edited"):
        load_recipe(path)
    path.write_text('{"scale_format": "fp32"}')
    assert load_recipe(path) == Fp8BlockRecipe(scale_format="fp32")
    path.write_text('{"scale_fmt": "fp32"}')
    with pytest.raises(ValueError, match=r"\['scale_fmt'\] are unknown"):
        load_recipe(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="holds list"):
        load_recipe(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is no JSON file"):
        load_recipe(path)
    with pytest.raises(ValueError, match="does not exist"):
        load_recipe(tmp_path / "nothing.json")
