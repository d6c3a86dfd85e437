"""From a trained model, live or saved, to a block-FP8 checkpoint that vLLM loads.

Both routes are one: source -> logical matrices -> `iter_fp8_weights` -> `write_export`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from jetrl_megatron.convert.bridge import import_bridge
from jetrl_megatron.convert.fp8_weights import is_decoder_linear, iter_fp8_weights
from jetrl_megatron.convert.hf_model import HfModel, open_hf_model
from jetrl_megatron.convert.live import check_model_recipe, gather_linears, unwrapped, wait_for_parameters
from jetrl_megatron.convert.mapping import HfMapping, LogicalMatrix
from jetrl_megatron.convert.plan import ExportPlan, plan_export
from jetrl_megatron.convert.recipe_file import choose_recipe
from jetrl_megatron.convert.rollout_tp import check_rollout_tp
from jetrl_megatron.convert.shards import ShardedCheckpoint
from jetrl_megatron.convert.writer import check_out, export_config, write_export
from jetrl_megatron.recipe import Fp8BlockRecipe

type HfConfigSource = PretrainedConfig | str | os.PathLike[str]
"""A configuration object, or the folder that holds config.json."""


def convert_checkpoint(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    hf_config: HfConfigSource,
    recipe: Fp8BlockRecipe | None = None,
    recipe_fields: Mapping[str, Any] | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    rollout_tp: int | None = None,
    force: bool = False,
) -> Path:
    """Converts a torch_dist checkpoint of any parallel layout, in one process and without a GPU.

    Args:
        src: the checkpoint, or a training folder, of which the last iteration is taken.
        out: the folder to make; it appears when it is complete.
        hf_config: the Hugging Face model that was trained.
        recipe: how to quantise. Where the checkpoint carries its training run's recipe, that one is used and this one
            may only repeat it; where it carries none, None means the default recipe.
        recipe_fields: single fields to ask for instead of a whole recipe.
        tokenizer_from: folder with the tokenizer; None takes the one beside config.json, if there is one.
        rollout_tp: tensor-parallel size that the engine will use; shapes that it cannot cut are refused.
        force: replace an export that is there already.

    Returns:
        `out`.

    Raises:
        ValueError: a file is missing or damaged, the checkpoint is not that of the model, a weight is not finite, or an
            argument contradicts the checkpoint. Nothing is left behind.
    """
    checkpoint = ShardedCheckpoint(src)
    recipe = choose_recipe(checkpoint.folder, recipe, recipe_fields)
    modules = {parameter.name.rpartition(".")[0] for parameter in checkpoint.parameters}
    linears = sorted(filter(is_decoder_linear, modules))
    job = _prepare(out, hf_config, recipe, linears, _Options(tokenizer_from, rollout_tp, force))
    names = {name for parameter in checkpoint.parameters for name in job.mapping.targets(parameter.name)}
    job.plan.check_sources(job.mapping.untied_names(names))
    return job.write(
        matrix
        for parameter in checkpoint.parameters
        for matrix in job.mapping.split(parameter.name, checkpoint.read(parameter))
    )


def export_vllm_checkpoint(
    model: torch.nn.Module | list[torch.nn.Module],
    out: str | os.PathLike[str],
    *,
    hf_config: HfConfigSource,
    recipe: Fp8BlockRecipe | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    rollout_tp: int | None = None,
    force: bool = False,
) -> Path:
    """Exports a live Megatron model. A collective: every rank calls it, and rank 0 writes.

    Args:
        model: the rank's model, or its list of virtual pipeline stages, wrapped or not.
        out: the folder to make, on rank 0; it appears when it is complete.
        hf_config: the Hugging Face model that is trained.
        recipe: None takes the recipe of the model's FP8 layers; another one is refused.
        tokenizer_from: folder with the tokenizer; None takes the one beside config.json, if there is one.
        rollout_tp: tensor-parallel size that the engine will use; shapes that it cannot cut are refused.
        force: replace an export that is there already.

    Returns:
        `out`, on every rank, once it is complete.

    Raises:
        ValueError: on every rank: the model has no FP8 layers or mixes recipes, a layer does not run in the precision
            that the recipe says, the model is not that of `hf_config`, or a weight is not finite. Nothing is left
            behind.
    """
    chunks = model if isinstance(model, list) else [model]
    for chunk in chunks:
        wait_for_parameters(chunk)
    models = [unwrapped(chunk) for chunk in chunks]
    linears, num_layers = gather_linears(models), models[0].config.num_layers
    recipe = check_model_recipe(linears, recipe, num_layers)
    options = _Options(tokenizer_from, rollout_tp, force)
    names = sorted({state.name for state in linears})
    job = _on_rank_0(lambda: _prepare(out, hf_config, recipe, names, options))
    hf = open_hf_model(hf_config)
    stream = import_bridge().AutoBridge.from_hf_config(hf.config).export_hf_weights(models, show_progress=False)

    def write() -> None:
        assert job is not None
        try:
            job.write(job.mapping.from_hf(name, tensor) for name, tensor in stream)
        finally:
            # The others wait in Bridge's collectives: they are run to the end, whatever happened to the file.
            _drain(stream)

    if dist.get_rank() != 0:
        _drain(stream)
    _on_rank_0(write)
    return Path(out)


@dataclass(frozen=True)
class _Options:
    tokenizer_from: str | os.PathLike[str] | None
    rollout_tp: int | None
    force: bool


@dataclass(frozen=True)
class _Job:
    """An export of which everything is known but the weights."""

    out: Path
    hf: HfModel
    recipe: Fp8BlockRecipe
    mapping: HfMapping
    plan: ExportPlan
    files: list[Path]
    force: bool

    def write(self, matrices: Iterable[LogicalMatrix]) -> Path:
        """Quantises and writes."""
        untied = self.mapping.without_tied_head(matrices)
        return write_export(
            iter_fp8_weights(untied, self.recipe, self.mapping.num_layers),
            self.out,
            plan=self.plan,
            config=export_config(self.hf, self.recipe, self.plan.ignored),
            files=self.files,
            force=self.force,
        )


def _prepare(
    out: str | os.PathLike[str],
    hf_config: HfConfigSource,
    recipe: Fp8BlockRecipe,
    linears: list[str],
    options: _Options,
) -> _Job:
    """Checks everything that can be checked before the first weight is read."""
    check_out(Path(out), force=options.force)
    hf = open_hf_model(hf_config)
    files = hf.files(options.tokenizer_from)
    if options.rollout_tp is not None:
        check_rollout_tp(hf.config, options.rollout_tp, recipe)
    mapping = HfMapping(hf)
    plan = plan_export(hf, mapping, linears, recipe)
    return _Job(Path(out), hf, recipe, mapping, plan, files, options.force)


def _drain(stream: Iterator[object]) -> None:
    for _ in stream:
        pass


def _on_rank_0[T](action: Callable[[], T]) -> T | None:
    """Runs the action on rank 0; every rank raises if it fails there.

    Raises:
        Exception: the action's own on rank 0; elsewhere ValueError with its text.
    """
    result: T | None = None
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:
            failure = error
    text = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    dist.broadcast_object_list(text, src=0)
    if failure is not None:
        raise failure
    if text[0] is not None:
        raise ValueError(f"rank 0 failed: {text[0]}")
    return result
