"""Mismatch between training and rollout on a GPU, by `jetrl verify`, for families and hidden sizes of real models.

    python -m benchmarks.bench_verify [--cases qwen3_4096,...] [--tp 2] [--out benchmarks/results]

Each case makes a random model (or SmolLM2's real weights, padded to whole tiles), quantises it, has vLLM generate 64
and 300 sequences of 600 tokens and 4 of 8,192 (or as many as the model has positions for), scores them with the
Megatron model in parity mode (with `--compare` also with ordinary operators and in BF16), takes three optimizer steps,
updates the engine's weights and compares again. Rows go to OUT/verify_CASE.json, |dlogp| and KL by position to
verify_CASE.png.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import require_hopper
from benchmarks.random_models import RandomModel
from benchmarks.warm_up import Product, compile_product, order
from jetrl_megatron import Fp8BlockRecipe
from jetrl_megatron.convert.stored import read_config
from jetrl_megatron.ops.bf16_linear import row_invariant_linear
from jetrl_megatron.verify.forward import packs
from jetrl_megatron.verify.training import STEP_SEQUENCES, STEP_TOKENS

CASES: dict[str, RandomModel | None] = {
    "qwen3_1024": RandomModel(family="qwen3", hidden=1024, intermediate=3072, heads=8, kv_heads=4, layers=8),
    "qwen3_4096": RandomModel(family="qwen3", hidden=4096, intermediate=12288, heads=32, kv_heads=8, layers=2),
    "qwen2_5120": RandomModel(family="qwen2", hidden=5120, intermediate=13824, heads=40, kv_heads=8, layers=2),
    "llama_8192": RandomModel(family="llama", hidden=8192, intermediate=28672, heads=64, kv_heads=8, layers=2),
    "smollm2": None,
}
BATCHES = "64x600,300x600,4x8192"
PROMPT = 32
TOKENS_PER_FORWARD = 16384
CAPTURED = (4, 64, 304)
ENGINE: dict[str, Any] = {
    # A size to capture for each batch, since DeepGEMM compiles for every size; a cache of known size, not measured.
    "compilation_config": {"cudagraph_capture_sizes": list(CAPTURED)},
    "max_num_batched_tokens": 16384,
    "max_num_seqs": max(CAPTURED),
    "kv_cache_memory_bytes": 8 << 30,
    "gpu_memory_utilization": 0.15,
}


def main() -> None:
    """Runs the cases one after the other; the status is the worst of theirs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_verify", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--rollout-tp", type=int, help="of the rollout, if it is another")
    parser.add_argument("--sequence-parallel", action="store_true", help="of training")
    parser.add_argument("--scale-format", choices=("ue8m0", "fp32"), default="ue8m0", help="of the recipe")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps before the weight update")
    parser.add_argument("--compare", action="store_true", help="also score with ordinary operators, and in BF16")
    parser.add_argument("--batches", default=BATCHES, help=f"sequences x generated tokens (default: {BATCHES})")
    parser.add_argument("--keep", type=Path, help="existing folder for models, requests and logs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile DeepGEMM's kernels first; 0: none"
    )
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))} unknown: use {', '.join(CASES)}")
    require_hopper()
    command = command_of(options, parser)
    statuses = [run(name, options, command) for name in options.cases.split(",")]
    raise SystemExit(max(statuses))


def command_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command line for the rows: what decides a result, and not where files lie."""
    words = ["python", "-m", "benchmarks.bench_verify"]
    for name, value in vars(options).items():
        if name in ("keep", "out", "workers") or value == parser.get_default(name):
            continue
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return shlex.join(words)


def run(name: str, options: argparse.Namespace, command: str) -> int:
    """One case; its status is that of `jetrl verify`."""
    from jetrl_megatron.demo.smollm import write_smollm
    from jetrl_megatron.verify.child import ChildError
    from jetrl_megatron.verify.hf_export import export_hf_folder
    from jetrl_megatron.verify.run import VerifyOptions, verify

    model, started = CASES[name], time.perf_counter()
    label = name + (f"_tp{options.tp}" if options.tp > 1 else "")
    label += f"_rollout_tp{options.rollout_tp}" if options.rollout_tp else ""
    label += "_sp" if options.sequence_parallel else ""
    label += "" if options.scale_format == "ue8m0" else f"_{options.scale_format}"
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        home = options.keep or Path(folder)
        train = write_smollm(home / name) if model is None else model.write(home / name)
        rollout = export_hf_folder(train, home / f"{name}-fp8", Fp8BlockRecipe(scale_format=options.scale_format))
        print(f"{name}: model made, {time.perf_counter() - started:.0f} s", flush=True)
        (sequences, tokens), *further = batches(options, read_config(rollout))
        if options.workers:
            compile_kernels(rollout, options)
            print(f"{name}: kernels compiled, {time.perf_counter() - started:.0f} s", flush=True)
        work = home / f"{name}-work"
        work.mkdir()
        try:
            report = verify(
                VerifyOptions(
                    train=train,
                    rollout=rollout,
                    tp=options.tp,
                    rollout_tp=options.rollout_tp,
                    sequence_parallel=options.sequence_parallel,
                    sequences=sequences,
                    tokens=tokens,
                    further=tuple(further),
                    prompt_tokens=PROMPT,
                    tokens_per_forward=TOKENS_PER_FORWARD,
                    variants=("parity", "ordinary", "bf16") if options.compare else ("parity",),
                    steps=options.steps,
                    engine_args=ENGINE,
                ),
                work,
                command,
            )
        except ChildError as error:
            print(f"{name}: {error}", flush=True)
            return 3
        options.out.mkdir(parents=True, exist_ok=True)
        report.write_json(options.out / f"verify_{label}.json")
        report.write_plot(options.out / f"verify_{label}.png")
        print(report.to_markdown(), f"\n{name}: {time.perf_counter() - started:.0f} s", flush=True)
        return report.status


def compile_kernels(folder: Path, options: argparse.Namespace) -> None:
    """DeepGEMM's kernels at the sizes that engine, scoring and optimizer steps use for a Hugging Face folder."""
    wanted, heads = products(folder, options)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        head = pool.starmap_async(compile_head, sorted(heads), chunksize=1)
        for _ in pool.imap_unordered(compile_product, order(wanted)):
            pass
        head.get()


def linears(config: Mapping[str, Any], tp: int = 1) -> list[tuple[int, int]]:
    """Rows and columns that a rank has of each linear of a decoder layer."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return [
        ((heads + 2 * kv_heads) * size // tp, hidden),
        (hidden, heads * size // tp),
        (2 * intermediate // tp, hidden),
        (hidden, intermediate // tp),
    ]


def products(folder: Path, options: argparse.Namespace) -> tuple[set[Product], set[tuple[int, int, int]]]:
    """Products of the decoder's linears, and (rows, columns, depth) of the head's."""
    config, tp = read_config(folder), options.tp
    shapes, hidden = linears(config, tp), config["hidden_size"]
    rows, scored = set(CAPTURED), set()
    for sequences, tokens in batches(options, config):
        rows |= {sequences * PROMPT}
        for pack in packs([PROMPT + tokens] * sequences, TOKENS_PER_FORWARD):
            rows |= {len(pack) * (PROMPT + tokens)}
            scored |= {sequences, len(pack) * tokens}
    wanted = {Product(m, n, k, along_tokens=False) for m in rows for n, k in shapes}
    if options.steps:
        trained = STEP_SEQUENCES["cuda"] * STEP_TOKENS["cuda"]
        for n, k in shapes:
            wanted |= {Product(trained, n, k, along_tokens=False), Product(trained, k, n, along_tokens=False)}
            wanted |= {Product(n, k, trained, along_tokens=True)}
    return wanted, {(m, config["vocab_size"] // tp, hidden) for m in scored}


def compile_head(rows: int, columns: int, depth: int) -> None:
    """Runs lm_head's product once."""
    x, weight = (torch.ones(size, depth, dtype=torch.bfloat16, device="cuda") for size in (rows, columns))
    row_invariant_linear(x, weight)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def batches(options: argparse.Namespace, config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Sequences and generated tokens of each batch, as many tokens at most as the model has positions for."""
    pairs = (batch.split("x") for batch in options.batches.split(","))
    longest = config["max_position_embeddings"] - PROMPT - 1
    return [(int(sequences), min(int(tokens), longest)) for sequences, tokens in pairs]


if __name__ == "__main__":
    main()
