"""Where precision changes between training and rollout, and what it costs."""

from jetrl_megatron.precision_flow.digests import weight_digests
from jetrl_megatron.precision_flow.engine import EngineDescription, EngineModule, RankReport
from jetrl_megatron.precision_flow.graph import (
    Difference,
    Node,
    NotPromised,
    PrecisionGraph,
    contains,
    differences,
    merge,
)
from jetrl_megatron.precision_flow.mismatch import Mismatch, mismatch, mismatch_by_position
from jetrl_megatron.precision_flow.report import CheckReport, check
from jetrl_megatron.precision_flow.rollout import rollout_graph

__all__ = [
    "CheckReport",
    "Difference",
    "EngineDescription",
    "EngineModule",
    "Mismatch",
    "Node",
    "NotPromised",
    "PrecisionGraph",
    "RankReport",
    "check",
    "contains",
    "differences",
    "merge",
    "mismatch",
    "mismatch_by_position",
    "rollout_graph",
    "weight_digests",
]
