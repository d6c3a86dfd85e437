"""The stream from a checkpoint's parameters to the parts of an export's tensors, in as many threads as there are cores.

A task is one parameter of the source. It is read whole, cut into logical matrices, and each matrix is quantised a band
of tile rows at a time: a band's intermediate results stay in a core's cache, which is several times as fast as passes
over a whole matrix, and tiles do not know of each other, so that the bytes are the same.
"""

# Shape suffixes: N rows and K columns of a weight.

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from tqdm import tqdm

from jetrl_megatron.convert.fp8_weights import (
    is_decoder_linear,
    iter_fp8_weights,
    require_finite,
    scale_name,
)
from jetrl_megatron.convert.mapping import EMBEDDING, HEAD, HfMapping, LogicalMatrix
from jetrl_megatron.convert.plan import ExportPlan
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import ceil_div

# Elements that are quantised at a time: 2 MB in float32, which cores' caches hold.
_BAND = 1 << 19
# Source bytes of the parameters that threads hold at the same time; one that is larger is held alone. Reading and
# cutting makes about two copies more.
_HELD_BYTES = 10**9


class Parameter(Protocol):
    """What is asked of a source's parameters: the global Megatron name, the whole shape, and the stored dtype."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Source(Protocol):
    """A checkpoint of any format.

    Attributes:
        folder: where it lies.
        parameters: whole parameters of the model.
    """

    folder: Path

    @property
    def parameters(self) -> Sequence[Parameter]: ...

    def read(self, parameter: Any) -> torch.Tensor:
        """One of its parameters, whole and on the CPU. Threads call it at the same time."""


class Piece(NamedTuple):
    """Some rows of a tensor of the export: first_row ... of the tensor `name`."""

    name: str
    first_row: int
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    """Parameters that are converted together, and what comes of them.

    Attributes:
        parameters: one; two where a tied head is compared with the embedding.
        names: tensors of the export.
        nbytes: of the parameters in the source.
    """

    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]
    nbytes: int


def make_tasks(parameters: Iterable[Parameter], mapping: HfMapping, plan: ExportPlan) -> list[Task]:
    """Divides a conversion.

    Raises:
        ValueError: the parameters do not make exactly the tensors of the plan.
    """
    parameters = list(parameters)
    names = {parameter.name: mapping.untied_names(mapping.targets(parameter.name)) for parameter in parameters}
    plan.check_sources(name for targets in names.values() for name in targets)
    seen: set[str] = set()
    for name in (name for targets in names.values() for name in targets):
        if name in seen:
            raise ValueError(f"{name} arrives twice: two parameters of the source map to it")
        seen.add(name)
    head = [parameter for parameter in parameters if parameter.name == HEAD and not names[HEAD]]
    tasks = []
    for parameter in parameters:
        if parameter in head:
            continue
        together = (parameter, *head) if parameter.name == EMBEDDING else (parameter,)
        made = [made for name in names[parameter.name] for made in (name, scale_name(name)) if made in plan.tensors]
        nbytes = sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in together)
        tasks.append(Task(together, tuple(dict.fromkeys(made)), nbytes))
    return tasks


def share_of(tasks: Sequence[Task], rank: int, size: int) -> list[Task]:
    """The tasks of one of several ranks, about as many bytes for each."""
    loads = [0] * size
    share = []
    for task in sorted(tasks, key=lambda task: -task.nbytes):
        least = loads.index(min(loads))
        loads[least] += task.nbytes
        if least == rank:
            share.append(task)
    # In the source's order, in which its files are read from front to back.
    mine = set(map(id, share))
    return [task for task in tasks if id(task) in mine]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Makes the pieces of a task.

    Attributes:
        source: the checkpoint.
        mapping: of the model.
        recipe: how to quantise, and what stays BF16.
        plan: what the tensors must be.
    """

    source: Source
    mapping: HfMapping
    recipe: Fp8BlockRecipe
    plan: ExportPlan

    def pieces(self, task: Task) -> Iterator[Piece]:
        """The tensors of a task, in parts.

        Raises:
            ValueError: a parameter cannot be read, has a wrong shape or a value that is not finite.
        """
        for matrix in self.mapping.without_tied_head(self._matrices(task)):
            self.plan.check_source(matrix.name, matrix.tensor)
            yield from self._pieces_of(matrix)

    def _matrices(self, task: Task) -> Iterator[LogicalMatrix]:
        for parameter in task.parameters:
            yield from self.mapping.split(parameter.name, self._read(parameter))

    def _read(self, parameter: Parameter) -> torch.Tensor:
        try:
            return self.source.read(parameter)
        except (ValueError, OSError):
            raise
        except Exception as error:
            raise ValueError(
                f"{self.source.folder}: {parameter.name} cannot be read ({type(error).__name__}: {error}): the "
                "checkpoint is damaged; restore it from a copy, or convert another iteration"
            ) from error

    def _pieces_of(self, matrix: LogicalMatrix) -> Iterator[Piece]:
        module, name, tensor = matrix
        if is_decoder_linear(module) and not self.recipe.quantizes(module, self.mapping.num_layers):
            require_finite(name, tensor)
            yield Piece(name, 0, tensor)
            return
        block = self.recipe.block
        rows, columns = _band_of(tensor, block)
        for first in range(0, len(tensor), rows) if rows else [0]:
            band = tensor[first : first + rows] if rows else tensor
            try:
                parts = self._fp8(module, name, band, columns)
            except ValueError:
                # The same complaint, with the position in the whole matrix.
                require_finite(name, tensor)
                raise
            for part, values in parts:
                yield Piece(part, first if part == name else first // block, values)

    def _fp8(self, module: str, name: str, band: torch.Tensor, columns: int) -> list[tuple[str, torch.Tensor]]:
        # That this module is quantised, if it is a linear, is known here; a pattern need not match in every matrix.
        whole = dataclasses.replace(self.recipe, ignore=(), num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
        how = whole, self.mapping.num_layers, self.plan.scale_dtype
        if scale_name(name) not in self.plan.tensors or band.shape[1] <= columns:
            return list(iter_fp8_weights([(module, name, band)], *how))
        parts: dict[str, list[torch.Tensor]] = {}
        for chunk in torch.split(band, columns, dim=1):
            for part, values in iter_fp8_weights([(module, name, chunk)], *how):
                parts.setdefault(part, []).append(values)
        # As bytes: torch does not join FP8 everywhere.
        return [(part, _joined(values)) for part, values in parts.items()]


def _band_of(tensor: torch.Tensor, block: int) -> tuple[int, int]:
    """Rows and columns that are quantised at a time, whole tiles; (0, 0) for a tensor that is no matrix."""
    if tensor.dim() != 2 or not tensor.numel():
        return 0, 0
    tiles = ceil_div(tensor.shape[1], block)
    columns = ceil_div(tiles, ceil_div(tiles * block * block, _BAND)) * block
    return max(1, _BAND // (block * columns)) * block, columns


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(parts[0].dtype)


def run_tasks(
    tasks: Sequence[Task], action: Callable[[Task], object], *, workers: int, progress: tqdm[None]
) -> Generator[Task]:
    """Runs an action for every task; no thread is left when the generator is closed.

    Args:
        workers: threads.
        progress: told the bytes of each task that is done.

    Yields:
        a task, in the caller's thread, when it is done.

    Raises:
        Exception: the first one that an action raises; tasks that did not begin are left out.
    """
    budget = _Budget(_HELD_BYTES)

    def one(task: Task) -> Task:
        with budget.holding(task.nbytes):
            action(task)
        return task

    pool = ThreadPoolExecutor(workers, "convert", initializer=torch.set_num_threads, initargs=(1,))
    waiting = iter(tasks)
    running: set[Future[Task]] = set()
    threads = torch.get_num_threads()
    try:
        while True:
            # Few in advance: what is queued cannot be cancelled once a thread has taken it.
            running.update(pool.submit(one, task) for task in islice(waiting, workers + 1 - len(running)))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                task = future.result()
                progress.update(task.nbytes)
                yield task
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


class _Budget:
    """Bytes that threads may hold together."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._limit)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()
