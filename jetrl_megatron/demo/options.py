"""What a demo run was asked to do, and where it keeps its files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MARKER = "jetrl_demo.json"
_FOLDERS = ("model", "checkpoint", "fp8", "bf16", "scales", "rollouts", "logs")
_FILES = ("losses.json", "rescored_*.json", "report.*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Size and layout of a demo run.

    Attributes:
        steps: optimizer steps.
        tp, pp: tensor- and pipeline-parallel size of training; one process each, on this machine.
        seed: of problems, their order, and sampling.
        learning_rate: of Adam, constant.
        sequences_per_step, sequences_per_microbatch: problems that one step, and one forward, trains on.
        sequence_length: tokens that each of them is padded to; longer problems are passed over.
        prompts: problems that each rollout answers.
        new_tokens: tokens of each answer.

    Raises:
        ValueError: a number is out of range, or a step is no whole number of microbatches.
    """

    steps: int = 8
    tp: int = 2
    pp: int = 1
    seed: int = 0
    learning_rate: float = 5e-5
    sequences_per_step: int = 4
    sequences_per_microbatch: int = 2
    sequence_length: int = 128
    prompts: int = 8
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and value <= 0:
                raise ValueError(f"{field.name}={value} must be greater than zero")
        if self.sequences_per_step % self.sequences_per_microbatch:
            raise ValueError(
                f"sequences_per_step={self.sequences_per_step} is no multiple of "
                f"sequences_per_microbatch={self.sequences_per_microbatch}: Megatron's schedules run whole microbatches"
            )

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DemoOptions:
        """The inverse of `to_dict`."""
        return cls(**fields)


def layout_label(tp: int, pp: int) -> str:
    """Name of a parallel layout: "tp1", "tp2", "pp2", "tp2_pp2"."""
    parts = [f"{kind}{size}" for kind, size in (("tp", tp), ("pp", pp)) if size > 1]
    return "_".join(parts) or "tp1"


@dataclasses.dataclass(frozen=True)
class DemoFolder:
    """The output folder, by name of what is in it."""

    root: Path

    @classmethod
    def create(cls, root: Path, options: DemoOptions) -> DemoFolder:
        """Makes the folder, or empties that of an earlier run, and notes the options in it.

        Raises:
            ValueError: the folder holds something else.
        """
        root = root.absolute()
        if root.exists() and not root.is_dir():
            raise ValueError(f"out={root} is a file: name a folder")
        if root.is_dir() and any(root.iterdir()) and not (root / _MARKER).is_file():
            raise ValueError(f"out={root} is not empty and no output of the demo: name another folder, or empty it")
        folder = cls(root)
        folder._remove_outputs()
        for path in (root, folder.logs, folder.scales, folder.rollouts):
            path.mkdir(parents=True, exist_ok=True)
        (root / _MARKER).write_text(json.dumps(options.to_dict(), indent=1))
        return folder

    def _remove_outputs(self) -> None:
        for name in _FOLDERS:
            shutil.rmtree(self.root / name, ignore_errors=True)
        for pattern in _FILES:
            for path in self.root.glob(pattern):
                path.unlink()

    @property
    def options(self) -> DemoOptions:
        """The options of the run."""
        return DemoOptions.from_dict(json.loads((self.root / _MARKER).read_text()))

    @property
    def model(self) -> Path:
        """The model before training, Hugging Face format."""
        return self.root / "model"

    @property
    def checkpoint(self) -> Path:
        """The trained model, Megatron's torch_dist format."""
        return self.root / "checkpoint"

    @property
    def fp8(self) -> Path:
        """The trained model as vLLM loads it in FP8."""
        return self.root / "fp8"

    @property
    def bf16(self) -> Path:
        """The same weights in BF16, Hugging Face format."""
        return self.root / "bf16"

    @property
    def scales(self) -> Path:
        """Codes and scales of models and engines."""
        return self.root / "scales"

    def layer_scales(self, name: str) -> Path:
        """Folder with the codes and scales of a Megatron model, one file per rank."""
        return self.scales / name

    def engine_scales(self, name: str) -> Path:
        """File with the codes and scales that an engine loaded."""
        return self.scales / f"{name}.safetensors"

    @property
    def rollouts(self) -> Path:
        """Requests to engines and their results."""
        return self.root / "rollouts"

    def rollout_request(self, name: str) -> Path:
        """What an engine is asked, JSON."""
        return self.rollouts / f"{name}.request.json"

    def rollout_result(self, name: str) -> Path:
        """What it answered, JSON."""
        return self.rollouts / f"{name}.result.json"

    @property
    def logs(self) -> Path:
        """Output of every child process."""
        return self.root / "logs"

    @property
    def losses(self) -> Path:
        """Training loss per step, JSON."""
        return self.root / "losses.json"

    def rescored(self, precision: str) -> Path:
        """Log-probs of all rollouts by the training forward in "fp8" or "bf16", JSON."""
        return self.root / f"rescored_{precision}.json"
