"""Models that are made on the spot, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jetrl_megatron.demo.smollm import write_smollm
from jetrl_megatron.demo.tiny import write_tiny

WRITTEN: dict[str, Callable[[Path], Path]] = {"smollm2": write_smollm, "tiny": write_tiny}
"""SmolLM2-135M-Instruct, padded to whole tiles, and a random model of one million parameters."""
