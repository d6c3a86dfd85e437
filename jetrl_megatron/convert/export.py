"""From a trained model, live or saved, to a block-FP8 checkpoint that vLLM loads.

Both routes are one: source -> logical matrices -> `iter_fp8_weights` -> the files of a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.convert.bridge import import_bridge
from jetrl_megatron.convert.conversion import ConvertOptions, HfConfigSource, Job, open_conversion, prepare_job
from jetrl_megatron.convert.fp8_weights import iter_fp8_weights
from jetrl_megatron.convert.hf_model import open_hf_model
from jetrl_megatron.convert.live import check_model_recipe, gather_linears, unwrapped, wait_for_parameters
from jetrl_megatron.convert.ranks import ALONE, Ranks
from jetrl_megatron.convert.writer import SHARD_BYTES, check_out, write_export
from jetrl_megatron.recipe import Fp8BlockRecipe


def convert_checkpoint(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    hf_config: HfConfigSource,
    recipe: Fp8BlockRecipe | None = None,
    recipe_fields: Mapping[str, Any] | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    rollout_tp: int | None = None,
    scale_dtype: str = "float32",
    max_shard_size: int = SHARD_BYTES,
    workers: int | None = None,
    force: bool = False,
    verify: bool = False,
    ranks: Ranks = ALONE,
) -> Path:
    """Converts a saved checkpoint of any parallel layout, without a GPU and one parameter at a time.

    A conversion that was killed goes on where it was when it is called again with the same source and options; its work
    lies in .OUT.partial beside `out`.

    Args:
        src: the checkpoint, or a training folder, of which the last iteration is taken.
        out: the folder to make; it appears when it is complete.
        hf_config: the Hugging Face model that was trained.
        recipe: how to quantise. Where the checkpoint carries its training run's recipe, that one is used and this one
            may only repeat it; where it carries none, None means the default recipe.
        recipe_fields: single fields to ask for instead of a whole recipe.
        tokenizer_from: folder with the tokenizer; None takes the one beside config.json, if there is one.
        rollout_tp: tensor-parallel size that the engine will use; shapes that it cannot cut are refused.
        scale_dtype: in which scales are stored; "float8_e8m0fnu", a byte each, holds those of an ue8m0 recipe.
        max_shard_size: largest weight file, in bytes of tensors.
        workers: threads; None takes the cores of this process, but no more than 8.
        force: replace an export that is there already.
        verify: read the weights back and compare them with the source before `out` appears.
        ranks: the processes that share the work, each of which calls this.

    Returns:
        `out`.

    Raises:
        ValueError: a file is missing or damaged, the checkpoint is not that of the model, a weight is not finite, or an
            argument contradicts the checkpoint. Nothing is left behind.
    """
    options = ConvertOptions(
        hf_config, recipe, recipe_fields, tokenizer_from, rollout_tp, scale_dtype, max_shard_size, workers
    )
    conversion = ranks.agree(lambda: open_conversion(src, out, options))
    return conversion.run(force=force, verify=verify, ranks=ranks)


def export_vllm_checkpoint(
    model: torch.nn.Module | list[torch.nn.Module],
    out: str | os.PathLike[str],
    *,
    hf_config: HfConfigSource,
    recipe: Fp8BlockRecipe | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    rollout_tp: int | None = None,
    scale_dtype: str = "float32",
    force: bool = False,
) -> Path:
    """Exports a live Megatron model. A collective: every rank calls it, and rank 0 writes.

    Args:
        model: the rank's model, or its list of virtual pipeline stages, wrapped or not.
        out: the folder to make, on rank 0; it appears when it is complete.
        hf_config: the Hugging Face model that is trained.
        recipe: None takes the recipe of the model's FP8 layers; another one is refused.
        tokenizer_from: folder with the tokenizer; None takes the one beside config.json, if there is one.
        rollout_tp, scale_dtype: as for `convert_checkpoint`.
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
    names = sorted({state.name for state in linears})

    def prepare() -> Job:
        check_out(Path(out), force=force)
        return prepare_job(out, hf_config, recipe, names, tokenizer_from, rollout_tp, scale_dtype)

    job = _on_rank_0(prepare)
    hf = open_hf_model(hf_config)
    stream = import_bridge().AutoBridge.from_hf_config(hf.config).export_hf_weights(models, show_progress=False)

    def write() -> None:
        assert job is not None
        untied = job.mapping.without_tied_head(job.mapping.from_hf(name, tensor) for name, tensor in stream)
        tensors = iter_fp8_weights(untied, recipe, job.mapping.num_layers, job.plan.scale_dtype)
        try:
            write_export(tensors, Path(out), plan=job.plan, config=job.config, files=job.files, force=force)
        finally:
            # The others wait in Bridge's collectives: they are run to the end, whatever happened to the file.
            _drain(stream)

    if dist.get_rank() != 0:
        _drain(stream)
    _on_rank_0(write)
    return Path(out)


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
