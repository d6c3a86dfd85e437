"""Norm and column-parallel linear in one module, with the state-dict keys of TransformerEngine's fused layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from jetrl_megatron.autograd import Norm
from jetrl_megatron.layers.column_parallel import JetRLColumnParallelLinear
from jetrl_megatron.ops.norm import rms_norm, runs_kernels

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class JetRLLayerNormColumnParallelLinear(JetRLColumnParallelLinear):
    """Drop-in for Megatron's TELayerNormColumnParallelLinear.

    The norm (`config.normalization`, RMSNorm or LayerNorm) runs in float32 and its result is rounded to the input's
    dtype; on a Hopper GPU one kernel computes RMSNorm and the codes of its BF16 result. `layer_norm_weight` (and
    `layer_norm_bias`), [input_size], are replicated over tensor-parallel ranks.

    Raises:
        ValueError: `config.normalization` is neither RMSNorm nor LayerNorm.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f"config.normalization={config.normalization!r}: use 'RMSNorm' or 'LayerNorm'")
        options = {"device": self.weight.device, "dtype": config.params_dtype}
        start = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(input_size, **options))
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, **options))
        else:
            self.register_parameter("layer_norm_bias", None)
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                # Megatron sums the gradients of such parameters over the parts of the sequence.
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        config: Any = self.config
        plain = self.layer_norm_bias is None and not config.layernorm_zero_centered_gamma
        if plain and runs_kernels(x.device):
            # The kernel that is fused elsewhere, so that a layer in BF16, or an ablation, norms alike.
            return rms_norm(x.to(torch.bfloat16), self.layer_norm_weight, config.layernorm_epsilon).to(x.dtype)
        weight = self.layer_norm_weight.float()
        if config.layernorm_zero_centered_gamma:
            weight = weight + 1
        size, eps = weight.shape, config.layernorm_epsilon
        if self.layer_norm_bias is None:
            return F.rms_norm(x.float(), size, weight, eps).to(x.dtype)
        return F.layer_norm(x.float(), size, weight, self.layer_norm_bias.float(), eps).to(x.dtype)

    def fused_norm(self) -> Norm | None:
        """RMSNorm, where the quantiser fuses it."""
        config: Any = self.config
        plain = self.layer_norm_bias is None and not config.layernorm_zero_centered_gamma
        if not (self.quantized and plain and self.plan(self.weight.device).fuses):
            return None
        return Norm(self.layer_norm_weight, config.layernorm_epsilon)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Norm, then the linear: see `JetRLColumnParallelLinear`."""
        x = input_ if self.fused_norm() is not None else self._normalize(input_)
        result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(x, weight, runtime_gather_output)
        return result

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Weight and bias sharded along axis 0, the norm replicated."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded
