"""One process or several, started by torchrun, that work on one conversion.

Every step that may fail runs in `agree`, so that an error on one rank is an error on all of them and nobody waits for a
rank that is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

# A rank may wait for the slowest one's whole share.
_TIMEOUT = datetime.timedelta(hours=24)


@dataclass(frozen=True)
class Ranks:
    """The processes of a conversion, seen from one of them.

    Attributes:
        rank: this process's number.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def agree[T](self, action: Callable[[], T]) -> T:
        """Runs the action on every rank and waits for all. A collective.

        Raises:
            Exception: the action's own where it failed.
            ValueError: elsewhere, with the texts of those that failed, if theirs were ValueErrors.
            OSError: elsewhere, if one of theirs was not.
        """
        if self.size == 1:
            return action()
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        failures: list[Any] = [None] * self.size
        dist.all_gather_object(failures, failure and (str(failure), isinstance(failure, ValueError)))
        if failure is not None:
            raise failure
        failed = {rank: told for rank, told in enumerate(failures) if told is not None}
        if failed:
            text = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed.items())
            raise ValueError(text) if all(ours for _, ours in failed.values()) else OSError(text)
        return result  # type: ignore[return-value]

    def any(self, yes: bool) -> bool:
        """Whether it is so on any rank. A collective."""
        answers: list[Any] = [yes]
        if self.size > 1:
            answers = [None] * self.size
            dist.all_gather_object(answers, yes)
        return True in answers

    def first[T](self, action: Callable[[], T]) -> T:
        """Runs the action on rank 0 alone, and hands its result to every rank. A collective.

        Raises:
            Exception: as `agree`.
        """
        result = self.agree(lambda: action() if self.rank == 0 else None)
        if self.size > 1:
            box: list[Any] = [result]
            dist.broadcast_object_list(box, src=0)
            result = box[0]
        return result  # type: ignore[return-value]


ALONE = Ranks()
"""One process."""


@contextlib.contextmanager
def ranks_of_launcher() -> Iterator[Ranks]:
    """The ranks that torchrun started, while entered; one where nobody did."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield ALONE
        return
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
