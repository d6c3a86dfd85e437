from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.verify.engine import engine_arguments, engine_environment
from jetrl_megatron.verify.forward import packs
from jetrl_megatron.verify.requests import Batch, EngineRequest, Scoring, TrainingRequest
from jetrl_megatron.verify.rollouts import Rollout, ScoredSequence, load_rollouts, save_rollouts

RECIPE = JETRL_FP8.to_dict()


def test_engine_request_survives_json() -> None:
    batches = (Batch(name="start", prompts=((1, 2), (3,))), Batch(name="updated", weights="/update", prefill=True))
    request = EngineRequest(
        checkpoint="/fp8",
        recipe=RECIPE,
        cuda=True,
        tensor_parallel=2,
        batches=batches,
        engine_args={"seed": 1},
        environment={"A": "1"},
    )
    assert EngineRequest.from_dict(json.loads(json.dumps(dataclasses.asdict(request)))) == request


def test_training_request_survives_json() -> None:
    scorings = (
        Scoring(variant="parity", batches=("start",)),
        Scoring(variant="bf16", batches=("a", "b"), checkpoint="/c"),
    )
    request = TrainingRequest(hf_model="/hf", recipe=RECIPE, scorings=scorings, exports={"": "/fp8"}, steps=3)
    assert TrainingRequest.from_dict(json.loads(json.dumps(dataclasses.asdict(request)))) == request


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": []}, r"\['batch'\] are unknown: use batches, "),
        ({"batches": [{"name": "a", "token": 1}]}, r"\['token'\] are unknown"),
        ({"mode": "eager"}, "mode='eager' is unknown: use one of parity, default, bf16"),
        ({"recipe": None}, "mode='parity' needs a recipe"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be 1 or more"),
        ({"batches": [{"name": "a"}, {"name": "a"}]}, "give each its own"),
        ({"batches": [{"name": "a", "tokens": 0}]}, "tokens=0 must be 1 or more"),
        ({"batches": [{"name": "a", "prompts": [[1], []]}]}, "empty prompt"),
        ({"batches": [{"name": "a/b"}]}, "name='a/b'"),
    ],
)
def test_engine_request_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineRequest.from_dict({"checkpoint": "/fp8", "recipe": RECIPE, **fields})
    with pytest.raises(ValueError, match="variant='fp8' is unknown: use one of parity, ordinary, bf16"):
        Scoring(variant="fp8", batches=())


def test_engine_arguments_parity_on_gpu_are_the_recipes() -> None:
    batch = Batch(name="a", sequences=300, tokens=600, prompt_tokens=30)
    request = EngineRequest(checkpoint="/fp8", recipe=RECIPE, cuda=True, tensor_parallel=2, batches=(batch,))
    arguments = engine_arguments(request)
    assert {name: arguments[name] for name in JETRL_FP8.to_vllm_engine_args()} == JETRL_FP8.to_vllm_engine_args()
    assert arguments["tensor_parallel_size"] == 2 and arguments["max_model_len"] == 631
    # The fast mode: nothing that slows an engine down.
    assert not {"enforce_eager", "enable_prefix_caching", "max_num_seqs"} & set(arguments)
    default = engine_arguments(dataclasses.replace(request, mode="default"))
    assert not set(default) & (set(JETRL_FP8.to_vllm_engine_args()) - {"dtype"})


def test_engine_arguments_merge_nested_configurations() -> None:
    more = {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}, "seed": 7}
    request = EngineRequest(checkpoint="/fp8", recipe=RECIPE, cuda=True, engine_args=more)
    arguments, plain = engine_arguments(request), JETRL_FP8.to_vllm_engine_args()["compilation_config"]
    assert arguments["compilation_config"]["pass_config"] == plain["pass_config"] | {"fuse_norm_quant": True}
    assert arguments["compilation_config"]["custom_ops"] == plain["custom_ops"] and arguments["seed"] == 7


def test_engine_environment_goes_by_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    recipe = Fp8BlockRecipe(scale_format="fp32")
    request = EngineRequest(checkpoint="/fp8", recipe=recipe.to_dict(), cuda=True, environment={"X": "1"})
    environment = engine_environment(request)
    assert {name: environment[name] for name in recipe.to_vllm_env()} == recipe.to_vllm_env()
    assert environment["VLLM_USE_DEEP_GEMM_E8M0"] == "0", "the recipe decides, not the caller's environment"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO", "what changes no bits stays the caller's"
    assert environment["X"] == "1" and "VLLM_PLUGINS" not in environment
    for mode in ("default", "bf16"):
        other = engine_environment(dataclasses.replace(request, mode=mode))
        assert other["VLLM_PLUGINS"] == "" and "VLLM_USE_DEEP_GEMM_E8M0" not in other


def test_rollouts_survive_their_file_exact(tmp_path: Path) -> None:
    thirds = [-1 / 3, -2 / 3, -1e-9]
    sequences = [
        ScoredSequence([5, 6], [7, 8, 9], thirds, thirds),
        ScoredSequence([1], [2], [-0.5], [-0.25]),
    ]
    plain = Rollout.of([sequence._replace(prefill_logprobs=None) for sequence in sequences])
    save_rollouts({"a": Rollout.of(sequences), "b": plain}, tmp_path / "rollouts.safetensors")
    read = load_rollouts(tmp_path / "rollouts.safetensors")
    assert read["a"].lengths == [5, 2] and read["b"].prefill_logprobs_o is None
    assert [ids.tolist() for ids in read["a"].ids()] == [[5, 6, 7, 8, 9], [1, 2]]
    assert torch.equal(read["a"].logprobs_o, torch.tensor([*thirds, -0.5]))
    assert read["a"].mask().tolist() == [[True] * 3, [True, False, False]]
    assert read["b"].padded(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 3], [4, 0, 0]]


def test_rollout_refuses_counts_that_differ() -> None:
    with pytest.raises(ValueError, match=r"sequence 0: \[1, 2\] output tokens and log-probs"):
        Rollout.of([ScoredSequence([1], [2, 3], [-1.0])])
    with pytest.raises(ValueError, match=r"\[1\] log-probs for 2 output tokens"):
        Rollout.of([ScoredSequence([1], [2, 3], [-1.0, -2.0])]).padded(torch.zeros(1))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, [[0], [1], [2], [3]]), (11, [[0], [1], [2], [3]]), (12, [[0, 1], [2], [3]]), (42, [[0, 1, 2, 3]])],
)
def test_packs_hold_at_most_the_limit(limit: int, expected: list[list[int]]) -> None:
    assert list(packs([7, 5, 10, 20], limit)) == expected
    assert list(packs([], limit)) == []
