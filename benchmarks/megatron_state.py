"""Megatron's parallel state of one rank, and the configs and linears that the benchmarks build."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import Model


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Model parallel groups of a single rank on the device, for as long as the context lasts."""
    if device.type == "cpu":
        from jetrl_megatron.integrations import megatron_cpu

        megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def transformer_config(model: Model, device: torch.device, **changes: Any) -> Any:
    """Megatron's config of one such layer in BF16, with gradients added to float32 main_grad by the linears."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    cpu = device.type == "cpu"
    settings = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": model.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": cpu,
        "gradient_accumulation_fusion": True,
        "bias_activation_fusion": not cpu,
        "bias_dropout_fusion": not cpu,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**{**settings, **changes})


def jetrl_linear(model: Model, name: str, device: torch.device) -> torch.nn.Module:
    """One of the four linears as a JetRL layer, its gradient going into `weight.main_grad`."""
    from jetrl_megatron.layers import JetRLColumnParallelLinear, JetRLRowParallelLinear

    rows, columns = model.linears[name]
    options: dict[str, Any] = {
        "config": transformer_config(model, device),
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.02),
        "bias": False,
        "skip_bias_add": False,
    }
    if name in ("proj", "fc2"):
        layer: torch.nn.Module = JetRLRowParallelLinear(columns, rows, input_is_parallel=True, **options)
    elif name == "qkv":
        layer = JetRLColumnParallelLinear(columns, rows, tp_comm_buffer_name="qkv", **options)
    else:
        layer = JetRLColumnParallelLinear(columns, rows, stride=2, **options)
    accumulate_into_main_grad(layer)
    return layer


def accumulate_into_main_grad(module: torch.nn.Module) -> None:
    """What Megatron's DistributedDataParallel does for one microbatch: a float32 main_grad, no `.grad` that stays.

    A gradient that a module has not added to main_grad by itself is added here.
    """

    def hook(parameter: torch.Tensor) -> None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(hook)


def drop_gradients(*tensors: torch.Tensor) -> None:
    """`.grad` of each is thrown away as soon as it is there: neither accumulated nor kept."""
    for tensor in tensors:
        tensor.register_post_accumulate_grad_hook(_drop)


def _drop(tensor: torch.Tensor) -> None:
    tensor.grad = None


def quantize_anew(module: torch.nn.Module) -> None:
    """Makes JetRL's and TransformerEngine's linears quantise their weights at the next forward, as a new step does."""
    for part in module.modules():
        if hasattr(part, "is_first_microbatch"):
            part.is_first_microbatch = True
