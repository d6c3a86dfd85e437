"""NeMo-RL's driver process: our worker classes in the place of its own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_megatron.integrations.nemo_rl.resolution import SECTION

_PACKAGE = __name__.rpartition(".")[0]
_MEGATRON = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
BASELINES: Mapping[str, str] = {
    _MEGATRON: f"{_PACKAGE}.policy_worker.BaselineMegatronPolicyWorker",
    "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker": (
        f"{_PACKAGE}.generation_worker.JetRLVllmGenerationWorker"
    ),
    "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker": (
        f"{_PACKAGE}.generation_worker.JetRLVllmAsyncGenerationWorker"
    ),
}
"""NeMo-RL's worker classes, and them beside the releases of vLLM and Megatron-Core that this package is for."""
WORKERS: Mapping[str, str] = {**BASELINES, _MEGATRON: f"{_PACKAGE}.policy_worker.JetRLMegatronPolicyWorker"}
"""NeMo-RL's worker classes and those of our policies; the ones of vLLM look at the configuration."""

_RESOLVERS = (
    ("nemo_rl.models.policy.lm_policy", "resolve_policy_worker_cls"),
    ("nemo_rl.models.generation.vllm.vllm_generation", "resolve_generation_worker_cls"),
)


def register_workers() -> None:
    """Has NeMo-RL start our workers, with this process's Python; may be called any number of times.

    A configuration without the section that `resolve` writes, a baseline, gets NeMo-RL's own workers; those of Megatron
    and vLLM are fitted to this environment's releases, which are newer than NeMo-RL's.
    """
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    cluster = importlib.import_module("nemo_rl.distributed.virtual_cluster")
    for ours in {*WORKERS.values(), *BASELINES.values()}:
        registry.ACTOR_ENVIRONMENT_REGISTRY[ours] = cluster.PY_EXECUTABLES.SYSTEM
    for name, function in _RESOLVERS:
        module = importlib.import_module(name)
        theirs = getattr(module, function)
        if not hasattr(theirs, "jetrl_workers"):
            setattr(module, function, _with_our_workers(theirs))


def _with_our_workers(theirs: Callable[[str, Any], str]) -> Callable[[str, Any], str]:
    @functools.wraps(theirs)
    def resolve(default_cls: str, config: Any) -> str:
        worker = theirs(default_cls, config)
        if config.get(SECTION) is None:
            return BASELINES.get(worker, worker)
        if worker not in WORKERS:
            raise ValueError(
                f"worker={worker} cannot run precision: jetrl_fp8: use the Megatron backend and vLLM, "
                f"{', '.join(WORKERS)}"
            )
        return WORKERS[worker]

    resolve.jetrl_workers = True  # type: ignore[attr-defined]
    return resolve
