"""What a live Megatron model says about itself: its linears, which of them run in FP8, and by which recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from jetrl_megatron.convert.fp8_weights import is_decoder_linear
from jetrl_megatron.convert.parameters import canonical_name
from jetrl_megatron.recipe import Fp8BlockRecipe

_LOCAL_LAYER = re.compile(r"^(decoder\.layers\.\d+)(\..+)$")
_LOCAL_EXPERT = re.compile(r"^(.*\.local_experts)\.(\d+)(\..+)$")


class LinearState(NamedTuple):
    """How one decoder linear computes on one rank.

    Attributes:
        name: global name, e.g. "decoder.layers.3.mlp.linear_fc2".
        quantized: whether it runs in FP8.
        recipe: its recipe; None for a linear that is none of ours.
    """

    name: str
    quantized: bool
    recipe: Fp8BlockRecipe | None


def unwrapped(model: Any) -> Any:
    """The GPTModel inside DistributedDataParallel, Float16Module and the like."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def wait_for_parameters(model: Any) -> None:
    """Makes the parameters those of the last optimizer step. A collective over data-parallel ranks.

    With overlap_param_gather the distributed optimizer updates each rank's own part alone, and gathers the rest in the
    next forward.
    """
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        if getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False):
            with torch.no_grad():
                model.start_param_sync(force_sync=True)
        model = model.module


def gather_linears(models: list[Any]) -> list[LinearState]:
    """All decoder linears of the model, sorted by name, on every rank. A collective over all ranks.

    A linear that several ranks hold stands there once, unless the ranks disagree about it.
    """
    held = {state for model in models for state in _linears_of(model)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held)
    return sorted(set().union(*gathered), key=lambda state: (state.name, state.quantized))


def check_model_recipe(
    linears: Sequence[LinearState], recipe: Fp8BlockRecipe | None, num_layers: int
) -> Fp8BlockRecipe:
    """The recipe that the model was built with.

    Args:
        linears: all decoder linears of the model.
        recipe: the recipe that the caller expects, or None.
        num_layers: decoder layers of the model.

    Raises:
        ValueError: no layer has a recipe, two recipes differ, or a layer does not run in the precision that the recipe
            says.
    """
    ours = [(state.name, state.recipe) for state in linears if state.recipe is not None]
    if not ours:
        raise ValueError(
            f"none of the model's {len(linears)} decoder linears is one of JetRL's: build it with "
            "jetrl_spec(spec, recipe), or save it with dist_checkpointing.save and convert the folder"
        )
    first, trained = ours[0]
    for name, other in ours:
        trained.require_same(other, ours=first, theirs=name)
    if recipe is not None:
        recipe.require_same(trained, ours="argument recipe", theirs="the model's FP8 layers")
    for state in linears:
        wanted = trained.quantizes(state.name, num_layers)
        if state.quantized != wanted:
            runs, puts = ("FP8" if quantized else "BF16" for quantized in (state.quantized, wanted))
            raise ValueError(
                f"{state.name} runs in {runs}, but the recipe puts it in {puts}: training and rollout would differ; "
                "build every layer with jetrl_spec(spec, recipe), and name the layers that stay BF16 in recipe.ignore"
            )
    return trained


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
    """The parameters of a rank's model: global name, as `Parameter.name` has it, the module that holds it, itself."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield _global_name(model, f"{prefix}.{name}"), module, parameter


def _linears_of(model: Any) -> Iterator[LinearState]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not is_decoder_linear(name) or not isinstance(weight, torch.Tensor):
            continue
        recipe = getattr(module, "recipe", None)
        recipe = recipe if isinstance(recipe, Fp8BlockRecipe) else None
        yield LinearState(_global_name(model, name), recipe is not None and bool(module.quantized), recipe)


def _global_name(model: Any, name: str) -> str:
    """Name of a module or parameter with layers and experts counted over all ranks."""
    local = _LOCAL_LAYER.match(name)
    if local:
        name = f"decoder.layers.{model.get_submodule(local[1]).layer_number - 1}{local[2]}"
    return _with_global_expert(model, canonical_name(name))


def _with_global_expert(model: Any, name: str) -> str:
    expert = _LOCAL_EXPERT.match(name)
    if not expert:
        return name
    from megatron.core import parallel_state

    ranks, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    first = model.config.num_moe_experts // ranks * rank
    return f"{expert[1]}.{first + int(expert[2])}{expert[3]}"
