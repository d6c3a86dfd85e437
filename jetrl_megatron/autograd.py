"""FProp, DGrad and WGrad of y = x W^T in one autograd Function, with Megatron's tensor-parallel communication.

| pass  | contraction | first operand       | second operand                   | result               |
|-------|-------------|---------------------|----------------------------------|----------------------|
| fprop | K           | x, 1 x block        | W, block x block                 | BF16                 |
| dgrad | N           | dy, 1 x block       | W^T, the same codes and scales   | BF16                 |
| wgrad | M           | dy^T, 1 x block     | x^T, 1 x block                   | FP32, into main_grad |

A scale must be constant along the axis that a tensor core sums over. So dy is quantised twice from one BF16 tensor, and
x is kept in the codes that fprop used and requantised along M; with ue8m0 scales that loses nothing but underflow.
"""

# Shape suffixes: M tokens, N and K rows and columns of the weight as stored; Na and Ka the same in aligned order.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.ops.alignment import Alignment, reduce_tiles
from jetrl_megatron.ops.backends import Backend
from jetrl_megatron.ops.linear import LinearOperand, as_matrix, gemm, pad_rows
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor


@dataclass(frozen=True)
class LinearPlan:
    """What stays the same over all calls of one linear layer.

    Attributes:
        rows, columns: how the weight's two dimensions, as stored, lie in tiles.
        group: tensor-parallel group of the layer, None for a single rank.
    """

    recipe: Fp8BlockRecipe
    backend: Backend
    rows: Alignment
    columns: Alignment
    group: dist.ProcessGroup | None

    def quantize_weight(self, weight_NK: torch.Tensor) -> LinearOperand:
        """The weight's codes in aligned order [Na, Ka]. A collective where tiles are shared among ranks."""
        w_NaKa = self.columns.align(self.rows.align(weight_NK.detach(), 0), 1).to(torch.bfloat16)
        amax = reduce_tiles(self.backend.block_amax(w_NaKa, self.recipe.weight_block), self.rows, self.columns)
        return LinearOperand(self.backend.quantize_weight(w_NaKa, self.recipe, amax=amax), self.backend)

    def quantize(self, x: torch.Tensor, alignment: Alignment) -> LinearOperand:
        """Activations [M, K] or gradients [M, N] in stored order, quantised along their aligned last axis."""
        aligned = alignment.align(x, 1)
        amax = alignment.reduce_columns(self.backend.block_amax(aligned, self.recipe.activation_block))
        return LinearOperand(self.backend.quantize_activation(aligned, self.recipe, amax=amax), self.backend)

    def quantize_along_tokens(self, x_MC: torch.Tensor) -> LinearOperand:
        """x^T [C, M] in groups along M, which is padded with zero to whole groups."""
        transposed = pad_rows(x_MC, self.recipe.block).t()
        return LinearOperand(self.backend.quantize_activation(transposed, self.recipe, amax=None), self.backend)


@dataclass(frozen=True)
class Communication:
    """What Megatron asks of one call: `sequence_parallel` gathers x and scatters dx, `allreduce_dgrad` sums dx."""

    sequence_parallel: bool = False
    allreduce_dgrad: bool = False


def _gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work]:
    world = dist.get_world_size(group)
    gathered = x.new_empty(x.shape[0] * world, *x.shape[1:])
    return gathered, dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=True)


class _GatheredCodes:
    """An asynchronous all-gather of codes and scales over the token axis: half the bytes of BF16."""

    def __init__(self, local: BlockScaledTensor, group: dist.ProcessGroup | None) -> None:
        self._local = local
        # Bytes, because not every communication library knows float8.
        self._codes, self._codes_work = _gather_rows(local.data.view(torch.uint8), group)
        self._scale, self._scale_work = _gather_rows(local.scale, group)

    def wait(self) -> BlockScaledTensor:
        self._codes_work.wait()
        self._scale_work.wait()
        return BlockScaledTensor(
            self._codes.view(self._local.data.dtype), self._scale, self._local.block, self._local.recipe
        )


def _reduce_dgrad(
    dx_MK: torch.Tensor, communication: Communication, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, dist.Work | None]:
    if communication.sequence_parallel:
        scattered = dx_MK.new_empty(dx_MK.shape[0] // dist.get_world_size(group), dx_MK.shape[1])
        return scattered, dist.reduce_scatter_tensor(scattered, dx_MK.contiguous(), group=group, async_op=True)
    if communication.allreduce_dgrad:
        dx_MK = dx_MK.contiguous()
        return dx_MK, dist.all_reduce(dx_MK, group=group, async_op=True)
    return dx_MK, None


def _finish_wgrad(dw_NK: torch.Tensor, weight: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor:
    """Adds FP32 dW into main_grad and returns a placeholder, or returns dW in the weight's dtype."""
    if main_grad is None:
        return dw_NK.to(weight.dtype)
    main_grad.add_(dw_NK)
    # Megatron's hooks want a gradient to exist, and do not read it once the flag is set.
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


class BlockFp8Linear(torch.autograd.Function):
    """y = x W^T + bias with blockwise FP8 operands in all three GEMMs; call it through `block_fp8_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        operand: LinearOperand,
        plan: LinearPlan,
        communication: Communication,
        main_grad: torch.Tensor | None,
    ) -> torch.Tensor:
        x_MK = as_matrix(x.detach()).to(torch.bfloat16)
        x_codes = plan.quantize(x_MK, plan.columns)
        total = x_codes
        if communication.sequence_parallel:
            total = LinearOperand(_GatheredCodes(x_codes.tensor, plan.group).wait(), plan.backend)
        y_MN = plan.rows.restore(gemm(total, operand.rows).to(torch.bfloat16), 1).to(x.dtype)
        if bias is not None:
            y_MN = y_MN + bias

        saved: tuple[torch.Tensor, ...] = ()
        if weight.requires_grad and plan.recipe.saved_activation == "bf16":
            saved = (x_MK,)
        elif weight.requires_grad:
            saved = (x_codes.tensor.data, x_codes.tensor.scale)
        ctx.save_for_backward(*saved)
        ctx.weight, ctx.operand, ctx.plan, ctx.communication = weight, operand, plan, communication
        ctx.main_grad, ctx.has_bias = main_grad, bias is not None
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        leading = (x.shape[0] * dist.get_world_size(plan.group),) if communication.sequence_parallel else (x.shape[0],)
        return y_MN.view(*(leading if x.dim() > 1 else ()), *x.shape[1:-1], y_MN.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, communication, recipe = ctx.plan, ctx.communication, ctx.plan.recipe
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy_MN = as_matrix(dy).to(torch.bfloat16)
        gather = _start_gather(ctx) if needs_dw else None

        dy_codes = None
        if needs_dx and recipe.dgrad == "fp8" or needs_dw and recipe.wgrad_gradient_source == "fp8":
            dy_codes = plan.quantize(dy_MN, plan.rows)
        dx, work = None, None
        if needs_dx:
            dx, work = _reduce_dgrad(_dgrad(ctx, dy_MN, dy_codes), communication, plan.group)
        dw = None
        if needs_dw:
            dw_NK = _wgrad(plan, dy_MN, dy_codes, _saved_input(ctx, gather))
            dw = _finish_wgrad(dw_NK, ctx.weight, ctx.main_grad)
        db = dy_MN.sum(dim=0).to(dy.dtype) if ctx.has_bias and needs_db else None
        if work is not None:
            work.wait()
        if dx is not None:
            dx = dx.to(ctx.x_dtype).view(ctx.x_shape)
        return dx, dw, db, None, None, None, None


def _start_gather(ctx: Any) -> _GatheredCodes | tuple[torch.Tensor, dist.Work] | None:
    if not ctx.communication.sequence_parallel:
        return None
    if ctx.plan.recipe.saved_activation == "bf16":
        return _gather_rows(ctx.saved_tensors[0], ctx.plan.group)
    return _GatheredCodes(_saved_codes(ctx), ctx.plan.group)


def _saved_codes(ctx: Any) -> BlockScaledTensor:
    data, scale = ctx.saved_tensors
    return BlockScaledTensor(data, scale, ctx.plan.recipe.activation_block, ctx.plan.recipe)


def _saved_input(ctx: Any, gather: _GatheredCodes | tuple[torch.Tensor, dist.Work] | None) -> torch.Tensor:
    """The input of all tokens in stored order [M, K], BF16 or dequantised to float32."""
    if isinstance(gather, tuple):
        gathered, work = gather
        work.wait()
        return gathered
    plan: LinearPlan = ctx.plan
    if plan.recipe.saved_activation == "bf16":
        x_MK: torch.Tensor = ctx.saved_tensors[0]
        return x_MK
    codes = _saved_codes(ctx) if gather is None else gather.wait()
    return plan.columns.restore(codes.dequantize(), 1)


def _dgrad(ctx: Any, dy_MN: torch.Tensor, dy_codes: LinearOperand | None) -> torch.Tensor:
    plan: LinearPlan = ctx.plan
    if plan.recipe.dgrad == "bf16":
        weight_NK: torch.Tensor = ctx.weight.detach().to(torch.bfloat16)
        return dy_MN @ weight_NK
    assert dy_codes is not None
    return plan.columns.restore(gemm(dy_codes, ctx.operand.columns).to(torch.bfloat16), 1)


def _wgrad(plan: LinearPlan, dy_MN: torch.Tensor, dy_codes: LinearOperand | None, x_MK: torch.Tensor) -> torch.Tensor:
    if plan.recipe.wgrad_gradient_source == "fp8":
        assert dy_codes is not None
        dy_MN = plan.rows.restore(dy_codes.tensor.dequantize(), 1)
    if plan.recipe.wgrad == "bf16":
        return (dy_MN.to(torch.bfloat16).t() @ x_MK.to(torch.bfloat16)).float()
    return gemm(plan.quantize_along_tokens(dy_MN), plan.quantize_along_tokens(x_MK).rows)


def block_fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    operand: LinearOperand,
    plan: LinearPlan,
    communication: Communication | None = None,
    *,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias, all three GEMMs in the plan's recipe.

    Args:
        x: float [..., K] as the rank holds it; under sequence parallelism axis 0 is the rank's part of the sequence.
        weight: float [N, K], the parameter that gets the gradient; its numbers enter through `operand` alone.
        bias: float [N] or None.
        operand: `plan.quantize_weight(weight)`.
        main_grad: float32 [N, K]; when given, dW is added to it and `weight.grad_added_to_main_grad` is set.

    Returns:
        x.dtype [..., N], rounded to BF16.
    """
    communication = communication or Communication()
    result: torch.Tensor = BlockFp8Linear.apply(x, weight, bias, operand, plan, communication, main_grad)
    return result
