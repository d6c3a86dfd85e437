"""Seconds and memory of a weight update of a running engine, against two peers that send BF16.

    python -m benchmarks.bench_sync [--models 8b] [--updates 5] [--layout colocated|nccl|tp2]

A Megatron model with random weights in the shapes of the model, all layers, and vLLM engines that take its weights.
Before each update every weight changes. On one GPU, trainer and engine share it (CUDA IPC), and the peers are measured
in the same run over the same transport: "vllm_quantising" sends BF16 into an FP8 engine, which quantises it and loads
it by vLLM's layerwise reload; "bf16" sends BF16 into a BF16 engine. The log-probs of an engine with CUDA graphs, after
all updates, must equal those of one without graphs that took the last of them. "nccl" has the trainer on the first GPU
and the engine on the second one, "tp2" has both on both.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Model, Run, require, start
from benchmarks.processes import Process
from benchmarks.random_models import RandomModel
from jetrl_megatron import JETRL_FP8
from jetrl_megatron.verify.engine import engine_environment
from jetrl_megatron.verify.environment import megatron_environment
from jetrl_megatron.verify.requests import EngineRequest

VOCABULARY = {True: 512, False: 151936}
"""By whether the run is dry."""
LAYOUTS = ("colocated", "nccl", "tp2")
MODULE = "benchmarks.sync_processes"
TIMEOUT = 300.0
ENGINE: dict[str, Any] = {
    "worker_extension_cls": f"{MODULE}.BenchWorker",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 2 << 30,
    # What must be free at the start; the cache's size is given.
    "gpu_memory_utilization": 0.3,
    "load_format": "dummy",
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
}


@dataclasses.dataclass
class Bench:
    """One run for one model: its folders, its trainer, and how engines are started."""

    run: Run
    model: Model
    home: Path
    layout: str

    def __post_init__(self) -> None:
        model = self.model
        self.random = RandomModel(
            family="qwen3" if model.qk_norm else "llama",
            hidden=model.hidden,
            intermediate=model.ffn,
            heads=model.heads,
            kv_heads=model.kv_heads,
            layers=model.layers,
            vocabulary=VOCABULARY[self.run.dry],
        )
        self.ranks = 2 if self.layout == "tp2" else 1
        request = {
            "folder": str(self.random.write_config(self.home / "train")),
            "tensor_parallel": self.ranks,
            "recipe": JETRL_FP8.to_dict(),
            "rendezvous": str(self.home / "ranks"),
        }
        environment = megatron_environment(self.ranks, cuda=not self.run.dry)
        self.trainer = self._start("trainer", request, environment)

    def engine(self, mode: str, *, graphs: bool = True) -> Process:
        """Starts an engine of mode "parity" or "bf16"."""
        recipe = JETRL_FP8 if mode == "parity" else None
        arguments = dict(ENGINE)
        folder = self.home / mode
        if self.run.dry:
            # A CPU has no graphs, and its FP8 operator refuses the scales of dummy weights.
            arguments = {"worker_extension_cls": ENGINE["worker_extension_cls"], "max_model_len": 256}
            arguments["max_num_batched_tokens"] = 1024
            if not folder.exists():
                self.random.write(folder, recipe=recipe)
        elif not folder.exists():
            self.random.write_config(folder, recipe=recipe)
        if not graphs and not self.run.dry:
            arguments["compilation_config"] = {"cudagraph_mode": "NONE"}
        request = EngineRequest(
            checkpoint=str(folder),
            recipe=None if recipe is None else recipe.to_dict(),
            mode=mode,
            cuda=not self.run.dry,
            tensor_parallel=self.ranks,
            engine_args=arguments,
        )
        environment = engine_environment(request)
        if self.layout == "nccl":
            environment["CUDA_VISIBLE_DEVICES"] = "1"
        name = f"{mode}{'' if graphs else '_eager'}"
        return self._start(name, dataclasses.asdict(request), environment)

    def update(self, engine: Process, endpoints: Any) -> dict[str, Any]:
        """One update; seconds, bytes, and peaks of extra memory on both sides."""
        self.trainer.send("send")
        engine.send("receive", endpoints=endpoints, timeout=TIMEOUT)
        received: int = engine.result()
        return {**self.trainer.result(), "received": received}

    def measure(self, engine: Process, name: str, *, bf16: bool) -> list[dict[str, Any]]:
        """A first update, which prepares both sides, and as many as were asked for."""
        options = self.run.options
        transport = "nccl" if self.layout == "nccl" else "auto"
        # Workers on a CPU have no GPU by which each would find its sender.
        each = self.ranks > 1 and not self.run.dry
        endpoints = self.trainer.ask(
            "listen", bf16=bf16, transport=transport, timeout=TIMEOUT, bucket_bytes=options.bucket_mb << 20,
            senders="all" if each else "first", receivers=1 if each else self.ranks,
            address="tcp:127.0.0.1" if self.layout == "nccl" else "unix",
        )  # fmt: skip
        first = self.update(engine, endpoints)
        print(f"{name}: first update {first['seconds']:.3f} s", flush=True)
        measured = []
        for _ in range(options.updates):
            if not bf16:
                self.trainer.ask("change")
            measured.append(self.update(engine, endpoints))
        return measured

    def _start(self, name: str, request: dict[str, Any], environment: dict[str, str]) -> Process:
        path = self.home / f"{name}.json"
        path.write_text(json.dumps(request))
        role = "trainer" if name == "trainer" else "engine"
        return Process(MODULE, [role, str(path)], environment, self.home / f"{name}.log")


def main() -> None:
    """Measures the first model asked for."""
    run = start(
        "bench_sync",
        "A weight update of a running engine, against peers that send BF16.",
        ("--updates", {"type": int, "default": 5, "help": "measured updates"}),
        ("--bucket-mb", {"type": int, "default": 512, "help": "memory for bytes on their way"}),
        ("--layout", {"choices": LAYOUTS, "default": "colocated", "help": "where trainer and engine are"}),
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sync-") as folder:
        bench = Bench(run, run.models[0], Path(folder), run.options.layout)
        try:
            measure(bench)
        finally:
            bench.trainer.stop()
    run.write()
    print(f"{time.perf_counter() - started:.0f} s in all")


def measure(bench: Bench) -> None:
    """All contenders of one layout."""
    found: dict[str, list[dict[str, Any]]] = {}
    engine = bench.engine("parity")
    try:
        found["jetrl"] = bench.measure(engine, "jetrl", bf16=False)
        scores = engine.ask("score")
        if bench.layout == "colocated":
            engine.ask("reload", quantize=True)
            found["vllm_quantising"] = bench.measure(engine, "vllm_quantising", bf16=True)
    finally:
        engine.stop()
    if bench.layout == "colocated":
        check_without_graphs(bench, scores)
        engine = bench.engine("bf16")
        try:
            engine.ask("reload", quantize=False)
            found["bf16"] = bench.measure(engine, "bf16", bf16=True)
        finally:
            engine.stop()
    report(bench, found)


def check_without_graphs(bench: Bench, scores: Any) -> None:
    """An engine without CUDA graphs that takes the same weights computes the same log-probs."""
    engine = bench.engine("parity", graphs=False)
    try:
        endpoints = bench.trainer.ask("listen", bf16=False, timeout=TIMEOUT)
        bench.update(engine, endpoints)
        require(engine.ask("score") == scores, "log-probs with CUDA graphs differ from those without after updates")
    finally:
        engine.stop()
    print("log-probs with and without CUDA graphs are equal after the updates", flush=True)


def report(bench: Bench, found: dict[str, list[dict[str, Any]]]) -> None:
    """Rows of seconds and of memory."""
    run, model = bench.run, bench.model
    seconds = {name: statistics.median(each["seconds"] for each in measured) for name, measured in found.items()}
    shape = f"{bench.layout}, {found['jetrl'][0]['bytes'] / 1e9:.2f} GB"
    for name, value in seconds.items():
        for peer in [other for other in seconds if other != name] or [None]:
            ratio = None if peer is None else seconds[peer] / value
            run.add(model, shape, None, f"{name}/update", value, "s", peer=peer, ratio=ratio)
        print(f"{name}: {value:.3f} s (median of {len(found[name])})", flush=True)
    allowed = bench.trainer.ask("layer_bytes") + (run.options.bucket_mb << 20)
    for side, key in (("trainer", "peak"), ("engine", "received")):
        for name, measured in found.items():
            peak = max(each[key] for each in measured)
            metric = f"{name}/extra memory of the {side}"
            run.add(model, shape, None, metric, peak, "bytes", peer="a layer and a bucket", ratio=peak / allowed)


if __name__ == "__main__":
    main()
