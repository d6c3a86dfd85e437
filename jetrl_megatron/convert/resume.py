"""The working folder of a conversion, from which a rerun of the same command goes on after a kill.

Beside OUT lies .OUT.partial with

    job.json     what makes the bytes: source, recipe, layout of the files, versions
    done-R       names of the tensors that rank R has written to disk, one a line
    export/      what becomes OUT by one rename

A name is in a done file only after its data was flushed, so that neither a kill nor a power failure makes it lie.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from jetrl_megatron import __version__
from jetrl_megatron.convert.bridge import release_of
from jetrl_megatron.convert.files import FileLayout, TensorFiles

_LOG = logging.getLogger(__name__)
_JOB, _DONE, _LOCK = "job.json", "done-", "lock"


def source_fingerprint(folder: Path, without: Iterable[Path] = ()) -> str:
    """Hash of names, sizes and times of change of all files below a folder, 16 hexadecimal digits.

    Args:
        without: folders that do not count: an export may lie inside its source.
    """
    ours = [path.resolve() for path in without]
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if not any(path.resolve().is_relative_to(other) for other in ours):
            status = path.stat()
            lines.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def job_description(source: str, recipe: str, layout: FileLayout, config: Mapping[str, Any]) -> dict[str, str]:
    """What decides the bytes of a conversion, a hash for each thing that may change between two runs.

    Args:
        source: fingerprint of the source.
        recipe: fingerprint of the recipe.
        config: content of the export's config.json.
    """
    bridge = ".".join(map(str, release_of("megatron.bridge")))
    versions = f"jetrl-megatron {__version__}, torch {torch.__version__}, megatron-bridge {bridge}"
    headers = hashlib.sha256(b"".join(file.name.encode() + file.header for file in layout.files)).hexdigest()
    return {
        "source": source,
        "recipe": recipe,
        "weight files": headers[:16],
        "config.json": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
        "versions": versions,
    }


class WorkFolder:
    """The working folder of one conversion.

    Args:
        out: the folder that it will become.

    Attributes:
        folder: where it lies.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.with_name(f".{out.name}.partial")
        self._lock: int | None = None

    @property
    def export(self) -> Path:
        """What becomes `out`."""
        return self.folder / "export"

    @property
    def _replaced(self) -> Path:
        return self.folder / "replaced"

    def finished(self, job: Mapping[str, str]) -> bool:
        """Whether an earlier run of this job was killed after its last rename: `out` is there and complete."""
        return self._out.is_dir() and not self.export.exists() and self._saved_job() == dict(job)

    def open(self, job: Mapping[str, str], layout: FileLayout) -> set[str]:
        """Takes up the work of an earlier run, or begins anew and says why. Rank 0 alone calls it.

        Returns:
            names of the tensors that are written already.

        Raises:
            ValueError: another process works here.
        """
        self.folder.mkdir(exist_ok=True)
        self.lock()
        if self._replaced.exists() and not self._out.exists():
            # A run that was to replace an export was killed between two renames.
            self._replaced.rename(self._out)
        saved = self._saved_job()
        if saved == dict(job) and self._has(layout):
            done = {name for path in self.folder.glob(f"{_DONE}*") for name in _whole_lines(path)}
            _LOG.warning("%s: goes on, %d of %d tensors are there", self.folder, len(done), len(layout.places))
            return done & set(layout.places)
        if saved:
            changed = [key for key in job if saved.get(key) != job[key]] or ["a weight file"]
            _LOG.warning("%s: begins anew, changed since the last run: %s", self.folder, ", ".join(changed))
        self._empty()
        self.export.mkdir()
        TensorFiles(self.export, layout, create=True).close()
        _write_flushed(self.folder / _JOB, json.dumps(dict(job), indent=2))
        return set()

    def changed(self, job: Mapping[str, str]) -> bool:
        """Whether this is another job than the one that the folder was opened for."""
        return self._saved_job() != dict(job)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes all but these files from what becomes `out`."""
        for path in [path for path in self.export.iterdir() if path.name not in names]:
            _remove(path)

    def publish(self) -> None:
        """Gives the export its name and removes the working folder. Rank 0 alone calls it."""
        replaced = self._replaced
        _flush_folder(self.export)
        if self._out.exists():
            self._out.rename(replaced)
        try:
            self.export.rename(self._out)
        except BaseException:
            if replaced.exists() and not self._out.exists():
                replaced.rename(self._out)
            raise
        _flush_folder(self._out.parent)
        self.discard()

    def discard(self) -> None:
        """Removes the working folder, if this process has locked it."""
        if self._lock is not None:
            # First, as in `_empty`: what a kill leaves is then no job that looks finished.
            (self.folder / _JOB).unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.close()

    def close(self) -> None:
        """Lets others work here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def journal(self, rank: int) -> Journal:
        """The done file of a rank."""
        return Journal(self.folder / f"{_DONE}{rank}")

    def lock(self) -> None:
        """Keeps others from working here.

        Raises:
            ValueError: another process does.
        """
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ValueError(
                f"{self.folder} is in use: another process converts to {self._out}; wait for it, or choose another name"
            ) from error

    def _saved_job(self) -> dict[str, str]:
        try:
            content = json.loads((self.folder / _JOB).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _has(self, layout: FileLayout) -> bool:
        return all(_begins_with(self.export / file.name, file.header, file.nbytes) for file in layout.files)

    def _empty(self) -> None:
        # The job file goes first: without it nothing else here counts.
        (self.folder / _JOB).unlink(missing_ok=True)
        for path in [path for path in self.folder.iterdir() if path.name != _LOCK]:
            _remove(path)


class Journal:
    """Names of tensors that are on disk, in a file that grows."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("ab", buffering=0)
        # A line that a kill tore stays the only one that is unreadable.
        if torn:
            self._file.write(b"\n")

    def add(self, names: Iterable[str]) -> None:
        """Records names; their data must have been flushed before."""
        self._file.write("".join(f"{json.dumps(name)}\n" for name in names).encode())
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class Committer:
    """Flushes and records finished tensors from time to time, in a thread of its own: a disk may be slow.

    Args:
        files: where the tensors are written.
        journal: where they are recorded.
        seconds: how long a finished tensor may wait.
    """

    def __init__(self, files: TensorFiles, journal: Journal, seconds: float) -> None:
        self._files, self._journal, self._seconds = files, journal, seconds
        self._pool = ThreadPoolExecutor(1, "commit")
        self._running: Future[None] | None = None
        self._waiting: list[str] = []
        self._last = time.monotonic()

    def add(self, names: Iterable[str]) -> None:
        """Takes tensors that are written.

        Raises:
            OSError: an earlier flush failed.
        """
        self._waiting += names
        idle = self._running is None or self._running.done()
        if idle and time.monotonic() - self._last >= self._seconds:
            self._settle()
            self._running = self._pool.submit(self._commit, self._waiting)
            self._waiting, self._last = [], time.monotonic()

    def __enter__(self) -> Committer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an interrupt what is finished is still worth recording, and its error matters more than one of this.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
            self._settle()
            self._commit(self._waiting)
        self._pool.shutdown()

    def _settle(self) -> None:
        if self._running is not None:
            self._running.result()

    def _commit(self, names: list[str]) -> None:
        if names:
            self._files.sync(names)
            self._journal.add(names)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _whole_lines(path: Path) -> list[str]:
    names = []
    for line in path.read_bytes().splitlines():
        try:
            names.append(json.loads(line))
        except ValueError:
            continue
    return [name for name in names if isinstance(name, str)]


def _begins_with(path: Path, header: bytes, nbytes: int) -> bool:
    if not path.is_file() or path.stat().st_size != nbytes:
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _write_flushed(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
