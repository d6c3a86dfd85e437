"""Weight sync over CUDA IPC into an engine with CUDA graphs, on one GPU."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.processes import Failed, Process
from benchmarks.random_models import RandomModel
from benchmarks.sync_processes import Unchecked
from jetrl_megatron import JETRL_FP8
from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource, WeightSyncError
from jetrl_megatron.verify.engine import engine_environment
from jetrl_megatron.verify.loaded_weights import join_pieces
from jetrl_megatron.verify.requests import EngineRequest
from tests.gpu.conftest import DEVICE

MODEL = RandomModel(family="qwen3", hidden=1024, intermediate=3072, heads=8, kv_heads=4, layers=2, vocabulary=4096)
GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
NO_GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_mode": "NONE"}}
ENGINE: dict[str, Any] = {
    "worker_extension_cls": "benchmarks.sync_processes.BenchWorker",
    "max_num_seqs": 16,
    "max_model_len": 512,
    "max_num_batched_tokens": 1024,
}
BUCKET_BYTES, SECONDS = 16 << 20, 120.0


@pytest.fixture
def home() -> Iterator[Path]:
    # A socket's path must be short.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def start(home: Path, name: str, checkpoint: Path, arguments: dict[str, Any]) -> Process:
    cuda = DEVICE.type == "cuda"
    memory = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.3} if cuda else {}
    request = EngineRequest(
        checkpoint=str(checkpoint),
        recipe=JETRL_FP8.to_dict(),
        cuda=cuda,
        engine_args={**ENGINE, **memory, **(arguments if cuda else {})},
    )
    path = home / f"{name}.json"
    path.write_text(json.dumps(dataclasses.asdict(request)))
    return Process(
        "benchmarks.sync_processes", ["engine", str(path)], engine_environment(request), home / f"{name}.log"
    )


def send(engine: Process, source: TensorSource) -> list[str]:
    """One update; what the sender and the engine say to it, "" where all is well."""
    synchronizer = JetRLWeightSynchronizer(source, bucket_bytes=BUCKET_BYTES, timeout=SECONDS)
    engine.send("receive", endpoints=synchronizer.endpoints, timeout=SECONDS)
    said = ["", ""]
    try:
        synchronizer.update()
    except WeightSyncError as error:
        said[0] = str(error)
    try:
        engine.result()
    except Failed as error:
        said[1] = str(error)
    synchronizer.close()
    return said


def test_updates_reach_an_engine_with_cuda_graphs_exact(home: Path) -> None:
    folders = [MODEL.write(home / f"step{step}", seed=step, recipe=JETRL_FP8) for step in range(3)]
    steps = [{name: t.to(DEVICE) for name, t in load_file(folder / "model.safetensors").items()} for folder in folders]
    engine = start(home, "graphs", folders[0], GRAPHS)
    try:
        scores = [engine.ask("score")]
        for tensors in steps[1:]:
            assert send(engine, TensorSource(tensors, JETRL_FP8)) == ["", ""]
            scores.append(engine.ask("score"))
        (home / "pieces").mkdir()
        engine.ask("pieces", out=str(home / "pieces"))
        for name, codes in join_pieces(home / "pieces").items():
            expected = steps[2][name].cpu()
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), name

        wrong = {**steps[1], "model.layers.1.mlp.down_proj.weight_scale_inv": torch.full((8, 24), torch.nan)}
        wrong = {name: tensor.to(DEVICE) for name, tensor in wrong.items()}
        said = send(engine, Unchecked(wrong, JETRL_FP8))
        assert all("down_proj.weight_scale_inv[0, 0] is nan" in text for text in said), said
        assert engine.ask("score") == scores[2]
        assert send(engine, TensorSource(steps[1], JETRL_FP8)) == ["", ""]
        assert engine.ask("score") == scores[1]
    finally:
        engine.stop()
    assert scores[0] != scores[1] != scores[2]
    for name, arguments in (("fresh", GRAPHS), ("no_graphs", NO_GRAPHS)):
        other = start(home, name, folders[2], arguments)
        try:
            assert other.ask("score") == scores[2], name
        finally:
            other.stop()
