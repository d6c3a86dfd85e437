"""Models that are made on the spot, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from jetrl_megatron.demo.smollm import write_smollm
from jetrl_megatron.demo.tiny import write_tiny

WRITTEN: dict[str, Callable[[Path], Path]] = {"smollm2": write_smollm, "tiny": write_tiny}
"""SmolLM2-135M-Instruct, padded to whole tiles, and a random model of one million parameters."""


def write_once(name: str, folder: Path) -> Path:
    """Writes a model of `WRITTEN` unless the folder is there; one that was cut short by a kill is not.

    Returns:
        the folder.
    """
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        WRITTEN[name](partial)
        partial.rename(folder)
    return folder
