"""Shared fixtures: Megatron's parallel state of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jetrl_megatron.integrations import megatron_cpu

if not torch.cuda.is_available():
    megatron_cpu.install()  # before any test module imports megatron.core: half of its import time goes


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Model parallel groups of a single CPU rank."""
    from megatron.core import parallel_state, tensor_parallel

    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
