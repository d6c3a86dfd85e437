"""Models that are made on the spot, by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from jetrl_megatron.demo.smollm import write_smollm
from jetrl_megatron.demo.tiny import write_tiny

WRITTEN: dict[str, Callable[[Path], Path]] = {"smollm2": write_smollm, "tiny": write_tiny}
"""SmolLM2-135M-Instruct, padded to whole tiles, and a random model of one million parameters."""


def make_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Makes a folder unless it is there; one that was cut short by a kill is not.

    Of processes that make it at the same time the first to come to its end counts.

    Args:
        write: fills the folder that it is given, one of another name.

    Returns:
        the folder.
    """
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(partial)
    return folder
