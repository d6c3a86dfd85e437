"""Megatron models: process groups, what is inside the wrappers, optimizer, checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from jetrl_megatron.convert.live import unwrapped
from jetrl_megatron.convert.recipe_file import save_recipe
from jetrl_megatron.recipe import Fp8BlockRecipe

_RANK_FILE = "rank{}.pt"


def initialize_groups(tensor_parallel: int, pipeline_parallel: int, seed: int = 0) -> None:
    """Megatron's process groups and random states; groups of an earlier layout are given up."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def gpt_model(model: Sequence[Any]) -> Any:
    """The GPTModel inside Megatron's wrappers, of a rank without virtual pipeline stages."""
    (module,) = model
    return unwrapped(module)


def causal_mask(length: int) -> torch.Tensor:
    """bool [1, 1, length, length], true where attention may not look."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def make_optimizer(model: list[Any], learning_rate: float, max_grad_norm: float = 1.0) -> Any:
    """Megatron's Adam with FP32 masters, and the hooks that its pipeline schedules call.

    Args:
        max_grad_norm: gradients with a larger norm are scaled down to it; 0 leaves them alone.
    """
    adam = {"optimizer": "adam", "lr": learning_rate, "weight_decay": 0.0, "clip_grad": max_grad_norm}
    optimizer = get_megatron_optimizer(OptimizerConfig(**adam, bf16=True, params_dtype=torch.bfloat16), model)
    config = gpt_model(model).config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def save_checkpoint(model: Sequence[Any], path: Path, recipe: Fp8BlockRecipe) -> None:
    """Saves the weights in Megatron's torch_dist format, with the recipe beside them."""
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    dist_checkpointing.save(_sharded_state(model), str(path))
    if dist.get_rank() == 0:
        save_recipe(path, recipe)


def load_checkpoint(model: Sequence[Any], path: Path) -> None:
    """Loads weights that any parallel layout saved."""
    gpt_model(model).load_state_dict(dist_checkpointing.load(_sharded_state(model), str(path)))


def save_training_state(model: Sequence[Any], optimizer: Any, folder: Path, step: int) -> None:
    """Saves model and optimizer to FOLDER/step-STEP, and removes what was saved there before. A collective.

    For the same parallel layout, to the bit. What is under way when ranks are killed does not count.
    """
    before, partial = saved_steps(folder), folder / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    state = {"model": gpt_model(model).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial / _RANK_FILE.format(dist.get_rank()))
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(folder / f"step-{step:06d}")
        for old in before.values():
            shutil.rmtree(old)
    dist.barrier()


def load_training_state(model: Sequence[Any], optimizer: Any, path: Path) -> None:
    """Loads what `save_training_state` saved."""
    state = torch.load(path / _RANK_FILE.format(dist.get_rank()), map_location="cpu", weights_only=False)
    gpt_model(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def saved_steps(folder: Path) -> dict[int, Path]:
    """The complete training states in a folder, by step."""
    return {int(path.name.removeprefix("step-")): path for path in sorted(folder.glob("step-*"))}


def _sharded_state(model: Sequence[Any]) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = gpt_model(model).sharded_state_dict(prefix="", metadata=metadata)
    return state
