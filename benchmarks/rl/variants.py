"""What is run: by name, options of `examples.grpo.train`; and which runs of a folder are complete."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PRECISIONS = ("bf16", "bf16_train_fp8_rollout", "jetrl_fp8")
_JETRL = ("--precision", "jetrl_fp8")
_BASELINE = ("--precision", "bf16_train_fp8_rollout")
VARIANTS: dict[str, tuple[str, ...]] = {
    **{precision: ("--precision", precision) for precision in PRECISIONS},
    "jetrl_fp8_ordinary_operators": (*_JETRL, "--operators", "ordinary"),
    "jetrl_fp8_other_scales": (*_JETRL, "--rollout-scales", "fp32"),
    "jetrl_fp8_one_scale": (*_JETRL, "--rollout-scales", "matrix"),
    "jetrl_fp8_wgrad_bf16": (*_JETRL, "--ablate", "wgrad"),
    "jetrl_fp8_dgrad_bf16": (*_JETRL, "--ablate", "dgrad"),
    "jetrl_fp8_backward_bf16": (*_JETRL, "--ablate", "wgrad,dgrad"),
    "jetrl_fp8_saved_bf16": (*_JETRL, "--ablate", "saved_activation"),
    "bf16_train_fp8_rollout_truncated": (*_BASELINE, "--truncate-ratios", "2"),
}
"""Precisions, and ablations of them."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run in the folder of a study.

    Attributes:
        study: the study's folder.
        variant: of `VARIANTS`.
        seed: of the run.
    """

    study: Path
    variant: str
    seed: int

    @property
    def path(self) -> Path:
        """Where the run is."""
        return self.study / self.variant / f"seed{self.seed}"

    def options(self) -> dict[str, Any]:
        """What it was asked to do; empty before its start."""
        path = self.path / "options.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Its metrics, a row for each step that is done, and one behind the last."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        # The last one may be half written.
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def is_complete(self, steps: int) -> bool:
        """Whether it has come to the end of its steps, and of no fewer than these."""
        rows = self.rows()
        return bool(rows) and rows[-1]["step"] >= steps and "reward" not in rows[-1]


def runs_of(study: Path, variants: Sequence[str], seeds: Sequence[int]) -> Iterator[RunFolder]:
    """All variants with the first seed, then with the next, so that a study that is cut short has whole seeds."""
    for seed in seeds:
        for variant in variants:
            yield RunFolder(study, variant, seed)


def found_in(study: Path) -> dict[str, list[RunFolder]]:
    """The runs that a study's folder has, by variant, in the order of `VARIANTS`."""
    found = {}
    for variant in VARIANTS:
        names = [path.parent.name[4:] for path in (study / variant).glob("seed*/metrics.jsonl")]
        seeds = sorted(int(name) for name in names if name.isdecimal())
        if seeds:
            found[variant] = [RunFolder(study, variant, seed) for seed in seeds]
    return found
