"""What all benchmarks share: shapes of three models, a clock that runs contenders in turn, and rows of results.

Exactness is checked before anything is timed; `require` aborts the run where it fails.
"""

# Shape suffixes: M tokens, N and K rows and columns of a weight, C features.

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import jetrl_megatron

NO_HOPPER = 2
"""Exit status on a machine without a Hopper GPU."""

Phase = Callable[[int], object]
Contender = Mapping[str, Phase]
"""Steps that belong together, by name, in order. Each is called with the number of the repetition."""

_DISTRIBUTIONS = (
    "torch",
    "triton",
    "vllm",
    "deep-gemm",
    "megatron-core",
    "transformer-engine",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
)


@dataclass(frozen=True)
class Model:
    """Sizes of one dense model, from its config.json."""

    key: str
    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    qk_norm: bool
    head_dim: int = 128
    rope_base: int = 1_000_000

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the four linears of a layer as Megatron stores them: q, k and v in one, gate and up in one."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "proj": (self.hidden, self.heads * self.head_dim),
            "fc1": (2 * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
        }


MODELS = {
    model.key: model
    for model in (
        Model("8b", "Qwen3-8B", hidden=4096, ffn=12288, heads=32, kv_heads=8, layers=36, qk_norm=True),
        Model("14b", "Qwen3-14B", hidden=5120, ffn=17408, heads=40, kv_heads=8, layers=40, qk_norm=True),
        Model("32b", "Qwen3-32B", hidden=5120, ffn=25600, heads=64, kv_heads=8, layers=64, qk_norm=True),
        Model(
            "70b", "Llama-3.3-70B", hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=80, qk_norm=False,
            rope_base=500_000,
        ),
    )
}  # fmt: skip
MEASURED = "8b,32b,70b"
"""What linears and layers are measured with."""
_TINY = Model("tiny", "tiny", hidden=256, ffn=512, heads=4, kv_heads=2, layers=2, qk_norm=True)


def require(condition: bool, what: str) -> None:
    """Aborts the run: a wrong result is not timed.

    Raises:
        SystemExit: the condition is false.
    """
    if not condition:
        raise SystemExit(f"wrong result, nothing is timed: {what}")


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm of the expected; NaN where either holds one."""
    expected = expected.double()
    return ((got.double() - expected).norm() / expected.norm()).item()


_FEWEST, _MOST = 4, 200
"""Repetitions in a turn."""
_LONGEST_SLEEP = 0.2


class CudaClock:
    """Times contenders with events, in turn, so that a change of clock rates meets all of them alike.

    A turn goes on for a while, because a GPU lowers its clock under a load that lasts, more for some work than for
    other, and training is such a load; the first third of a turn is not measured. Before each turn the device sleeps
    for as long as the host needs to stay ahead of it, so no launch gap is measured.

    Args:
        rounds: turns of each contender.
        seconds: length of a turn.
    """

    def __init__(self, rounds: int, seconds: float) -> None:
        self.rounds = rounds
        self.seconds = seconds

    def race(self, contenders: Mapping[str, Contender]) -> dict[str, dict[str, float]]:
        """Median milliseconds of every phase of every contender, and of "total"."""
        costs = {name: self._warm_up(contender) for name, contender in contenders.items()}
        samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
        for _ in range(self.rounds):
            for name, contender in contenders.items():
                samples[name] += self._turn(contender, *costs[name])
        return {name: _medians(contender, samples[name]) for name, contender in contenders.items()}

    def _warm_up(self, contender: Contender) -> tuple[float, float]:
        """Seconds that the host needs to enqueue one repetition, and the device to run it."""
        host, events = 0.0, []
        for repetition in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            events = [_event()]
            for phase in contender.values():
                phase(repetition)
            events.append(_event())
            host = time.perf_counter() - start
        torch.cuda.synchronize()
        return host, events[0].elapsed_time(events[1]) / 1000

    def _turn(self, contender: Contender, host: float, device: float) -> list[list[float]]:
        repetitions = max(_FEWEST, min(_MOST, round(self.seconds / device)))
        torch.cuda.synchronize()
        _sleep(min(1.5 * (max(host - device, 0) * repetitions + 2 * host), _LONGEST_SLEEP))
        recorded = []
        for repetition in range(repetitions):
            events = [_event()]
            for phase in contender.values():
                phase(repetition)
                events.append(_event())
            recorded.append(events)
        torch.cuda.synchronize()
        return [
            [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)] + [events[0].elapsed_time(events[-1])]
            for events in recorded[repetitions // 3 :]
        ]


class HostClock:
    """The clock of a dry run on a CPU: its figures mean nothing."""

    def race(self, contenders: Mapping[str, Contender]) -> dict[str, dict[str, float]]:
        """See `CudaClock.race`; one repetition."""
        return {name: _medians(contender, [self._once(contender)]) for name, contender in contenders.items()}

    def _once(self, contender: Contender) -> list[float]:
        times = [time.perf_counter()]
        for phase in contender.values():
            phase(0)
            times.append(time.perf_counter())
        spans = [b - a for a, b in zip(times, times[1:], strict=False)]
        return [1000 * span for span in (*spans, times[-1] - times[0])]


def _medians(contender: Contender, samples: list[list[float]]) -> dict[str, float]:
    columns = zip(*samples, strict=True)
    return {name: statistics.median(column) for name, column in zip((*contender, "total"), columns, strict=True)}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _sleep(seconds: float) -> None:
    # In cycles of a clock that is at most 2 GHz on a Hopper GPU, so it sleeps a little longer than asked.
    torch.cuda._sleep(int(seconds * 2e9))


@dataclass
class Run:
    """One run of one benchmark.

    Attributes:
        models: what to measure, in order.
        dry: a run on a CPU with tiny shapes, to see that everything works; its figures mean nothing.
    """

    bench: str
    out: Path
    models: list[Model]
    device: torch.device
    clock: CudaClock | HostClock
    dry: bool
    options: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        model: Model | None,
        shape: str,
        m: int | None,
        metric: str,
        value: float | None,
        unit: str,
        *,
        peer: str | None = None,
        ratio: float | None = None,
        show: bool = True,
    ) -> None:
        """One row of the result file; printed as well where it compares or explains, unless `show` is False.

        Args:
            metric: "implementation/what".
            value: None where it could not be measured; `unit` then says why.
            ratio: how the value compares with `peer`: for times peer / value, so more is faster; for GB/s and bytes
                value / peer.
        """
        name = "all" if model is None else model.name
        row = {"bench": self.bench, "model": name, "shape": shape, "m": m, "metric": metric, "value": value}
        row |= {"unit": unit, "peer": peer, "ratio": ratio}
        self.rows.append({**row, **provenance(self.bench, self.device)})
        if value is None:
            print(f"{name} {metric}: {unit}", flush=True)
        elif show and ratio is not None:
            print(f"{name} {shape} M={m} {metric} {value:.4g} {unit}: {ratio:.3f} x {peer}", flush=True)

    def add_times(
        self,
        model: Model,
        shape: str,
        m: int,
        times: Mapping[str, float],
        what: str,
        *,
        peers: Iterable[str] = (),
        show: bool = True,
    ) -> None:
        """Rows of milliseconds by implementation; those of `jetrl` are compared with every peer that was measured."""
        peers = [peer for peer in peers if peer in times]
        for name, value in times.items():
            ours = name.startswith("jetrl")
            for peer in (peers if ours else ()) or (None,):
                ratio = None if peer is None else times[peer] / value
                self.add(model, shape, m, f"{name}/{what}", value, "ms", peer=peer, ratio=ratio, show=show)

    def write(self) -> None:
        """Writes the rows so far; rows of models that this run does not measure stay in the file."""
        names = {row["model"] for row in self.rows}
        kept = json.loads(self.out.read_text()) if self.out.exists() else []
        kept = [row for row in kept if row["model"] not in names]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(row) for row in kept + self.rows)
        self.out.write_text(f"[\n{lines}\n]\n")


def start(bench: str, description: str, *arguments: tuple[str, dict[str, Any]], models: str = MEASURED) -> Run:
    """Parses the command line and checks the device.

    Args:
        arguments: further options of this benchmark: name, keywords of `add_argument`.
        models: keys of `MODELS` that are measured unless the command line says otherwise, comma-separated.

    Raises:
        SystemExit: status 2 where there is no Hopper GPU.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{bench}", description=description)
    default_out = Path(__file__).parent / "results" / f"{bench}.json"
    parser.add_argument("--out", type=Path, default=default_out, help="result file, a JSON list of rows")
    parser.add_argument("--models", default=models, help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    for name, keywords in arguments:
        parser.add_argument(name, **keywords)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.dry_run:
        return Run(bench, options.out, [_TINY], torch.device("cpu"), HostClock(), True, options)
    unknown = sorted(set(options.models.split(",")) - set(MODELS))
    if unknown:
        parser.error(f"--models {','.join(unknown)}: choose from {', '.join(MODELS)}")
    chosen = [MODELS[key] for key in options.models.split(",")]
    require_hopper()
    clock = CudaClock(options.rounds, options.seconds)
    return Run(bench, options.out, chosen, torch.device("cuda"), clock, False, options)


def write_profile(run: Run, contender: Contender, name: str, heading: str) -> Path:
    """Writes torch's table of kernels for ten repetitions beside the results, under `name`."""
    from torch.profiler import ProfilerActivity

    cuda = run.device.type == "cuda"
    run.clock.race({"profiled": contender})
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        for repetition in range(10):
            for phase in contender.values():
                phase(repetition)
        if cuda:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=100)
    path = run.out.parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{heading}, 10 repetitions\n{table}\n")
    print(path)
    return path


def require_hopper() -> None:
    """Ends the process where there is no Hopper GPU.

    Raises:
        SystemExit: status 2.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        print(f"this benchmark needs a Hopper GPU (compute capability 9.0), here is {found}", file=sys.stderr)
        raise SystemExit(NO_HOPPER)


def versions() -> dict[str, str]:
    """Versions of what is installed and matters, and of CUDA."""
    found = {"jetrl-megatron": jetrl_megatron.__version__, "cuda": str(torch.version.cuda)}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(bench: str, device: torch.device) -> dict[str, Any]:
    """What a row says of where it comes from: "device", "versions", "command" and "date"."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"device": device_name(device), "versions": versions(), "command": command(bench), "date": date}


def device_name(device: torch.device) -> str:
    """Marketing name of the GPU, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def command(bench: str) -> str:
    """The command of this process as one would type it again; where the rows went is left out."""
    arguments = iter(sys.argv[1:])
    kept = [word for word in arguments if not (word == "--out" and next(arguments, None)) and word[:6] != "--out="]
    return shlex.join(["python", "-m", f"benchmarks.{bench}", *kept])


def transformer_engine() -> tuple[Any, str]:
    """The module `transformer_engine.pytorch`, or None and the reason why it cannot serve as a peer."""
    if not torch.cuda.is_available():
        return None, "TransformerEngine needs a GPU"
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import check_fp8_block_scaling_support
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        # Beside ImportError, what its loader raises when libraries or packages do not fit together.
        return None, f"TransformerEngine does not import: {type(error).__name__}: {error}"
    supported, reason = check_fp8_block_scaling_support()
    return (te, "") if supported else (None, f"TransformerEngine: {reason}")
