"""Legacy checkpoints: what a damaged, incomplete or foreign one is answered with, and what is never run."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig

from jetrl_megatron.convert.shards import ShardedCheckpoint
from tests.unit.megatron_layouts import Layout, save_legacy, save_torch_dist

LAYERS, EXPERTS, HIDDEN = 4, 8, 8
CONFIG = PretrainedConfig(num_hidden_layers=LAYERS)


def parameters(experts: int = EXPERTS, hidden: int = HIDDEN, ffn: int = 16) -> dict[str, torch.Tensor]:
    """A small model whose experts are filled with their global number; the values are exact in BF16."""
    found = {
        "embedding.word_embeddings.weight": torch.arange(64 * hidden).remainder(251).view(64, hidden),
        "decoder.final_layernorm.weight": torch.arange(hidden),
        "output_layer.weight": torch.arange(64 * hidden).remainder(241).view(64, hidden),
    }
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}"
        found[f"{prefix}.self_attention.linear_qkv.weight"] = torch.arange(32 * hidden).remainder(239).view(32, hidden)
        found[f"{prefix}.self_attention.linear_qkv.bias"] = torch.arange(32) + layer
        found[f"{prefix}.self_attention.linear_proj.weight"] = torch.arange(hidden * 16).remainder(233).view(hidden, 16)
        found[f"{prefix}.mlp.router.weight"] = torch.arange(experts * hidden).view(experts, hidden) + layer
        for expert in range(experts):
            inner = f"{prefix}.mlp.experts.local_experts.{expert}"
            found[f"{inner}.linear_fc1.weight"] = torch.full((2 * ffn, hidden), expert) + torch.arange(2 * ffn)[:, None]
            found[f"{inner}.linear_fc2.weight"] = torch.full((hidden, ffn), expert) + torch.arange(ffn)
    return {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}


def save(folder: Path, layout: Layout, **options: Any) -> Path:
    return save_legacy(folder, parameters(), CONFIG, layout, **options)


def assert_reads(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = ShardedCheckpoint(folder)
    read = {parameter.name: checkpoint.read(parameter) for parameter in checkpoint.parameters}
    assert read.keys() == expected.keys()
    for parameter in checkpoint.parameters:
        assert (parameter.shape, parameter.dtype) == (read[parameter.name].shape, torch.bfloat16), parameter.name
        assert torch.equal(read[parameter.name], expected[parameter.name]), parameter.name


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a rank's file."""
    content = torch.load(path / "model_optim_rng.pt", weights_only=False)
    change(content)
    torch.save(content, path / "model_optim_rng.pt")


def test_every_expert_is_read_once_exact(tmp_path: Path) -> None:
    """Megatron-LM#5844."""
    checkpoint = ShardedCheckpoint(save(tmp_path / "ck", Layout(ep=4)))
    values = [
        checkpoint.read(parameter)[0, 0].item()
        for parameter in checkpoint.parameters
        if parameter.name.startswith("decoder.layers.2.") and parameter.name.endswith("linear_fc2.weight")
    ]
    assert values == list(range(8))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(ep=2), Layout(tp=2, pp=2, ep=2)])
def test_folder_names_are_understood_without_arguments(tmp_path: Path, layout: Layout) -> None:
    assert_reads(save(tmp_path / "ck", layout, args=False), parameters())


def test_optimizer_files_are_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "ck", Layout(tp=2))
    (folder / "mp_rank_00/distrib_optim.pt").write_text("no pickle")
    assert_reads(folder, parameters())


def test_what_was_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    rows, size = 4096, 64 * 2**20
    whole = {f"decoder.layers.{i}.mlp.linear_fc2.weight": torch.full((rows, 8192), i).bfloat16() for i in range(LAYERS)}
    folder = save_legacy(tmp_path / "ck", whole, CONFIG, Layout(tp=2))
    checkpoint = ShardedCheckpoint(folder)
    resident = []
    for parameter in checkpoint.parameters:
        assert torch.equal(checkpoint.read(parameter), whole[parameter.name])
        fields = Path("/proc/self/statm").read_text().split()
        resident.append(int(fields[1]) * mmap.PAGESIZE)
    assert checkpoint.parameters[0].shape == (rows, 8192)
    assert max(resident) - resident[0] < size / 2


@pytest.mark.parametrize("missing", ["mp_rank_01_001_000", "mp_rank_00_000_001", "mp_rank_01_001_001"])
def test_missing_rank_is_named(tmp_path: Path, missing: str) -> None:
    """Megatron-LM#5844."""
    folder = save(tmp_path / "ck", Layout(tp=2, pp=2, ep=2))
    shutil.rmtree(folder / missing)
    with pytest.raises(ValueError, match=f"ck lacks {missing}: .* TP 2, PP 2, EP 2, expert TP 2"):
        ShardedCheckpoint(folder)


def test_missing_last_rank_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "ck", Layout(tp=2))
    shutil.rmtree(folder / "mp_rank_01")
    with pytest.raises(ValueError, match=r"ck lacks mp_rank_01: the checkpoint was saved with TP 2"):
        ShardedCheckpoint(folder)


def test_missing_layers_are_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path / "ck", Layout())
    edit(folder / "mp_rank_00", lambda content: setattr(content["args"], "num_layers", 6))
    with pytest.raises(ValueError, match=r"holds 4 layers, and its own arguments say num_layers=6"):
        ShardedCheckpoint(folder)


@pytest.mark.parametrize("length", [0, 100, 5000])
def test_truncated_file_is_named(tmp_path: Path, length: int) -> None:
    folder = save(tmp_path / "ck", Layout(tp=2))
    path = folder / "mp_rank_01/model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"mp_rank_01/model_optim_rng\.pt cannot be read: .*copy it again"):
        ShardedCheckpoint(folder)


def _diverged(content: dict[str, Any]) -> None:
    content["model"]["decoder.final_layernorm.weight"][3] += 1


def _without_one(content: dict[str, Any]) -> None:
    del content["model"]["decoder.layers.1.self_attention.linear_qkv.bias"]


def _another_width(content: dict[str, Any]) -> None:
    content["model"]["output_layer.weight"] = torch.zeros(16, HIDDEN, dtype=torch.bfloat16)


def _as_before_core(content: dict[str, Any]) -> None:
    content["model"] = {"language_model": {"embedding": {}}}


def _in_one_tensor(content: dict[str, Any]) -> None:
    content["model"]["decoder.layers.0.mlp.experts.weight1"] = torch.zeros(HIDDEN, 64)


def _of_another_layout(content: dict[str, Any]) -> None:
    content["args"].tensor_model_parallel_size = 1


def _without_columns(content: dict[str, Any]) -> None:
    content["model"]["decoder.layers.0.self_attention.linear_proj.weight"] = torch.zeros(5)


def _without_axes(content: dict[str, Any]) -> None:
    content["model"]["output_layer.weight"] = torch.zeros(())


def _expert_tp_in_words(content: dict[str, Any]) -> None:
    content["args"].expert_tensor_parallel_size = "two"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without_columns,
            r"mp_rank_00/model_optim_rng\.pt: decoder\.layers\.0\..*linear_proj\.weight has the shape \[5\]",
        ),
        (
            _without_axes,
            r"mp_rank_00/model_optim_rng\.pt: output_layer\.weight has the shape \[\], and .* along axis 0",
        ),
        (_expert_tp_in_words, r"its own arguments say expert_tensor_parallel_size='two', which is no number of ranks"),
        (lambda content: content["model"].update({5: torch.zeros(1)}), r'"model" has the key 5, not a parameter'),
        (_diverged, r"final_layernorm\.weight differs between .*mp_rank_00/.* and .*mp_rank_01/.*drifted apart"),
        (_without_one, r"have different parameters, decoder\.layers\.1\.self_attention\.linear_qkv\.bias"),
        (_another_width, r"output_layer\.weight has other shapes on one rank"),
        (_as_before_core, r'"language_model" is a dict inside the model, .* before Megatron-core'),
        (_in_one_tensor, r"experts\.weight1 holds all experts of a rank in one tensor"),
        (_of_another_layout, r"has files for tensor_model_parallel_size=2, and its own arguments say 1"),
        (lambda content: content.pop("model"), r'has no "model"'),
        (lambda content: content.update(model=[1]), r'"model" is a list'),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = save(tmp_path / "ck", Layout(tp=2))
    # Both ranks where one alone would be told apart by its names.
    alone = (_as_before_core, _in_one_tensor, _of_another_layout, _without_columns, _without_axes, _expert_tp_in_words)
    both = change in alone
    for path in sorted(folder.iterdir())[0 if both else 1 :]:
        edit(path, change)
    with pytest.raises(ValueError, match=message):
        assert_reads(folder, parameters())


def test_copies_of_the_embedding_that_differ_are_refused(tmp_path: Path) -> None:
    """Megatron-Bridge#2799."""
    # A layer of multi-token prediction has a copy of the embedding on the last pipeline stage.
    mtp = {"mtp.layers.0.enorm.weight": torch.ones(HIDDEN)}
    folder = save_legacy(tmp_path / "ck", {**parameters(), **mtp}, CONFIG, Layout(pp=2))
    names = [parameter.name for parameter in ShardedCheckpoint(folder).parameters]
    assert names.count("embedding.word_embeddings.weight") == 1
    edit(folder / "mp_rank_00_001", lambda content: content["model"]["embedding.word_embeddings.weight"].zero_())
    with pytest.raises(ValueError, match=r"word_embeddings\.weight differs between pipeline stages, in .*_000/.*_001/"):
        assert_reads(folder, parameters())


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "ck", Layout(tp=2))
    shutil.copytree(folder / "mp_rank_00", folder / "mp_rank_00_old")
    with pytest.raises(ValueError, match=r"mp_rank_00_old is no folder of a rank"):
        ShardedCheckpoint(folder)
    (folder / "mp_rank_00_old").rename(folder / "mp_rank_00_000")
    with pytest.raises(ValueError, match=r"mixes mp_rank_\* folders of several layouts"):
        ShardedCheckpoint(folder)


class _Calls:
    """An object whose pickle calls a function: what a weights-only reader must not do."""

    def __init__(self, function: Callable[..., object], path: Path) -> None:
        self._called = function, (path,)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._called


def test_no_function_of_a_file_is_called(tmp_path: Path) -> None:
    folder, victim = save(tmp_path / "ck", Layout()), tmp_path / "victim"
    victim.mkdir()
    edit(folder / "mp_rank_00", lambda content: content.update(rng_state=_Calls(shutil.rmtree, victim)))
    assert_reads(folder, parameters())
    assert victim.exists()
    torch.load(folder / "mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert not victim.exists()


@pytest.mark.parametrize("function", [os.mkdir, Path.touch])
def test_files_that_reach_for_the_system_are_refused(tmp_path: Path, function: Callable[..., object]) -> None:
    folder = save(tmp_path / "ck", Layout())
    edit(folder / "mp_rank_00", lambda content: content.update(rng_state=_Calls(function, tmp_path / "made")))
    with pytest.raises(ValueError, match=r"model_optim_rng\.pt cannot be read: Trying to"):
        ShardedCheckpoint(folder)
    assert not (tmp_path / "made").exists()


LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    vpp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([0, 1, 2]),
    fused=st.booleans(),
).filter(lambda layout: layout.expert_tp <= layout.tp <= layout.ep * layout.expert_tp)


@settings(max_examples=25)
@given(
    layout=LAYOUTS,
    experts=st.sampled_from([4, 8]),
    hidden=st.integers(1, 9),
    ffn=st.integers(1, 5),
    legacy=st.booleans(),
    stacked=st.booleans(),
)
def test_sharded_and_read_is_the_same_exact(
    tmp_path_factory: pytest.TempPathFactory,
    layout: Layout,
    experts: int,
    hidden: int,
    ffn: int,
    legacy: bool,
    stacked: bool,
) -> None:
    whole = parameters(experts, hidden, 4 * ffn)
    folder = tmp_path_factory.mktemp("property") / "ck"
    if legacy:
        save_legacy(folder, whole, CONFIG, layout)
    else:
        save_torch_dist(folder, whole, CONFIG, layout, stacked=stacked)
    assert_reads(folder, whole)
    shutil.rmtree(folder)
