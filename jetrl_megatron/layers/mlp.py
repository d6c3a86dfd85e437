"""Megatron's MLP, with SwiGLU computed together with the quantisation around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP

from jetrl_megatron.autograd import block_fp8_swiglu_mlp
from jetrl_megatron.layers.fp8_linear import Fp8LinearMixin
from jetrl_megatron.layers.hooks import run_forward_pre_hooks
from jetrl_megatron.linear_call import Communication


class JetRLMLP(MLP):
    """Drop-in for Megatron's MLP; where both linears are JetRL's, SwiGLU reads and writes FP8 on a Hopper GPU.

    silu(gate) is rounded to BF16 before it is multiplied with up, as vLLM does. Wherever something does not fit (a
    bias, another activation, a token weight, a linear in BF16, tiles that tensor parallelism cuts, a device without
    the kernels) the forward is Megatron's own.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Megatron's MLP."""
        if per_token_scale is not None or not self._fuses():
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states, per_token_scale=per_token_scale, **kwargs
            )
            return result
        fused: torch.Tensor = self._fused_forward(hidden_states)
        return fused, None

    def _fuses(self) -> bool:
        config, linears = self.config, (self.linear_fc1, self.linear_fc2)
        if not all(isinstance(linear, Fp8LinearMixin) and linear.quantized for linear in linears):
            return False
        swiglu = config.gated_linear_unit and config.activation_func is F.silu and not config.use_te_activation_func
        plain = not config.add_bias_linear and config.activation_func_clamp_value is None
        if not (swiglu and plain) or config.glu_linear_offset or self.linear_fc2.explicit_expert_comm:
            return False
        norm = getattr(self.linear_fc1, "layer_norm_weight", None)
        if norm is not None and self.linear_fc1.fused_norm() is None:
            return False
        return all(linear.plan(linear.weight.device).fuses for linear in linears)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _fused_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        for linear in (fc1, fc2):
            run_forward_pre_hooks(linear)
        communication = Communication(sequence_parallel=fc1.sequence_parallel, allreduce_dgrad=fc1.allreduce_dgrad)
        call_1, call_2 = (
            linear.linear_call(linear.weight, comm, fuse_gradients=linear.gradient_accumulation_fusion)
            for linear, comm in ((fc1, communication), (fc2, Communication()))
        )
        partial = block_fp8_swiglu_mlp(hidden_states, call_1, call_2, norm=fc1.fused_norm())
        scatter = fc2.sequence_parallel
        reduce = reduce_scatter_to_sequence_parallel_region if scatter else reduce_from_tensor_model_parallel_region
        result: torch.Tensor = reduce(partial, group=fc2.tp_group)
        return result
