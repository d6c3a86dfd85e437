"""A small Qwen3 as a torch_dist checkpoint of two tensor-parallel ranks, and what tests ask of its conversions."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_convert import TINY, write_checkpoint, write_config
from jetrl_megatron.cli import main
from jetrl_megatron.convert.export import convert_checkpoint

type Made = tuple[Path, Path, Path]


def make_source(root: Path) -> tuple[Path, Path]:
    """Writes the checkpoint and config.json; returns their folders."""
    write_checkpoint(root / "source", TINY)
    write_config(root / "hf", TINY)
    return root / "source", root / "hf"


def make_export(root: Path) -> Made:
    """Checkpoint, config.json and export."""
    source, hf = make_source(root)
    return source, hf, convert_checkpoint(source, root / "out", hf_config=hf)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(source: Path, hf: Path, out: Path, *options: str) -> int:
    """The status of `jetrl convert`."""
    return main(["convert", str(source), str(out), "--hf-config", str(hf), *options])
