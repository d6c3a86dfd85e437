"""The checker's answer: may zero mismatch be promised, and if not, what has to change."""

from __future__ import annotations

import dataclasses
from typing import Any

from jetrl_megatron.precision_flow.graph import Difference, NotPromised, PrecisionGraph, Side, differences, join_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check` found.

    Attributes:
        training, rollout: the graphs that were compared.
        differences: every field in which they differ.
        not_promised: what has no proof of equal bytes.
    """

    training: PrecisionGraph
    rollout: PrecisionGraph
    differences: tuple[Difference, ...]
    not_promised: tuple[NotPromised, ...]

    @property
    def promises_zero(self) -> bool:
        """Whether training's log-probs must equal the rollout's to the bit."""
        return not (self.differences or self.not_promised)

    def lines(self) -> list[str]:
        """One line for each finding; nodes that differ in the same way share one."""
        return [*self.difference_lines(), *self.note_lines()]

    def difference_lines(self) -> list[str]:
        """`lines` of the differences alone."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for entry in self.differences:
            setting = entry.setting.replace(entry.node, "{node}")
            groups.setdefault((entry.field, entry.training, entry.rollout, setting), []).append(entry.node)
        found = []
        for (field, training, rollout, setting), nodes in groups.items():
            name = _join(nodes)
            mend = setting.replace("{node}", name)
            found.append(f"{name}: {field}: training {training}, rollout {rollout}; {mend}")
        return found

    def note_lines(self) -> list[str]:
        """`lines` of what is not promised alone."""
        reasons: dict[tuple[Side, str, str], list[str]] = {}
        for note in self.not_promised:
            reasons.setdefault((note.side, note.reason, note.setting), []).append(note.node)
        return [
            f"{_join(nodes)} ({side}): not promised: {reason}; {setting}"
            for (side, reason, setting), nodes in reasons.items()
        ]

    def require_zero(self) -> None:
        """Raises unless zero mismatch is promised.

        Raises:
            ValueError: with one line for each finding.
        """
        if not self.promises_zero:
            raise ValueError("training and rollout would not compute the same log-probs:\n" + "\n".join(self.lines()))

    def to_dict(self) -> dict[str, Any]:
        """The findings and both graphs, ready for JSON."""
        return {
            "promises_zero": self.promises_zero,
            "differences": [entry.to_dict() for entry in self.differences],
            "not_promised": [entry.to_dict() for entry in self.not_promised],
            "training": self.training.to_dict(),
            "rollout": self.rollout.to_dict(),
        }

    def to_markdown(self) -> str:
        """The verdict, a list of the findings, and the table of each graph."""
        count = len(self.rollout.nodes)
        verdict = f"The rollout graph ({count} nodes) lies inside the training graph: zero mismatch is promised."
        if not self.promises_zero:
            verdict = "Zero mismatch is not promised:\n\n" + "\n".join(f"- {line}" for line in self.lines())
        return "\n\n".join([verdict, self.training.to_markdown(), self.rollout.to_markdown()]) + "\n"


def check(training: PrecisionGraph, rollout: PrecisionGraph) -> CheckReport:
    """Compares the precision graphs of the two sides.

    Args:
        training, rollout: the graphs of whole models; see `merge` for the graphs of single ranks.

    Raises:
        ValueError: the graphs were given in the wrong order.
    """
    notes = dict.fromkeys((*training.not_promised, *rollout.not_promised))
    return CheckReport(
        training=training,
        rollout=rollout,
        differences=tuple(dict.fromkeys(differences(training, rollout))),
        not_promised=tuple(notes),
    )


def _join(nodes: list[str]) -> str:
    by_leaf: dict[str, list[str]] = {}
    for node in dict.fromkeys(nodes):
        by_leaf.setdefault(node.rpartition(".layers.")[2].partition(".")[2] or node, []).append(node)
    return ", ".join(map(join_names, by_leaf.values()))
