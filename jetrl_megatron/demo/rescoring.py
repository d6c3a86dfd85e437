"""What the trained checkpoint computes in other layouts, and what it says about the tokens that vLLM generated.

Runs on every rank of two, in a process that has not seen the training: everything comes from the checkpoint.
"""

# Shape suffixes: S token positions.

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from jetrl_megatron.demo.options import DemoFolder, layout_label
from jetrl_megatron.demo.scales import write_layers
from jetrl_megatron.integrations.megatron_bridge import build_model
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.verify.forward import score_pack
from jetrl_megatron.verify.model import gpt_model, initialize_groups, load_checkpoint
from jetrl_megatron.verify.progress import report_progress

LAYOUTS = ((2, 1), (1, 2), (1, 1))
"""(tensor, pipeline) parallel sizes; the last one scores, and spreads the sequences over the ranks."""

SCORED = {"fp8": ("fp8_tp1", "fp8_tp2"), "bf16": ("fp8_tp1", "bf16_tp1")}
"""Precision of the forward to names of the rollouts that it scores."""

Sequences = list[dict[str, list[int]]]


def rescore(folder: DemoFolder) -> None:
    """Writes down codes and scales per layout, and the log-probs of all generated tokens in FP8 and in BF16."""
    for tp, pp in LAYOUTS:
        initialize_groups(tp, pp)
        model = load(folder, tp, pp, JETRL_FP8)
        if parallel_state.get_data_parallel_rank() == 0:
            write_layers(gpt_model(model).decoder.layers, folder.layer_scales(layout_label(tp, pp)), dist.get_rank())
    vocabulary = json.loads((folder.model / "config.json").read_text())["vocab_size"]
    score(model, read_rollouts(folder, SCORED["fp8"]), folder.rescored("fp8"), vocabulary)
    score(load(folder, 1, 1, None), read_rollouts(folder, SCORED["bf16"]), folder.rescored("bf16"), vocabulary)


def load(folder: DemoFolder, tp: int, pp: int, recipe: Fp8BlockRecipe | None) -> list[Any]:
    """The trained model in another layout; without a recipe every linear is Megatron's own, in BF16."""
    model = build_model(
        folder.model,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        recipe=recipe,
        load_weights=False,
        perform_initialization=False,
    )
    load_checkpoint(model, folder.checkpoint)
    return model


def read_rollouts(folder: DemoFolder, names: Sequence[str]) -> dict[str, Sequences]:
    """Prompt and output token ids, by the rollout's name."""
    return {name: json.loads(folder.rollout_result(name).read_text())["sequences"] for name in names}


def score(model: Sequence[Any], rollouts: dict[str, Sequences], path: Path, vocabulary: int) -> None:
    """Writes, per rollout, the log-prob of each generated token: rank 0, after all ranks did their part."""
    module = gpt_model(model).eval()
    jobs = [(name, index) for name, sequences in rollouts.items() for index in range(len(sequences))]
    mine = jobs[dist.get_rank() :: dist.get_world_size()]
    scored = {}
    for done, (name, index) in enumerate(mine):
        sequence = rollouts[name][index]
        ids_S = torch.tensor([*sequence["prompt"], *sequence["output"]])
        scored[name, index] = score_pack(module, [(ids_S, len(sequence["prompt"]))], vocabulary).tolist()
        if dist.get_rank() == 0:
            report_progress(done + 1, len(mine), path.stem)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, scored)
    if dist.get_rank() == 0:
        everything = {job: logprobs for part in gathered for job, logprobs in part.items()}
        result = {name: [everything[name, i] for i in range(len(rollouts[name]))] for name in rollouts}
        path.write_text(json.dumps(result))
