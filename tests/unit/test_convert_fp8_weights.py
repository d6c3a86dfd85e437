from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe, quantize_weight
from jetrl_megatron.convert.fp8_weights import iter_fp8_weights

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
HF = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


def matrices(layers: int, size: int = 8) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The decoder linears of a dense model, each filled with a value of its own."""
    value = 0
    for layer in range(layers):
        for linear in LINEARS:
            for name in HF[linear]:
                value += 1
                tensor = torch.full((size, size), float(value), dtype=torch.bfloat16)
                yield f"decoder.layers.{layer}.{linear}", f"model.layers.{layer}.{name}.weight", tensor


def produce(
    module: str, name: str, tensor: torch.Tensor, recipe: Fp8BlockRecipe = JETRL_FP8
) -> dict[str, torch.Tensor]:
    return dict(iter_fp8_weights([(module, name, tensor)], recipe, num_layers=1))


def test_iter_fp8_weights_shapes_and_bytes_exact() -> None:
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = produce("decoder.layers.0.mlp.linear_fc2", "model.layers.0.mlp.down_proj.weight", w)
    codes, scale = out["model.layers.0.mlp.down_proj.weight"], out["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert list(out) == ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert (codes.dtype, tuple(codes.shape)) == (torch.float8_e4m3fn, (256, 384))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (2, 3))
    direct = quantize_weight(w, JETRL_FP8)
    assert torch.equal(codes.view(torch.uint8), direct.data.view(torch.uint8))
    assert torch.equal(scale, direct.scale)


def test_iter_fp8_weights_passes_others_on_unchanged() -> None:
    given = [
        ("embedding.word_embeddings", "model.embed_tokens.weight", torch.randn(8, 4).to(torch.bfloat16)),
        ("output_layer", "lm_head.weight", torch.randn(8, 4).to(torch.bfloat16)),
        ("decoder.final_layernorm", "model.norm.weight", torch.ones(4, dtype=torch.bfloat16)),
        ("decoder.layers.0.self_attention.linear_qkv", "model.layers.0.self_attn.q_proj.bias", torch.ones(4)),
        # A fused norm belongs to a linear's module and is no linear.
        ("decoder.layers.0.mlp.linear_fc1", "model.layers.0.post_attention_layernorm.weight", torch.ones(4)),
        ("decoder.layers.0.mlp.router", "model.layers.0.mlp.gate.weight", torch.randn(8, 4).to(torch.bfloat16)),
        ("decoder.layers.0.mlp.router", "model.layers.0.mlp.gate.e_score_correction_bias", torch.randn(8)),
    ]
    out = list(iter_fp8_weights(given, JETRL_FP8, num_layers=1))
    assert [name for name, _ in out] == [name for _, name, _ in given]
    for (_, name, before), (_, after) in zip(given, out, strict=True):
        assert after is before, name
    assert out[-1][1].dtype == torch.float32


def test_iter_fp8_weights_counts_every_linear() -> None:
    """prime-rl#2442."""
    # Qwen3-1.7B: 28 layers of q, k, v, o, gate, up, down. A skip pattern for "mlp.gate" once took gate_proj with it.
    scales = [name for name, _ in iter_fp8_weights(matrices(28), JETRL_FP8, 28) if name.endswith("_scale_inv")]
    assert len(scales) == 196


def test_iter_fp8_weights_follows_ignore_and_bf16_layers() -> None:
    recipe = Fp8BlockRecipe(ignore=("*.linear_proj",), num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    out = dict(iter_fp8_weights(matrices(4), recipe, 4))
    fp8 = {name for name, tensor in out.items() if tensor.dtype == torch.float8_e4m3fn}
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    assert fp8 == {f"model.layers.{layer}.{name}.weight" for layer in (1, 2) for name in names}
    assert len(out) == 4 * 7 + len(fp8)


def test_iter_fp8_weights_zero_tile_has_a_scale() -> None:
    """slime#2256."""
    w = torch.zeros(256, 256, dtype=torch.bfloat16)
    w[0, 0] = 1
    out = produce("decoder.layers.0.mlp.linear_fc2", "w.weight", w)
    codes, scale = out["w.weight"].to(torch.float32), out["w.weight_scale_inv"]
    # 1/464 and 1e-4/464, rounded up to powers of two.
    assert scale.tolist() == [[2**-8, 2**-22], [2**-22, 2**-22]]
    assert codes[0, 0] == 256
    assert codes.abs().sum() == 256


@pytest.mark.parametrize(
    ("name", "value", "position", "message"),
    [
        ("w.weight", float("nan"), (130, 7), r"w\.weight\[130, 7\] is nan"),
        ("w.weight", float("-inf"), (0, 200), r"w\.weight\[0, 200\] is -inf"),
        ("w.bias", float("inf"), (5,), r"w\.bias\[5\] is inf"),
    ],
)
def test_iter_fp8_weights_names_non_finite_position(
    name: str, value: float, position: tuple[int, ...], message: str
) -> None:
    """sglang#31712."""
    tensor = torch.ones((256, 256)[: len(position)], dtype=torch.bfloat16)
    tensor[position] = value
    with pytest.raises(ValueError, match=message):
        produce("decoder.layers.0.mlp.linear_fc2", name, tensor)


def test_iter_fp8_weights_refuses_pattern_without_match() -> None:
    recipe = Fp8BlockRecipe(ignore=("*.linear_fc2", "*.linear_projj"))
    with pytest.raises(
        ValueError, match=r"'\*\.linear_projj' matches no decoder linear.*near ones are '\*\.linear_proj'"
    ):
        list(iter_fp8_weights(matrices(2), recipe, 2))


def test_iter_fp8_weights_is_lazy() -> None:
    def endless() -> Iterator[tuple[str, str, torch.Tensor]]:
        while True:
            yield "decoder.layers.0.mlp.linear_fc2", "w.weight", torch.ones(128, 128, dtype=torch.bfloat16)

    assert next(iter_fp8_weights(endless(), JETRL_FP8, 1))[0] == "w.weight"


def test_iter_fp8_weights_survive_requantisation_by_vllm() -> None:
    """Megatron-LM#6666."""
    fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(300, 520, generator=generator).mul(torch.logspace(-6, 3, 520)).to(torch.bfloat16)
    w[0, 0], w[:128, 1:128], w[1:128, 0] = 3.59375, 0, 0
    out = produce("decoder.layers.0.mlp.linear_fc2", "w.weight", w)
    codes, scale = out["w.weight"].clone(), out["w.weight_scale_inv"].clone()
    assert (scale[0, 0], codes[0, 0].item()) == (2**-7, 448)
    with torch.compiler.set_stance("force_eager"):
        fp8_utils.requant_weight_ue8m0_inplace(codes, scale, JETRL_FP8.weight_block)
    assert torch.equal(codes.view(torch.uint8), out["w.weight"].view(torch.uint8))
    assert torch.equal(scale, out["w.weight_scale_inv"])
