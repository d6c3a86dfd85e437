"""Generation throughput of vLLM: zero-mismatch mode, its own FP8 defaults, and BF16, each in an engine of its own.

    python -m benchmarks.bench_rollout [--models 8b] [--prompt 512] [--tokens 1024] [--concurrent 128]

Random weights in the shapes of the model, all layers, made by the engine itself. The modes run one after the other on
the same prompts; a few tokens warm each engine up, then `--rounds` batches are timed, three by default, and the median
counts. An engine may take nine tenths of the GPU; sequences whose keys and values do not fit wait for others.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Model, start
from benchmarks.random_models import RandomModel
from benchmarks.warm_up import Product, compile_product, order
from jetrl_megatron import JETRL_FP8
from jetrl_megatron.verify.child import run_child
from jetrl_megatron.verify.requests import Batch, EngineRequest

MODES = ("bf16", "default", "parity")
VOCABULARY = 151936
PREFILL = 16384
"""Tokens of a step at most, vLLM's own choice for an H200."""


def main() -> None:
    """Measures every model asked for."""
    run = start(
        "bench_rollout",
        "Generation throughput of the zero-mismatch mode against vLLM's FP8 defaults and BF16.",
        ("--prompt", {"type": int, "default": 512, "help": "tokens of each prompt"}),
        ("--tokens", {"type": int, "default": 1024, "help": "generated tokens of each sequence"}),
        ("--concurrent", {"type": int, "default": 128, "help": "sequences at once"}),
        ("--modes", {"default": ",".join(MODES), "help": f"comma-separated, of {', '.join(MODES)}"}),
        (
            "--profile",
            {"action": "store_true", "help": "write which kernels each engine runs, by time, and measure nothing"},
        ),
        ("--workers", {"type": int, "default": 12, "help": "processes that compile DeepGEMM's kernels first; 0: none"}),
        models="8b,14b,32b",
    )
    options = run.options
    size = {"sequences": options.concurrent, "tokens": options.tokens, "prompt_tokens": options.prompt}
    batches = tuple(Batch(name=f"batch {seed}", prompts=(), seed=seed, **size) for seed in range(options.rounds))
    for model in run.models:
        found: dict[str, float] = {}
        if options.workers:
            compile_kernels(model, options.concurrent, options.workers)
        with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
            for mode in options.modes.split(","):
                request = make_request(model, mode, batches, Path(folder))
                if options.profile:
                    profile(request, run.options.out.parent / f"profile_rollout_{model.key}_{mode}.txt")
                else:
                    found[mode] = generate(f"{model.name} {mode}", request)
        if options.profile:
            continue
        shape = f"{options.concurrent} x ({options.prompt} + {options.tokens}) tokens"
        for mode, speed in found.items():
            name = "jetrl_parity" if mode == "parity" else f"vllm_{mode}"
            for peer in [other for other in found if other != mode] or [None]:
                ratio = None if peer is None else speed / found[peer]
                run.add(model, shape, None, f"{name}/generation", speed, "tokens/s", peer=peer, ratio=ratio)
        run.write()


def compile_kernels(model: Model, concurrent: int, workers: int) -> None:
    """DeepGEMM's kernels at the sizes of the engine's steps."""
    sizes = [(m, n, k) for m in (concurrent, PREFILL) for n, k in model.linears.values()]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _ in pool.imap_unordered(compile_product, order({Product(*size, along_tokens=False) for size in sizes})):
            pass


def make_request(model: Model, mode: str, batches: tuple[Batch, ...], folder: Path) -> Path:
    """Writes MODE.request.json, for an engine of the mode, and the configuration of its model."""
    checkpoint, recipe = folder / mode, None if mode == "bf16" else JETRL_FP8
    RandomModel(
        family="qwen3" if model.qk_norm else "llama",
        hidden=model.hidden,
        intermediate=model.ffn,
        heads=model.heads,
        kv_heads=model.kv_heads,
        layers=model.layers,
        vocabulary=VOCABULARY,
    ).write_config(checkpoint, recipe=recipe)
    request = EngineRequest(
        checkpoint=str(checkpoint),
        recipe=None if recipe is None else recipe.to_dict(),
        mode=mode,
        cuda=True,
        batches=batches,
        engine_args={
            "max_num_seqs": batches[0].sequences,
            "max_num_batched_tokens": PREFILL,
            # The size that is timed, and no other: DeepGEMM compiles for every size that is captured.
            "compilation_config": {"cudagraph_capture_sizes": [batches[0].sequences]},
            "gpu_memory_utilization": 0.9,
            "load_format": "random",
            "worker_extension_cls": "benchmarks.random_weights.RandomWorker",
        },
    )
    path = folder / f"{mode}.request.json"
    path.write_text(json.dumps(dataclasses.asdict(request)))
    return path


def generate(name: str, request: Path) -> float:
    """Generated tokens a second of one engine, the prompts' prefill included."""
    started, result = time.perf_counter(), request.with_suffix(".result.json")
    command = [sys.executable, "-m", "jetrl_megatron.verify.engine", str(request), str(result)]
    run_child(f"{name} engine", command, request.with_suffix(".log"), {})
    found: dict[str, Any] = json.loads(result.read_text())
    speeds = [float(batch["tokens_per_second"]) for batch in found["batches"].values()]
    spent = f"engine up in {found['start_seconds']:.0f} s, {time.perf_counter() - started:.0f} s in all"
    print(f"{name}: {', '.join(f'{speed:.0f}' for speed in speeds)} tokens/s; {spent}", flush=True)
    return statistics.median(speeds)


def profile(request: Path, out: Path) -> None:
    """Writes the kernels of an engine's steps to `out`."""
    command = [sys.executable, "-m", "benchmarks.engine_profile", str(request), str(out)]
    run_child(f"profile of {out.stem}", command, request.with_suffix(".log"), {})


if __name__ == "__main__":
    main()
