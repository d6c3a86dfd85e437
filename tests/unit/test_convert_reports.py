"""What other converters were reported to get wrong, through the whole of this one; each test names the reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from jetrl_megatron import Fp8BlockRecipe
from jetrl_megatron.convert.export import convert_checkpoint
from jetrl_megatron.convert.shards import ShardedCheckpoint
from tests.unit.megatron_layouts import Layout, megatron_parameters, save_legacy, save_torch_dist

ATTENTION, DOWN = "model.layers.0.self_attn", "model.layers.1.mlp.down_proj.weight"
FP32 = Fp8BlockRecipe(scale_format="fp32")
HALF_BILLION = Qwen2Config(
    hidden_size=896,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    num_hidden_layers=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)


def matrices(config: PretrainedConfig, *, bias: bool) -> dict[str, torch.Tensor]:
    """The tensors of a dense model under their Hugging Face names, bfloat16; each tile has noise of another size."""
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    query, key = heads * dim, config.num_key_value_heads * dim
    generator = torch.Generator().manual_seed(0)
    found = {
        "model.embed_tokens.weight": torch.zeros(config.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config.num_hidden_layers):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in shapes.items():
            rows, columns = (torch.arange(size) // 128 for size in shape)
            size = torch.exp2((3 * rows[:, None] + 5 * columns) % 7 - 9)
            found[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=generator) * size
        for part, rows in (("q", query), ("k", key), ("v", key)) if bias else ():
            found[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.randn(rows, generator=generator)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def amax_of_tiles(w: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each tile, float32."""
    rows, columns = (math.ceil(size / 128) for size in w.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: w.shape[0], : w.shape[1]] = w.float().abs()
    return padded.view(rows, 128, columns, 128).amax((1, 3))


def converted(
    work: Path,
    config: PretrainedConfig,
    hf: dict[str, torch.Tensor],
    layout: Layout = Layout(),  # noqa: B008
    *,
    legacy: bool = False,
    recipe: Fp8BlockRecipe | None = None,
) -> dict[str, torch.Tensor]:
    """What the converter writes for these tensors, saved under a layout."""
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(work / "hf")
    parameters = megatron_parameters(hf, config, fused=layout.fused)
    (save_legacy if legacy else save_torch_dist)(work / "ck", parameters, config, layout)
    out = convert_checkpoint(work / "ck", work / "out", hf_config=work / "hf", recipe=recipe)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("legacy", [False, True], ids=["torch_dist", "legacy"])
def test_half_billion_at_tp2_and_pp2_has_the_tiles_of_the_logical_matrices_exact(tmp_path: Path, legacy: bool) -> None:
    """Megatron-Bridge#5757, vllm#52915, torchtune#2233, Model-Optimizer#876, Megatron-Bridge#919, #4694, #5375."""
    hf = matrices(HALF_BILLION, bias=True)
    hf["model.embed_tokens.weight"][-1] = 3
    found = converted(tmp_path, HALF_BILLION, hf, Layout(tp=2, pp=2), legacy=legacy, recipe=FP32)
    for part, grid in (("q", [7, 7]), ("k", [1, 7]), ("v", [1, 7]), ("o", [7, 7])):
        name = f"{ATTENTION}.{part}_proj.weight"
        scale = found[f"{name}_scale_inv"]
        assert list(scale.shape) == grid
        assert torch.equal(scale, (amax_of_tiles(hf[name]).double() / 448).float()), name
    for part, rows in (("q", 896), ("k", 128), ("v", 128)):
        name = f"{ATTENTION}.{part}_proj.bias"
        assert (list(found[name].shape), found[name].dtype) == ([rows], torch.bfloat16)
        assert torch.equal(found[name], hf[name]) and f"{name}_scale_inv" not in found
    assert sum(name.endswith("layernorm.weight") for name in found) == 2 * HALF_BILLION.num_hidden_layers
    assert "model.norm.weight" in found and "lm_head.weight" not in found
    embedding = found["model.embed_tokens.weight"]
    assert list(embedding.shape) == [151936, 896] and embedding[-1].eq(3).all() and embedding[:-1].eq(0).all()


def test_few_kv_heads_at_tp4_keep_their_own_tiles_exact(tmp_path: Path) -> None:
    """modelexpress#650."""
    config = LlamaConfig(
        hidden_size=1536,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=256,
        num_hidden_layers=1,
        vocab_size=64,
    )
    hf = matrices(config, bias=False)
    found = converted(tmp_path, config, hf, Layout(tp=4), recipe=FP32)
    for part, grid in (("q", [12, 12]), ("k", [2, 12]), ("v", [2, 12])):
        name = f"{ATTENTION}.{part}_proj.weight"
        assert list(found[f"{name}_scale_inv"].shape) == grid
        assert torch.equal(found[f"{name}_scale_inv"], (amax_of_tiles(hf[name]).double() / 448).float()), name


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_halves_of_a_gated_layer_are_joined_over_ranks_exact(tmp_path: Path, kind: str) -> None:
    """Megatron-LM#360: rank 0 holds g0 g1 u0 u1, rank 1 g2 g3 u2 u3."""
    name = f"decoder.layers.0.mlp.linear_fc1.{kind}"
    for rank, held in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        rows = torch.tensor(held, dtype=torch.bfloat16)
        model = {
            "embedding.word_embeddings.weight": torch.zeros(4, 4),
            "decoder.layers.0.mlp.linear_fc1.weight": rows[:, None].expand(-1, 4),
            name: rows if kind == "bias" else rows[:, None].expand(-1, 4),
        }
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        torch.save({"model": model, "iteration": 1}, tmp_path / f"mp_rank_{rank:02d}/model_optim_rng.pt")
    checkpoint = ShardedCheckpoint(tmp_path)
    (parameter,) = [parameter for parameter in checkpoint.parameters if parameter.name == name]
    whole = checkpoint.read(parameter)
    assert whole.view(8, -1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


SMALL: dict[str, Any] = {
    "hidden_size": 129,
    "intermediate_size": 129,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def small_with_down(tmp_path: Path, down: torch.Tensor, recipe: Fp8BlockRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, as float32, and scales of a down_proj [129, 129] in the middle of a whole conversion."""
    config = LlamaConfig(**SMALL, tie_word_embeddings=False)
    hf = matrices(config, bias=False) | {DOWN: down.bfloat16()}
    found = converted(tmp_path, config, hf, recipe=recipe)
    return found[DOWN].float(), found[f"{DOWN}_scale_inv"]


def one_value(value: float) -> torch.Tensor:
    w = torch.zeros(129, 129)
    w[0, 0] = value
    return w


def test_edge_tiles_are_padded_with_zeros(tmp_path: Path) -> None:
    """A 129x129 of 0.25 with a last element of 8: that element is in no tile but its own."""
    w = torch.full((129, 129), 0.25)
    w[128, 128] = 8
    _, scale = small_with_down(tmp_path, w, FP32)
    assert scale[1, 0].item() == pytest.approx(5.5804e-4, rel=1e-4)
    assert scale[1, 1].item() == pytest.approx(1.7857e-2, rel=1e-4)


@pytest.mark.parametrize(
    ("value", "recipe", "scale", "code"),
    [
        pytest.param(3.0, FP32, 0.00669643, 448, id="miles#2034"),
        pytest.param(3.59375, Fp8BlockRecipe(), 2**-7, 448, id="Megatron-LM#6666"),
        # A quotient of 464 saturates: rounded to the nearest code it would be no number.
        pytest.param(464 * 2**-7, Fp8BlockRecipe(), 2**-7, 448, id="transformers#42775"),
        pytest.param(466 * 2**-6, Fp8BlockRecipe(), 2**-5, 240, id="ao#4725"),
    ],
)
def test_scale_and_code_of_one_value(
    tmp_path: Path, value: float, recipe: Fp8BlockRecipe, scale: float, code: float
) -> None:
    codes, scales = small_with_down(tmp_path, one_value(value), recipe)
    assert scales[0, 0].item() == pytest.approx(scale, abs=1e-8)
    assert codes[0, 0].item() == code


@pytest.mark.parametrize("recipe", [Fp8BlockRecipe(), FP32], ids=["ue8m0", "fp32"])
def test_zero_tiles_have_scales_that_are_numbers(tmp_path: Path, recipe: Fp8BlockRecipe) -> None:
    """slime#2256."""
    codes, scales = small_with_down(tmp_path, one_value(1.0), recipe)
    assert scales.isfinite().all() and (scales > 0).all() and codes.isfinite().all()
    assert (codes * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:129, :129])[1:].eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_named(tmp_path: Path, bad: float) -> None:
    """sglang#31712."""
    w = torch.ones(129, 129)
    w[128, 5] = bad
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.down_proj\.weight\[128, 5\] is {bad}"):
        small_with_down(tmp_path, w, Fp8BlockRecipe())
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "ck"}


def test_a_checkpoint_in_float32_gives_the_bytes_of_its_bfloat16_exact(tmp_path: Path) -> None:
    """xtuner#2044: 1.0059062 in the FP32 master is 1.0078125 in BF16, which is what the engine must hold."""
    config = LlamaConfig(**SMALL, tie_word_embeddings=False)
    hf = matrices(config, bias=False)
    hf[DOWN] = torch.full((129, 129), 1.0059062)
    master = converted(tmp_path / "master", config, {name: tensor.float() for name, tensor in hf.items()}, recipe=FP32)
    (tmp_path / "bf16").mkdir()
    bf16 = converted(tmp_path / "bf16", config, {name: tensor.bfloat16() for name, tensor in hf.items()}, recipe=FP32)
    assert master[f"{DOWN}_scale_inv"][0, 0].item() == pytest.approx(1.0078125 / 448, rel=1e-7)
    assert master.keys() == bf16.keys()
    for name, tensor in bf16.items():
        assert master[name].dtype == tensor.dtype, name
        assert torch.equal(master[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, None),
        ({"num_attention_heads": 8, "kv_channels": 32, "apply_layernorm_1p": False, "num_query_groups": 1}, None),
        ({"num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 4}, None),
        ({"num_attention_heads": 4}, r"num_attention_heads=4, and the Hugging Face model has 8"),
        ({"kv_channels": 64}, r"kv_channels=64, and the Hugging Face model has 32"),
        (
            {"group_query_attention": True, "num_query_groups": 2},
            r"num_query_groups=2, and the Hugging Face model has 4",
        ),
        ({"apply_layernorm_1p": True}, r"apply_layernorm_1p=True, and the Hugging Face model has False"),
    ],
)
@pytest.mark.parametrize("torch_dist", [False, True], ids=["legacy", "torch_dist"])
def test_heads_and_norms_of_another_model_are_refused(
    tmp_path: Path, torch_dist: bool, said: dict[str, Any], message: str | None
) -> None:
    """Four heads of 64 in two groups have as many rows as eight of 32 in four, and no shape tells them apart."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 256}
    config = LlamaConfig(**{**SMALL, **heads}, tie_word_embeddings=False)
    config.save_pretrained(tmp_path / "hf")
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(fields | {"architectures": ["LlamaForCausalLM"]}))
    parameters = megatron_parameters(matrices(config, bias=False), config, fused=False)
    if torch_dist:
        save_torch_dist(tmp_path / "ck", parameters, config, Layout())
        torch.save({"args": argparse.Namespace(**said), "iteration": 3}, tmp_path / "ck/common.pt")
    else:
        file = save_legacy(tmp_path / "ck", parameters, config, Layout()) / "mp_rank_00/model_optim_rng.pt"
        content = torch.load(file, weights_only=False)
        vars(content["args"]).update(said)
        torch.save(content, file)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        convert_checkpoint(tmp_path / "ck", tmp_path / "out", hf_config=tmp_path / "hf")
    assert (tmp_path / "out").exists() == (message is None)
