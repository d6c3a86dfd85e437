"""Runs test bodies on several ranks of one machine: imports once, forks the ranks, gathers what they return.

`python -m tests.distributed.ranks MODULE WORLD OUT` runs MODULE.BODIES (a dict of functions) on WORLD ranks over gloo
and saves {name: [result of rank 0, 1, ...]} to OUT. Megatron's imports cost many seconds, so bodies share one launch
and set up their own parallel state.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.integrations import megatron_cpu

ROOT = Path(__file__).parents[2]


def launch(module: str, world: int, out: Path, timeout: int = 600) -> dict[str, list[Any]]:
    """Runs a module's bodies in a fresh interpreter and returns their results by name, one entry per rank."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.ranks", module, str(world), str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-6000:]
    results: dict[str, list[Any]] = torch.load(out, weights_only=False)
    return results


def _rank_main(module: str, rank: int, world: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1")
    torch.set_num_threads(1)
    results = {}
    try:
        for name, body in importlib.import_module(module).BODIES.items():
            results[name] = _run_body(body, f"file://{folder}/{name}", rank, world)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # peers may be inside a collective: leave at once, the parent ends them
    torch.save(results, f"{folder}/rank{rank}.pt")


def _run_body(body: Callable[[], Any], init_method: str, rank: int, world: int) -> Any:
    # All groups go with the body: each keeps threads that poll, and Megatron makes dozens of groups.
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    from megatron.core import parallel_state

    result = body()
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return result


def main(module: str, world: int, out: str) -> int:
    megatron_cpu.install()
    importlib.import_module(module)
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank_main, args=(module, rank, world, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            for process in ranks:
                process.join(timeout=0.2)
            if any(process.exitcode not in (None, 0) for process in ranks):
                for process in ranks:
                    process.terminate()
        if any(process.exitcode for process in ranks):
            return 1
        per_rank = [torch.load(f"{folder}/rank{rank}.pt", weights_only=False) for rank in range(world)]
        torch.save({name: [results[name] for results in per_rank] for name in per_rank[0]}, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
