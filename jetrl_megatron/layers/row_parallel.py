"""RowParallelLinear with blockwise FP8 in all three GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.utils import get_pg_rank, get_pg_size

from jetrl_megatron.layers.fp8_linear import Fp8LinearMixin, check_config
from jetrl_megatron.layout import plain_layout
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig


class JetRLRowParallelLinear(Fp8LinearMixin, RowParallelLinear):
    """Drop-in for Megatron's RowParallelLinear: Y = X A^T + b with A cut along its columns.

    Constructor, forward contract, state-dict keys and sharded_state_dict are Megatron's. In addition:

    Args:
        recipe: how to quantise.

    Input float [..., input_size / TP], output in the input's dtype [..., output_size]: each rank's partial sum is
    rounded to BF16 and summed over the tensor-parallel group (scattered along axis 0 under sequence parallelism).

    Raises:
        ValueError: `config.fp8` is set as well.
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
        super().__init__(input_size, output_size, config=config, **kwargs)
        rank, world = get_pg_rank(self.tp_group), get_pg_size(self.tp_group)
        rows = plain_layout(output_size, rank=0, world=1, block=recipe.block)
        self._init_fp8(recipe, rows, plain_layout(input_size, rank=rank, world=world, block=recipe.block))
