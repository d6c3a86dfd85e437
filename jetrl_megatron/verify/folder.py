"""Checks a rollout folder before an engine is started: what vLLM would load from it, and what it would not read.

Engines skip a scale that belongs to no FP8 weight, or cast a weight that has none, with a warning at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_megatron.convert.inspect import CODES, ignored_modules, rollout_faults
from jetrl_megatron.convert.stored import read_config, read_headers
from jetrl_megatron.recipe import Fp8BlockRecipe

_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class RolloutFolder:
    """A block FP8 checkpoint whose tensors fit together.

    Attributes:
        path: the folder.
        config: its config.json.
        recipe: the recipe that it carries, None for a checkpoint made by others.
        fp8_weights: number of FP8 matrices.
    """

    path: Path
    config: Mapping[str, Any]
    recipe: Fp8BlockRecipe | None
    fp8_weights: int


def check_rollout_folder(path: Path) -> RolloutFolder:
    """Reads configuration and headers, no weights.

    Raises:
        ValueError: the folder is no block FP8 checkpoint, its recipe was edited, an FP8 weight has no scale, a scale
            would be read by nobody, or a linear's dtype contradicts the configuration; the message names the tensors.
    """
    config = read_config(path)
    quantization: Any = config.get("quantization_config")
    block = _block(quantization)
    if block is None:
        raise ValueError(
            f"{path} is no block FP8 checkpoint: its config.json has no quantization_config with quant_method 'fp8' "
            "and a weight_block_size of two numbers; make one with `jetrl convert CHECKPOINT OUT --hf-config DIR`, or "
            "with export_vllm_checkpoint from the live model"
        )
    recipe = Fp8BlockRecipe.from_stamp(config["jetrl"], str(path / "config.json")) if "jetrl" in config else None
    tensors = read_headers(path)
    faults = list(rollout_faults(tensors, ignored_modules(quantization), block))
    if faults:
        more = f"\n... and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(
            f"{path} does not hold what its configuration says, export it again:\n" + "\n".join(faults[:_SHOWN]) + more
        )
    return RolloutFolder(path, config, recipe, sum(tensor.dtype == CODES for tensor in tensors.values()))


def _block(quantization: Any) -> tuple[int, int] | None:
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None
