"""FProp, DGrad and WGrad of one linear, and of a gated MLP, in one autograd Function each.

What is computed, and what Megatron's tensor parallelism adds, is `LinearCall`'s; here is in which order, and what is
saved in between.
"""

# Shape suffixes: M tokens, N and K rows and columns of the weight as stored, F half the rows of a gated pair.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.linear_call import Gradient, LinearCall, LinearPlan
from jetrl_megatron.ops.linear import LinearOperand, as_matrix
from jetrl_megatron.tensor import BlockScaledTensor


def _codes(saved: Iterator[torch.Tensor], plan: LinearPlan) -> BlockScaledTensor:
    return BlockScaledTensor(next(saved), next(saved), plan.recipe.activation_block, plan.recipe)


@dataclass(frozen=True)
class Norm:
    """The RMSNorm before a linear, computed together with the quantisation of its result."""

    weight: torch.Tensor
    eps: float


class BlockFp8Linear(torch.autograd.Function):
    """y = x W^T + bias with blockwise FP8 operands in all three GEMMs; call it through `block_fp8_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        call: LinearCall,
        norm: Norm | None,
    ) -> torch.Tensor:
        plan = call.plan
        x_MK = as_matrix(x.detach()).to(torch.bfloat16)
        x_codes, for_norm = _quantize_input(plan, x_MK, norm)
        y_MN = call.fprop(call.gather(x_codes)).to(x.dtype)
        if bias is not None:
            y_MN = y_MN + bias
        for_wgrad: tuple[torch.Tensor, ...] = ()
        if weight.requires_grad:
            bf16 = plan.recipe.saved_activation == "bf16"
            for_wgrad = (x_MK,) if bf16 else (x_codes.tensor.data, x_codes.tensor.scale)
        ctx.save_for_backward(*for_norm, *for_wgrad)
        ctx.call, ctx.has_bias, ctx.has_norm = call, bias is not None, norm is not None
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return _like_input(y_MN, x, call)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: LinearCall = ctx.call
        plan = call.plan
        needs_x, needs_dw, needs_db, needs_norm = ctx.needs_input_grad[:4]
        needs_dx = needs_x or needs_norm
        dy_MN = as_matrix(dy).to(torch.bfloat16)
        saved = iter(ctx.saved_tensors)
        for_norm = tuple(next(saved) for _ in range(3)) if ctx.has_norm else ()
        saved_x, gather = None, None
        if needs_dw:
            saved_x = next(saved) if plan.recipe.saved_activation == "bf16" else _codes(saved, plan)
            gather = call.start_gather(saved_x)
        gradient = plan.quantize_gradient(dy_MN, needs_dx=needs_dx, needs_dw=needs_dw)
        dx, work, dw = None, None, None
        if needs_dx:
            dx, work = call.reduce_dgrad(call.dgrad(gradient))
            gradient = replace(gradient, rows=None)
        if saved_x is not None:
            dw = call.wgrad(gradient, saved_x if gather is None else gather.wait())
        del gradient, saved_x, gather
        db = dy_MN.sum(dim=0).to(dy.dtype) if ctx.has_bias and needs_db else None
        dx, dnorm = _finish_dgrad(ctx, plan, dx, work, for_norm)
        return dx, call.for_autograd(dw) if needs_dw else None, db, dnorm, None, None


class BlockFp8SwiGluMlp(torch.autograd.Function):
    """(silu(gate) * up) W2^T with [gate, up] = x W1^T: quantised between the linears without BF16 in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_1: torch.Tensor,
        weight_2: torch.Tensor,
        norm_weight: torch.Tensor | None,
        call_1: LinearCall,
        call_2: LinearCall,
        norm: Norm | None,
    ) -> torch.Tensor:
        x_codes, for_norm = _quantize_input(call_1.plan, as_matrix(x.detach()).to(torch.bfloat16), norm)
        y_M2F = call_1.fprop(call_1.gather(x_codes))
        h_codes = call_2.plan.operand(call_2.plan.quantizer.swiglu(y_M2F, call_2.plan.recipe))
        z_MK = call_2.fprop(h_codes).to(x.dtype)
        codes = [part for o in (x_codes, h_codes) for part in (o.tensor.data, o.tensor.scale)]
        ctx.save_for_backward(*for_norm, *codes, y_M2F)
        ctx.calls, ctx.has_norm = (call_1, call_2), norm is not None
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return _like_input(z_MK, x, call_1)

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call_1, call_2 = ctx.calls
        plan_1, plan_2 = call_1.plan, call_2.plan
        needs_x, needs_dw1, needs_dw2, needs_norm = ctx.needs_input_grad[:4]
        saved = iter(ctx.saved_tensors)
        for_norm = tuple(next(saved) for _ in range(3)) if ctx.has_norm else ()
        x_codes, h_codes, y_M2F = _codes(saved, plan_1), _codes(saved, plan_2), next(saved)
        gather = call_1.start_gather(x_codes) if needs_dw1 else None
        dz_MK = as_matrix(dz).to(torch.bfloat16)
        gradient_2 = plan_2.quantize_gradient(dz_MK, needs_dx=True, needs_dw=needs_dw2)
        dh_MF = call_2.dgrad(gradient_2)
        dw1, dw2 = None, call_2.wgrad(gradient_2, h_codes) if needs_dw2 else None
        # What is large is let go as soon as it has been read: this is where a layer takes most memory.
        del gradient_2, h_codes
        rows, columns = plan_1.quantizer.swiglu_backward(dh_MF, y_M2F, plan_1.recipe)
        del dh_MF, y_M2F
        dx, work = None, None
        if needs_x or needs_norm:
            dx, work = call_1.reduce_dgrad(call_1.dgrad(Gradient(plan_1.operand(rows), None, None)))
        del rows
        if needs_dw1:
            dw1 = call_1.wgrad(Gradient(None, columns, None), x_codes if gather is None else gather.wait())
        del columns, gather
        dx, dnorm = _finish_dgrad(ctx, plan_1, dx, work, for_norm)
        dw1 = call_1.for_autograd(dw1) if needs_dw1 else None
        dw2 = call_2.for_autograd(dw2) if needs_dw2 else None
        return dx, dw1, dw2, dnorm, None, None, None


def _quantize_input(
    plan: LinearPlan, x_MK: torch.Tensor, norm: Norm | None
) -> tuple[LinearOperand, tuple[torch.Tensor, ...]]:
    """Codes of the input, after its norm if there is one, and what the norm's backward needs."""
    if norm is None:
        return plan.quantize(x_MK, plan.columns), ()
    codes, rstd_M = plan.quantizer.rms_norm(x_MK, norm.weight.detach(), norm.eps, plan.recipe)
    return plan.operand(codes), (x_MK, norm.weight, rstd_M)


def _finish_dgrad(
    ctx: Any, plan: LinearPlan, dx: torch.Tensor | None, work: dist.Work | None, for_norm: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the input, once all ranks have summed theirs, and of the norm's weight if there is a norm."""
    if work is not None:
        work.wait()
    if dx is None:
        return None, None
    dnorm = None
    if for_norm:
        x_MK, weight_K, rstd_M = for_norm
        dx, dweight_K = plan.quantizer.rms_norm_backward(dx, x_MK, weight_K, rstd_M)
        dnorm = dweight_K.to(weight_K.dtype)
    return dx.to(ctx.x_dtype).view(ctx.x_shape), dnorm


def _like_input(y_MN: torch.Tensor, x: torch.Tensor, call: LinearCall) -> torch.Tensor:
    """[M, N] with the leading axes of x; under sequence parallelism axis 0 is that of all ranks."""
    world = dist.get_world_size(call.plan.group) if call.communication.sequence_parallel else 1
    leading = (x.shape[0] * world, *x.shape[1:-1]) if x.dim() > 1 else ()
    return y_MN.view(*leading, y_MN.shape[-1])


def block_fp8_linear(
    x: torch.Tensor, call: LinearCall, *, bias: torch.Tensor | None = None, norm: Norm | None = None
) -> torch.Tensor:
    """y = x W^T + bias, all three GEMMs in the plan's recipe.

    Args:
        x: float [..., K] as the rank holds it; under sequence parallelism axis 0 is the rank's part of the sequence.
        bias: float [N] or None.
        norm: RMSNorm of x before the linear. Only where `call.plan.fuses`.

    Returns:
        x.dtype [..., N], rounded to BF16.
    """
    assert norm is None or call.plan.fuses
    norm_weight = None if norm is None else norm.weight
    result: torch.Tensor = BlockFp8Linear.apply(x, call.weight, bias, norm_weight, call, norm)
    return result


def block_fp8_swiglu_mlp(
    x: torch.Tensor, call_1: LinearCall, call_2: LinearCall, *, norm: Norm | None = None
) -> torch.Tensor:
    """Both linears of a gated MLP and the SwiGLU between them. Only where both plans fuse.

    Args:
        x: float [..., K], see `block_fp8_linear`.
        call_1: the linear whose rows are gate, then up.
        call_2: the linear after; its output is the rank's partial sum.

    Returns:
        x.dtype [..., K], rounded to BF16.
    """
    assert call_1.plan.fuses and call_2.plan.fuses
    norm_weight = None if norm is None else norm.weight
    result: torch.Tensor = BlockFp8SwiGluMlp.apply(x, call_1.weight, call_2.weight, norm_weight, call_1, call_2, norm)
    return result
