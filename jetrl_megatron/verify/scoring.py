"""Scores rollouts on Megatron ranks: `torchrun ... -m jetrl_megatron.verify.scoring REQUEST.json [RESULT.json]`.

The request is a `TrainingRequest`. RESULT.json holds what the precision-flow check and the comparison of weights found;
RESULT.safetensors beside it holds float32 log-probs under "VARIANT/BATCH", in the order of the rollout.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.elastic.multiprocessing.errors import record

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.verify.environment import request_paths
from jetrl_megatron.verify.ranks import load_model, operators_of, process_group
from jetrl_megatron.verify.requests import Scoring, TrainingRequest
from jetrl_megatron.verify.rollouts import Rollout, load_rollouts


def run_scorings(request: TrainingRequest) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Runs every forward that is asked for. A collective over all ranks.

    Returns:
        on rank 0, ready for JSON, "check": what the precision-flow checker found, None where it was not asked;
        "weights": for each key of `request.exports` the tensors that differ; and the log-probs by "VARIANT/BATCH".
    """
    rollouts = load_rollouts(Path(request.rollouts)) if request.rollouts else {}
    found: dict[str, Any] = {"check": None, "weights": {}}
    logprobs = {}
    for scoring in request.scorings:
        model = load_model(request, scoring.variant, scoring.checkpoint)
        if scoring.variant == "parity":
            _inspect(request, scoring, model, found)
        for name in scoring.batches:
            logprobs[f"{scoring.variant}/{name}"] = _score(request, scoring, model, rollouts[name])
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found, logprobs


def _inspect(request: TrainingRequest, scoring: Scoring, model: list[Any], found: dict[str, Any]) -> None:
    from jetrl_megatron.verify.loaded_weights import ServedPiece
    from jetrl_megatron.verify.static_check import static_check
    from jetrl_megatron.verify.weights import differing_weights

    if request.description is not None and found["check"] is None:
        found["check"] = static_check(model, json.loads(Path(request.description).read_text()))
    key = scoring.checkpoint or ""
    if key in request.exports and key not in found["weights"]:
        recipe = Fp8BlockRecipe.from_dict(request.recipe)
        served = [ServedPiece(*fields) for fields in request.served.get(key, ())]
        found["weights"][key] = differing_weights(model, Path(request.exports[key]), recipe, served)


def _score(request: TrainingRequest, scoring: Scoring, model: list[Any], rollout: Rollout) -> torch.Tensor:
    from jetrl_megatron.verify.forward import score

    vocabulary = json.loads((Path(request.hf_model) / "config.json").read_text())["vocab_size"]
    with operators_of(scoring.variant):
        return score(model, rollout, vocabulary=vocabulary, tokens_per_forward=request.tokens_per_forward)


# So that torchrun's own report ends with the traceback of the rank that failed.
@record
def main() -> None:
    """Command line: REQUEST.json, and the path of the result (default: REQUEST.result.json)."""
    request_path, result_path = request_paths("jetrl_megatron.verify.scoring")
    request = TrainingRequest.from_dict(json.loads(request_path.read_text()))
    with process_group():
        found, logprobs = run_scorings(request)
        if dist.get_rank() == 0:
            save_file(
                {name: tensor.contiguous() for name, tensor in logprobs.items()},
                result_path.with_suffix(".safetensors"),
            )
            result_path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
