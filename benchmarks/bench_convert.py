"""Speed and memory of `jetrl convert` on a checkpoint of four billion parameters, on a CPU.

Writes a synthetic torch_dist checkpoint of Qwen3-4B's shapes, cut as two tensor-parallel ranks save it, converts it in
a process of its own, checks matrices against the quantiser, and deletes both. Needs 13 GB of disk.

    python -m benchmarks.bench_convert --folder /somewhere
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import io
import json
import pickle
import pstats
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.common import HostClock, Model, Run, require

QWEN3_4B = Model("4b", "Qwen3-4B", hidden=2560, ffn=9728, heads=32, kv_heads=8, layers=36, qk_norm=True)
TINY = Model("tiny", "tiny", hidden=256, ffn=384, heads=2, kv_heads=1, layers=2, qk_norm=True)
VOCABULARY = {"4b": 151936, "tiny": 512}
TENSOR_PARALLEL = 2


def main() -> None:
    """Measures and writes the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_convert", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_convert.json")
    parser.add_argument("--folder", type=Path, help="where the checkpoint and the export lie meanwhile")
    parser.add_argument("--workers", default="1,2", help="comma-separated numbers of threads to measure")
    parser.add_argument("--kills", type=int, default=0, help="also kill a conversion so often, and go on after each")
    parser.add_argument("--profile", type=Path, help="write which functions took a single thread's time")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*map(Path, options.child[:2]), int(options.child[2]), options.profile)
        return
    model = TINY if options.dry_run else QWEN3_4B
    run = Run("bench_convert", options.out, [model], torch.device("cpu"), HostClock(), options.dry_run, options)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-convert-") as name:
        folder = Path(name)
        parameters = write_checkpoint(folder / "source", model)
        write_config(folder / "hf", model)
        for workers in map(int, options.workers.split(",")):
            _measure(run, model, folder, parameters, workers)
        if options.kills:
            _kill(run, model, folder, parameters)
    kills = f" --kills {options.kills}" if options.kills else ""
    for row in run.rows:
        # Where the files lay and what else was written says nothing about the figures.
        row["command"] = f"python -m benchmarks.bench_convert --workers {options.workers}{kills}"
    run.write()


def _measure(run: Run, model: Model, folder: Path, parameters: int, workers: int) -> None:
    profile = run.options.profile if workers == 1 else None
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_convert"]
    command += ["--profile", str(profile)] if profile else []
    done = subprocess.run(
        [*command, "--child", str(folder), str(folder / "export"), str(workers)], stdout=subprocess.PIPE, text=True
    )
    require(done.returncode == 0, f"the conversion ended with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    _check(folder, model)
    shutil.rmtree(folder / "export")
    shape, megabytes = f"{parameters / 1e9:.2f}e9 parameters, {workers} threads", found["source_bytes"] / 1e6
    run.add(model, shape, None, "jetrl/wall time", found["wall_s"], "s")
    run.add(model, shape, None, "jetrl/BF16 input", megabytes / found["wall_s"], "MB/s")
    run.add(model, shape, None, "jetrl/BF16 input per core", megabytes / found["cpu_s"], "MB/s of CPU time")
    run.add(model, shape, None, "jetrl/peak memory above the interpreter", found["peak_bytes"], "B")
    print(f"{shape}: {json.dumps(found)}", flush=True)


def _kill(run: Run, model: Model, folder: Path, parameters: int) -> None:
    """Kills `jetrl convert` at random moments; started again it goes on, and ends with the bytes of an unhurt one."""
    out = folder / "export"
    command = [sys.executable, "-W", "ignore", "-m", "jetrl_megatron.convert", str(folder / "source"), str(out)]
    command += ["--hf-config", str(folder / "hf"), "--workers", "2"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    whole, expected = time.perf_counter() - start, _digests(out)
    shutil.rmtree(out)
    moments, kills = random.Random(0), 0
    while not out.exists():
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                process.wait(moments.uniform(0.2, 0.9) * whole if kills < run.options.kills else None)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
        require(process.returncode in (0, -signal.SIGKILL), f"the conversion ended with status {process.returncode}")
        # Nothing but the whole export may ever be there, also where a kill met a process that was done.
        if out.exists():
            require(_digests(out) == expected, f"after {kills} kills the bytes are others")
            if kills < run.options.kills:
                shutil.rmtree(out)
    shutil.rmtree(out)
    run.add(model, f"{parameters / 1e9:.2f}e9 parameters, 2 threads", None, "jetrl/killed, same bytes", kills, "kills")


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _child(folder: Path, out: Path, workers: int, profile: Path | None) -> None:
    """One conversion; prints bytes, seconds and the peak of resident memory above that of the imports."""
    from jetrl_megatron.convert.bridge import import_bridge
    from jetrl_megatron.convert.conversion import ConvertOptions, open_conversion

    import_bridge()
    before = _status_bytes("VmRSS")
    # Makes the kernel count the peak from here on.
    Path("/proc/self/clear_refs").write_text("5")
    conversion = open_conversion(folder / "source", out, ConvertOptions(hf_config=folder / "hf", workers=workers))
    start, cpu = time.perf_counter(), _cpu_seconds()
    conversion.run()
    found = {
        "source_bytes": sum(task.nbytes for task in conversion.tasks),
        "wall_s": time.perf_counter() - start,
        "cpu_s": _cpu_seconds() - cpu,
        "peak_bytes": _status_bytes("VmHWM") - before,
        "interpreter_bytes": before,
    }
    if profile:
        _profile(conversion, profile)
    print(json.dumps(found))


def _profile(conversion: Any, path: Path) -> None:
    """Writes the functions of one thread, by their own time: the stream alone, into files that are thrown away."""
    from jetrl_megatron.convert.files import TensorFiles

    profiler = cProfile.Profile()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=path.absolute().parent) as name:
        files = TensorFiles(Path(name), conversion.layout, create=True)
        profiler.enable()
        for task in conversion.tasks:
            for piece in conversion.stream.pieces(task):
                files.write(piece.name, piece.tensor, piece.first_row)
        profiler.disable()
        files.close()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    path.write_text(text.getvalue())


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _check(folder: Path, model: Model) -> None:
    """Compares matrices of the first and the last layer with the quantiser's own output."""
    from safetensors import safe_open

    from jetrl_megatron import quantize_weight
    from jetrl_megatron.convert.shards import ShardedCheckpoint
    from jetrl_megatron.convert.stored import tensor_files

    source, files = ShardedCheckpoint(folder / "source"), tensor_files(folder / "export")
    stored = {parameter.name: parameter for parameter in source.parameters}
    for layer in (0, model.layers - 1):
        gate, up = source.read(stored[f"decoder.layers.{layer}.mlp.linear_fc1.weight"]).chunk(2)
        down = source.read(stored[f"decoder.layers.{layer}.mlp.linear_fc2.weight"])
        for part, matrix in (("gate", gate), ("up", up), ("down", down)):
            name = f"model.layers.{layer}.mlp.{part}_proj.weight"
            with safe_open(files[name], framework="pt") as file:
                codes, scale = file.get_tensor(name), file.get_tensor(f"{name}_scale_inv")
            expected = quantize_weight(matrix)
            same = torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
            require(same and torch.equal(scale, expected.scale), f"{name} is not what the quantiser makes")


def write_config(folder: Path, model: Model) -> None:
    """config.json of the model."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": VOCABULARY[model.key],
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_checkpoint(folder: Path, model: Model) -> int:
    """Writes a torch_dist checkpoint of random weights as tensor-parallel ranks do, one chunk for each layer and rank.

    Returns:
        number of parameters.
    """
    folder.mkdir()
    elements = min(1 << 24, VOCABULARY[model.key] * model.hidden)
    random = torch.randn(elements, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    tensors: dict[str, TensorStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    total = 0
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(TENSOR_PARALLEL)]
    for key, shape, cut in _tensors(model):
        boxes = []
        for layer in range(shape[0]) if "layers" in key else [None]:
            for rank, (offsets, sizes) in enumerate(_boxes(shape, cut, layer)):
                file, start = files[rank % len(files)], files[rank % len(files)].tell()
                count = torch.Size(sizes).numel()
                values = random.roll(len(where)).repeat(-(-count // random.numel()))[:count].view(sizes)
                torch.save(values.clone(), file)
                info = _StorageInfo(Path(file.name).name, start, file.tell() - start)
                where[MetadataIndex(key, torch.Size(offsets))] = info
                boxes.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        total += torch.Size(shape).numel()
        properties = TensorProperties(dtype=torch.bfloat16)
        tensors[key] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
    for file in files:
        file.close()
    # What torch.distributed.checkpoint reads is a pickle of these classes.
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, where)))
    return total


def _tensors(model: Model) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Key, shape with the stacked layers in front, and the axis that ranks cut."""
    layers, qkv, fc1 = model.layers, model.linears["qkv"], model.linears["fc1"]
    yield "embedding.word_embeddings.weight", (VOCABULARY[model.key], model.hidden), 0
    yield "decoder.layers.self_attention.linear_qkv.weight", (layers, *qkv), 1
    yield "decoder.layers.self_attention.linear_proj.weight", (layers, *model.linears["proj"]), 2
    yield "decoder.layers.mlp.linear_fc1.weight", (layers, *fc1), 1
    yield "decoder.layers.mlp.linear_fc2.weight", (layers, *model.linears["fc2"]), 2
    for norm in ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"):
        yield f"decoder.layers.{norm}", (layers, model.hidden), None
    for norm in ("q_layernorm", "k_layernorm"):
        yield f"decoder.layers.self_attention.{norm}.weight", (layers, model.head_dim), None
    yield "decoder.final_layernorm.weight", (model.hidden,), None


def _boxes(shape: tuple[int, ...], cut: int | None, layer: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of the chunks of one layer."""
    offsets, sizes = [0] * len(shape), list(shape)
    if layer is not None:
        offsets[0], sizes[0] = layer, 1
    if cut is None:
        yield offsets, sizes
        return
    part = shape[cut] // TENSOR_PARALLEL
    for rank in range(TENSOR_PARALLEL):
        yield [*offsets[:cut], rank * part, *offsets[cut + 1 :]], [*sizes[:cut], part, *sizes[cut + 1 :]]


if __name__ == "__main__":
    main()
