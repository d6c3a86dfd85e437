"""One conversion of a saved checkpoint, from the checks before the first weight to the name that the export gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PretrainedConfig

from jetrl_megatron.convert.arguments import check_arguments
from jetrl_megatron.convert.compare import differing_files, differing_headers, differing_tensors
from jetrl_megatron.convert.files import FileLayout, TensorFiles, lay_out
from jetrl_megatron.convert.fp8_weights import is_decoder_linear
from jetrl_megatron.convert.hf_model import HfModel, open_hf_model
from jetrl_megatron.convert.mapping import HfMapping
from jetrl_megatron.convert.plan import ExportPlan, count_of, plan_export
from jetrl_megatron.convert.ranks import ALONE, Ranks
from jetrl_megatron.convert.recipe_file import choose_recipe
from jetrl_megatron.convert.resume import Committer, WorkFolder, job_description, source_fingerprint
from jetrl_megatron.convert.rollout_tp import check_rollout_tp
from jetrl_megatron.convert.shards import ShardedCheckpoint
from jetrl_megatron.convert.stored import read_config
from jetrl_megatron.convert.stream import Stream, Task, make_tasks, run_tasks, share_of
from jetrl_megatron.convert.writer import (
    SHARD_BYTES,
    check_out,
    check_parent,
    export_config,
    write_beside,
    write_index,
)
from jetrl_megatron.recipe import Fp8BlockRecipe

type HfConfigSource = PretrainedConfig | str | os.PathLike[str]
"""A configuration object, or the folder that holds config.json."""

COMMIT_SECONDS = 2.0
"""How much work a kill may cost: what is written is flushed and recorded after this time."""

_MOST_WORKERS = 8
_SHOWN = 8
_LONGEST = 300
_MOST_TP = 64


@dataclass(frozen=True)
class ConvertOptions:
    """How a checkpoint is converted; the fields are the arguments of `convert_checkpoint`."""

    hf_config: HfConfigSource
    recipe: Fp8BlockRecipe | None = None
    recipe_fields: Mapping[str, Any] | None = None
    tokenizer_from: str | os.PathLike[str] | None = None
    rollout_tp: int | None = None
    scale_dtype: str = "float32"
    max_shard_size: int = SHARD_BYTES
    workers: int | None = None


@dataclass(frozen=True)
class Job:
    """An export of which everything is known but the weights.

    Attributes:
        hf: the Hugging Face model.
        recipe: how to quantise.
        mapping: from Megatron's names to Hugging Face's.
        plan: the tensors.
        files: to copy beside them.
    """

    hf: HfModel
    recipe: Fp8BlockRecipe
    mapping: HfMapping
    plan: ExportPlan
    files: list[Path]

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        return export_config(self.hf, self.recipe, self.plan)


def prepare_job(
    out: str | os.PathLike[str],
    hf_config: HfConfigSource,
    recipe: Fp8BlockRecipe,
    linears: list[str],
    tokenizer_from: str | os.PathLike[str] | None,
    rollout_tp: int | None,
    scale_dtype: str,
) -> Job:
    """Checks everything that can be checked before the first weight is read.

    Args:
        linears: Megatron names of all decoder linears of the model.

    Raises:
        ValueError: the place, the model, the tokenizer, the rollout's TP or the recipe does not fit.
    """
    check_parent(Path(out))
    hf = open_hf_model(hf_config)
    files = hf.files(tokenizer_from)
    if rollout_tp is not None:
        check_rollout_tp(hf.config, rollout_tp, recipe)
    mapping = HfMapping(hf)
    return Job(hf, recipe, mapping, plan_export(hf, mapping, linears, recipe, scale_dtype), files)


def open_conversion(src: str | os.PathLike[str], out: str | os.PathLike[str], options: ConvertOptions) -> Conversion:
    """Reads the source's index and plans the export; no weight is read and nothing is written.

    Raises:
        ValueError: as `convert_checkpoint`.
    """
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"workers={options.workers} must be 1 or more threads")
    source = _open_source(src)
    recipe = choose_recipe(source.folder, options.recipe, options.recipe_fields)
    modules = {parameter.name.rpartition(".")[0] for parameter in source.parameters}
    linears = sorted(filter(is_decoder_linear, modules))
    job = prepare_job(
        out, options.hf_config, recipe, linears, options.tokenizer_from, options.rollout_tp, options.scale_dtype
    )
    check_arguments(source.folder, source.arguments, job.mapping)
    return Conversion(
        out=Path(out),
        job=job,
        stream=Stream(source, job.mapping, recipe, job.plan),
        tasks=make_tasks(source.parameters, job.mapping, job.plan),
        layout=lay_out(job.plan.tensors, options.max_shard_size),
        workers=options.workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0))),
    )


@dataclass(frozen=True)
class Conversion:
    """A conversion that may begin.

    Attributes:
        out: the folder to make.
        job: what it will be.
        stream: what makes its tensors.
        tasks: the parts of the work.
        layout: of the weight files.
        workers: threads of this process.
    """

    out: Path
    job: Job
    stream: Stream
    tasks: Sequence[Task]
    layout: FileLayout
    workers: int

    @property
    def work(self) -> WorkFolder:
        """The folder that it works in; a new object each time."""
        return WorkFolder(self.out)

    def run(self, *, force: bool = False, verify: bool = False, ranks: Ranks = ALONE) -> Path:
        """Converts; see `convert_checkpoint`."""
        work = self.work
        try:
            done = ranks.first(lambda: self._begin(work, force))
            if done is not None:
                ranks.agree(lambda: self._write(work, done, ranks))
                ranks.first(lambda: self._write_beside(work))
                if verify:
                    ranks.agree(lambda: self._verify(work, ranks))
                ranks.first(lambda: self._publish(work, force))
        except ValueError:
            # Not after an interrupt or a full disk: from there the same command goes on.
            work.discard()
            raise
        finally:
            work.close()
        return self.out

    def to_text(self) -> str:
        """The plan as a table: tensors that differ in their numbers alone share a line."""
        recipe, plan = self.job.recipe, self.job.plan
        files = count_of(len(self.layout.files), "file")
        source = sum(task.nbytes for task in self.tasks)
        served = servable_tps(self.job.hf.config, recipe)
        lines = [
            f"{self.stream.source.folder} -> {self.out}: {recipe.scale_format} scales, recipe {recipe.fingerprint}",
            plan.to_text(),
            f"{len(plan.tensors)} tensors, {source / 1e9:.3f} GB -> {plan.nbytes / 1e9:.3f} GB in {files}",
            f"rollout TP that vLLM can serve: {', '.join(map(str, served)) or 'none known; --rollout-tp 1 says why'}",
        ]
        lines += [f"stays BF16: {name}" for name in plan.ignored]
        return "\n".join(lines + [f"copied: {path}" for path in self.job.files])

    def differences(self, folder: Path, ranks: Ranks = ALONE) -> list[str]:
        """Compares an export with what the source makes, byte for byte.

        Returns:
            a line for each difference, in this rank's share of the weights; rank 0 alone has those of everything else.

        Raises:
            ValueError: a file on either side is missing or damaged.
        """
        lines = differing_headers(folder, self.job.plan)
        stored, config = read_config(folder), self.job.config
        fields = sorted(key for key in {*stored, *config} if stored.get(key) != config.get(key))
        lines += [f"config.json: {key} is {_brief(stored.get(key))}, not {_brief(config.get(key))}" for key in fields]
        lines += differing_files(folder, self.job.files)
        if lines:
            return lines if ranks.rank == 0 else []
        share = share_of(self.tasks, ranks.rank, ranks.size)
        return differing_tensors(folder, self.stream, share, self.workers, show=ranks.rank == 0)

    def _begin(self, work: WorkFolder, force: bool) -> set[str] | None:
        """What is done already; None where everything is, and only the working folder was left."""
        job = self._description()
        if work.finished(job) and not differing_files(self.out, self.job.files):
            work.lock()
            work.discard()
            return None
        check_out(self.out, force=force)
        return work.open(job, self.layout)

    def _description(self) -> dict[str, str]:
        source = source_fingerprint(self.stream.source.folder, without=(self.out, self.work.folder))
        return job_description(source, self.job.recipe.fingerprint, self.layout, self.job.config)

    def _write(self, work: WorkFolder, done: set[str], ranks: Ranks) -> None:
        share = share_of(self.tasks, ranks.rank, ranks.size)
        todo = [task for task in share if not done.issuperset(task.names)]
        # disable=None: no bar where nobody watches, e.g. in a log file.
        bar = tqdm(
            total=sum(task.nbytes for task in share),
            initial=sum(task.nbytes for task in share) - sum(task.nbytes for task in todo),
            unit="B",
            unit_scale=True,
            desc="convert",
            disable=None if ranks.rank == 0 else True,
        )
        with (
            bar as progress,
            TensorFiles(work.export, self.layout, create=False) as files,
            work.journal(ranks.rank) as journal,
            Committer(files, journal, COMMIT_SECONDS) as committer,
        ):

            def write(task: Task) -> None:
                for piece in self.stream.pieces(task):
                    files.write(piece.name, piece.tensor, piece.first_row)

            # Closed before the files are, so that no thread writes to a file that is closed.
            with closing(run_tasks(todo, write, workers=self.workers, progress=progress)) as written:
                for task in written:
                    committer.add(task.names)

    def _write_beside(self, work: WorkFolder) -> None:
        # An earlier run may have copied another tokenizer.
        work.keep_only({file.name for file in self.layout.files})
        write_index(work.export, self.layout)
        write_beside(work.export, self.job.config, self.job.files)

    def _verify(self, work: WorkFolder, ranks: Ranks) -> None:
        lines = self.differences(work.export, ranks)
        if lines:
            more = f"\n... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ValueError(
                f"what was written is not what the source makes, and {self.out} was not made:\n"
                + "\n".join(lines[:_SHOWN])
                + f"{more}\nThe disk or the memory is faulty, or somebody wrote to {work.export}: convert again"
            )

    def _publish(self, work: WorkFolder, force: bool) -> None:
        if work.changed(self._description()):
            raise ValueError(
                f"{self.stream.source.folder} changed while it was read: convert again when nobody writes to it"
            )
        try:
            check_out(self.out, force=force)
        except ValueError as error:
            # Not a ValueError, after which the work would be removed.
            raise FileExistsError(f"{error}; it appeared during the conversion, whose work is kept") from error
        work.publish()


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def servable_tps(hf_config: Any, recipe: Fp8BlockRecipe) -> list[int]:
    """The tensor parallel sizes at which vLLM serves an export with every scale in its place."""
    sizes = []
    for tp in range(1, _MOST_TP + 1):
        try:
            check_rollout_tp(hf_config, tp, recipe)
        except ValueError:
            continue
        sizes.append(tp)
    return sizes


def _open_source(src: str | os.PathLike[str]) -> ShardedCheckpoint:
    try:
        return ShardedCheckpoint(src)
    except (ValueError, OSError):
        raise
    except Exception as error:
        # A damaged file is a pickle that may fail in any way.
        raise ValueError(
            f"{src}: the checkpoint cannot be read ({type(error).__name__}: {error}): it is damaged; copy it "
            "again, or convert another iteration"
        ) from error
