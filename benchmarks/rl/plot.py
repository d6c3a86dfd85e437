"""Tables and pictures of a study: `python -m benchmarks.rl.plot STUDY [--out FOLDER] [--last 10]`.

FOLDER gets study.json (every number of the tables), study.md (the tables), series.json (every number of the curves, a
line for each run and metric), curves.png (mean and standard deviation over seeds by step), positions.png (mismatch by
token position) and phases.png (where a step's time goes).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.rl.variants import RunFolder, found_in

Row = dict[str, Any]
Series = dict[str, dict[str, dict[int, dict[int, float]]]]
"""Values by metric, variant, seed, and step or position."""
_LOGARITHMIC = {"KL to the first policy", "token_mult_prob_error"}
"""Curves with single steps far above the others, on a logarithmic axis."""
_CURVES: dict[str, Callable[[Row], float | None]] = {
    "reward": lambda row: row.get("reward"),
    "held-out accuracy": lambda row: row.get("held_out_accuracy"),
    "entropy, nats": lambda row: row.get("entropy"),
    "gradient norm": lambda row: row.get("grad_norm"),
    "KL to the first policy": lambda row: row.get("kl"),
    "token_mult_prob_error": lambda row: row["mismatch"]["token_mult_prob_error"] if "mismatch" in row else None,
}
_LISTED: dict[str, Callable[[Row], float | None]] = {
    "accuracy": lambda row: row.get("accuracy"),
    "loss": lambda row: row.get("loss"),
    "tokens": lambda row: row.get("tokens"),
    "share of tokens whose KL is clamped": lambda row: row.get("kl_clamped"),
    "seconds": lambda row: row["seconds"].get("step"),
}
"""What series.json has besides, and no picture."""
_POSITIONS = {"mean_abs_dlogp": "mean |dlogp|", "gen_kl_error": "KL(rollout || training)"}
_ENDS = ("reward at the end", "held-out accuracy at the end")
_PLACES = ("out", "shared", "time_budget", "checkpoint_every", "tensorboard", "transport")
"""Options that say where and how a run was made, not what it is."""
_OF_A_RUN = ("seed", "steps", "precision", "operators", "ablate", "rollout_scales", "truncate_ratios")
"""Options in which runs of a study may differ."""
PHASES = ("rollout", "sync_quantize", "sync_send_and_load", "log_prob", "reference", "forward", "backward", "optimizer")


def main() -> None:
    """Draws and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl.plot", description="Tables and pictures of a study.")
    parser.add_argument("study", type=Path, help="folder that benchmarks.rl.run filled")
    parser.add_argument("--out", type=Path, help="folder of the results (default: that of the study)")
    parser.add_argument("--last", type=int, default=10, help="steps that count as a run's end (default: %(default)s)")
    options = parser.parse_args()
    runs = {variant: [run for run in found if run.rows()] for variant, found in found_in(options.study).items()}
    runs = {variant: found for variant, found in runs.items() if found}
    if not runs:
        parser.error(f"{options.study}: no runs there, name the folder that was --out of benchmarks.rl.run")
    if options.last < 1:
        parser.error(f"--last {options.last}: use 1 or more")
    differing = differing_options([run for found in runs.values() for run in found])
    if differing:
        parser.error(f"{options.study}: its runs differ in {', '.join(differing)}, so they are not to be compared")
    out = options.out or options.study
    out.mkdir(parents=True, exist_ok=True)
    summary = {variant: summarize(found, options.last) for variant, found in runs.items()}
    curves = by_step(runs, _CURVES)
    positions = {
        title: by_position(runs, functools.partial(over_positions, name=name)) for name, title in _POSITIONS.items()
    }
    counts = {"tokens by position": by_position(runs, tokens_by_position)}
    more = lines("step", by_step(runs, _LISTED)) + lines("position", counts)
    (out / "study.json").write_text(json.dumps({"last": options.last, "variants": summary}, indent=1) + "\n")
    (out / "study.md").write_text(tables(summary, options.last))
    (out / "series.json").write_text(
        f"[\n{',\n'.join(lines('step', curves) + lines('position', positions) + more)}\n]\n"
    )
    draw_series(curves, (2, 3), "step", out / "curves.png")
    draw_series(positions, (1, 2), "position of the generated token", out / "positions.png")
    draw_phases(summary, out / "phases.png")
    for name in ("study.json", "study.md", "series.json", "curves.png", "positions.png", "phases.png"):
        print(out / name)


def differing_options(runs: Iterable[RunFolder]) -> list[str]:
    """Names of options in which runs differ, and runs of one study may not."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.options().items():
            values.setdefault(name, set()).add(json.dumps(value))
    return sorted(name for name in set(values) - {*_PLACES, *_OF_A_RUN} if len(values[name]) > 1)


def summarize(runs: Sequence[RunFolder], last: int) -> dict[str, Any]:
    """Numbers of a variant: means over its seeds, and standard deviations where there are two or more."""
    steps = {run.seed: [row for row in run.rows() if "reward" in row] for run in runs}
    everything = [row for rows in steps.values() for row in rows]
    errors = [row["mismatch"] for row in everything]
    held_out = {run.seed: [row for row in run.rows() if "held_out_accuracy" in row] for run in runs}
    starts = [rows[0]["held_out_accuracy"] for rows in held_out.values() if rows and rows[0]["step"] == 0]
    # The first step of a sitting compiles and captures; the median does not mind.
    seconds = {name: _median(row["seconds"].get(name, 0.0) for row in everything) for name in (*PHASES, "step")}
    return {
        "options": {name: value for name, value in runs[0].options().items() if name not in _PLACES},
        "seeds": list(steps),
        "steps": [len(rows) for rows in steps.values()],
        "reward at the start": _spread([rows[0]["reward"] for rows in steps.values() if rows]),
        "reward at the end": _of_seeds(
            {seed: _mean(row["reward"] for row in rows[-last:]) for seed, rows in steps.items() if rows}
        ),
        "held-out accuracy at the start": _spread(starts),
        "held-out accuracy at the end": _of_seeds(
            {seed: rows[-1]["held_out_accuracy"] for seed, rows in held_out.items() if rows}
        ),
        "tokens": sum(found["tokens"] for found in errors),
        "tokens_differing": sum(found["tokens_differing"] for found in errors),
        "steps_exactly_equal": sum(
            found["token_mult_prob_error"] == 1.0 and found["gen_kl_error"] == 0.0 for found in errors
        ),
        "token_mult_prob_error": _spread([found["token_mult_prob_error"] for found in errors]),
        "largest token_mult_prob_error": max((found["token_mult_prob_error"] for found in errors), default=None),
        "gen_kl_error": _spread([found["gen_kl_error"] for found in errors]),
        "median seconds": seconds,
        "median tokens_per_second": _median(row["tokens_per_second"] for row in everything),
        "peak_memory_gib": max((row["peak_memory_gib"] for row in everything), default=None),
    }


def tables(summary: dict[str, dict[str, Any]], last: int) -> str:
    """The summary in Markdown."""
    parts = [_table(summary, f"Learning (the end is the mean of the last {last} steps)", _learning)]
    base = summary.get("bf16", {"seeds": [], "steps": []})
    paired = {name: found for name, found in summary.items() if found is not base and _pairs(found, base)}
    if paired:
        parts.append(_table(paired, "Minus bf16 with the same seed", lambda found: _minus(found, base)))
    parts.append(_table(summary, "Mismatch of training and rollout, over all steps", _mismatch))
    parts.append(_table(summary, "Seconds of a step, median", _seconds))
    return "\n".join(parts)


def _learning(found: dict[str, Any]) -> dict[str, str]:
    names = ("reward at the start", _ENDS[0], "held-out accuracy at the start", _ENDS[1])
    shown = {name: _shown(found[name]) for name in names}
    return {"seeds": str(len(found["seeds"])), "steps": _range(found["steps"]), **shown}


def _pairs(found: dict[str, Any], base: dict[str, Any]) -> list[int]:
    """Seeds that both have, to the same step."""
    both = {*zip(found["seeds"], found["steps"], strict=True)} & {*zip(base["seeds"], base["steps"], strict=True)}
    return sorted(seed for seed, _ in both)


def _minus(found: dict[str, Any], base: dict[str, Any]) -> dict[str, str]:
    seeds = _pairs(found, base)
    shown = {"seeds": ", ".join(map(str, seeds))}
    for name in _ENDS:
        ours, theirs = found[name]["seeds"], base[name]["seeds"]
        shown[name] = _shown(_spread([ours[seed] - theirs[seed] for seed in seeds if seed in ours and seed in theirs]))
    return shown


def _mismatch(found: dict[str, Any]) -> dict[str, str]:
    largest = found["largest token_mult_prob_error"]
    return {
        "tokens that differ": f"{found['tokens_differing']:,} of {found['tokens']:,}",
        "steps with none": f"{found['steps_exactly_equal']} of {sum(found['steps'])}",
        "token_mult_prob_error": _shown(found["token_mult_prob_error"]),
        "largest": "-" if largest is None else f"{largest:.6g}",
        "gen_kl_error": _shown(found["gen_kl_error"]),
    }


def _seconds(found: dict[str, Any]) -> dict[str, str]:
    seconds = {name: f"{value:.2f}" for name, value in found["median seconds"].items()}
    return {**seconds, "tokens/s": f"{found['median tokens_per_second']:.0f}"}


def _table(summary: dict[str, dict[str, Any]], title: str, cells: Callable[[dict[str, Any]], dict[str, str]]) -> str:
    rows = {variant: cells(found) for variant, found in summary.items()}
    names = list(next(iter(rows.values())))
    lines = [f"### {title}", "", f"| run | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {variant} | {' | '.join(values.values())} |" for variant, values in rows.items()]
    return "\n".join(lines) + "\n"


def by_step(runs: dict[str, list[RunFolder]], metrics: dict[str, Callable[[Row], float | None]]) -> Series:
    """Metrics by step."""
    return {
        title: {
            variant: {
                run.seed: {row["step"]: value for row in run.rows() if (value := read(row)) is not None}
                for run in found
            }
            for variant, found in runs.items()
        }
        for title, read in metrics.items()
    }


def by_position(
    runs: dict[str, list[RunFolder]], measure: Callable[[Sequence[Row]], Mapping[int, float]]
) -> dict[str, dict[int, dict[int, float]]]:
    """A measure by token position, over all steps of a run."""
    return {variant: {run.seed: dict(measure(run.rows())) for run in found} for variant, found in runs.items()}


def over_positions(rows: Sequence[Row], name: str) -> dict[int, float]:
    """Mean of a measure over a run's tokens by position; ranges of several widths go by their first position."""
    tokens, sums = tokens_by_position(rows), dict[int, float]()
    for part in _parts(rows):
        sums[part["position"]] = sums.get(part["position"], 0.0) + part[name] * part["tokens"]
    return {first: sums[first] / count for first, count in tokens.items()}


def tokens_by_position(rows: Sequence[Row]) -> dict[int, int]:
    """How many tokens such a mean is of, positions in order."""
    tokens: dict[int, int] = {}
    for part in _parts(rows):
        tokens[part["position"]] = tokens.get(part["position"], 0) + part["tokens"]
    return dict(sorted(tokens.items()))


def _parts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [part for row in rows for part in row.get("positions", ())]


def lines(axis: str, series: Series) -> list[str]:
    """A JSON object for each run and metric: where it was measured, and what."""
    return [
        json.dumps({"metric": title, "run": variant, "seed": seed, axis: list(values), "values": list(values.values())})
        for title, variants in series.items()
        for variant, seeds in variants.items()
        for seed, values in seeds.items()
    ]


def draw_series(series: Series, shape: tuple[int, int], axis: str, path: Path) -> None:
    """A panel for each metric: a line for the mean over seeds, a band of a standard deviation on each side."""
    rows, columns = shape
    figure = Figure(figsize=(4.3 * columns, 3.6 * rows), layout="constrained")
    for axes, (title, variants) in zip(figure.subplots(rows, columns).flat, series.items(), strict=True):
        for variant, seeds in variants.items():
            _draw_band(axes, collect(seeds.values()), variant)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(axis)
        if title in _LOGARITHMIC:
            # Linear below that: the first KL is 0.
            axes.set_yscale("symlog", linthresh=1e-3)
    _save(figure, path)


def draw_phases(summary: dict[str, dict[str, Any]], path: Path) -> None:
    """A stacked bar for each variant."""
    figure = Figure(figsize=(max(6.0, 1.6 * len(summary) + 3), 5), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * len(summary)
    for phase in PHASES:
        heights = [found["median seconds"][phase] for found in summary.values()]
        axes.bar(list(summary), heights, bottom=bottom, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.tick_params(axis="x", rotation=30, labelsize=8)
    axes.set_ylabel("seconds of a step, median")
    _save(figure, path)


def collect(seeds: Iterable[dict[int, float]]) -> dict[int, list[float]]:
    """Values of all seeds by step or position, in order."""
    curve: dict[int, list[float]] = {}
    for values in seeds:
        for at, value in values.items():
            curve.setdefault(at, []).append(value)
    return dict(sorted(curve.items()))


def _draw_band(axes: Any, curve: dict[int, list[float]], label: str) -> None:
    means = [_mean(values) for values in curve.values()]
    widths = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in curve.values()]
    (line,) = axes.plot(list(curve), means, label=label, linewidth=1.2)
    low, high = ([mean + sign * width for mean, width in zip(means, widths, strict=True)] for sign in (-1, 1))
    axes.fill_between(list(curve), low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _save(figure: Any, path: Path) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _of_seeds(values: dict[int, float]) -> dict[str, Any]:
    return {**_spread(list(values.values())), "seeds": values}


def _spread(values: list[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation; None where there are too few values."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values) if values else None, "std": deviation}


def _shown(spread: dict[str, float | None]) -> str:
    mean, deviation = spread["mean"], spread["std"]
    return "-" if mean is None else f"{mean:.6g}" + ("" if deviation is None else f" ± {deviation:.2g}")


def _range(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


if __name__ == "__main__":
    main()
