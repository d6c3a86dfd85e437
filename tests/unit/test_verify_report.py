from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_megatron.precision_flow import Mismatch
from jetrl_megatron.verify.logprobs import LogProbs
from jetrl_megatron.verify.report import Comparison, VerifyReport
from jetrl_megatron.verify.rollouts import Rollout, ScoredSequence


def _rollout() -> Rollout:
    return Rollout.of([ScoredSequence([1], [2, 3], [-1.0, -2.0]), ScoredSequence([1], [2], [-0.5])])


def _comparison(variant: str, train: list[float], batch: str = "start") -> Comparison:
    logprobs = LogProbs.of_rollout(_rollout(), torch.tensor(train))
    return Comparison(batch=batch, variant=variant, logprobs=logprobs, tokens_per_second=1234.5)


SAME = _comparison("parity", [-1.0, -2.0, -0.5])
OTHER = _comparison("parity", [-1.0, -1.75, -0.5])
BF16 = _comparison("bf16", [-1.5, -1.75, -0.25])
ABOUT = {
    "model": "tiny",
    "tp": 2,
    "mode": "parity",
    "versions": {"torch": "2"},
    "command": "jetrl verify",
    "date": "now",
}


def _report(*comparisons: Comparison, **fields: Any) -> VerifyReport:
    return VerifyReport(about=ABOUT, comparisons=comparisons, **fields)


def test_report_rows_hold_every_metric() -> None:
    row, bf16 = _report(SAME, BF16).rows()
    metrics = SAME.logprobs.mismatch.to_dict()
    assert set(metrics) == set(Mismatch.__dataclass_fields__) and metrics.items() <= row.items()
    assert {**ABOUT, "bench": "verify", "variant": "parity", "batch": "start", "sequences": 2}.items() <= row.items()
    assert (row["tokens"], row["tokens_differing"], row["rollout_tokens_per_second"]) == (3, 0, 1234.5)
    assert (bf16["tokens_differing"], bf16["max_abs_dlogp"]) == (3, 0.5)
    assert (row["promised"], bf16["promised"]) == (True, False)


@pytest.mark.parametrize(
    ("comparisons", "fields", "status", "verdict"),
    [
        ((SAME, BF16), {}, 0, "is promised and holds: 0 of 3 tokens differ"),
        ((OTHER, BF16), {}, 1, "is promised and does not hold: 1 of 3 tokens differ"),
        ((SAME, OTHER), {}, 1, "does not hold: 1 of 6 tokens differ"),
        ((SAME,), {"differences": ["fuse_norm_quant: off != on"]}, 1, "does not hold"),
        ((SAME,), {"weights": ["model.norm.weight: 1 of 256"]}, 1, "does not hold"),
        ((OTHER,), {"no_promise": ["TP 1 and TP 2"]}, 0, "is not promised here; 1 of 3 tokens differ"),
        ((OTHER,), {"notes": ["experts: no proof"]}, 0, "is not promised here"),
        ((BF16,), {"no_promise": ["nothing in parity mode"]}, 0, "no tokens were measured"),
    ],
)
def test_report_status_is_1_where_a_promise_is_broken(
    comparisons: tuple[Comparison, ...], fields: dict[str, Any], status: int, verdict: str
) -> None:
    report = _report(*comparisons, **fields)
    assert report.status == report.to_dict()["status"] == status
    text = report.to_markdown()
    assert verdict in text
    assert all(line in text for lines in fields.values() for line in lines)


def test_report_names_at_most_twelve_weights() -> None:
    text = _report(SAME, weights=[f"w{index}: differs" for index in range(20)]).to_markdown()
    assert "w11: differs" in text and "w12: differs" not in text and "... and 8 more" in text


def test_report_table_has_a_line_for_each_comparison() -> None:
    lines = _report(SAME, BF16).to_markdown().splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 4 and table[3].startswith("| BF16 training, start | 3 | 3 | ")


def test_report_writes_json_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = _report(SAME, BF16)
    report.write_json(tmp_path / "out.json")
    report.write_plot(tmp_path / "out.png")
    read = json.loads((tmp_path / "out.json").read_text())
    first, second = read["by_position"]["bf16/start"]
    assert (first["position"], first["mean_abs_dlogp"], first["tokens"]) == (0, 0.375, 2)
    assert (second["position"], second["mean_abs_dlogp"], second["tokens"]) == (1, 0.25, 1)
    assert first["gen_kl_error"] > 0 and read["by_position"]["parity/start"][1]["gen_kl_error"] == 0
    assert [row["variant"] for row in read["rows"]] == ["parity", "bf16"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    _report().write_plot(tmp_path / "empty.png")


def test_report_json_has_no_infinities(tmp_path: Path) -> None:
    logprobs = LogProbs.of([[-1.0, float("-inf")]], [[-1.0, -2.0]])
    _report(Comparison(batch="start", variant="parity", logprobs=logprobs, tokens_per_second=1.0)).write_json(
        tmp_path / "out.json"
    )
    read = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert read["rows"][0]["tokens_differing"] == 1 and read["rows"][0]["max_abs_dlogp"] is None


def test_report_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str) -> None:
        path.write_bytes(text[:9].encode())
        raise OSError("no space left")

    (tmp_path / "out.json").write_bytes(b"{}")
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        _report(SAME).write_json(tmp_path / "out.json")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"{}"]
