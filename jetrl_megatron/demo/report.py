"""What `jetrl demo` found out: report.json, report.md and report.png."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl_megatron.demo.scales import Comparison
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.verify.logprobs import LogProbs, curve, markdown_table

QUESTION = "What is the capital of France?"
"""What the trained model is asked, through its chat template, greedily."""

PAIRINGS = {
    "fp8_train_fp8_rollout": "FP8 training, FP8 rollout",
    "bf16_train_fp8_rollout": "BF16 training, FP8 rollout",
    "bf16_train_bf16_rollout": "BF16 training, BF16 rollout",
    "fp8_train_fp8_tp2_rollout": "FP8 training, FP8 rollout with TP 2",
}
"""Keys of `DemoReport.logprobs`, with their titles: which forward scored the tokens, and which engine drew them."""

_RANGES = 8
_SHOWN = ("tokens", "tokens_differing", "gen_kl_error", "token_mult_prob_error", "max_abs_dlogp")
_SCALE_HEAD = ("pair", "matrices", "scales", "codes", "equal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoReport:
    """Results of a demo run.

    Attributes:
        options: what the demo was asked to do.
        recipe: the recipe of training, export and rollout.
        versions: package name to version.
        loss: mean training loss over the answers' tokens, one per step.
        scales: comparison of codes and scales per pair, e.g. "training_tp2/export".
        logprobs: per key of `PAIRINGS`.
        answers: engine ("fp8", "bf16") to its answer to `QUESTION`.
        seconds: phase to wall-clock seconds, in order.
    """

    options: Mapping[str, Any]
    recipe: Fp8BlockRecipe
    versions: Mapping[str, str]
    loss: Sequence[float]
    scales: Mapping[str, Comparison]
    logprobs: Mapping[str, LogProbs]
    answers: Mapping[str, str]
    seconds: Mapping[str, float]

    @property
    def scales_equal(self) -> bool:
        """Whether every pair that was compared holds the same bytes."""
        return bool(self.scales) and all(comparison.equal for comparison in self.scales.values())

    def to_dict(self) -> dict[str, Any]:
        """report.json."""
        return {
            "options": dict(self.options),
            "recipe": {**self.recipe.to_dict(), "fingerprint": self.recipe.fingerprint},
            "versions": dict(self.versions),
            "loss": list(self.loss),
            "scales_equal": {pair: comparison.equal for pair, comparison in self.scales.items()},
            "scales": {pair: comparison.to_dict() for pair, comparison in self.scales.items()},
            "mismatch": {key: logprobs.mismatch.to_dict() for key, logprobs in self.logprobs.items()},
            "by_position": {key: logprobs.rows_by_position(_RANGES) for key, logprobs in self.logprobs.items()},
            "question": QUESTION,
            "answer": self.answers["fp8"],
            "answers": dict(self.answers),
            "seconds": dict(self.seconds),
        }

    def to_markdown(self) -> str:
        """report.md."""
        sections = (
            ("# jetrl demo", [self._verdict(), "![loss and mismatch](report.png)"]),
            (
                "## Scales and codes",
                [markdown_table(("pair", "matrices", "scales", "codes", "equal"), self._scale_rows())],
            ),
            ("## Mismatch", [markdown_table(("", *_SHOWN), self._mismatch_rows()), self._mismatch_notes()]),
            ("## Training", [markdown_table(("step", "loss"), [[i, f"{x:.4f}"] for i, x in enumerate(self.loss)])]),
            ("## Answers", [markdown_table(("rollout", "answer"), self._answer_rows())]),
            ("## Seconds", [markdown_table(("phase", "seconds"), self._second_rows())]),
            ("## Setting", [markdown_table(("", ""), self._setting_rows())]),
        )
        return "\n\n".join(part for title, parts in sections for part in (title, *parts)) + "\n"

    def _verdict(self) -> str:
        count = len(self.scales)
        unequal = [pair for pair, comparison in self.scales.items() if not comparison.equal]
        if unequal:
            return f"**{len(unequal)} of {count} pairs do not hold the same scales and codes: {', '.join(unequal)}.**"
        return f"All {count} pairs hold the same scales and codes, byte for byte."

    def _scale_rows(self) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for pair, comparison in self.scales.items():
            verdict = "yes" if comparison.equal else f"**no**: {comparison.first or 'nothing to compare'}"
            scales = f"{comparison.scales_differing} of {comparison.scales} differ"
            codes = f"{comparison.codes_differing} of {comparison.codes} differ"
            rows.append([pair.replace("/", " / "), comparison.matrices, scales, codes, verdict])
        return rows

    def _mismatch_rows(self) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for key, logprobs in self.logprobs.items():
            metrics = logprobs.mismatch.to_dict()
            rows.append([PAIRINGS[key], *(_number(metrics[name]) for name in _SHOWN)])
        return rows

    def _mismatch_notes(self) -> str:
        return (
            "Generated tokens at temperature 1; training scores them with TP 1, as the rollouts of the first three "
            "lines run. With TP 2 row-parallel linears add two rounded halves, which is another number. Metrics as in "
            "NeMo-RL: gen_kl_error is KL(rollout || training) by the k3 estimator, token_mult_prob_error is mean "
            "exp|dlogp|."
        )

    def _answer_rows(self) -> list[list[Any]]:
        return [["question", QUESTION], *([engine, " ".join(text.split())] for engine, text in self.answers.items())]

    def _second_rows(self) -> list[list[Any]]:
        rows = [[phase, f"{seconds:.0f}"] for phase, seconds in self.seconds.items()]
        return [*rows, ["total", f"{sum(self.seconds.values()):.0f}"]]

    def _setting_rows(self) -> list[list[Any]]:
        rows = [[name, value] for name, value in {**self.options, **self.versions}.items()]
        return [*rows, ["recipe", self.recipe.fingerprint], ["scale format", self.recipe.scale_format]]

    def write(self, folder: Path) -> None:
        """Writes report.json, report.md and report.png."""
        (folder / "report.json").write_text(json.dumps(self.to_dict(), indent=1))
        (folder / "report.md").write_text(self.to_markdown())
        _plot(self, folder / "report.png")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _plot(report: DemoReport, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, mismatch_axes = figure.subplots(1, 2)
    loss_axes.plot(range(len(report.loss)), report.loss, marker="o")
    loss_axes.set(title="FP8 training", xlabel="step", ylabel="loss over the answers")
    for key, logprobs in report.logprobs.items():
        points = curve(logprobs.rows_by_position(_RANGES), "mean_abs_dlogp")
        mismatch_axes.plot(*points, marker=".", label=PAIRINGS[key])
    mismatch_axes.set(
        title="Training against rollout",
        xlabel="generated token",
        ylabel="mean |dlogp|",
        ylim=0,
    )
    if report.logprobs:
        mismatch_axes.legend()
    figure.savefig(path, dpi=120)
