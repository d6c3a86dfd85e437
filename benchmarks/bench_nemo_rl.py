"""NeMo-RL's own GRPO on one GPU, with `precision: jetrl_fp8` and with both baselines: what mismatch each step has.

    python -m benchmarks.bench_nemo_rl [--model FOLDER] [--steps 3] [--runs jetrl_fp8,bf16,...] [KEY=VALUE ...]

Each run is the command that a user types, on conf/grpo_smoke_1n1g.yaml. Without a model a random one with a tokenizer
of bytes is made; its rewards are all zero, so weight decay is what changes the weights. `token_mult_prob_error` and
`gen_kl_error` are read from NeMo-RL's TensorBoard files. Rows of runs that are not asked for stay in the result file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command, device_name, require_hopper, versions
from benchmarks.random_models import RandomModel
from jetrl_megatron.integrations.nemo_rl.checkout import require_nemo_rl_checkout
from jetrl_megatron.integrations.nemo_rl.seams import release_of_checkout

ROOT = Path(__file__).parents[1]
CONFIG = "conf/grpo_smoke_1n1g.yaml"
RUNS: Mapping[str, Sequence[str]] = {
    "jetrl_fp8": (),
    "bf16": ("--overlay", "conf/overlays/bf16.yaml"),
    "bf16_train_fp8_rollout": ("--overlay", "conf/overlays/bf16_train_fp8_rollout.yaml"),
}
METRICS = ("token_mult_prob_error", "gen_kl_error", "loss", "grad_norm")
MODEL = RandomModel(family="qwen3", hidden=1024, intermediate=3072, heads=8, kv_heads=4, layers=4)
_MOVES = ("policy.megatron_cfg.optimizer.lr=0.01", "policy.megatron_cfg.optimizer.weight_decay=0.1")
_CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def main() -> None:
    """Runs all, prints a table, and writes it as JSON; the status is 1 if a run fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_nemo_rl", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: a random model)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--runs", default=",".join(RUNS), help=f"comma-separated, of {', '.join(RUNS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "nemo_rl.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of NeMo-RL's configuration")
    arguments = parser.parse_intermixed_args()
    require_hopper()
    try:
        root = require_nemo_rl_checkout()
    except ValueError as error:
        parser.error(str(error))
    release = release_of_checkout(root)
    with tempfile.TemporaryDirectory(prefix="jetrl-nemo-rl-") as folder:
        rows = [run_one(name, arguments, Path(folder), release) for name in arguments.runs.split(",")]
    for row in rows:
        print(f"{row['run']:24} {row['status']:>3} {row['seconds']:7.1f} s")
        for metric, values in row["metrics"].items():
            print(f"    {metric:24} {'  '.join(f'{value:.9g}' for value in values)}")
    kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    kept = [row for row in kept if row["run"] not in {row["run"] for row in rows}]
    arguments.out.write_text(json.dumps([*kept, *rows], indent=1) + "\n")
    sys.exit(max(row["status"] != 0 for row in rows))


def run_one(name: str, arguments: argparse.Namespace, folder: Path, release: str) -> dict[str, Any]:
    """One run of NeMo-RL in a process of its own.

    Returns:
        what identifies the row; "run", "overrides" of NeMo-RL's configuration, exit "status", "seconds", and "metrics":
        for each metric its value in each step.
    """
    model, overrides = arguments.model, list(arguments.overrides)
    if model is None:
        model, overrides = random_model(folder / "model"), [*_MOVES, *overrides]
    logs = folder / name
    started_with = [
        sys.executable, "-m", "jetrl_megatron.integrations.nemo_rl", "grpo", "--config", CONFIG, *RUNS[name],
        f"policy.model_name={model}", f"grpo.max_num_steps={arguments.steps}", f"logger.log_dir={logs}", *overrides,
    ]  # fmt: skip
    environment = {
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "NRL_MEGATRON_CHECKPOINT_DIR": str(folder / "megatron"),
        **os.environ,
    }
    started = time.perf_counter()
    done = subprocess.run(started_with, cwd=ROOT, env=environment, check=False)
    seconds = time.perf_counter() - started
    return {
        "bench": "nemo_rl",
        "run": name,
        "overrides": overrides,
        "device": device_name(torch.device("cuda")),
        "versions": {**versions(), "nemo-rl": release},
        "command": command("bench_nemo_rl"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "status": done.returncode,
        "seconds": round(seconds, 1),
        "metrics": read_metrics(logs),
    }


def read_metrics(logs: Path) -> dict[str, list[float]]:
    """The metrics of training steps in the TensorBoard files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for file in sorted(logs.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            if tag.startswith("train/") and tag.removeprefix("train/") in METRICS:
                found[tag.removeprefix("train/")] = [event.value for event in events.Scalars(tag)]
    return found


def random_model(folder: Path) -> Path:
    """A random model with a tokenizer whose tokens are bytes; made once."""
    if folder.exists():
        return folder
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    MODEL.write(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
