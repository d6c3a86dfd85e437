"""FProp, DGrad and WGrad of y = x W^T in one autograd Function, with Megatron's tensor-parallel communication.

| pass  | contraction | first operand       | second operand                   | result               |
|-------|-------------|---------------------|----------------------------------|----------------------|
| fprop | K           | x, 1 x block        | W, block x block                 | BF16                 |
| dgrad | N           | dy, 1 x block       | W^T, the same codes and scales   | BF16                 |
| wgrad | M           | dy^T, 1 x block     | x^T, 1 x block                   | FP32, into main_grad |

A scale must be constant along the axis that a tensor core sums over. So dy is quantised twice from one BF16 tensor, and
x is kept in the codes that fprop used and requantised along M; with ue8m0 scales that loses nothing but underflow.
"""

# Shape suffixes: M tokens, N and K rows and columns of the weight as stored, F half the rows of a gated pair,
# Mp tokens padded to whole groups.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.ops.alignment import Alignment, reduce_tiles
from jetrl_megatron.ops.backends import Gemm, Quantizer
from jetrl_megatron.ops.gathering import Gathered, GatheredCodes
from jetrl_megatron.ops.linear import LinearOperand, as_matrix
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.reference import block_amax
from jetrl_megatron.tensor import BlockScaledTensor


@dataclass(frozen=True)
class Gradient:
    """dy in the forms that the two backward GEMMs contract; None where the recipe or frozen tensors need it not.

    Attributes:
        rows: codes [M, N] in aligned order, for dgrad.
        columns: codes [N, Mp] in stored order, for wgrad.
        stored: BF16 [M, N], for GEMMs that the recipe keeps in BF16.
    """

    rows: LinearOperand | None
    columns: BlockScaledTensor | None
    stored: torch.Tensor | None


@dataclass(frozen=True)
class LinearPlan:
    """What stays the same over all calls of one linear layer.

    Attributes:
        rows, columns: how the weight's two dimensions, as stored, lie in tiles.
        group: tensor-parallel group of the layer, None for a single rank.
    """

    recipe: Fp8BlockRecipe
    quantizer: Quantizer
    gemm: Gemm
    rows: Alignment
    columns: Alignment
    group: dist.ProcessGroup | None

    @property
    def fuses(self) -> bool:
        """Whether norm and SwiGLU can write this layer's codes, and read its gradient's, without BF16 in between."""
        recipe = self.recipe
        ablated = "bf16" in (recipe.dgrad, recipe.wgrad, recipe.saved_activation)
        ablated = ablated or recipe.wgrad_gradient_source == "fp8"
        return self.quantizer.fused and not ablated and self.rows.direct and self.columns.direct

    def quantize_weight(self, weight_NK: torch.Tensor) -> LinearOperand:
        """The weight's codes in aligned order. A collective where tiles are shared among ranks."""
        w = self.columns.align(self.rows.align(weight_NK.detach(), 0), 1).to(torch.bfloat16)
        amax = None
        if self.rows.layout.shared or self.columns.layout.shared:
            amax = reduce_tiles(block_amax(w, self.recipe.weight_block), self.rows, self.columns)
        return LinearOperand(*self.quantizer.weight(w, self.recipe, amax=amax), self.gemm)

    def quantize(self, x: torch.Tensor, alignment: Alignment) -> LinearOperand:
        """Activations [M, K] or gradients [M, N] in stored order, quantised along their aligned last axis."""
        aligned, amax = alignment.align(x, 1), None
        if alignment.layout.shared:
            amax = alignment.reduce_columns(block_amax(aligned, self.recipe.activation_block))
        return self.operand(self.quantizer.activation(aligned, self.recipe, amax=amax))

    def quantize_gradient(self, dy_MN: torch.Tensor, *, needs_dx: bool, needs_dw: bool) -> Gradient:
        """dy in the forms that the recipe's backward GEMMs want."""
        recipe = self.recipe
        for_dgrad, for_wgrad = needs_dx and recipe.dgrad == "fp8", needs_dw and recipe.wgrad == "fp8"
        rows, columns, stored = None, None, dy_MN
        if needs_dw and recipe.wgrad_gradient_source == "fp8":
            rows = self.quantize(dy_MN, self.rows)
            stored = self.rows.restore(rows.tensor.dequantize(), 1)
        elif for_dgrad and for_wgrad and self.rows.direct:
            codes, columns = self.quantizer.both(dy_MN, recipe)
            rows = self.operand(codes)
        elif for_dgrad:
            rows = self.quantize(dy_MN, self.rows)
        if for_wgrad and columns is None:
            columns = self.quantizer.along_tokens(stored, recipe)
        bf16 = needs_dx and recipe.dgrad == "bf16" or needs_dw and recipe.wgrad == "bf16"
        return Gradient(rows, columns, stored if bf16 else None)

    def operand(self, codes: BlockScaledTensor) -> LinearOperand:
        """Codes as an operand of this layer's GEMMs."""
        return LinearOperand(codes, gemm=self.gemm)


@dataclass(frozen=True)
class Communication:
    """What Megatron asks of one call: `sequence_parallel` gathers x and scatters dx, `allreduce_dgrad` sums dx."""

    sequence_parallel: bool = False
    allreduce_dgrad: bool = False


@dataclass(frozen=True)
class LinearCall:
    """One linear's part in one forward and its backward.

    Attributes:
        weight: float [N, K], the parameter that gets the gradient; its numbers enter through `operand` alone.
        operand: `plan.quantize_weight(weight)`.
        main_grad: float32 [N, K]; when given, dW is added to it and `weight.grad_added_to_main_grad` is set.
    """

    plan: LinearPlan
    weight: torch.Tensor
    operand: LinearOperand
    communication: Communication = Communication()
    main_grad: torch.Tensor | None = None

    def gather(self, x: LinearOperand) -> LinearOperand:
        """The input of all tokens: under sequence parallelism codes and scales of all ranks."""
        if not self.communication.sequence_parallel:
            return x
        return self.plan.operand(GatheredCodes(x.tensor, self.plan.group).wait())

    def fprop(self, x: LinearOperand) -> torch.Tensor:
        """y in stored order, BF16 [M, N]."""
        return self.plan.rows.restore(self.plan.gemm.nt(x.rows, self.operand.rows), 1)

    def dgrad(self, dy: Gradient) -> torch.Tensor:
        """dx in stored order, BF16 [M, K]."""
        if dy.rows is None or self.plan.recipe.dgrad == "bf16":
            assert dy.stored is not None
            weight_NK: torch.Tensor = self.weight.detach().to(torch.bfloat16)
            return dy.stored.to(torch.bfloat16) @ weight_NK
        return self.plan.columns.restore(self.plan.gemm.nt(dy.rows.rows, self.operand.columns), 1)

    def start_gather(self, x: BlockScaledTensor | torch.Tensor) -> GatheredCodes | Gathered | None:
        """Under sequence parallelism, sets out to collect the saved input of all ranks."""
        if not self.communication.sequence_parallel:
            return None
        group = self.plan.group
        return Gathered(x, group) if isinstance(x, torch.Tensor) else GatheredCodes(x, group)

    def reduce_dgrad(self, dx_MK: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Sets out to sum dx over the tensor-parallel ranks, as the layer's kind asks."""
        group = self.plan.group
        if self.communication.sequence_parallel:
            scattered = dx_MK.new_empty(dx_MK.shape[0] // dist.get_world_size(group), dx_MK.shape[1])
            return scattered, dist.reduce_scatter_tensor(scattered, dx_MK.contiguous(), group=group, async_op=True)
        if self.communication.allreduce_dgrad:
            dx_MK = dx_MK.contiguous()
            return dx_MK, dist.all_reduce(dx_MK, group=group, async_op=True)
        return dx_MK, None

    def wgrad(self, dy: Gradient, x: BlockScaledTensor | torch.Tensor) -> torch.Tensor | None:
        """Adds dW to main_grad and returns None, or returns dW in the weight's dtype.

        Args:
            x: the saved input of all tokens: codes in aligned order, or BF16 [M, K] in stored order.
        """
        plan, main_grad = self.plan, self.main_grad
        if plan.recipe.wgrad == "bf16":
            assert dy.stored is not None
            return self._finish((dy.stored.to(torch.bfloat16).t() @ self._stored(x).to(torch.bfloat16)).float())
        assert dy.columns is not None
        if isinstance(x, BlockScaledTensor) and plan.columns.position is None:
            x_columns = plan.quantizer.requantize_along_tokens(x)
        else:
            x_columns = plan.quantizer.along_tokens(self._stored(x), plan.recipe)
        operands = plan.gemm.prepare(dy.columns), plan.gemm.prepare(x_columns)
        if main_grad is not None and main_grad.dtype == torch.float32 and main_grad.is_contiguous():
            plan.gemm.accumulate_nt(*operands, main_grad)
            return None
        dw_NK = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        plan.gemm.accumulate_nt(*operands, dw_NK)
        return self._finish(dw_NK)

    def _stored(self, x: BlockScaledTensor | torch.Tensor) -> torch.Tensor:
        return x if isinstance(x, torch.Tensor) else self.plan.columns.restore(x.dequantize(), 1)

    def _finish(self, dw_NK: torch.Tensor) -> torch.Tensor | None:
        if self.main_grad is None:
            return dw_NK.to(self.weight.dtype)
        self.main_grad.add_(dw_NK)
        return None

    def for_autograd(self, dw_NK: torch.Tensor | None) -> torch.Tensor:
        """What backward returns for the weight: dW, or a placeholder as large where main_grad has it already.

        To be called last: the placeholder takes the memory of what backward needs no more.
        """
        if dw_NK is not None:
            return dw_NK
        # Megatron's hooks want a gradient to exist, and do not read it once the flag is set.
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(self.weight, "zero_out_wgrad", False):
            return torch.zeros_like(self.weight)
        return torch.empty_like(self.weight)


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
