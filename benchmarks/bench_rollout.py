"""Generation throughput of vLLM: zero-mismatch mode, its own FP8 defaults, and BF16, each in an engine of its own.

    python -m benchmarks.bench_rollout [--models 8b] [--prompt 512] [--tokens 1024] [--concurrent 128]

Random weights in the shapes of the model, all layers. The modes run one after the other on the same prompts; a first
batch of a few tokens warms each engine up.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Model, start
from benchmarks.random_models import RandomModel
from jetrl_megatron import JETRL_FP8
from jetrl_megatron.verify.child import run_child
from jetrl_megatron.verify.requests import Batch, EngineRequest

MODES = ("bf16", "default", "parity")
VOCABULARY = 151936


def main() -> None:
    """Measures every model asked for."""
    run = start(
        "bench_rollout",
        "Generation throughput of the zero-mismatch mode against vLLM's FP8 defaults and BF16.",
        ("--prompt", {"type": int, "default": 512, "help": "tokens of each prompt"}),
        ("--tokens", {"type": int, "default": 1024, "help": "generated tokens of each sequence"}),
        ("--concurrent", {"type": int, "default": 128, "help": "sequences at once"}),
        ("--modes", {"default": ",".join(MODES), "help": f"comma-separated, of {', '.join(MODES)}"}),
    )
    options = run.options
    batch = Batch(
        name="batch", sequences=options.concurrent, tokens=options.tokens, prompt_tokens=options.prompt, prompts=()
    )
    for model in run.models:
        found: dict[str, float] = {}
        with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
            for mode in options.modes.split(","):
                found[mode] = generate(model, mode, batch, Path(folder))
        shape = f"{options.concurrent} x ({options.prompt} + {options.tokens}) tokens"
        for mode, speed in found.items():
            name = "jetrl_parity" if mode == "parity" else f"vllm_{mode}"
            for peer in [other for other in found if other != mode] or [None]:
                ratio = None if peer is None else speed / found[peer]
                run.add(model, shape, None, f"{name}/generation", speed, "tokens/s", peer=peer, ratio=ratio)
        run.write()


def generate(model: Model, mode: str, batch: Batch, folder: Path) -> float:
    """Tokens a second of one engine."""
    started = time.perf_counter()
    random = RandomModel(
        family="qwen3" if model.qk_norm else "llama",
        hidden=model.hidden,
        intermediate=model.ffn,
        heads=model.heads,
        kv_heads=model.kv_heads,
        layers=model.layers,
        vocabulary=VOCABULARY,
    )
    checkpoint = folder / ("bf16" if mode == "bf16" else "fp8")
    if not checkpoint.exists():
        random.write(checkpoint, recipe=None if mode == "bf16" else JETRL_FP8)
    request = EngineRequest(
        checkpoint=str(checkpoint),
        recipe=None if mode == "bf16" else JETRL_FP8.to_dict(),
        mode=mode,
        cuda=True,
        batches=(batch,),
        engine_args={"max_num_seqs": batch.sequences, "gpu_memory_utilization": 0.85},
    )
    path, result = folder / f"{mode}.request.json", folder / f"{mode}.result.json"
    path.write_text(json.dumps(dataclasses.asdict(request)))
    command = [sys.executable, "-m", "jetrl_megatron.verify.engine", str(path), str(result)]
    run_child(f"{mode} engine", command, folder / f"{mode}.log", {})
    found: dict[str, Any] = json.loads(result.read_text())
    seconds = time.perf_counter() - started
    print(f"{model.name} {mode}: engine up in {found['start_seconds']:.0f} s, {seconds:.0f} s in all", flush=True)
    speed: float = found["batches"][batch.name]["tokens_per_second"]
    return speed


if __name__ == "__main__":
    main()
