"""`torchrun -m jetrl_megatron.convert`: several processes write the bytes of one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_megatron.convert.export import convert_checkpoint
from tests.distributed.ranks import ROOT
from tests.unit.convert_cases import contents, make_source

pytestmark = pytest.mark.distributed


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [*launcher, "--master-port", "29571", "-m", "jetrl_megatron.convert", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_ranks_write_the_bytes_of_one_process_exact(tmp_path: Path) -> None:
    source, hf = make_source(tmp_path)
    one = convert_checkpoint(source, tmp_path / "one", hf_config=hf, max_shard_size=300_000)
    options = ["--hf-config", str(hf), "--max-shard-size", "300000", "--verify", "--workers", "1"]
    done = torchrun(2, str(source), str(tmp_path / "two"), *options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert contents(tmp_path / "two") == contents(one)
    assert done.stdout.count("block FP8, ue8m0 scales") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"source", "hf", "one", "two"}


def test_error_on_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    source, hf = make_source(tmp_path)
    index = pickle.loads((source / ".metadata").read_bytes())
    place = next(info for key, info in index.storage_data.items() if key.fqn == "decoder.layers.mlp.linear_fc2.weight")
    file = source / place.relative_path
    content = bytearray(file.read_bytes())
    middle = place.offset + place.length // 2
    # NaN in BF16, wherever an element begins. One rank alone reads this matrix.
    content[middle : middle + 64] = b"\xff" * 64
    file.write_bytes(content)
    done = torchrun(2, str(source), str(tmp_path / "out"), "--hf-config", str(hf), "--workers", "1")
    assert done.returncode != 0
    assert "is nan: weights must be finite" in done.stderr
    assert sum("jetrl: error: " in line for line in done.stderr.splitlines()) >= 1
    assert {path.name for path in tmp_path.iterdir()} == {"source", "hf"}
