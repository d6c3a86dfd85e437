"""What one linear computes with: forms of its gradient, quantised operands, the three GEMMs and their communication.

| pass  | contraction | first operand       | second operand                   | result               |
|-------|-------------|---------------------|----------------------------------|----------------------|
| fprop | K           | x, 1 x block        | W, block x block                 | BF16                 |
| dgrad | N           | dy, 1 x block       | W^T, the same codes and scales   | BF16                 |
| wgrad | M           | dy^T, 1 x block     | x^T, 1 x block                   | FP32, into main_grad |

A scale must be constant along the axis that a tensor core sums over. So dy is quantised twice from one BF16 tensor, and
x is kept in the codes that fprop used and requantised along M; with ue8m0 scales that loses nothing but underflow.
"""

# Shape suffixes: M tokens, N and K rows and columns of the weight as stored, Mp tokens padded to whole groups.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from jetrl_megatron.ops.alignment import Alignment, reduce_tiles
from jetrl_megatron.ops.backends import Gemm, Quantizer
from jetrl_megatron.ops.gathering import Gathered, GatheredCodes
from jetrl_megatron.ops.linear import LinearOperand
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
