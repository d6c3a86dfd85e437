"""Where precision changes between training and rollout, and what it costs."""

from jetrl_megatron.precision_flow.mismatch import Mismatch, abs_dlogp_by_position, mismatch

__all__ = ["Mismatch", "abs_dlogp_by_position", "mismatch"]
