"""What follows the decoder's layers, with the rollout's bytes: final norm and output layer (lm_head)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from jetrl_megatron.layers.rms_norm import JetRLRMSNorm
from jetrl_megatron.ops.bf16_linear import row_invariant_linear, row_invariant_refusal


class _RowInvariantLinear(torch.autograd.Function):
    """Megatron's autograd function for a BF16 linear with another product in its forward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[attr-defined, untyped-decorator]
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if options["gradient_accumulation_fusion"] else None
        ctx.use_bias = False
        for name, value in options.items():
            setattr(ctx, name, value)
        total = input
        if ctx.sequence_parallel:
            total = gather_from_sequence_parallel_region(
                input.detach(), tensor_parallel_output_grad=False, group=ctx.tp_group
            )
        return row_invariant_linear(total, weight.detach())

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw, *_ = LinearWithGradAccumulationAndAsyncCommunication.backward(ctx, dy)
        return dx, dw, None


class _FrozenRowInvariantLinear(torch.autograd.Function):
    """The same for a weight that takes no gradient."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[attr-defined, untyped-decorator]
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, allreduce_dgrad: bool, group: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.allreduce_dgrad, ctx.tp_group = allreduce_dgrad, group
        return row_invariant_linear(input, weight.detach())

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, *_ = LinearWithFrozenWeight.backward(ctx, dy)
        return dx, None, None, None


class JetRLOutputLayer(ColumnParallelLinear):
    """Drop-in for the output layer of Megatron's GPTModel and HybridModel: BF16, rows computed as the rollout does.

    Raises:
        ValueError: the layer has a bias, or the machine cannot run the product.
    """

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        refusal = row_invariant_refusal(input.device)
        if refusal is not None:
            raise ValueError(f"the parity output layer cannot run: {refusal}")
        if bias is not None:
            raise ValueError("an output layer with a bias is not among the parity operators: build it without one")
        options = {
            name: kwargs.get(name, default)
            for name, default in (
                ("gradient_accumulation_fusion", False),
                ("allreduce_dgrad", False),
                ("sequence_parallel", False),
                ("grad_output_buffer", None),
                ("wgrad_deferral_limit", None),
                ("tp_group", None),
                ("gtp_remat_size", 1),
            )
        }
        if options["gtp_remat_size"] != 1:
            raise ValueError(
                f"gtp_remat_size={options['gtp_remat_size']}: the parity output layer takes whole weights: set it to 1"
            )
        y: torch.Tensor
        if weight.requires_grad:
            y = _RowInvariantLinear.apply(input, weight, options)  # type: ignore[no-untyped-call]
            return y
        group = options["tp_group"]
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
        y = _FrozenRowInvariantLinear.apply(input, weight, options["allreduce_dgrad"], group)  # type: ignore[no-untyped-call]
        return y


def use_parity_head(model: Any) -> Any:
    """Makes what follows the decoder's layers in a GPTModel or HybridModel parity operators: final norm, output layer.

    Megatron builds both itself, not from the layer spec, so this follows the model's construction. Parameters,
    state-dict keys and tied embeddings stay; a pipeline stage that has neither stays as it is.

    Args:
        model: the model, or what wraps it (Float16Module, DistributedDataParallel).

    Returns:
        the same model.

    Raises:
        ValueError: the output layer is of another class or has a bias, or the final norm is no RMSNorm.
    """
    # Classes alone change: no parameter or module moves, so optimizers, hooks and tied embeddings keep what they hold.
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    norm = getattr(inner.decoder, "final_layernorm", None) or getattr(inner.decoder, "final_norm", None)
    if norm is not None and not isinstance(norm, JetRLRMSNorm):
        JetRLRMSNorm.check_config(inner.config)
        norm.__class__, norm.eps = JetRLRMSNorm, inner.config.layernorm_epsilon
    layer = getattr(inner, "output_layer", None)
    if layer is None or isinstance(layer, JetRLOutputLayer):
        return model
    if type(layer) is not ColumnParallelLinear or layer.bias is not None:
        raise ValueError(
            f"output_layer={type(layer).__name__}, bias={layer.bias is not None}: the parity output layer takes the "
            "place of Megatron's ColumnParallelLinear without bias"
        )
    layer.__class__ = JetRLOutputLayer
    return model
