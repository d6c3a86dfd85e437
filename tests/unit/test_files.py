"""Folders that processes share appear whole, whoever makes them, and are held by one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_megatron.verify.files import hold, make_once, write_whole

ROOT = Path(__file__).parents[2]


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


def test_a_folder_is_held_once_until_the_program_ends_that_the_process_becomes(tmp_path: Path) -> None:
    waits = "import sys; print('here', flush=True); sys.stdin.read()"
    code = (
        "import os, sys; from pathlib import Path; from jetrl_megatron.verify.files import hold; "
        f"hold(Path(sys.argv[1])); os.execv(sys.executable, [sys.executable, '-c', {waits!r}])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        with pytest.raises(ValueError, match="is in use by another process: wait for it, or name another folder"):
            hold(tmp_path)
        process.communicate("")
    hold(tmp_path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_whole(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half of the second \ud800")
    assert path.read_text() == "first" and [found.name for found in tmp_path.iterdir()] == ["file.json"]
