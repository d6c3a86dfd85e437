"""The recipe beside a training checkpoint, and which recipe a conversion uses."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

RECIPE_FILE = "jetrl_recipe.json"
"""Name of the file that carries a training run's recipe; it lies beside the checkpoint's own files."""


def save_recipe(folder: str | os.PathLike[str], recipe: Fp8BlockRecipe) -> Path:
    """Writes the recipe beside a training checkpoint, so that a conversion cannot use another one.

    Args:
        folder: the checkpoint's folder, or the training folder above it.

    Returns:
        the file.
    """
    path = Path(folder) / RECIPE_FILE
    path.write_text(json.dumps(recipe.to_stamp(), indent=2) + "\n")
    return path


def load_recipe(path: str | os.PathLike[str]) -> Fp8BlockRecipe:
    """Reads a file that `save_recipe` wrote, or a JSON object with recipe fields alone.

    Raises:
        ValueError: the file is missing, is no JSON object, names an unknown field, or was edited after it was stamped.
    """
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} does not exist: pass a recipe file, or leave it out for the default recipe"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}: a recipe file is an object with recipe fields")
    return Fp8BlockRecipe.from_stamp(content, str(path)) if "recipe" in content else Fp8BlockRecipe.from_dict(content)


def choose_recipe(
    checkpoint: Path, recipe: Fp8BlockRecipe | None, fields: Mapping[str, Any] | None = None
) -> Fp8BlockRecipe:
    """The recipe to convert a checkpoint with: the training run's own where it was saved, else what is asked for.

    Args:
        checkpoint: the checkpoint's folder; its parent is searched as well.
        recipe: what is asked for, whole; None asks for nothing.
        fields: single fields that are asked for on top of it, e.g. {"scale_format": "fp32"}.

    Raises:
        ValueError: the training run's recipe has another value in a field that is asked for; the message names it.
    """
    fields = dict(fields or {})
    saved = next((path for path in _places(checkpoint) if path.is_file()), None)
    if saved is None:
        return dataclasses.replace(recipe or JETRL_FP8, **fields)
    trained = load_recipe(saved)
    dataclasses.replace(recipe or trained, **fields).require_same(trained, ours="asked for", theirs=str(saved))
    return trained


def _places(checkpoint: Path) -> list[Path]:
    return [checkpoint / RECIPE_FILE, checkpoint.resolve().parent / RECIPE_FILE]
