"""Shared fixtures: Megatron's parallel state of one rank, the CUDA toolkit."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools
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


@pytest.fixture(scope="session")
def cuda_toolkit() -> Path:
    """Folder of the toolkit that setup.py would build with; a skip where it lacks what csrc/ includes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        toolkit = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))["find_toolkit"]()
    if toolkit is None:
        pytest.skip("no CUDA toolkit with nvcc was found")
    headers = ("cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")
    missing = [name for name in headers if not (toolkit / "include" / name).exists()]
    if missing:
        pytest.skip(f"the CUDA toolkit in {toolkit} lacks {', '.join(missing)}")
    return toolkit
