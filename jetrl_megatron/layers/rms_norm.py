"""RMSNorm whose forward gives vLLM's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jetrl_megatron.ops.norm import rms_norm

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class JetRLRMSNorm(torch.nn.Module):
    """Drop-in for Megatron's norms (TENorm, FusedLayerNorm, WrappedTorchNorm) with RMSNorm.

    Float [..., hidden_size] in, BF16 of the same shape out; four axes [s, b, heads, hidden_size] are heads. The weight,
    [hidden_size], has the state-dict key that Megatron's norms have.

    Raises:
        ValueError: the configuration asks for another norm, or for a zero-centred gain.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.check_config(config)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Megatron sums the gradients of such parameters over the parts of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @staticmethod
    def check_config(config: TransformerConfig) -> None:
        """Raises ValueError where the configuration asks for another norm, or for a zero-centred gain."""
        if config.normalization != "RMSNorm":
            raise ValueError(f"config.normalization={config.normalization!r}: parity operators know 'RMSNorm' alone")
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "config.layernorm_zero_centered_gamma=True (weight + 1) is Gemma's norm, which parity operators do not "
                "have: use jetrl_spec(..., parity=False)"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last axis, rounded to BF16 once, in x's dtype."""
        return rms_norm(x.to(torch.bfloat16), self.weight, self.eps).to(x.dtype)
