"""Pictures of benchmarks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import plot


def test_every_result_is_drawn_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for result in plot.RESULTS.glob("bench_*.json"):
        shutil.copy(result, tmp_path)
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot"])
    plot.main()
    said = capsys.readouterr().out
    assert f"{tmp_path / 'bench_sync.json'}: there is no chart of it" in said
    assert all(str(file.stem) in said for file in tmp_path.glob("bench_*.json"))
    drawn = {file.stem for file in tmp_path.glob("*.png")}
    assert {*plot.CHARTS, "bench_training"} <= drawn
