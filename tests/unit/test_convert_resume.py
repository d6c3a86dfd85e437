"""A conversion that is killed, at any moment, and called again."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_megatron import Fp8BlockRecipe
from jetrl_megatron.cli import main
from jetrl_megatron.convert import conversion
from jetrl_megatron.convert.export import convert_checkpoint
from jetrl_megatron.convert.files import TensorFiles
from jetrl_megatron.convert.resume import WorkFolder
from tests.unit.convert_cases import contents, make_source

SHARDS: dict[str, Any] = {"max_shard_size": 300_000, "workers": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, bytes]]:
    """Checkpoint, config.json and the files of an undisturbed conversion."""
    root = tmp_path_factory.mktemp("resume")
    source, hf = make_source(root)
    return source, hf, contents(convert_checkpoint(source, root / "out", hf_config=hf, **SHARDS))


@pytest.fixture
def commits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "COMMIT_SECONDS", 0.0)


def in_a_child(action: Callable[[], object]) -> int:
    """Starts the action in a forked process."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        action()
        os._exit(0)
    except BaseException:
        os._exit(1)


def ended(child: int, seconds: float, watch: Callable[[], object]) -> bool:
    """Waits for a child for some time, and kills it then; whether it had ended by itself."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watch()
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_conversion_killed_ten_times_gives_the_same_bytes_exact(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, commits_at_once: None
) -> None:
    source, hf, expected = made
    out, moments = tmp_path / "out", random.Random(1)
    write = TensorFiles.write

    def slowly(self: TensorFiles, *arguments: Any) -> None:
        time.sleep(0.03)
        write(self, *arguments)

    def whole_if_there() -> None:
        if out.exists():
            assert contents(out) == expected

    monkeypatch.setattr(TensorFiles, "write", slowly)
    kills = completed = 0
    while kills < 10 or not completed:
        child = in_a_child(lambda: convert_checkpoint(source, out, hf_config=hf, **SHARDS))
        patience = moments.uniform(0, 0.6) if kills < 10 else 60
        if not ended(child, patience, whole_if_there):
            kills += 1
            assert not out.exists() or contents(out) == expected
            continue
        assert contents(out) == expected
        completed += 1
        for path in list(out.iterdir()):
            path.unlink()
        out.rmdir()
        assert list(tmp_path.iterdir()) == []
    assert kills == 10


def test_conversion_goes_on_where_it_was(
    tmp_path: Path,
    made: tuple[Path, Path, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    commits_at_once: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, hf, expected = made
    written: list[str] = []
    write = TensorFiles.write

    def interrupted(self: TensorFiles, name: str, *arguments: Any) -> None:
        if len(written) == 12:
            raise KeyboardInterrupt
        written.append(name)
        write(self, name, *arguments)

    monkeypatch.setattr(TensorFiles, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", hf_config=hf, **{**SHARDS, "workers": 1})
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    before, again = set(written), []
    monkeypatch.setattr(TensorFiles, "write", lambda self, name, *rest: (again.append(name), write(self, name, *rest)))
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    assert contents(tmp_path / "out") == expected
    assert "goes on" in caplog.text
    # At most the tensors of one parameter are made twice: gate and up with their scales.
    assert len(before & set(again)) <= 4 and len(before | set(again)) == len(before) + len(again) - len(
        before & set(again)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupt(source: Path, hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, out, hf_config=hf, **SHARDS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recipe": Fp8BlockRecipe(scale_format="fp32")}, "recipe, config.json"),
        ({"max_shard_size": 400_000}, "weight files"),
        ({}, "source"),
    ],
    ids=["recipe", "shards", "source"],
)
def test_conversion_begins_anew_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Any, said: str
) -> None:
    source, hf = make_source(tmp_path)
    interrupt(source, hf, tmp_path / "out", monkeypatch)
    if not change:
        os.utime(source / "__0_0.distcp", ns=(1, 1))
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, **{**SHARDS, **change})
    assert f"begins anew, changed since the last run: {said}" in caplog.text
    convert_checkpoint(source, tmp_path / "straight", hf_config=hf, **{**SHARDS, **change})
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_conversion_takes_up_a_finished_stream(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made
    interrupt(source, hf, tmp_path / "out", monkeypatch)

    def nothing_more(*arguments: Any) -> None:
        raise AssertionError("a tensor is written again")

    monkeypatch.setattr(TensorFiles, "write", nothing_more)
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    assert contents(tmp_path / "out") == expected


def test_conversion_killed_after_the_last_rename_is_complete(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made

    def stop(self: WorkFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "discard", stop)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partial"}
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and contents(tmp_path / "out") == expected
    with pytest.raises(ValueError, match="out exists"):
        convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)


def tokenizers(root: Path) -> tuple[Path, Path]:
    """Two folders with a tokenizer of different files."""
    for name, files in (("first", ("tokenizer.json", "merges.txt")), ("second", ("tokenizer.json", "vocab.txt"))):
        (root / name).mkdir()
        for file in files:
            (root / name / file).write_text(name)
    return root / "first", root / "second"


def test_conversion_goes_on_with_another_tokenizer_alone(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made
    first, second = tokenizers(tmp_path)

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    # Once before the rename, once after it, when only the working folder was left.
    for name, step in (("before", "publish"), ("after", "discard")):
        with monkeypatch.context() as patch:
            patch.setattr(WorkFolder, step, stop)
            with pytest.raises(KeyboardInterrupt):
                convert_checkpoint(source, tmp_path / name, hf_config=hf, tokenizer_from=first, **SHARDS)
    convert_checkpoint(source, tmp_path / "before", hf_config=hf, tokenizer_from=second, **SHARDS)
    assert contents(tmp_path / "before") == expected | {"tokenizer.json": b"second", "vocab.txt": b"second"}
    with pytest.raises(ValueError, match="after exists"):
        convert_checkpoint(source, tmp_path / "after", hf_config=hf, tokenizer_from=second, **SHARDS)
    convert_checkpoint(source, tmp_path / "after", hf_config=hf, tokenizer_from=second, force=True, **SHARDS)
    assert contents(tmp_path / "after") == contents(tmp_path / "before")


def test_conversion_killed_while_it_removes_its_work_is_not_taken_for_finished(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, recipe=Fp8BlockRecipe(scale_format="fp32"))
    remove = shutil.rmtree

    def half(folder: Path, *arguments: Any, **options: Any) -> None:
        remove(folder / "export")
        raise KeyboardInterrupt

    def faulty(*arguments: Any) -> None:
        raise ValueError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_beside", faulty)
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, tmp_path / "out", hf_config=hf, force=True, **SHARDS)
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, force=True, **SHARDS)
    assert contents(tmp_path / "out") == expected


def test_conversion_begins_anew_over_a_damaged_work_folder(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made
    for damage in (
        lambda folder: (folder / "job.json").write_text("{"),
        lambda folder: next((folder / "export").glob("*.safetensors")).write_bytes(b"short"),
        lambda folder: (folder / "done-0").write_bytes(b'\xff\n17\n"no.such.tensor"\n"torn'),
    ):
        interrupt(source, hf, tmp_path / "out", monkeypatch)
        damage(tmp_path / ".out.partial")
        convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
        assert contents(tmp_path / "out") == expected
        for path in list((tmp_path / "out").iterdir()):
            path.unlink()
        (tmp_path / "out").rmdir()


def test_conversion_refuses_a_second_process(tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]]) -> None:
    source, hf, _ = made
    (tmp_path / ".out.partial").mkdir()
    other = WorkFolder(tmp_path / "out")
    other.lock()
    with pytest.raises(ValueError, match="is in use: another process converts to"):
        convert_checkpoint(source, tmp_path / "out", hf_config=hf)
    assert (tmp_path / ".out.partial").is_dir()
    other.discard()
    assert list(tmp_path.iterdir()) == []


def test_conversion_notices_a_source_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, hf = make_source(tmp_path)
    write = TensorFiles.write

    def touching(self: TensorFiles, *arguments: Any) -> None:
        os.utime(source / "__1_0.distcp", ns=(2, 2))
        write(self, *arguments)

    monkeypatch.setattr(TensorFiles, "write", touching)
    with pytest.raises(ValueError, match="source changed while it was read"):
        convert_checkpoint(source, tmp_path / "out", hf_config=hf)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "hf"}


def test_conversion_keeps_its_work_when_the_disk_is_full(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    source, hf, expected = made

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_beside", full)
        with pytest.raises(OSError, match="No space left"):
            convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    caplog.set_level(logging.WARNING)
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    assert "goes on" in caplog.text and contents(tmp_path / "out") == expected


def test_conversion_never_replaces_what_appears_meanwhile(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made
    write = TensorFiles.write

    def appears(self: TensorFiles, *arguments: Any) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/mine.txt").write_text("x")
        write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFiles, "write", appears)
        with pytest.raises(FileExistsError, match="out exists and is no export .* whose work is kept"):
            convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    assert contents(tmp_path / "out") == {"mine.txt": b"x"}
    (tmp_path / "out").rename(tmp_path / "mine")
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, **SHARDS)
    assert contents(tmp_path / "out") == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_replaced_export_comes_back_after_a_kill_between_two_renames(
    tmp_path: Path, made: tuple[Path, Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hf, expected = made
    fp32 = Fp8BlockRecipe(scale_format="fp32")
    before = contents(convert_checkpoint(source, tmp_path / "out", hf_config=hf, recipe=fp32))
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == "export":
            os._exit(9)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    child = in_a_child(lambda: convert_checkpoint(source, tmp_path / "out", hf_config=hf, force=True, **SHARDS))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    # Another run, which may not replace it, puts it back.
    with pytest.raises(FileExistsError, match="out exists"):
        convert_checkpoint(source, tmp_path / "out", hf_config=hf, max_shard_size=400_000)
    assert contents(tmp_path / "out") == before
    convert_checkpoint(source, tmp_path / "out", hf_config=hf, force=True, **SHARDS)
    assert contents(tmp_path / "out") == expected and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_command_says_how_to_go_on_after_an_interrupt(
    tmp_path: Path,
    made: tuple[Path, Path, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, hf, _ = made

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkFolder, "publish", stop)
    assert main(["convert", str(source), str(tmp_path / "out"), "--hf-config", str(hf)]) == 130
    assert f"the same command goes on, or remove {tmp_path / '.out.partial'}" in capsys.readouterr().out


def test_export_may_lie_inside_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, hf = make_source(tmp_path)
    interrupt(source, hf, source / "hf", monkeypatch)
    convert_checkpoint(source, source / "hf", hf_config=hf, **SHARDS)
    convert_checkpoint(source, source / "hf", hf_config=hf, force=True, **SHARDS)
    assert {path.name for path in source.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "hf"}
