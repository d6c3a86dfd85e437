"""ColumnParallelLinear with blockwise FP8 in all three GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.utils import get_pg_rank, get_pg_size

from jetrl_megatron.layers.fp8_linear import Fp8LinearMixin, check_config, without_fusion
from jetrl_megatron.layout import TileLayout, gated_layout, plain_layout, qkv_layout
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig


class JetRLColumnParallelLinear(Fp8LinearMixin, ColumnParallelLinear):
    """Drop-in for Megatron's ColumnParallelLinear: Y = X A^T + b with A cut along its rows.

    Constructor, forward contract, state-dict keys and sharded_state_dict are Megatron's. In addition:

    Args:
        recipe: how to quantise.
        tp_comm_buffer_name: "qkv" says that the rows are q, k and v interleaved by group, as SelfAttention stores them.
        stride: 2 says that the rows of each rank are gate, then up, as a gated MLP stores them.

    Input float [..., input_size] (under sequence parallelism the rank's part of axis 0), output in the input's dtype
    [..., output_size / TP], rounded to BF16. dW goes into `weight.main_grad` (float32) where Megatron has one.

    Raises:
        ValueError: `config.fp8` is set as well, or the attention has an output gate.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        recipe: Fp8BlockRecipe = JETRL_FP8,
        **kwargs: Any,
    ) -> None:
        check_config(config)
        super().__init__(input_size, output_size, config=without_fusion(config), **kwargs)
        self.config = config
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        rank, world = get_pg_rank(self.tp_group), get_pg_size(self.tp_group)
        rows = self._row_layout(output_size, kwargs, rank, world, recipe.block)
        self._init_fp8(recipe, rows, plain_layout(input_size, rank=0, world=1, block=recipe.block))

    def _row_layout(self, rows: int, kwargs: dict[str, Any], rank: int, world: int, block: int) -> TileLayout:
        config: Any = self.config
        if kwargs.get("tp_comm_buffer_name") == "qkv":
            if getattr(config, "attention_output_gate", False):
                raise ValueError(
                    "config.attention_output_gate=True stores gates between q and k, which the FP8 layout does not "
                    "know: put '*.linear_qkv' into the recipe's ignore list, or turn the gate off"
                )
            heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
            return qkv_layout(heads, groups, config.kv_channels, rank=rank, world=world, block=block)
        if kwargs.get("stride", 1) == 2:
            return gated_layout(rows // 2, rank=rank, world=world, block=block)
        return plain_layout(rows, rank=rank, world=world, block=block)
