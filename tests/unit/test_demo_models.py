"""`make_once`: folders that processes share appear whole, whoever makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetrl_megatron.demo.models import make_once


def _write(text: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "file").write_text(text)


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    for text in ("first", "second"):
        assert make_once(tmp_path / "made", lambda out, text=text: _write(text, out)) == tmp_path / "made"
    assert (tmp_path / "made/file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_of_two_that_make_it_at_once_the_first_at_its_end_counts(tmp_path: Path) -> None:
    def write(out: Path) -> None:
        _write("mine", out)
        _write("theirs", tmp_path / "made")

    make_once(tmp_path / "made", write)
    assert (tmp_path / "made/file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_fails_leaves_no_folder_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        _write("half", out)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        make_once(tmp_path / "made", fail)
    assert not (tmp_path / "made").exists()
    make_once(tmp_path / "made", lambda out: _write("whole", out))
    assert (tmp_path / "made/file").read_text() == "whole"
