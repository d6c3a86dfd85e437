"""Files and folders that several processes use: they appear whole, and a folder can be held by one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_LOCK = ".lock"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside the path that takes its place when it is complete."""
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that holds either what it held or all of the text, whenever the process ends."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text)


def make_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Makes a folder unless it is there; one that was cut short by a kill is not.

    Of processes that make it at the same time the first to come to its end counts.

    Args:
        write: fills the folder that it is given, one of another name.

    Returns:
        the folder.
    """
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(partial)
    return folder


def hold(folder: Path) -> None:
    """Keeps the folder for this process, and for the program that it becomes by exec, until that ends.

    Raises:
        ValueError: another process holds it.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ValueError(f"{folder} is in use by another process: wait for it, or name another folder") from error
    os.set_inheritable(lock, True)
