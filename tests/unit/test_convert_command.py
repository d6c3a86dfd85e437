"""`jetrl convert`: its options, its plan, its comparison, and what it says about damaged sources."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from jetrl_megatron.cli import main
from jetrl_megatron.convert import stream
from jetrl_megatron.convert.export import convert_checkpoint
from jetrl_megatron.convert.files import TensorFiles, lay_out
from jetrl_megatron.convert.plan import TensorSpec
from tests.unit.convert_cases import Made, command, contents, make_export, make_source


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Checkpoint, config.json and export."""
    return make_export(tmp_path_factory.mktemp("command"))


def test_weight_files_are_those_of_safetensors_exact(tmp_path: Path) -> None:
    tensors = {
        "z.é": torch.randn(3, 5).bfloat16(),
        "layers.10": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "layers.2": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "scalar": torch.randn(()),
        "half": torch.randn(3).half(),
        "e8m0": torch.ones(5).to(torch.float8_e8m0fnu),
        "empty": torch.zeros(0, 4),
        "rows": torch.randn(6, 2),
    }
    layout = lay_out({name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}, 10**6)
    with TensorFiles(tmp_path, layout, create=True) as files:
        for name, tensor in reversed(tensors.items()):
            if name != "rows":
                files.write(name, tensor)
        files.write("rows", tensors["rows"][4:], 4)
        files.write("rows", tensors["rows"][:4])
    assert (tmp_path / "model.safetensors").read_bytes() == save(tensors, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "options", [("--workers", "1"), ("--workers", "5"), ("--verify",)], ids=["one_thread", "five_threads", "verify"]
)
def test_command_writes_the_same_bytes_exact(tmp_path: Path, made: Made, options: tuple[str, ...]) -> None:
    source, hf, expected = made
    assert command(source, hf, tmp_path / "out", *options) == 0
    assert contents(tmp_path / "out") == contents(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bands_of_any_size_give_the_same_bytes_exact(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made
    for tiles in (1, 2):
        monkeypatch.setattr(stream, "_BAND", tiles * 128 * 128)
        monkeypatch.setattr(stream, "_HELD_BYTES", 1)
        assert command(source, hf, tmp_path / f"out{tiles}") == 0
        assert contents(tmp_path / f"out{tiles}") == contents(expected)


def test_max_shard_size_makes_files_with_an_index(tmp_path: Path, made: Made) -> None:
    source, hf, expected = made
    out = tmp_path / "out"
    assert command(source, hf, out, "--max-shard-size", "0.3MB", "--verify") == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    whole = load_file(expected / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and {path.name for path in files} == set(index["weight_map"].values())
    for path in files:
        for name, tensor in load_file(path).items():
            assert index["weight_map"][name] == path.name
            assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8))
    # The same comparison of an export that is there already; its files' sizes do not matter.
    assert command(source, hf, out, "--verify") == 0


def test_scale_dtype_stores_exponents_of_the_same_scales_exact(
    tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    source, hf, expected = made
    out = tmp_path / "out"
    assert command(source, hf, out, "--scale-dtype", "float8_e8m0fnu", "--verify") == 0
    wide, narrow = (load_file(folder / "model.safetensors") for folder in (expected, out))
    assert wide.keys() == narrow.keys()
    for name, tensor in wide.items():
        if name.endswith("_scale_inv"):
            assert narrow[name].dtype == torch.float8_e8m0fnu and torch.equal(narrow[name].float(), tensor), name
            continue
        assert torch.equal(narrow[name].view(torch.uint8), tensor.view(torch.uint8)), name
    config, wide_config = (json.loads((folder / "config.json").read_text()) for folder in (out, expected))
    assert config["quantization_config"] == {**wide_config["quantization_config"], "scale_fmt": "ue8m0"}
    assert config["jetrl"] == wide_config["jetrl"]
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    text = capsys.readouterr().out
    assert "nothing contradicts itself" in text and "F8_E8M0" in text
    config["quantization_config"].pop("scale_fmt")
    (out / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(out)]) == 1
    assert "config.json: scale_fmt is None, and scales are F8_E8M0" in capsys.readouterr().out


def test_scale_dtype_of_powers_of_two_refuses_other_scales(
    tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    source, hf, _ = made
    options = "--scale-dtype", "float8_e8m0fnu", "--scale-format", "fp32"
    assert command(source, hf, tmp_path / "out", *options) == 2
    assert "'float8_e8m0fnu' holds powers of two alone, and scale_format='fp32'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="scale_dtype='bfloat16' is not supported: use one of float32, float8_e8m0fnu"):
        convert_checkpoint(source, tmp_path / "out", hf_config=hf, scale_dtype="bfloat16")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{ nonsense", r"config\.json is no JSON file"),
        ("[]", r"config\.json holds list"),
        ({"hidden_size": "big"}, r"config\.json makes no model \(\w+: Validation error for field 'hidden_size'"),
        ({"num_attention_heads": 0}, r"config\.json makes no model \(ZeroDivisionError"),
        ({"model_type": "nonsense"}, r"config\.json makes no model .*model type `nonsense`"),
        ({"architectures": ["NopeForCausalLM"]}, r"config\.json makes no model .*'NopeForCausalLM'"),
        ({"hidden_size": 129}, r"weight is .*256\], and the export wants .*129\]"),
        ({"num_hidden_layers": 3}, r"lacks 11 tensors of the Hugging Face model, model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"has 11 tensors that the Hugging Face model has not, model\.layers\.1\."),
        ({"num_key_value_heads": 2}, r"linear_qkv has 512 rows; 2 heads, 2 groups and head size 128 make 768"),
        ({"vocab_size": 1000}, r"embed_tokens\.weight has 512 rows, fewer than config\.json's vocab_size=1000"),
    ],
)
def test_foreign_configuration_is_a_named_error(
    tmp_path: Path, made: Made, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, hf, _ = made
    (tmp_path / "hf").mkdir()
    if isinstance(content, dict):
        content = json.dumps(json.loads((hf / "config.json").read_text()) | content)
    (tmp_path / "hf/config.json").write_text(content)
    assert command(source, tmp_path / "hf", tmp_path / "out") == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_unknown_model_is_an_error_without_a_question(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    (tmp_path / "hf").mkdir()
    fields = {"model_type": "nope", "auto_map": {"AutoConfig": "nope.Config"}, "architectures": ["NopeForCausalLM"]}
    (tmp_path / "hf/config.json").write_text(json.dumps(fields))
    (tmp_path / "hf/nope.py").write_text("raise SystemExit('run')")
    assert command(made[0], tmp_path / "hf", tmp_path / "out") == 2
    assert "config.json makes no model" in capsys.readouterr().err and not asked


@pytest.mark.parametrize("recipe", ['{"block": "128"}', '{"ignore": 5}', '{"element_max": null}'])
def test_recipe_file_of_other_types_is_a_named_error(
    tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    (tmp_path / "recipe.json").write_text(recipe)
    assert command(made[0], made[1], tmp_path / "out", "--recipe", str(tmp_path / "recipe.json")) == 2
    assert re.search(r"jetrl: error: \w+=.* must be a ", capsys.readouterr().err)


def test_bf16_layers_are_first_and_last(tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    source, hf, _ = made
    assert command(source, hf, tmp_path / "out", "--bf16-layers", "1/0") == 0
    tensors = load_file(tmp_path / "out/model.safetensors")
    for layer, dtype in enumerate((torch.bfloat16, torch.float8_e4m3fn)):
        assert tensors[f"model.layers.{layer}.mlp.up_proj.weight"].dtype == dtype
    assert command(source, hf, tmp_path / "no", "--bf16-layers", "1/0", "--bf16-end", "1") == 2
    assert "leave out --bf16-start and --bf16-end" in capsys.readouterr().err


def test_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    source, hf, _ = made
    assert command(source, hf, tmp_path / "out", "--dry-run", "--ignore", "*.1.mlp.linear_fc2") == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    lines = [line.split() for line in text.splitlines()]
    assert ["tensor", "number", "dtype", "shape", "MB"] in lines
    assert ["model.layers.*.self_attn.q_proj.weight", "2", "F8_E4M3", "256x256", "0.131"] in lines
    assert ["model.layers.*.mlp.down_proj.weight", "1", "F8_E4M3", "256x384", "0.098"] in lines
    assert ["model.layers.*.mlp.down_proj.weight", "1", "BF16", "256x384", "0.197"] in lines
    assert ["model.layers.*.mlp.down_proj.weight_scale_inv", "1", "F32", "2x3", "0.000"] in lines
    assert "stays BF16: model.layers.1.mlp.down_proj" in text and "rollout TP that vLLM can serve: 1\n" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-shard-size", "many"), "'many' is no size: write e.g. 500MB or 5GB"),
        (("--max-shard-size", "0"), "'0' is no size"),
        (("--bf16-layers", "3"), "'3' is not like 1/2"),
        (("--bf16-layers", "9/9"), "the recipe keeps every linear in BF16"),
        (("--workers", "0"), "workers=0 must be 1 or more threads"),
    ],
)
def test_command_refuses_options(
    tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str], options: tuple[str, str], message: str
) -> None:
    source, hf, _ = made
    try:
        status = command(source, hf, tmp_path / "out", *options)
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2 and message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def _truncated(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def _missing_rank(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def _foreign_file_in_its_place(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(random.Random(0).randbytes(file.stat().st_size))


def _no_index(folder: Path) -> None:
    (folder / ".metadata").unlink()


def _empty_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"")


def _foreign_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"not": "an index"}))


def _text_index(folder: Path) -> None:
    (folder / ".metadata").write_text('{"weight_map": {}}')


def _wrong_dtype(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    entry = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    object.__setattr__(entry.properties, "dtype", torch.int8)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _dtype_in_words(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    properties = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].properties
    object.__setattr__(properties, "dtype", "bfloat16")
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _one_shard_twice(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    chunks = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks
    chunks[1] = chunks[0]
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _overlapping_shards(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    name = "embedding.word_embeddings.weight"
    chunks = index.state_dict_metadata[name].chunks
    moved = dataclasses.replace(chunks[1], offsets=torch.Size([chunks[1].offsets[0] - 1, 0]))
    stored = next(place for place in index.storage_data if (place.fqn, place.offset) == (name, chunks[1].offsets))
    index.storage_data[dataclasses.replace(stored, offset=moved.offsets)] = index.storage_data.pop(stored)
    chunks[1] = moved
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _index_of_another_place(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    places = list(index.storage_data)
    first, last = index.storage_data[places[0]], index.storage_data[places[-1]]
    index.storage_data[places[0]], index.storage_data[places[-1]] = last, first
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncated, r"__1_0\.distcp has \d+ bytes, the index wants \d+"),
        (_missing_rank, r"__1_0\.distcp is missing"),
        (_foreign_file_in_its_place, r"cannot be read from .*__0_0\.distcp"),
        (_no_index, r"has no \.metadata"),
        (_empty_index, r"\.metadata is no index"),
        (_foreign_index, r"index"),
        (_text_index, r"\.metadata is no index"),
        (_wrong_dtype, r"linear_fc2\.weight is stored as torch\.int8"),
        (_dtype_in_words, r"the dtype of decoder\.layers\.mlp\.linear_fc2\.weight is 'bfloat16', which is none"),
        (_one_shard_twice, r"the shards of decoder\.layers\.mlp\.linear_fc2\.weight do not cover its \[2, 256, 384\]"),
        (_overlapping_shards, r"the shards of embedding\.word_embeddings\.weight do not cover its \[512, 256\]"),
        (_index_of_another_place, r"(final_layernorm|word_embeddings)\.weight cannot be read"),
    ],
)
def test_damaged_source_is_a_named_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], message: str
) -> None:
    source, hf = make_source(tmp_path)
    spoil(source)
    assert command(source, hf, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error and {path.name for path in tmp_path.iterdir()} == {"source", "hf"}


def test_foreign_files_beside_the_source_do_not_matter_exact(tmp_path: Path, made: Made) -> None:
    source, hf = make_source(tmp_path)
    (source / "notes.txt").write_text("x")
    (source / "__9_0.distcp").write_bytes(b"left over")
    (source / "model").mkdir()
    (source / "model/config.json").write_text("{}")
    assert command(source, hf, tmp_path / "out") == 0
    assert contents(tmp_path / "out") == contents(made[2])


def test_flipped_bytes_of_the_index_are_errors_or_harmless(
    tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    _, hf, expected = made
    source = make_source(tmp_path)[0]
    index = (source / ".metadata").read_bytes()
    flips = random.Random(2)
    statuses: list[Any] = []
    for _ in range(60):
        spoilt = bytearray(index)
        spoilt[flips.randrange(len(spoilt))] ^= 1 << flips.randrange(8)
        (source / ".metadata").write_bytes(spoilt)
        status = command(source, hf, tmp_path / "out")
        error = capsys.readouterr().err
        statuses.append(status)
        if status == 0:
            assert contents(tmp_path / "out") == contents(expected)
            shutil.rmtree(tmp_path / "out")
        assert "Traceback" not in error and not (tmp_path / "out").exists()
        assert status == 0 or "jetrl: error: " in error
    assert statuses.count(2) > 20, statuses
