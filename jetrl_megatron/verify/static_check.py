"""The precision-flow check between a live Megatron model and a described engine: the one place that calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.precision_flow.graph import merge
from jetrl_megatron.precision_flow.report import check
from jetrl_megatron.precision_flow.rollout import rollout_graph


def static_check(model: list[Any], description: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the precision graphs of both sides. A collective over all ranks.

    Args:
        model: what `build_model` returned.
        description: the engine's `EngineDescription` as JSON.

    Returns:
        on every rank, ready for JSON, "promises_zero"; "differences", which must be mended, and "not_promised", what
        nobody has proved, one line each; nodes that differ in the same way share one.
    """
    # Imports Megatron, which an engine's process does without.
    from jetrl_megatron.precision_flow.training import training_graph

    graphs: list[Any] = [None] * dist.get_world_size()
    (module,) = model
    dist.all_gather_object(graphs, training_graph(module, exact_sums=not torch.cuda.is_available()))
    report = check(merge(graphs), rollout_graph(description))
    return {
        "promises_zero": report.promises_zero,
        "differences": report.difference_lines(),
        "not_promised": report.note_lines(),
    }


def describe(engine: Any) -> dict[str, Any]:
    """The engine of this process as the checker reads it, ready for JSON.

    Args:
        engine: a `vllm.LLM`.
    """
    from jetrl_megatron.integrations.vllm_description import describe_engine

    description: dict[str, Any] = describe_engine(engine).to_dict()
    return description
