"""What `jetrl verify` found: rows for JSON, a table, and a plot of |dlogp| and KL against token position."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl_megatron.verify.files import whole_file, write_whole
from jetrl_megatron.verify.logprobs import LogProbs, curve, markdown_table
from jetrl_megatron.verify.requests import VARIANTS

_SHOWN = (
    "tokens",
    "tokens_differing",
    "gen_kl_error",
    "policy_kl_error",
    "token_mult_prob_error",
    "max_abs_dlogp",
)
_PLOTTED = {"mean_abs_dlogp": "mean |dlogp|", "gen_kl_error": "KL(rollout || training)"}
# Below float32's resolution of any log-prob, above zero: where a logarithmic axis turns linear.
_SMALLEST = 1e-8
_LINES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One batch of a rollout, scored by one training forward.

    Attributes:
        batch: name of the batch.
        variant: one of `VARIANTS`, or "prefill" for the engine's own prefill.
        logprobs: both sides.
        tokens_per_second: of the engine, for this batch.
    """

    batch: str
    variant: str
    logprobs: LogProbs
    tokens_per_second: float

    @property
    def scored_by(self) -> str:
        """For tables and plots."""
        return VARIANTS.get(self.variant, "the engine itself, prefill")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Results of a verification.

    Attributes:
        about: fields of every row: "model", "tp", "rollout_tp", "mode", "recipe", "versions", "command", "date", ...
        comparisons: in the order of the table.
        no_promise: why zero mismatch is not promised; () if it is.
        differences: what the precision-flow check says must be mended.
        notes: what the precision-flow check says nobody has proved.
        weights: tensors of the rollout folder that are not training's.
    """

    about: Mapping[str, Any]
    comparisons: Sequence[Comparison]
    no_promise: Sequence[str] = ()
    differences: Sequence[str] = ()
    notes: Sequence[str] = ()
    weights: Sequence[str] = ()

    @property
    def tokens_differing(self) -> int:
        """Tokens whose log-prob in parity mode is not the engine's to the bit."""
        return sum(c.logprobs.mismatch.tokens_differing for c in self.comparisons if c.variant == "parity")

    @property
    def promised(self) -> bool:
        """Whether zero mismatch is promised."""
        return not (self.no_promise or self.notes)

    @property
    def holds(self) -> bool:
        """Whether nothing was found that contradicts zero mismatch."""
        return not (self.tokens_differing or self.differences or self.weights)

    @property
    def status(self) -> int:
        """Exit status: 1 where zero mismatch is promised and does not hold."""
        return 1 if self.promised and not self.holds else 0

    def rows(self) -> list[dict[str, Any]]:
        """One for each comparison: what identifies it, then every metric."""
        return [
            {
                "bench": "verify",
                **self.about,
                "batch": comparison.batch,
                "variant": comparison.variant,
                "sequences": len(comparison.logprobs.mask),
                **comparison.logprobs.mismatch.to_dict(),
                "rollout_tokens_per_second": comparison.tokens_per_second,
                "promised": self.promised and comparison.variant == "parity",
            }
            for comparison in self.comparisons
        ]

    def to_dict(self) -> dict[str, Any]:
        """Rows, findings, and the metrics by position, ready for JSON."""
        return {
            "status": self.status,
            "promised": self.promised,
            "no_promise": [*self.no_promise, *self.notes],
            "differences": list(self.differences),
            "weights": list(self.weights),
            "rows": self.rows(),
            "by_position": {f"{c.variant}/{c.batch}": c.logprobs.rows_by_position() for c in self.comparisons},
        }

    def verdict(self) -> str:
        """One sentence."""
        tokens = sum(c.logprobs.mismatch.tokens for c in self.comparisons if c.variant == "parity")
        measured = f"{self.tokens_differing} of {tokens} tokens differ" if tokens else "no tokens were measured"
        if not self.promised:
            return f"Zero mismatch is not promised here; {measured}."
        if self.holds:
            return f"Zero mismatch is promised and holds: {measured}."
        return f"Zero mismatch is promised and does not hold: {measured}."

    def to_markdown(self) -> str:
        """The verdict, what was found, and the table."""
        findings = (
            ("Why not promised:", [*self.no_promise, *self.notes]),
            ("Precision flow:", self.differences),
            ("Weights that are not training's:", self.weights),
        )
        parts = [f"**{self.verdict()}**"]
        for title, lines in findings:
            if lines:
                more = [f"... and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
                parts.append("\n".join([title, "", *(f"- {line}" for line in [*lines[:_LINES], *more])]))
        if self.comparisons:
            parts.append(markdown_table(("scored by", *_SHOWN, "rollout tokens/s"), self._table()))
        return "\n\n".join(parts) + "\n"

    def _table(self) -> list[list[Any]]:
        rows = []
        for comparison in self.comparisons:
            metrics = comparison.logprobs.mismatch.to_dict()
            values = [_number(metrics[name]) for name in _SHOWN]
            rows.append([f"{comparison.scored_by}, {comparison.batch}", *values, f"{comparison.tokens_per_second:.0f}"])
        return rows

    def write_json(self, path: Path) -> None:
        """Writes `to_dict`; numbers that are not finite, which JSON has not, become null."""
        write_whole(path, json.dumps(_finite(self.to_dict()), indent=1, allow_nan=False) + "\n")

    def write_plot(self, path: Path) -> None:
        """Draws mean |dlogp| and KL against token position; zero has a place below the smallest difference."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 7), layout="constrained")
        panels = figure.subplots(len(_PLOTTED), sharex=True)
        colors = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(c.scored_by for c in self.comparisons))}
        drawn = [(c.logprobs.rows_by_position(), colors[c.scored_by]) for c in self.comparisons]
        for axes, (metric, label) in zip(panels, _PLOTTED.items(), strict=True):
            for rows, color in drawn:
                axes.plot(*curve(rows, metric), marker=".", linewidth=1, color=color)
            axes.set_yscale("symlog", linthresh=_SMALLEST)
            axes.set(ylabel=label, ylim=(-_SMALLEST / 4, None))
            axes.grid(alpha=0.3)
        for name, color in colors.items():
            panels[0].plot([], [], color=color, label=name)
        if colors:
            panels[0].legend(fontsize="small")
        panels[0].set_title(f"{self.about.get('model', '')}: training against rollout".lstrip(": "))
        panels[-1].set_xlabel("generated token")
        with whole_file(path) as unfinished:
            figure.savefig(unfinished, dpi=120)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
