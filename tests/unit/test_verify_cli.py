"""Bad input: named with its value and a way out, status 2, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jetrl_megatron import cli
from jetrl_megatron.cli.verify import read_prompts
from jetrl_megatron.convert.recipe_file import save_recipe
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.reference import quantize_weight
from jetrl_megatron.verify import run as driver
from jetrl_megatron.verify.child import ChildError
from jetrl_megatron.verify.rollouts import Rollout, ScoredSequence
from jetrl_megatron.verify.run import VerifyOptions
from jetrl_megatron.verify.sources import training_source

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """A BF16 folder and a block FP8 folder, with configurations as far as the driver reads them."""
    config: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 8, **SHAPE}
    name = "model.layers.0.mlp.down_proj.weight"
    weight = torch.ones(128, 128).bfloat16()
    bf16, fp8 = tmp_path / "bf16", tmp_path / "fp8"
    for folder in (bf16, fp8):
        folder.mkdir()
    save_file({name: weight}, bf16 / "model.safetensors")
    (bf16 / "config.json").write_text(json.dumps(config))
    quantized = quantize_weight(weight, JETRL_FP8)
    tensors = {name: quantized.data, name + "_scale_inv": quantized.scale}
    save_file(tensors, fp8 / "model.safetensors")
    of_export = {"quantization_config": JETRL_FP8.to_vllm_quantization_config(), "jetrl": JETRL_FP8.to_stamp()}
    (fp8 / "config.json").write_text(json.dumps(config | of_export))
    return {"--train": str(bf16), "--rollout": str(fp8)}


@pytest.fixture(autouse=True)
def _no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(name: str, *_: Any) -> None:
        raise ChildError(f"{name} was started")

    monkeypatch.setattr(driver, "run_child", started)


def _run(arguments: dict[str, str]) -> int:
    return cli.main(["verify", *(word for pair in arguments.items() for word in pair)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"--rollout": "/nowhere"}, "rollout=/nowhere is no folder"),
        ({"--train": "/nowhere"}, "train=/nowhere is no folder"),
        ({"--seqs": "0"}, "sequences=0 must be 1 or more"),
        ({"--json": "/"}, "/ is a folder: name a file"),
        ({"--plot": "plot.xyz"}, "plot=plot.xyz: name a file that ends in one of .png"),
        ({"--mode": "bf16"}, "holds quantised weights: mode 'bf16' serves a BF16 folder"),
        ({"--tp": "0"}, "tp=0 must be 1 or more"),
        ({"--rollout-tp": "-1"}, "rollout_tp=-1 must be 1 or more"),
        ({"--rollout-tp": "2"}, "rollout TP 2: rows of k_proj and v_proj: 128 / 2 = 64 is no multiple of the tile"),
        ({"--steps": "-1"}, "steps=-1 must be 0 or more"),
        ({"--tokens": "60"}, "max_position_embeddings=64 leaves room for 31"),
        ({"--json": "/nowhere/out.json"}, "/nowhere is no folder: create it first"),
        ({"--hf-config": "/nowhere"}, "/nowhere has no config.json"),
        ({"--prompts": "/nowhere.json"}, "prompts=/nowhere.json cannot be read (No such file or directory)"),
        ({"--keep": "/dev/null/work"}, "keep=/dev/null/work cannot be created (Not a directory)"),
    ],
)
def test_verify_bad_input_is_status_2(
    folders: dict[str, str], arguments: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folders | {"--tokens": "8"} | arguments) == 2
    assert message in capsys.readouterr().err


def test_verify_refuses_a_bf16_rollout_and_an_fp8_training_folder(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = {"--train": folders["--rollout"], "--rollout": folders["--train"], "--tokens": "8"}
    assert _run(swapped) == 2
    assert "is no block FP8 checkpoint" in capsys.readouterr().err
    assert _run(swapped | {"--rollout": folders["--rollout"]}) == 2
    assert "holds quantised weights: training starts from BF16 ones" in capsys.readouterr().err
    assert _run(swapped | {"--mode": "bf16", "--train": folders["--train"], "--steps": "1"}) == 2
    assert "leave steps at 0" in capsys.readouterr().err


def test_verify_sound_input_starts_the_engine(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folders | {"--tokens": "8"}) == 3
    assert "jetrl verify: engine was started" in capsys.readouterr().err
    assert _run(folders | {"--tokens": "8", "--steps": "1"}) == 3
    assert "training was started" in capsys.readouterr().err


def test_verify_keeps_only_empty_folders(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folders | {"--tokens": "8", "--keep": folders["--train"]}) == 2
    assert "is no empty folder" in capsys.readouterr().err
    assert _run(folders | {"--tokens": "8", "--keep": str(tmp_path / "keep")}) == 3
    request = json.loads((tmp_path / "keep" / "engine.request.json").read_text())
    assert request["recipe"] == json.loads(json.dumps(JETRL_FP8.to_dict()))


def test_verify_prompts_outside_the_vocabulary(folders: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "prompts.json").write_text("[[1, 8]]")
    assert _run(folders | {"--prompts": str(tmp_path / "prompts.json"), "--tokens": "4"}) == 2
    assert "prompts hold token 8: the model's vocab_size=8" in capsys.readouterr().err


@pytest.mark.parametrize("side", ["logprobs", "train"])
def test_verify_log_probs_that_are_no_numbers(side: str) -> None:
    rollout = Rollout.of([ScoredSequence([1], [2, 3], [-1.0, float("nan") if side == "logprobs" else -1.0])])
    train_o = torch.tensor([-1.0, float("nan") if side == "train" else -1.0])
    with pytest.raises(ChildError, match="gave 1 of 2 tokens of batch 'start' no number as log-prob"):
        driver._comparison("start", "parity", rollout, train_o, {"batches": {"start": {"tokens_per_second": 1.0}}})


def test_verify_options_unknown_words_and_pairs_that_come_twice_raise() -> None:
    folders = {"train": Path("a"), "rollout": Path("b")}
    with pytest.raises(ValueError, match=r"further=\(\(4, 8\), \(4, 8\)\) names a pair twice"):
        VerifyOptions(**folders, further=((4, 8), (4, 8)))
    with pytest.raises(ValueError, match="mode='fast' is unknown"):
        VerifyOptions(**folders, mode="fast")
    with pytest.raises(ValueError, match="must be some of parity, ordinary, bf16"):
        VerifyOptions(**folders, variants=())


@pytest.mark.parametrize("rate", [0.0, -1e-4, float("nan"), float("inf")])
def test_verify_options_learning_rate_is_a_positive_number(rate: float) -> None:
    with pytest.raises(ValueError, match=f"learning_rate={rate} must be a number more than 0"):
        VerifyOptions(train=Path("a"), rollout=Path("b"), learning_rate=rate)


@pytest.mark.parametrize("content", ["[]", "[[]]", "[[1.5]]", "[[-1]]", '["12"]', "{}", "[[true]]", "nonsense"])
def test_read_prompts_refuses_other_json(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"prompts=.*prompts\.json"):
        read_prompts(path)
    path.write_text("[[1, 2], [3]]")
    assert read_prompts(path) == ((1, 2), (3,))


def test_training_source_takes_the_recipe_of_the_training_run(folders: dict[str, str], tmp_path: Path) -> None:
    trained, exported = Fp8BlockRecipe(scale_format="fp32"), JETRL_FP8
    checkpoint, work = tmp_path / "checkpoint", tmp_path / "work"
    checkpoint.mkdir()
    work.mkdir()
    (checkpoint / ".metadata").touch()
    config = json.loads((Path(folders["--rollout"]) / "config.json").read_text())
    found = training_source(checkpoint, architecture=config, recipe=exported, work=work)
    assert found.checkpoint == checkpoint and found.recipe == exported
    written = json.loads((found.hf_model / "config.json").read_text())
    assert written == {key: value for key, value in config.items() if key not in ("quantization_config", "jetrl")}
    save_recipe(checkpoint, trained)
    assert training_source(checkpoint, architecture=config, recipe=exported, work=work).recipe == trained
    bf16 = training_source(Path(folders["--train"]), architecture=config, recipe=None, work=work)
    assert bf16.checkpoint is None and bf16.recipe == JETRL_FP8
