"""What the FP8 linears have in common: where they come between Megatron's `forward` and its GEMM."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from jetrl_megatron.autograd import Norm, block_fp8_linear
from jetrl_megatron.layers.weight import VersionedParameter, WeightCache
from jetrl_megatron.layout import TileLayout
from jetrl_megatron.linear_call import Communication, LinearCall, LinearPlan
from jetrl_megatron.ops import LinearOperand, select_gemm, select_quantizer
from jetrl_megatron.ops.alignment import Alignment
from jetrl_megatron.recipe import Fp8BlockRecipe

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig


def check_config(config: ModelParallelConfig) -> None:
    """Refuses settings of Megatron's own FP8 beside ours.

    Raises:
        ValueError: `config.fp8` or `config.fp4` is set, or `first_last_layers_bf16` asks for what the recipe decides.
    """
    for field in ("fp8", "fp4"):
        value = getattr(config, field, None)
        if value:
            raise ValueError(
                f"config.{field}={value!r} asks TransformerEngine to quantise layers that a JetRL spec quantises "
                f"already: set {field}=None, or build the model from Megatron's own layer spec"
            )
    if getattr(config, "first_last_layers_bf16", False):
        raise ValueError(
            "config.first_last_layers_bf16=True is read by Megatron's own FP8 alone: set it to False and use "
            "Fp8BlockRecipe(num_layers_at_start_in_bf16=..., num_layers_at_end_in_bf16=...), which export honours too"
        )


def without_fusion(config: ModelParallelConfig) -> ModelParallelConfig:
    """The config for Megatron's constructor, which refuses gradient fusion without Apex; ours needs no Apex."""
    if not config.gradient_accumulation_fusion:
        return config
    config = copy.copy(config)
    config.gradient_accumulation_fusion = False
    return config


class Fp8LinearMixin(torch.nn.Module):
    """Overrides `_forward_impl` of Megatron's parallel linears; stands before them in the bases.

    Attributes:
        recipe: the layer's recipe.
        quantized: whether this layer runs in FP8; `name_linear` decides once the layer's name is known.
        layouts: how the rows and the columns that this rank stores lie in tiles.
        is_first_microbatch: set by Megatron's schedules at each step; the weight is then quantised anew, as a net under
            writes that torch cannot see.
    """

    recipe: Fp8BlockRecipe
    quantized: bool
    layouts: tuple[TileLayout, TileLayout]
    weight: torch.nn.Parameter
    config: ModelParallelConfig
    tp_group: torch.distributed.ProcessGroup | None

    def _init_fp8(self, recipe: Fp8BlockRecipe, rows: TileLayout, columns: TileLayout) -> None:
        self.recipe = recipe
        self.quantized = True
        self.is_first_microbatch = True
        self.layouts = rows, columns
        self._plan: LinearPlan | None = None
        self._cache: WeightCache | None = None
        weight = self.weight
        if type(weight) is torch.nn.Parameter:
            # The parameter is new and nobody has taken its .data yet, so no alias escapes the counters.
            weight.__class__ = VersionedParameter

    def name_linear(self, name: str, num_layers: int) -> None:
        """Tells the layer its global Megatron name, by which the recipe decides whether it runs in FP8."""
        self.quantized = self.recipe.quantizes(name, num_layers)

    def plan(self, device: torch.device) -> LinearPlan:
        """What serves on the device; made at the first call, since modules are moved after building."""
        if self._plan is None or self._plan.rows.tiles.device != device:
            rows, columns = (Alignment(layout, self.tp_group, device) for layout in self.layouts)
            quantizer, gemm = select_quantizer(self.recipe, device), select_gemm(self.recipe, device)
            self._plan = LinearPlan(self.recipe, quantizer, gemm, rows, columns, self.tp_group)
            self._cache = WeightCache(self._plan.quantize_weight)
        return self._plan

    def quantized_weight(self, weight: torch.Tensor | None = None) -> LinearOperand:
        """The FP8 weight that the next forward uses, in aligned order. A collective where ranks share tiles."""
        weight = self.weight if weight is None else weight
        self.plan(weight.device)
        assert self._cache is not None
        refresh, self.is_first_microbatch = self.is_first_microbatch, False
        return self._cache.get(weight, refresh=refresh)

    def release_quantized_weight(self) -> None:
        """Frees the FP8 weight; the next forward makes it anew. For phases in which the model waits without its GPU."""
        if self._plan is not None:
            self._cache = WeightCache(self._plan.quantize_weight)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.quantized:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc, no-any-return]
        result: torch.Tensor = self._fp8_forward(input, weight, **kwargs)
        return result

    # Process groups, caches keyed on versions and collectives mean nothing to a tracer; the model around is compiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _fp8_forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[torch.Tensor] | None = None,
        gtp_remat_size: int = 1,
        **_: Any,
    ) -> torch.Tensor:
        if grad_output_buffer is not None or gtp_remat_size != 1:
            raise ValueError(
                f"defer_embedding_wgrad_compute and gtp_remat_size={gtp_remat_size} do not work with FP8 linears: turn "
                "them off, or name the layer in the recipe's ignore list"
            )
        communication = Communication(sequence_parallel=sequence_parallel, allreduce_dgrad=allreduce_dgrad)
        call = self.linear_call(weight, communication, fuse_gradients=gradient_accumulation_fusion)
        return block_fp8_linear(input, call, bias=bias, norm=self.fused_norm())

    def linear_call(self, weight: torch.Tensor, communication: Communication, *, fuse_gradients: bool) -> LinearCall:
        """What one forward of this layer computes with.

        Args:
            fuse_gradients: whether dW is added to main_grad even if Megatron's hooks have not marked the weight.
        """
        main_grad = getattr(weight, "main_grad", None)
        if not (fuse_gradients or hasattr(weight, "grad_added_to_main_grad")):
            main_grad = None
        operand = self.quantized_weight(weight)
        return LinearCall(self.plan(weight.device), weight, operand, communication, main_grad)

    def fused_norm(self) -> Norm | None:
        """The norm that the forward computes together with the quantisation of its result, if the layer has one."""
        return None
