"""Whole conversions of small models, from a torch_dist folder to what vLLM and transformers read, and the command."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter, save
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from jetrl_megatron import JETRL_FP8, BlockScaledTensor, Fp8BlockRecipe, quantize_weight
from jetrl_megatron.cli import main
from jetrl_megatron.convert.export import convert_checkpoint
from jetrl_megatron.convert.recipe_file import save_recipe
from jetrl_megatron.layout import qkv_runs

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 200}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        **{**SIZES, "intermediate_size": 320}, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
    ),
    "qwen2_tied": Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(
        **SIZES, num_attention_heads=6, num_key_value_heads=3, head_dim=128, tie_word_embeddings=False
    ),
    "mistral": MistralConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False),
}


def hugging_face_model(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """A random BF16 model, saved with a tokenizer file beside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return model


def megatron_tensors(model: PreTrainedModel, padded_vocabulary: int = 256) -> dict[str, torch.Tensor]:
    """The same weights as Megatron stores them: layers stacked, q/k/v by group, gate above up, vocabulary padded."""
    hf, config = model.state_dict(), model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def layers(make: Callable[[str], torch.Tensor]) -> torch.Tensor:
        return torch.stack([make(f"model.layers.{layer}.") for layer in range(config.num_hidden_layers)])

    def qkv(prefix: str, kind: str) -> torch.Tensor:
        parts = [hf[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        runs = qkv_runs(config.num_attention_heads, config.num_key_value_heads, head_dim)
        return torch.cat([parts[matrix][first : first + length] for matrix, first, length in runs])

    def padded(name: str) -> torch.Tensor:
        return torch.cat([hf[name], hf[name].new_zeros(padded_vocabulary - config.vocab_size, config.hidden_size)])

    def fc1(prefix: str) -> torch.Tensor:
        return torch.cat([hf[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])

    tensors = {
        "embedding.word_embeddings.weight": padded("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        # One norm named as Megatron's local spec names it, the other as TransformerEngine's.
        "decoder.layers.input_layernorm.weight": layers(lambda p: hf[p + "input_layernorm.weight"]),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": layers(lambda p: hf[p + "post_attention_layernorm.weight"]),
        "decoder.layers.self_attention.linear_qkv.weight": layers(lambda p: qkv(p, "weight")),
        "decoder.layers.self_attention.linear_proj.weight": layers(lambda p: hf[p + "self_attn.o_proj.weight"]),
        "decoder.layers.mlp.linear_fc1.weight": layers(fc1),
        "decoder.layers.mlp.linear_fc2.weight": layers(lambda p: hf[p + "mlp.down_proj.weight"]),
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(config.hidden_size),
    }
    if not config.tie_word_embeddings:
        tensors["output_layer.weight"] = padded("lm_head.weight")
    if "model.layers.0.self_attn.q_proj.bias" in hf:
        tensors["decoder.layers.self_attention.linear_qkv.bias"] = layers(lambda p: qkv(p, "bias"))
    for part in "qk":
        if f"model.layers.0.self_attn.{part}_norm.weight" in hf:
            name = f"decoder.layers.self_attention.{part}_layernorm.weight"
            tensors[name] = layers(lambda p, part=part: hf[f"{p}self_attn.{part}_norm.weight"])
    return tensors


def save_torch_dist(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def direct_export(
    model: PreTrainedModel, recipe: Fp8BlockRecipe = JETRL_FP8, bf16: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """What an export must hold: the model's own matrices, quantised one by one."""
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        expected[name] = tensor
        if "_proj.weight" in name and not any(part in name for part in bf16):
            quantized = quantize_weight(tensor, recipe)
            expected[name], expected[name + "_scale_inv"] = quantized.data, quantized.scale
    return expected


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, PreTrainedModel]:
    """Hugging Face folder, torch_dist folder and model of a tied Qwen2; tests must not change the folders."""
    root = tmp_path_factory.mktemp("qwen2")
    model = hugging_face_model(FAMILIES["qwen2_tied"], root / "hf")
    return root / "hf", save_torch_dist(root / "ck", megatron_tensors(model)), model


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_checkpoint_equals_direct_quantisation_exact(tmp_path: Path, family: str) -> None:
    model = hugging_face_model(FAMILIES[family], tmp_path / "hf")
    source = save_torch_dist(tmp_path / "ck", megatron_tensors(model))
    recipe = Fp8BlockRecipe(scale_format="fp32") if family == "llama" else None
    out = convert_checkpoint(source, tmp_path / "out", hf_config=tmp_path / "hf", recipe=recipe)
    assert_same_tensors(load_file(out / "model.safetensors"), direct_export(model, recipe or JETRL_FP8))
    files = {path.name for path in out.iterdir()}
    assert files == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "ck", "out"}


def test_export_config_fields(tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel]) -> None:
    hf, source, _ = qwen2
    config = json.loads((convert_checkpoint(source, tmp_path / "out", hf_config=hf) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    assert config["jetrl"] == {"version": 1, "recipe": JETRL_FP8.to_dict(), "fingerprint": JETRL_FP8.fingerprint}


def test_transformers_loads_the_export_exact(tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel]) -> None:
    pytest.importorskip("accelerate")
    hf, source, model = qwen2
    recipe = Fp8BlockRecipe(ignore=("decoder.layers.1.mlp.linear_fc1",))
    out = convert_checkpoint(source, tmp_path / "out", hf_config=hf, recipe=recipe)
    # Without a GPU transformers dequantises to BF16, which is exact for powers of two. It guesses the tile from the
    # shapes, so every size here is a multiple of the block.
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    for name, expected in direct_export(model, bf16=("1.mlp.gate", "1.mlp.up")).items():
        if name.endswith("_scale_inv"):
            continue
        if expected.dtype == torch.float8_e4m3fn:
            quantized = quantize_weight(model.state_dict()[name], recipe)
            expected = quantized.dequantize(torch.bfloat16)
        assert torch.equal(loaded.state_dict()[name], expected), name


def test_ignored_layers_stay_bf16_in_file_and_config(tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel]) -> None:
    hf, source, model = qwen2
    recipe = Fp8BlockRecipe(ignore=("*.linear_qkv",), num_layers_at_start_in_bf16=1)
    out = convert_checkpoint(source, tmp_path / "out", hf_config=hf, recipe=recipe)
    bf16 = ("layers.0.", "q_proj", "k_proj", "v_proj")
    assert_same_tensors(load_file(out / "model.safetensors"), direct_export(model, bf16=bf16))
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = [name for name in model.state_dict() if "_proj.weight" in name and any(part in name for part in bf16)]
    assert set(quantization["ignored_layers"]) == {name.removesuffix(".weight") for name in weights} | {"lm_head"}
    assert quantization["modules_to_not_convert"] == quantization["ignored_layers"]


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("decoder.final_layernorm.weight", None, r"lacks 1 tensors of the Hugging Face model, model\.norm\.weight"),
        (
            "decoder.layers.input_layernorm.weight",
            lambda t: t[:1],
            r"lacks 1 .* model\.layers\.1\.input_layernorm\.weight",
        ),
        ("output_layer.weight", torch.ones(256, 256), r"differ, but config\.json ties them"),
        ("decoder.layers.extra.weight", torch.ones(2, 4), r"decoder\.layers\.0\.extra\.weight has no counterpart"),
        ("decoder.layers.mlp.linear_fc2.weight", lambda t: t[:, :, :256], r"down_proj\.weight is .* \[256, 256\]"),
        (
            "decoder.final_layernorm.weight",
            lambda t: t.index_fill(0, torch.tensor(7), torch.nan),
            r"norm\.weight\[7\] is nan",
        ),
    ],
    ids=["no_norm", "no_second_layer", "untied_head", "unknown", "wrong_shape", "nan"],
)
def test_convert_checkpoint_leaves_nothing_after_an_error(
    tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel], key: str, change: Any, message: str
) -> None:
    hf, _, model = qwen2
    tensors = megatron_tensors(model)
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change if isinstance(change, torch.Tensor) else change(tensors[key]).contiguous()
    source = save_torch_dist(tmp_path / "ck", tensors)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", hf_config=hf)
    assert {path.name for path in tmp_path.iterdir()} == {"ck"}


def test_convert_checkpoint_replaces_its_own_export_alone(
    tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel]
) -> None:
    hf, source, _ = qwen2
    out = convert_checkpoint(source, tmp_path / "out", hf_config=hf)
    (out / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match=r"out exists: choose another name, or replace the export with --force"):
        convert_checkpoint(source, out, hf_config=hf)
    fp32 = Fp8BlockRecipe(scale_format="fp32")
    convert_checkpoint(source, out, hf_config=hf, recipe=fp32, force=True)
    assert not (out / "mine.txt").exists()
    assert json.loads((out / "config.json").read_text())["jetrl"]["fingerprint"] == fp32.fingerprint
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"other exists and is no export of this converter"):
        convert_checkpoint(source, tmp_path / "other", hf_config=hf, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}


def test_command_converts(
    tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    hf, source, model = qwen2
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text('{"version": "2.0"}')
    options = ["--ignore", "*.linear_fc2", "*.linear_proj", "--bf16-start", "0", "--scale-format", "fp32"]
    out = tmp_path / "out"
    command = ["convert", str(source), str(out), "--hf-config", str(hf), "--tokenizer", str(tmp_path / "tokenizer")]
    assert main([*command, *options]) == 0
    recipe = Fp8BlockRecipe(scale_format="fp32", ignore=("*.linear_fc2", "*.linear_proj"))
    assert capsys.readouterr().out == f"{out}: block FP8, fp32 scales, recipe {recipe.fingerprint}\n"
    assert_same_tensors(load_file(out / "model.safetensors"), direct_export(model, recipe, ("down_proj", "o_proj")))
    assert (out / "tokenizer.json").read_text() == '{"version": "2.0"}'


def test_command_prints_user_errors(
    tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    hf, source, model = qwen2
    for arguments, message in (
        ([str(tmp_path / "no"), "out", "--hf-config", str(hf)], "no is no folder"),
        ([str(source), str(tmp_path / "out"), "--hf-config", str(source)], "ck has no config.json"),
        ([str(source), str(tmp_path / "out"), "--hf-config", str(hf), "--tokenizer", str(source)], "holds none of"),
        ([str(source), str(tmp_path / "out"), "--hf-config", str(hf), "--recipe", "no.json"], "no.json does not exist"),
        ([str(source), str(tmp_path / "out"), "--hf-config", str(hf), "--ignore", "*.fc2"], "near ones"),
        (
            [str(source), str(tmp_path / "out"), "--hf-config", str(hf), "--rollout-tp", "2"],
            "128 / 2 = 64 is no multiple",
        ),
    ):
        assert main(["convert", *arguments]) == 2
        error = capsys.readouterr().err
        assert "jetrl: error: " in error and message in error and "Traceback" not in error
    trained = save_torch_dist(tmp_path / "ck", megatron_tensors(model))
    save_recipe(trained, JETRL_FP8)
    arguments = ["convert", str(trained), str(tmp_path / "out"), "--hf-config", str(hf), "--scale-format", "fp32"]
    assert main(arguments) == 2
    assert "scale_format: 'fp32' != 'ue8m0'" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"ck"}


def test_dequantised_export_is_close_to_the_model(tmp_path: Path, qwen2: tuple[Path, Path, PreTrainedModel]) -> None:
    hf, source, model = qwen2
    out = load_file(convert_checkpoint(source, tmp_path / "out", hf_config=hf) / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    w = BlockScaledTensor(out[name], out[name + "_scale_inv"], JETRL_FP8.weight_block, JETRL_FP8).dequantize()
    # e4m3 keeps 3 bits after the leading one: half a unit there is 1/16 of the value.
    reference = model.state_dict()[name].float()
    assert ((w - reference).abs() <= reference.abs() / 16 + out[name + "_scale_inv"].max() * 2**-10).all()
