"""Draws a picture beside a result file: `python -m benchmarks.plot [FILE.json ...]`, by default each that has one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Bars = dict[str, dict[str, float]]
"""Heights by series and group."""


def main() -> None:
    """Draws the files named on the command line, or every result of a benchmark that has a chart."""
    files = [Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("bench_*.json"))
    for path in files:
        rows = [row for row in json.loads(path.read_text()) if row["value"] is not None]
        if not rows or rows[0]["bench"] not in (*CHARTS, "bench_training"):
            print(f"{path}: {'there is no chart of it' if rows else 'nothing was measured'}")
            continue
        draw(rows, path.with_suffix(".png"))
        print(path.with_suffix(".png"))


def draw(rows: Sequence[Row], path: Path) -> None:
    """One picture of one benchmark's rows."""
    bench = rows[0]["bench"]
    if bench == "bench_training":
        return draw_curves(rows, path)
    chart, unit, title, line = CHARTS[bench]
    bars = chart(rows)
    groups = list(dict.fromkeys(group for series in bars.values() for group in series))
    # Without pyplot, which would look for a display.
    figure = Figure(figsize=(max(7.0, 0.25 * len(groups) * len(bars) + 3), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(bars)
    for i, (name, heights) in enumerate(bars.items()):
        at = [g + (i + 0.5) * width - 0.4 for g in range(len(groups))]
        axes.bar(at, [heights.get(group, 0.0) for group in groups], width, label=name)
    if line is not None:
        axes.axhline(line, color="black", linewidth=1, linestyle="--", label=f"aim: {line}")
    upright = max(map(len, groups)) > 20
    axes.set_xticks(range(len(groups)), groups, rotation=90 if upright else 0, fontsize=8)
    axes.set_ylabel(unit)
    axes.set_title(f"{title}\n{rows[0]['device']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """The loss of each form of training against the step."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    curves = collect(rows, lambda row: row["metric"].split("/")[0], lambda row: row["m"], "value")
    for name, losses in curves.items():
        axes.plot(list(losses), list(losses.values()), label=name, linewidth=1)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss, {rows[0]['unit']}")
    axes.set_title(f"The same run in several forms\n{rows[0]['device']}", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=130)


def collect(rows: Iterable[Row], series: Callable[[Row], str | None], group: Callable[[Row], str], field: str) -> Bars:
    """Heights from `field`, without rows whose series is None."""
    bars: Bars = {}
    for row in rows:
        name = series(row)
        if name is not None:
            bars.setdefault(name, {})[group(row)] = row[field]
    return bars


def _speed_up(what: str, shape: str) -> Callable[[Sequence[Row]], Bars]:
    """Ratios of one metric, by implementation and peer."""

    def series(row: Row) -> str | None:
        implementation, metric = row["metric"].split("/", 1)
        wanted = metric == what and row["shape"].startswith(shape) and row["ratio"] is not None
        # Cached weights are in the file; the picture shows what a step with one microbatch costs.
        wanted = wanted and not implementation.endswith("_cached")
        return f"{implementation} over {row['peer']}" if wanted else None

    return lambda rows: collect(rows, series, lambda row: f"{row['model']}\nM = {row['m']}", "ratio")


def _bandwidth(rows: Sequence[Row]) -> Bars:
    def series(row: Row) -> str | None:
        return row["metric"].split("/")[0] if row["peer"] == "copy" else None

    return collect(rows, series, lambda row: row["shape"], "ratio")


def _rollout(rows: Sequence[Row]) -> Bars:
    return collect(rows, lambda row: row["metric"].split("/")[0], lambda row: row["model"], "value")


def _memory(rows: Sequence[Row]) -> Bars:
    def series(row: Row) -> str | None:
        return row["metric"].split("/")[1] if row["ratio"] is not None else None

    return collect(rows, series, lambda row: f"{row['model']}\n{row['shape'].split()[0]}", "ratio")


CHARTS: dict[str, tuple[Callable[[Sequence[Row]], Bars], str, str, float | None]] = {
    "bench_quantize": (_bandwidth, "bandwidth / device copy", "Quantisers, bytes read and written once", 0.8),
    "bench_linear": (
        _speed_up("fprop+dgrad+wgrad", "all four"),
        "times as fast as the peer",
        "FProp + DGrad + WGrad of a layer's four linears, with all quantisation",
        1.5,
    ),
    "bench_decode_linear": (
        _speed_up("fprop", "all four"),
        "times as fast as the peer",
        "A layer's four linears while decoding, with quantisation, under CUDA graphs",
        1.35,
    ),
    "bench_layer": (
        _speed_up("forward+backward", "layer"),
        "times as fast as the peer",
        "One transformer layer, forward and backward, sequence 8192",
        1.41,
    ),
    "bench_rollout": (_rollout, "tokens/s", "Generation by vLLM", None),
    "bench_memory": (_memory, "bytes / BF16", "What a linear keeps for backward", 0.55),
}
"""By benchmark: heights, unit, title, aim."""


if __name__ == "__main__":
    main()
