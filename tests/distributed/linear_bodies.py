"""Single linears and expert layers on four ranks: real widths, odd token counts, frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from jetrl_megatron.layers import (
    Fp8LinearMixin,
    JetRLColumnParallelLinear,
    JetRLLayerNormColumnParallelLinear,
    JetRLMLP,
    JetRLRowParallelLinear,
)
from jetrl_megatron.ops.backends import ReferenceQuantizer
from jetrl_megatron.ops.log_prob import token_log_probs
from tests.fused_reference import FusedReference

# hidden, heads, KV heads, head_dim, FFN: head_dim 64 with half tiles, and fewer KV heads than ranks.
QWEN_0_5B = (896, 14, 2, 64, 4864)
FEW_KV_HEADS = (1536, 12, 2, 128, 8960)
TOKENS = 33


def parallel(tp: int) -> None:
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(tp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def settings(shape: tuple[int, ...], tp: int, **changes: Any) -> TransformerConfig:
    hidden, heads, groups, head_dim, _ = shape
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=head_dim,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
        **changes,
    )


def init_method(weight: torch.Tensor) -> None:
    """Half tiles of different size, so that a scale taken from one half alone is seen."""
    torch.nn.init.normal_(weight, std=0.02)
    with torch.no_grad():
        for axis in (0, 1):
            factor = 2.0 ** (torch.arange(weight.shape[axis]) // 64 % 5)
            weight.mul_(factor[:, None] if axis == 0 else factor)


def build(kind: str, shape: tuple[int, ...], tp: int, **changes: Any) -> Fp8LinearMixin:
    hidden, heads, groups, head_dim, ffn = shape
    config = settings(shape, tp, **changes)
    torch.manual_seed(3)
    if kind == "qkv":
        rows = (heads + 2 * groups) * head_dim
        return JetRLColumnParallelLinear(
            hidden, rows, config=config, init_method=init_method, bias=True, tp_comm_buffer_name="qkv"
        )
    if kind == "fc1":
        return JetRLColumnParallelLinear(
            hidden, 2 * ffn, config=config, init_method=init_method, bias=False, tp_comm_buffer_name="fc1", stride=2
        )
    columns = heads * head_dim if kind == "proj" else ffn
    options = {"bias": False, "input_is_parallel": True, "skip_bias_add": True}
    return JetRLRowParallelLinear(columns, hidden, config=config, init_method=init_method, **options)


def run(layer: Fp8LinearMixin, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Any]:
    """One forward and backward; results of the first data-parallel replica."""
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    layer.weight.grad_added_to_main_grad = False
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    y.backward(dy)
    tensor = layer.quantized_weight().tensor
    if mpu.get_data_parallel_rank() > 0:
        return {}
    return {
        "rank": mpu.get_tensor_model_parallel_rank(),
        "y": y.detach(),
        "dx": x.grad,
        "dw": layer.weight.main_grad,
        "weight": layer.weight.detach().clone(),
        "scale": tensor.scale,
        "layouts": layer.layouts,
    }


def linear(kind: str, shape: tuple[int, ...], tp: int) -> Callable[[], dict[str, Any]]:
    """The same global input, gradient and weight at any TP; column inputs are whole, row inputs this rank's columns."""

    def body() -> dict[str, Any]:
        parallel(tp)
        layer = build(kind, shape, tp)
        rank = mpu.get_tensor_model_parallel_rank()
        generator = torch.Generator().manual_seed(7)
        rows = layer.output_size
        x = torch.randn(TOKENS, layer.input_size, generator=generator).bfloat16()
        dy = torch.randn(TOKENS, rows, generator=generator).bfloat16()
        if kind in ("proj", "fc2"):
            return run(layer, x.chunk(tp, dim=1)[rank], dy)
        if kind == "fc1":
            dy = torch.cat([half.chunk(tp, dim=1)[rank] for half in dy.chunk(2, dim=1)], dim=1)
        else:
            dy = dy.chunk(tp, dim=1)[rank]
        return run(layer, x, dy)

    return body


def odd_tokens() -> dict[str, Any]:
    """11,486 tokens under TP 2 with sequence parallelism, and the same padded with zero to 11,520."""
    result: dict[str, Any] = {}
    for name, tokens in (("odd", 11486), ("padded", 11520)):
        parallel(2)
        rank = mpu.get_tensor_model_parallel_rank()
        shape = (128, 2, 2, 64, 256)
        column, row = (build(kind, shape, 2, sequence_parallel=True) for kind in ("fc1", "fc2"))
        generator = torch.Generator().manual_seed(5)
        x, dy = torch.zeros(tokens, 128).bfloat16(), torch.zeros(tokens, 128).bfloat16()
        x[:11486] = torch.randn(11486, 128, generator=generator).bfloat16()
        dy[:11486] = torch.randn(11486, 128, generator=generator).bfloat16()
        for layer in (column, row):
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
        part = x.chunk(2)[rank].clone().requires_grad_()
        hidden, _ = column(part)
        y, _ = row(hidden.chunk(2, dim=-1)[0].contiguous())
        y.backward(dy.chunk(2)[rank])
        result[name] = {"rows": y.shape[0], "column": column.weight.grad, "row": row.weight.grad, "dx": part.grad}
    return result


def frozen() -> dict[str, Any]:
    """Frozen weights under TP 2, with and without sequence parallelism: dx as with a trainable weight."""
    result = {}
    for sequence_parallel in (False, True):
        parallel(2)
        layer = build("fc1", QWEN_0_5B, 2, sequence_parallel=sequence_parallel)
        gradients = []
        for trainable in (True, False):
            layer.weight.requires_grad_(trainable)
            generator = torch.Generator().manual_seed(9)
            x = torch.randn(8, 896, generator=generator).bfloat16().requires_grad_()
            y, _ = layer(x)
            y.backward(torch.ones_like(y))
            gradients.append(x.grad)
        result[sequence_parallel] = gradients
    return result


def mlp(tp: int, *, sequence_parallel: bool, fused: bool) -> Callable[[], dict[str, Any]]:
    """A gated MLP with its norm: the same input, gradient and weights at any TP."""
    hidden, ffn = 256, 512

    def body() -> dict[str, Any]:
        parallel(tp)
        shape, rank = (hidden, 2, 2, 128, ffn), mpu.get_tensor_model_parallel_rank()
        gated = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "ffn_hidden_size": ffn}
        config = settings(shape, tp, normalization="RMSNorm", sequence_parallel=sequence_parallel, **gated)
        linears = MLPSubmodules(linear_fc1=JetRLLayerNormColumnParallelLinear, linear_fc2=JetRLRowParallelLinear)
        torch.manual_seed(3)
        layer = JetRLMLP(config, linears, ffn_hidden_size=ffn, tp_group=mpu.get_tensor_model_parallel_group())
        with torch.no_grad():
            layer.linear_fc1.layer_norm_weight.normal_(mean=1, std=0.1)
        for weight in (layer.linear_fc1.weight, layer.linear_fc2.weight):
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        generator = torch.Generator().manual_seed(7)
        x, dy = (torch.randn(64, 1, hidden, generator=generator).bfloat16() for _ in range(2))
        if sequence_parallel:
            x, dy = (whole.chunk(tp)[rank].clone() for whole in (x, dy))
        x.requires_grad_()
        quantizer = FusedReference() if fused else ReferenceQuantizer()
        with mock.patch("jetrl_megatron.layers.fp8_linear.select_quantizer", return_value=quantizer):
            y, _ = layer(x)
            assert layer._fuses() == fused
            y.backward(dy)
        if mpu.get_data_parallel_rank() > 0:
            return {}
        first, second = layer.linear_fc1, layer.linear_fc2
        gradients = {"dx": x.grad, "dnorm": first.layer_norm_weight.grad, "dw1": first.weight.main_grad}
        return {"y": y.detach(), **gradients, "dw2": second.weight.main_grad}

    return body


MLPS = {
    "mlp_unfused": mlp(1, sequence_parallel=False, fused=False),
    "mlp_tp1": mlp(1, sequence_parallel=False, fused=True),
    "mlp_tp2": mlp(2, sequence_parallel=False, fused=True),
    "mlp_tp2_sp": mlp(2, sequence_parallel=True, fused=True),
}

LINEARS = [
    ("qkv", "0.5b", QWEN_0_5B, 2),
    ("proj", "0.5b", QWEN_0_5B, 2),
    ("fc1", "0.5b", QWEN_0_5B, 2),
    ("fc2", "0.5b", QWEN_0_5B, 2),
    ("qkv", "few_kv", FEW_KV_HEADS, 4),
    ("proj", "few_kv", FEW_KV_HEADS, 4),
]


def log_probs(tp: int) -> Callable[[], dict[str, Any]]:
    """Log-probs of 7 tokens (no multiple of the ranks) over 96 columns, 91 of them real, and the logits' gradient."""

    def body() -> dict[str, Any]:
        parallel(tp)
        generator = torch.Generator().manual_seed(7)
        whole_TV = (torch.randn(7, 96, generator=generator) * 3).bfloat16()
        targets_T = torch.tensor([0, 90, 17, 48, 47, 3, 60])
        mine_TW = whole_TV.chunk(tp, 1)[mpu.get_tensor_model_parallel_rank()].clone().requires_grad_()
        group = mpu.get_tensor_model_parallel_group() if tp > 1 else None
        found = token_log_probs(mine_TW, targets_T, vocabulary=91, group=group)
        (found * torch.linspace(-1, 1, 7)).sum().backward()
        return {"log_probs": found.detach(), "gradient": mine_TW.grad}

    return body


BODIES: dict[str, Callable[[], Any]] = {
    **{f"{kind}_{name}_tp{tp}": linear(kind, shape, tp) for kind, name, shape, most in LINEARS for tp in (1, most)},
    "odd_tokens": odd_tokens,
    "frozen": frozen,
    **MLPS,
    **{f"log_probs_tp{tp}": log_probs(tp) for tp in (1, 2, 4)},
}
