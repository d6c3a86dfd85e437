"""`jetrl convert --verify`: what it compares, and what it keeps from appearing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from jetrl_megatron.convert.files import TensorFiles
from tests.unit.convert_cases import Made, command, make_export, make_source


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Checkpoint, config.json and export."""
    return make_export(tmp_path_factory.mktemp("verify"))


def test_verify_names_a_changed_byte(tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    source, hf, expected = made
    out = Path(shutil.copytree(expected, tmp_path / "out"))
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    assert command(source, hf, out, "--verify") == 1
    # The last codes in the file are those of the name that sorts last.
    assert capsys.readouterr().out == "model.layers.1.self_attn.v_proj.weight: 1 bytes differ from the source's\n"
    shutil.copy(expected / "model.safetensors", out)
    capsys.readouterr()
    assert command(source, hf, out, "--verify") == 0
    assert "every byte is what the source makes" in capsys.readouterr().out
    assert command(source, hf, out, "--verify", "--scale-format", "fp32") == 1
    assert "config.json: jetrl is" in capsys.readouterr().out


def _another_tokenizer(out: Path) -> None:
    (out / "tokenizer.json").write_text("another")


def _no_chat_template(out: Path) -> None:
    (out / "additional_chat_templates/tool.jinja").unlink()


def _foreign_weights(out: Path) -> None:
    (out / "model-other.safetensors").write_bytes(save({"model.norm.weight": torch.zeros(256)}))


def _second_copy(out: Path) -> None:
    first, second, *_ = sorted(out.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    second.write_bytes(save({**load_file(second), name: torch.zeros_like(tensor)}))


def _extra_tensor(out: Path) -> None:
    first = min(out.glob("*.safetensors"))
    first.write_bytes(save({**load_file(first), "extra": torch.zeros(3)}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_another_tokenizer, r"^tokenizer\.json: differs from .*hf/tokenizer\.json$"),
        (_no_chat_template, r"^additional_chat_templates/tool\.jinja: missing in .*out$"),
        (_foreign_weights, r"model-other\.safetensors: model\.safetensors\.index\.json does not name it"),
        (_second_copy, r"embed_tokens\.weight: in model-00001-of-\d+\.safetensors and in model-00002-of-"),
        (_extra_tensor, r"extra: in model-00001-of-\d+\.safetensors, and model\.safetensors\.index\.json does not"),
    ],
)
def test_verify_sees_what_lies_beside_the_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], message: str
) -> None:
    source, hf = make_source(tmp_path)
    (hf / "tokenizer.json").write_text("{}")
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates/tool.jinja").write_text("x")
    out = tmp_path / "out"
    assert command(source, hf, out, "--max-shard-size", "0.3MB", "--verify") == 0
    assert command(source, hf, out, "--verify") == 0
    spoil(out)
    capsys.readouterr()
    assert command(source, hf, out, "--verify") == 1
    assert re.search(message, capsys.readouterr().out, re.MULTILINE)


def test_verify_keeps_a_wrong_export_from_appearing(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, hf, _ = made
    write = TensorFiles.write

    def faulty(self: TensorFiles, name: str, tensor: torch.Tensor, first_row: int = 0) -> None:
        if name.endswith("1.mlp.up_proj.weight"):
            tensor = tensor.clone()
            tensor.view(torch.uint8)[0, 0] ^= 8
        write(self, name, tensor, first_row)

    monkeypatch.setattr(TensorFiles, "write", faulty)
    assert command(source, hf, tmp_path / "out", "--verify") == 2
    error = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight: " in error and "out was not made" in error
    assert list(tmp_path.iterdir()) == []
