"""Where a verification takes the training model from: a Hugging Face folder, or a Megatron checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jetrl_megatron.convert.recipe_file import RECIPE_FILE, choose_recipe
from jetrl_megatron.convert.shards import checkpoint_folder
from jetrl_megatron.convert.stored import read_config
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

_OF_EXPORTS = ("quantization_config", "jetrl")


@dataclasses.dataclass(frozen=True)
class TrainingSource:
    """The training model.

    Attributes:
        hf_model: folder with config.json, and with BF16 weights where there is no checkpoint.
        checkpoint: torch_dist checkpoint, or None.
        recipe: how it trains.
    """

    hf_model: Path
    checkpoint: Path | None
    recipe: Fp8BlockRecipe


def training_source(
    train: Path, *, architecture: dict[str, Any], recipe: Fp8BlockRecipe | None, work: Path
) -> TrainingSource:
    """Finds out what `train` is.

    Args:
        train: folder of a BF16 Hugging Face model, or of a torch_dist checkpoint.
        architecture: config.json of the model that a checkpoint belongs to.
        recipe: of the rollout folder; a recipe that lies beside a checkpoint is the training run's own and wins.
        work: folder for what has to be written.

    Raises:
        ValueError: it is neither, or its weights are FP8.
    """
    if not train.is_dir():
        raise ValueError(f"train={train} is no folder: name a BF16 Hugging Face model or a torch_dist checkpoint")
    if (train / "config.json").is_file():
        if "quantization_config" in read_config(train):
            raise ValueError(
                f"train={train} holds quantised weights: training starts from BF16 ones; name the folder or the "
                "checkpoint that the rollout folder was exported from"
            )
        return TrainingSource(train, None, recipe or JETRL_FP8)
    checkpoint = checkpoint_folder(train)
    saved = any((folder / RECIPE_FILE).is_file() for folder in (checkpoint, checkpoint.resolve().parent))
    own = choose_recipe(checkpoint, None) if saved else recipe or JETRL_FP8
    return TrainingSource(_architecture_folder(architecture, work), checkpoint, own)


def _architecture_folder(config: dict[str, Any], work: Path) -> Path:
    folder = work / "architecture"
    folder.mkdir(exist_ok=True)
    fields = {key: value for key, value in config.items() if key not in _OF_EXPORTS}
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    return folder
