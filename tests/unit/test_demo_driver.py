from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from jetrl_megatron import cli
from jetrl_megatron.demo.options import DemoFolder, DemoOptions, layout_label
from jetrl_megatron.verify.child import ChildError, run_child
from jetrl_megatron.verify.exact_sums import ExactSums
from jetrl_megatron.verify.progress import parse_progress, report_progress


def test_demo_folder_refuses_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("42")
    with pytest.raises(ValueError, match="is not empty and no output of the demo"):
        DemoFolder.create(tmp_path, DemoOptions())
    with pytest.raises(ValueError, match="is a file"):
        DemoFolder.create(tmp_path / "thesis.tex", DemoOptions())
    assert (tmp_path / "thesis.tex").read_text() == "42"


def test_demo_folder_replaces_earlier_run(tmp_path: Path) -> None:
    folder = DemoFolder.create(tmp_path / "a" / "demo", DemoOptions(steps=2))
    assert folder.options == DemoOptions(steps=2)
    folder.losses.write_text("[1.0]")
    folder.rescored("fp8").write_text("{}")
    folder.model.mkdir()
    (folder.root / "notes.txt").write_text("mine")
    again = DemoFolder.create(folder.root, DemoOptions(steps=3))
    assert again.options.steps == 3
    names = {path.name for path in folder.root.iterdir()}
    assert names == {"jetrl_demo.json", "logs", "scales", "rollouts", "notes.txt"}


@pytest.mark.parametrize("field", ["steps", "tp", "pp", "learning_rate", "prompts"])
def test_demo_options_out_of_range_raises(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0 must be greater than zero"):
        DemoOptions(**{field: 0})
    with pytest.raises(ValueError, match="sequences_per_step=3 is no multiple"):
        DemoOptions(sequences_per_step=3, sequences_per_microbatch=2)


def test_layout_label_names_every_dimension() -> None:
    assert [layout_label(*sizes) for sizes in ((1, 1), (2, 1), (1, 2), (2, 2))] == ["tp1", "tp2", "pp2", "tp2_pp2"]


def test_run_child_passes_environment_and_writes_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import os, sys; print(os.environ['ANSWER']); print('warning', file=sys.stderr)"
    run_child("child", [sys.executable, "-c", code], log, {"ANSWER": "42"})
    assert sorted(log.read_text().split()) == ["42", "warning"]


def test_run_child_failure_names_log_and_shows_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit(3)"
    with pytest.raises(ChildError) as error:
        run_child("train", [sys.executable, "-c", code], log, {})
    assert f"train ended with status 3; {log} ends:" in str(error.value)
    assert "line 99" in str(error.value) and "line 5\n" not in str(error.value)


def test_report_progress_parses_back(capsys: pytest.CaptureFixture[str]) -> None:
    report_progress(3, 8, "loss 1.5")
    assert parse_progress(capsys.readouterr().out) == {"done": 3, "total": 8, "note": "loss 1.5"}
    assert parse_progress("3 of 8") is None
    assert parse_progress('jetrl-progress {"done": 3}jetrl-progress {"done": 4}') is None


def test_exact_sums_round_once_exact() -> None:
    """2^24 + 1 + ... is beyond float32: a sum of 1 and small numbers that only float64 holds before it is rounded."""
    x, w = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([[2.0**30, 1.0, -(2.0**30)]] * 4, dtype=torch.bfloat16)
    with ExactSums():
        products = [F.linear(x, w), x @ w.t(), torch.matmul(x, w.t()), torch.bmm(x[None], w.t()[None])[0]]
        mixed = torch.matmul(x.float(), w.float().t())
    for product in products:
        assert product.dtype == torch.bfloat16 and torch.equal(product, torch.ones(2, 4, dtype=torch.bfloat16))
    assert mixed.dtype == torch.float32


def test_exact_sums_softmax_ignores_masked_tail_exact() -> None:
    """A row's softmax is the same with and without columns that are masked."""
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 4
    masked = torch.cat([scores, torch.full((5, 77), -10000.0)], dim=1)
    with ExactSums():
        short, long = torch.nn.Softmax(-1)(scores), torch.nn.Softmax(-1)(masked)
    assert short.dtype == torch.float32
    assert torch.equal(short, long[:, :300]) and not long[:, 300:].any()


def test_exact_sums_gradients_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in ((4, 96), (8, 96)))
    with ExactSums():
        F.linear(x, w).sum().backward()
    assert x.grad is not None and torch.equal(x.grad[0], w.detach().double().sum(0).bfloat16())
    assert w.grad is not None and torch.equal(w.grad[0], x.detach().double().sum(0).bfloat16())


def test_cli_demo_refuses_foreign_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "no output of the demo" in capsys.readouterr().err
    assert cli.main(["demo", "--steps", "0", "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_demo_options_survive_json() -> None:
    options = DemoOptions(steps=3, tp=1, pp=2, seed=7)
    assert DemoOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
