"""How a Megatron rank of a verification starts and ends, and the model that it builds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.integrations import megatron_cpu
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.verify.exact_sums import ExactSums
from jetrl_megatron.verify.requests import TrainingRequest


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """torch.distributed over NCCL on GPUs, over gloo elsewhere; call it before anything imports Megatron."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        megatron_cpu.install()
        dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def device() -> torch.device:
    """Where this rank's model lives."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def operators_of(variant: str) -> contextlib.AbstractContextManager[Any]:
    """What the variant's forward runs in: on a CPU, sums that do not depend on their order are part of parity."""
    exact = variant == "parity" and not torch.cuda.is_available()
    return ExactSums() if exact else contextlib.nullcontext()


def load_model(request: TrainingRequest, variant: str, checkpoint: str | None, *, ddp: Any = False) -> list[Any]:
    """Builds the model of the request, with the weights of the checkpoint or of the Hugging Face folder.

    Args:
        variant: one of `VARIANTS`.
        ddp: as for `build_model`.
    """
    from jetrl_megatron.integrations.megatron_bridge import build_model
    from jetrl_megatron.verify.model import initialize_groups, load_checkpoint

    initialize_groups(request.tensor_parallel, 1, request.seed)
    options: dict[str, Any] = {"parity": True} if variant == "parity" and torch.cuda.is_available() else {}
    if checkpoint is not None:
        options["perform_initialization"] = False
    model = build_model(
        request.hf_model,
        tensor_parallel=request.tensor_parallel,
        sequence_parallel=request.sequence_parallel,
        recipe=None if variant == "bf16" else Fp8BlockRecipe.from_dict(request.recipe),
        load_weights=checkpoint is None,
        ddp=ddp,
        **options,
    )
    if checkpoint is not None:
        load_checkpoint(model, Path(checkpoint))
    return model
