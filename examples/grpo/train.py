"""Trains a policy with GRPO: `python -m examples.grpo.train --out runs/a`; torchrun runs it again on every rank."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import sys
import time

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from examples.grpo.options import Options, parse
from examples.grpo.task import dataset
from jetrl_megatron.demo.models import WRITTEN
from jetrl_megatron.verify.environment import megatron_command, megatron_environment
from jetrl_megatron.verify.files import hold, make_once, write_whole
from jetrl_megatron.verify.hf_export import export_hf_folder
from jetrl_megatron.verify.ranks import operators_of, process_group


def prepare(options: Options) -> None:
    """Checks what can be checked before processes start, and makes the run's folder. Raises ValueError."""
    gpus, known = torch.cuda.device_count(), options.folder / "options.json"
    if gpus and options.tp > gpus:
        raise ValueError(f"tp={options.tp}: {gpus} GPUs are visible, use a smaller one")
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard=True: it is not installed, pip install tensorboard or leave it out")
    if options.model not in WRITTEN and not (options.hf_model / "config.json").is_file():
        raise ValueError(f"model={options.model!r}: no config.json there, use a folder or {', '.join(WRITTEN)}")
    dataset(options, seed=0, size=1)
    if known.is_file():
        options.require_resumable(json.loads(known.read_text()))
    elif options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        raise ValueError(f"out={options.out!r}: holds something that is no run, name another folder")
    for folder in (options.folder, options.checkpoint.parent):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(known, json.dumps(dataclasses.asdict(options), indent=1))
    make_once(options.hf_model, lambda out: WRITTEN[options.model](out))
    make_once(options.checkpoint, lambda out: export_hf_folder(options.hf_model, out, options.recipes[1]))


@record
def run_rank(job: str) -> None:
    """One rank's part. Megatron is imported when the process group is there, as `process_group` wants it."""
    with process_group(), operators_of("parity"):
        from examples.grpo.loop import Run

        fields = json.loads(job)
        Run(Options(**fields["options"]), fields["deadline"]).main()


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--job"]:
        return run_rank(sys.argv[2])
    started, options = time.time(), parse()
    try:
        prepare(options)
        hold(options.folder)
    except ValueError as error:
        raise SystemExit(f"python -m examples.grpo.train: error: {error}") from error
    deadline = started + options.time_budget if options.time_budget else math.inf
    job = json.dumps({"options": dataclasses.asdict(options), "deadline": deadline})
    environment = {**os.environ, **megatron_environment(options.tp, cuda=torch.cuda.is_available())}
    os.execve(sys.executable, megatron_command("examples.grpo.train", ["--job", job], options.tp), environment)


if __name__ == "__main__":
    main()
