"""The linears as drop-ins for Megatron's, on one rank."""

import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe, quantize_activation, quantize_weight, reference
from jetrl_megatron.layers import (
    JetRLColumnParallelLinear,
    JetRLLayerNormColumnParallelLinear,
    JetRLMLP,
    JetRLRowParallelLinear,
    VersionedParameter,
)
from tests.fused_reference import FusedReference

pytestmark = pytest.mark.usefixtures("megatron")


def config(**changes) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 64,
            "use_cpu_initialization": True,
            "normalization": "RMSNorm",
            "params_dtype": torch.bfloat16,
            "bf16": True,
            "gradient_accumulation_fusion": False,
            **changes,
        }
    )


def init_method(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.05)


def column(cls=JetRLColumnParallelLinear, rows: int = 384, settings=None, **options):
    torch.manual_seed(0)
    return cls(256, rows, config=settings or config(), init_method=init_method, **{"bias": True, **options})


def row(cls=JetRLRowParallelLinear, settings=None, **options):
    torch.manual_seed(0)
    options = {"bias": True, "input_is_parallel": True, "skip_bias_add": False, **options}
    return cls(256, 384, config=settings or config(), init_method=init_method, **options)


def expected(x: torch.Tensor, weight: torch.Tensor, recipe: Fp8BlockRecipe = JETRL_FP8) -> torch.Tensor:
    a, b = quantize_activation(x, recipe), quantize_weight(weight, recipe)
    y = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    return y.float().bfloat16().view(*x.shape[:-1], -1)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(JetRLColumnParallelLinear, ColumnParallelLinear), (JetRLRowParallelLinear, RowParallelLinear)]
)
def test_linear_state_dict_and_signature_are_megatrons(ours, theirs):
    make = column if ours is JetRLColumnParallelLinear else row
    a, b = make(ours), make(theirs)
    assert list(a.state_dict()) == list(b.state_dict())
    assert isinstance(a, theirs)
    assert torch.equal(a.weight, b.weight)
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
        assert getattr(a.weight, attribute) == getattr(b.weight, attribute)
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    metadata = {"dp_cp_group": torch.distributed.group.WORLD}
    mine, theirs_ = (layer.sharded_state_dict("x.", (), metadata) for layer in (a, b))
    assert mine.keys() == theirs_.keys()
    for key in ("x.weight", "x.bias"):
        for field in ("key", "global_shape", "global_offset", "axis_fragmentations", "replica_id"):
            assert getattr(mine[key], field) == getattr(theirs_[key], field)
    b.load_state_dict(a.state_dict())


@pytest.mark.parametrize("make", [column, row])
def test_linear_forward_is_the_reference_exact(make):
    layer = make(bias=False)
    x = torch.randn(5, 2, 256).bfloat16()
    y, bias = layer(x)
    assert bias is None
    assert torch.equal(y, expected(x, layer.weight))


@pytest.mark.parametrize("make", [column, row])
def test_linear_bias_is_added_or_handed_back(make):
    x = torch.randn(5, 2, 256).bfloat16()
    added, handed = make(), make(skip_bias_add=True)
    for layer in (added, handed):
        with torch.no_grad():
            layer.bias.copy_(torch.linspace(-1, 1, 384))
    y, none = added(x)
    plain, bias = handed(x)
    assert none is None and torch.equal(bias, handed.bias)
    assert torch.equal(y, plain + bias)


def test_linear_weight_is_versioned_and_cached():
    layer = column(bias=False)
    assert type(layer.weight) is VersionedParameter
    x = torch.randn(4, 256).bfloat16()
    layer(x)
    first = layer.quantized_weight()
    layer(x)
    assert layer.quantized_weight() is first
    before = first.tensor.scale.clone()
    layer.weight.data.mul_(2)
    assert torch.equal(layer.quantized_weight().tensor.scale, 2 * before)
    assert torch.equal(layer(x)[0], expected(x, layer.weight))
    layer.is_first_microbatch = True
    second = layer.quantized_weight()
    layer.is_first_microbatch = True
    assert layer.quantized_weight() is not second


def test_linear_external_weight():
    layer = column(bias=False, skip_weight_param_allocation=True)
    assert layer.weight is None
    weight = torch.nn.Parameter(torch.randn(384, 256).bfloat16())
    x = torch.randn(4, 256).bfloat16()
    assert torch.equal(layer(x, weight=weight)[0], expected(x, weight))
    weight.data.mul_(3)
    assert torch.equal(layer(x, weight=weight)[0], expected(x, weight))


def test_linear_gradient_fusion_needs_no_apex():
    settings = config(gradient_accumulation_fusion=True)
    layer = column(settings=settings, bias=False)
    assert layer.config is settings and layer.gradient_accumulation_fusion
    layer.weight.main_grad = torch.full((384, 256), 7.0)
    layer.weight.grad_added_to_main_grad = False
    x = torch.randn(16, 256).bfloat16()
    layer(x)[0].sum().backward()
    assert layer.weight.grad_added_to_main_grad
    plain = column(bias=False)
    plain(x)[0].sum().backward()
    # The same FP32 sum, once added to 7 and once rounded to BF16.
    torch.testing.assert_close(layer.weight.main_grad - 7, plain.weight.grad.float(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("fusion", [True, False])
def test_linear_frozen_weight_with_fusion(fusion):
    layer = column(settings=config(gradient_accumulation_fusion=fusion), bias=False)
    x = torch.randn(16, 256).bfloat16().requires_grad_()
    layer(x)[0].sum().backward()
    dx, x.grad = x.grad, None
    layer.weight.requires_grad_(False)
    layer(x)[0].sum().backward()
    assert torch.equal(x.grad, dx)


def test_linear_float32_parameters_give_the_bf16_numbers_exact():
    layer = column(bias=False, settings=config(params_dtype=torch.float32, bf16=False))
    x = torch.randn(4, 256)
    y, _ = layer(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, expected(x.bfloat16(), layer.weight.bfloat16()).float())


def test_linear_of_one_row():
    layer = column(bias=False)
    x = torch.randn(256).bfloat16()
    assert torch.equal(layer(x)[0], expected(x[None], layer.weight)[0])


@pytest.mark.parametrize(("field", "value"), [("fp8", "e4m3"), ("fp8", "hybrid")])
def test_linear_with_config_fp8_explains(field, value):
    settings = config()
    setattr(settings, field, value)  # past Megatron's own check for TransformerEngine
    with pytest.raises(ValueError, match=f"config.{field}='{value}' asks TransformerEngine.*set {field}=None"):
        column(settings=settings)
    with pytest.raises(ValueError, match="TransformerEngine"):
        row(settings=settings)


def test_linear_with_config_first_last_layers_explains():
    settings = config()
    settings.first_last_layers_bf16 = True
    with pytest.raises(ValueError, match=r"Fp8BlockRecipe\(num_layers_at_start_in_bf16="):
        column(settings=settings)


def test_linear_with_output_gate_explains():
    settings = config()
    settings.attention_output_gate = True
    with pytest.raises(ValueError, match="config.attention_output_gate=True"):
        column(rows=512, settings=settings, tp_comm_buffer_name="qkv")


def test_linear_qkv_in_megatron_order():
    layer = column(rows=512, bias=False, tp_comm_buffer_name="qkv")
    x = torch.randn(4, 256).bfloat16()
    stored = layer.weight.detach()
    q = torch.cat([stored[0:128], stored[256:384]])
    k, v = torch.cat([stored[128:192], stored[384:448]]), torch.cat([stored[192:256], stored[448:512]])
    q_y, k_y, v_y = (expected(x, part) for part in (q, k, v))
    y = torch.cat([q_y[:, :128], k_y[:, :64], v_y[:, :64], q_y[:, 128:], k_y[:, 64:], v_y[:, 64:]], dim=1)
    assert torch.equal(layer(x)[0], y)


def test_linear_ignored_by_name_is_megatrons_bf16_exact():
    layer, stock = column(recipe=Fp8BlockRecipe(ignore=("*.linear_fc1",))), column(ColumnParallelLinear)
    layer.name_linear("decoder.layers.2.mlp.linear_fc1", 4)
    x = torch.randn(4, 256).bfloat16()
    assert torch.equal(layer(x)[0], stock(x)[0])
    layer.name_linear("decoder.layers.2.mlp.linear_fc2", 4)
    assert not torch.equal(layer(x)[0], stock(x)[0])


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layernorm_linear_is_norm_then_linear(normalization, zero_centered):
    settings = config(normalization=normalization, layernorm_zero_centered_gamma=zero_centered)
    layer = column(JetRLLayerNormColumnParallelLinear, settings=settings, bias=False)
    keys = {"weight", "layer_norm_weight", "_extra_state"} | (
        {"layer_norm_bias"} if normalization == "LayerNorm" else set()
    )
    assert set(layer.state_dict()) == keys
    x = torch.randn(4, 256).bfloat16() * 3
    with torch.no_grad():
        layer.layer_norm_weight.add_(0.5)
    if normalization == "RMSNorm":
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + settings.layernorm_epsilon) * 1.5
    else:
        normed = torch.nn.functional.layer_norm(x.float(), (256,), eps=settings.layernorm_epsilon) * 1.5
    y, _ = layer(x)
    reference = expected(normed.bfloat16(), layer.weight)
    assert (y.float() - reference.float()).norm() < 5e-3 * reference.float().norm()
    y.sum().backward()
    assert layer.layer_norm_weight.grad.abs().sum() > 0
    metadata = {"dp_cp_group": torch.distributed.group.WORLD}
    assert layer.sharded_state_dict("x.", (), metadata)["x.layer_norm_weight"].global_shape == (256,)


def test_layernorm_linear_unknown_normalization_raises():
    settings = dataclasses.replace(config())
    settings.normalization = "GroupNorm"
    with pytest.raises(ValueError, match="config.normalization='GroupNorm': use 'RMSNorm' or 'LayerNorm'"):
        column(JetRLLayerNormColumnParallelLinear, settings=settings)


def test_fused_mlp_runs_the_hooks_of_both_linears_and_gives_their_product(monkeypatch):
    # DistributedDataParallel waits in them for the weights of a step.
    monkeypatch.setattr("jetrl_megatron.layers.fp8_linear.select_quantizer", lambda *_: FusedReference())
    settings = config(ffn_hidden_size=384, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False)
    submodules = MLPSubmodules(linear_fc1=JetRLColumnParallelLinear, linear_fc2=JetRLRowParallelLinear)
    mlp = JetRLMLP(settings, submodules)
    assert mlp._fuses()
    called = []
    for linear in (mlp.linear_fc1, mlp.linear_fc2):
        linear.register_forward_pre_hook(lambda module, *_: called.append(module))
    x = torch.randn(5, 1, 256).bfloat16()
    y = mlp(x)[0]
    assert called == [mlp.linear_fc1, mlp.linear_fc2]
    assert torch.equal(y, mlp.linear_fc2(reference.swiglu(mlp.linear_fc1(x)[0][:, 0])[:, None])[0])
