"""What this package takes hold of in NeMo-RL, and whether the checkout that is there still has it.

Read from NeMo-RL's sources without importing them, so that a checkout that does not fit is refused before Ray starts,
and can be looked at on a machine without GPUs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUPPORTED_NEMO_RL = "0.7"
"""Release series of NeMo-RL that the workers know; their Megatron-Core and Megatron-Bridge are this package's."""

_REPOSITORY = "github.com/NVIDIA-NeMo/RL"


class UnsupportedNemoRL(ValueError):
    """The NeMo-RL checkout is of another release, or something that the workers take hold of has changed."""


class Seam(NamedTuple):
    """A function, method or name of NeMo-RL's.

    Attributes:
        file: below the checkout.
        name: "function", "Class.method" or the name of a variable.
        parameters: of a function, in this order; further ones must have defaults. None for a variable.
    """

    file: str
    name: str
    parameters: tuple[str, ...] | None


_POLICY_WORKER = "nemo_rl/models/policy/workers/megatron_policy_worker.py"
_ENGINE_WORKER = "nemo_rl/models/generation/vllm/vllm_worker.py"
_ASYNC_ENGINE_WORKER = "nemo_rl/models/generation/vllm/vllm_worker_async.py"
_ENGINE_BACKEND = "nemo_rl/models/generation/vllm/vllm_backend.py"
_MODEL_UTILS = "nemo_rl/distributed/model_utils.py"
_RESOLVER = ("default_cls", "config")
_LOG_PROB = ("ctx", "vocab_parallel_logits", "target", "vocab_start_index", "vocab_end_index")

SEAMS = (
    # The driver: which worker classes run, and with which Python.
    Seam("nemo_rl/models/policy/utils.py", "resolve_policy_worker_cls", _RESOLVER),
    Seam("nemo_rl/models/generation/vllm/utils.py", "resolve_generation_worker_cls", _RESOLVER),
    Seam("nemo_rl/distributed/ray_actor_environment_registry.py", "ACTOR_ENVIRONMENT_REGISTRY", None),
    Seam("nemo_rl/utils/config.py", "parse_hydra_overrides", ("cfg", "overrides")),
    Seam("examples/run_grpo.py", "main", ()),
    # Training: the layer spec, the head, the caches, and weight sync in the place of NeMo-RL's.
    Seam("nemo_rl/models/megatron/setup.py", "setup_model_and_optimizer", ("policy_cfg", "megatron_cfg")),
    Seam(_POLICY_WORKER, "MegatronPolicyWorkerImpl.prepare_refit_info", ("self",)),
    Seam(_POLICY_WORKER, "MegatronPolicyWorkerImpl.stream_weights_via_ipc_zmq", ("self",)),
    Seam(_POLICY_WORKER, "MegatronPolicyWorkerImpl.broadcast_weights_for_collective", ("self",)),
    Seam(_POLICY_WORKER, "MegatronPolicyWorkerImpl.offload_after_refit", ("self",)),
    Seam(
        "nemo_rl/models/policy/workers/base_policy_worker.py",
        "AbstractPolicyWorker.init_collective",
        ("self", "ip", "port", "world_size", "train_world_size"),
    ),
    # Training: log-probs in vLLM's order of summation.
    Seam(_MODEL_UTILS, "DistributedLogprob.forward", (*_LOG_PROB, "group")),
    Seam(_MODEL_UTILS, "ChunkedDistributedLogprob.forward", (*_LOG_PROB, "chunk_size", "tp_group")),
    # Generation: the engine's arguments, and the receiver in the place of NeMo-RL's.
    Seam(_ENGINE_WORKER, "VllmGenerationWorkerImpl._create_engine", ("self", "llm_kwargs")),
    Seam(_ASYNC_ENGINE_WORKER, "VllmAsyncGenerationWorkerImpl._create_engine", ("self", "llm_kwargs")),
    Seam(_ENGINE_BACKEND, "VllmInternalWorkerExtension._load_weights", ("self", "weights")),
    Seam(_ENGINE_BACKEND, "VllmInternalWorkerExtension.prepare_refit_info", ("self", "state_dict_info")),
    Seam(_ENGINE_BACKEND, "VllmInternalWorkerExtension.update_weights_via_ipc_zmq", ("self",)),
    Seam(_ENGINE_BACKEND, "VllmInternalWorkerExtension.update_weights_from_collective", ("self",)),
    Seam(
        _ENGINE_BACKEND,
        "VllmInternalWorkerExtension.init_collective",
        ("self", "rank_prefix", "ip", "port", "world_size", "train_world_size"),
    ),
)


def check_checkout(root: Path) -> str:
    """Checks a checkout's release and everything that the workers take hold of.

    Args:
        root: folder of the checkout.

    Returns:
        its release, e.g. "0.7.0".

    Raises:
        UnsupportedNemoRL: it is another release, or a seam has changed; the message names each.
    """
    version = release_of_checkout(root)
    if version.rpartition(".")[0] != SUPPORTED_NEMO_RL:
        raise UnsupportedNemoRL(
            f"nemo_rl {version} in {root} is not supported: check out release {SUPPORTED_NEMO_RL}.x of {_REPOSITORY} "
            f"(git checkout v{SUPPORTED_NEMO_RL}.0); main needs another Megatron-Core than this package"
        )
    problems = list(seam_problems(root))
    if problems:
        raise UnsupportedNemoRL(
            f"nemo_rl {version} in {root} is not the {SUPPORTED_NEMO_RL}.x that this package knows: "
            f"{'; '.join(problems)}; check out v{SUPPORTED_NEMO_RL}.0"
        )
    return version


def release_of_checkout(root: Path) -> str:
    """The release that a checkout calls itself, e.g. "0.7.0"; development versions keep the last release's number.

    Raises:
        UnsupportedNemoRL: its package_info.py names none.
    """
    numbers: dict[str, object] = {}
    for node in _parsed(root / "nemo_rl" / "package_info.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            numbers |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    try:
        return ".".join(str(numbers[part]) for part in ("MAJOR", "MINOR", "PATCH"))
    except KeyError as error:
        raise UnsupportedNemoRL(f"{root}/nemo_rl/package_info.py has no {error}: it is no NeMo-RL checkout") from error


def seam_problems(root: Path) -> Iterator[str]:
    """One line for each seam that a checkout has not, or has with other parameters."""
    trees: dict[str, ast.Module] = {}
    for seam in SEAMS:
        path = root / seam.file
        if not path.is_file():
            yield f"{seam.file} is missing"
            continue
        if seam.file not in trees:
            trees[seam.file] = _parsed(path)
        found = _find(trees[seam.file], seam.name)
        if found is None:
            yield f"{seam.file} has no {seam.name}"
        elif seam.parameters is not None:
            yield from _parameter_problems(seam, found)


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def _find(tree: ast.Module, name: str) -> ast.AST | None:
    scope: list[ast.stmt] = tree.body
    node: ast.AST | None = None
    for part in name.split("."):
        node = next((statement for statement in scope if part in _names(statement)), None)
        if node is None:
            return None
        scope = getattr(node, "body", [])
    return node


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameter_problems(seam: Seam, found: ast.AST) -> Iterator[str]:
    assert seam.parameters is not None
    if not isinstance(found, ast.FunctionDef):
        yield f"{seam.name} in {seam.file} is no function"
        return
    arguments = found.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keyword = [argument.arg for argument in arguments.kwonlyargs]
    optional = set(positional[len(positional) - len(arguments.defaults) :])
    optional |= {name for name, default in zip(keyword, arguments.kw_defaults, strict=True) if default is not None}
    has = [name for name in (*positional, *keyword) if name in seam.parameters or name not in optional]
    if tuple(has) != seam.parameters:
        yield f"{seam.name} in {seam.file} takes ({', '.join(has)}) where ({', '.join(seam.parameters)}) is known"
