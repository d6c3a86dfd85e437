"""Megatron-LM's legacy format: a folder `mp_rank_TT[_PPP][_EEE]` for each rank, with its part of the model as it is.

Nothing says how the parts go together: layers count from 0 in each pipeline chunk, experts from 0 on each expert rank,
and a tensor does not say along which axis it was cut. All of that follows from the names and from Megatron's rules.
"""

# Shape suffixes: N rows, K columns.

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from jetrl_megatron.convert.legacy_file import RankFile, open_rank_file, release
from jetrl_megatron.convert.parameters import Parameter, by_layer, canonical_name, joined

RANK_FOLDERS = "mp_rank_*"
"""Pattern of the folders; a folder that holds such ones is a checkpoint in this format."""

_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_LAYER = re.compile(r"^(decoder\.layers)\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.local_experts)\.(\d+)\.")
_FUSED_EXPERTS = re.compile(r"\.experts\.weight[12]$")
_LAST = "decoder.final_layernorm.weight"


class _Cut(Enum):
    """How tensor-parallel ranks hold a parameter."""

    ROWS = re.compile(
        r"(word_embeddings|output_layer|linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(weight|bias)$"
    )
    COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
    # Each rank stores its rows of gate, then its rows of up.
    HALVES = re.compile(r"linear_fc1\.(weight|bias)$")
    # Cut by Megatron's own linears, whole on every rank with TransformerEngine's.
    ROWS_OR_WHOLE = re.compile(r"linear_(q|kv)_down_proj\.weight$")
    WHOLE = re.compile(r"$")


@dataclass(frozen=True)
class _Stored:
    """Where a parameter lies: on the tensor-parallel ranks of one expert rank and one pipeline chunk."""

    key: str
    shards: tuple[tuple[Path, torch.Tensor], ...]


class LegacyStore:
    """A folder in the legacy format, saved with any TP, PP, VPP, EP and expert TP; data parallel ranks save nothing.

    Args:
        folder: the folder that holds `mp_rank_*`.

    Attributes:
        parameters: the model's parameters, layer after layer; optimizer state and extra state are left out.
        arguments: of the training run; {} where it saved none.

    Raises:
        ValueError: a rank's folder or file is missing, cut off or foreign, or the ranks do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self._ranks = _Ranks(folder)
        self.arguments = self._ranks.args
        self._stored: dict[str, list[_Stored]] = defaultdict(list)
        for pipeline, chunk, first_layer in self._ranks.chunks():
            for name, stored in self._ranks.parameters(pipeline, chunk, first_layer):
                self._stored[name].append(stored)
        self.parameters = sorted(self._described(), key=by_layer)

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, in memory of its own.

        Raises:
            ValueError: tensor-parallel ranks that hold the same disagree. What expert-parallel ranks hold in common is
                read from the first of them.
        """
        first, *others = (_assembled(parameter.name, stored) for stored in self._stored[parameter.name])
        for stored in self._stored[parameter.name]:
            for _, shard in stored.shards:
                release(shard)
        for other in others:
            if not torch.equal(first, other):
                files = joined([str(stored.shards[0][0]) for stored in self._stored[parameter.name]])
                raise ValueError(
                    f"{parameter.name} differs between pipeline stages, in {files}: copies of one parameter drifted "
                    "apart in training; convert an earlier iteration"
                )
        return first

    def _described(self) -> Iterator[Parameter]:
        for name, (stored, *_) in self._stored.items():
            (_, first), parts = stored.shards[0], len(stored.shards)
            shape = list(first.shape)
            cut = _cut_of(name, stored)
            axes = {_Cut.WHOLE: 0, _Cut.COLUMNS: 2}.get(cut, 1)
            if len(shape) < axes:
                raise ValueError(
                    f"{stored.shards[0][0]}: {name} has the shape {shape}, and tensor-parallel ranks cut it along axis "
                    f"{axes - 1}: the file was edited; restore it from a copy"
                )
            if cut in (_Cut.ROWS, _Cut.HALVES):
                shape[0] *= parts
            elif cut is _Cut.COLUMNS:
                shape[1] *= parts
            yield Parameter(name, stored.key, (), tuple(shape), first.dtype)


class _Ranks:
    """The ranks' files by their places in the parallel layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = self._opened()
        self.args = next(iter(self._files.values())).args
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        self._tensor, self._pipeline, self._expert = (
            self._asked(1 + max(place[axis] for place in self._files), name) for axis, name in enumerate(names)
        )
        self._expert_tensor = self.args.get("expert_tensor_parallel_size") or self._tensor
        if not isinstance(self._expert_tensor, int):
            raise ValueError(
                f"{self._folder}: its own arguments say expert_tensor_parallel_size={self._expert_tensor!r}, which is "
                "no number of ranks: restore the folder from a copy"
            )
        self._require_complete()

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """(pipeline rank, virtual stage, global number of its first layer), in the order of the layers."""
        stages = {len(file.chunks) for file in self._files.values()}
        if len(stages) > 1:
            raise ValueError(
                f"{self._folder}: ranks have {sorted(stages)} virtual pipeline stages: files of several checkpoints "
                "lie in one folder; restore it from a copy"
            )
        first_layer = 0
        for chunk, pipeline in itertools.product(range(stages.pop()), range(self._pipeline)):
            yield pipeline, chunk, first_layer
            first_layer += self._layers(pipeline, chunk)
        asked = self.args.get("num_layers")
        if isinstance(asked, int) and asked != first_layer:
            raise ValueError(
                f"{self._folder} holds {first_layer} layers, and its own arguments say num_layers={asked}: it was "
                "saved or copied incompletely"
            )

    def parameters(self, pipeline: int, chunk: int, first_layer: int) -> Iterator[tuple[str, _Stored]]:
        """(global name, where it lies) for each parameter of a pipeline chunk."""
        files = [self._any_expert(tensor, pipeline) for tensor in range(self._tensor)]
        for key in _same_names(files, chunk):
            name = _global(key, first_layer, 0)
            if not _EXPERT.search(name):
                yield name, _Stored(key, tuple((file.path, file.chunks[chunk][key]) for file in files))
        for expert in range(self._expert):
            files = [self._expert_file(tensor, pipeline, expert) for tensor in range(self._expert_tensor)]
            keys = [key for key in _same_names(files, chunk) if _EXPERT.search(canonical_name(key))]
            held = _experts_held(files[0].path, keys)
            for key in keys:
                shards = tuple((file.path, file.chunks[chunk][key]) for file in files)
                yield _global(key, first_layer, expert * held), _Stored(key, shards)

    def _opened(self) -> dict[tuple[int, int, int], RankFile]:
        numbers: dict[tuple[int, ...], RankFile] = {}
        for path in sorted(self._folder.glob(RANK_FOLDERS)):
            match = _RANK.match(path.name)
            if not match:
                raise ValueError(f"{path} is no folder of a rank, mp_rank_TT[_PPP][_EEE]: move it elsewhere")
            numbers[tuple(int(part) for part in match.groups() if part)] = open_rank_file(path / _FILE)
        if len({len(place) for place in numbers}) > 1:
            raise ValueError(
                f"{self._folder} mixes mp_rank_* folders of several layouts: remove those of the other checkpoint"
            )
        # With one number more, it is the pipeline's or the experts': a single stage has the last layer's norm.
        lone = _LAST in numbers[min(numbers)].chunks[-1]
        return {_place(place, lone): file for place, file in numbers.items()}

    def _asked(self, found: int, name: str) -> int:
        asked = self.args.get(name)
        if not isinstance(asked, int) or asked == found:
            return found
        if asked < found:
            raise ValueError(
                f"{self._folder} has files for {name}={found}, and its own arguments say {asked}: remove the files of "
                "the other checkpoint"
            )
        return asked

    def _require_complete(self) -> None:
        dense = {(tensor, pipeline) for tensor, pipeline, _ in self._files}
        experts = {(tensor % self._expert_tensor, pipeline, expert) for tensor, pipeline, expert in self._files}
        missing = [
            self._folder_name(tensor, pipeline, None)
            for tensor, pipeline in itertools.product(range(self._tensor), range(self._pipeline))
            if (tensor, pipeline) not in dense
        ]
        places = itertools.product(range(self._expert_tensor), range(self._pipeline), range(self._expert))
        missing += [self._folder_name(*place) for place in places if place not in experts]
        if missing:
            sizes = f"TP {self._tensor}, PP {self._pipeline}, EP {self._expert}, expert TP {self._expert_tensor}"
            names = joined(list(dict.fromkeys(missing)))
            raise ValueError(
                f"{self._folder} lacks {names}: the checkpoint was saved with {sizes}, and each rank's "
                "folder is needed; copy all of them"
            )

    def _folder_name(self, tensor: int, pipeline: int, expert: int | None) -> str:
        name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if self._pipeline > 1 else "")
        return name + ("" if self._expert == 1 else "_*" if expert is None else f"_{expert:03d}")

    def _any_expert(self, tensor: int, pipeline: int) -> RankFile:
        return next(file for place, file in sorted(self._files.items()) if place[:2] == (tensor, pipeline))

    def _expert_file(self, expert_tensor: int, pipeline: int, expert: int) -> RankFile:
        return next(
            file
            for (tensor, *rest), file in sorted(self._files.items())
            if tensor % self._expert_tensor == expert_tensor and rest == [pipeline, expert]
        )

    def _layers(self, pipeline: int, chunk: int) -> int:
        file = self._any_expert(0, pipeline)
        layers = sorted({int(match[2]) for name in file.chunks[chunk] if (match := _LAYER.match(name))})
        if layers != list(range(len(layers))):
            raise ValueError(
                f"{file.path} has layers {layers} of its chunk {chunk}, which are not numbered from 0: the checkpoint "
                "was edited; restore it from a copy"
            )
        return len(layers)


def _place(numbers: Sequence[int], lone: bool) -> tuple[int, int, int]:
    if len(numbers) == 2:
        return (numbers[0], 0, numbers[1]) if lone else (numbers[0], numbers[1], 0)
    tensor, pipeline, expert = (*numbers, 0, 0)[:3]
    return tensor, pipeline, expert


def _same_names(files: Sequence[RankFile], chunk: int) -> list[str]:
    first, *others = files
    for file in others:
        odd = sorted(first.chunks[chunk].keys() ^ file.chunks[chunk].keys())
        if odd:
            raise ValueError(
                f"{first.path} and {file.path} have different parameters, {joined(odd)}: the ranks saved different "
                "models; restore the folder from a copy"
            )
    return list(first.chunks[chunk])


def _global(key: str, first_layer: int, first_expert: int) -> str:
    if _FUSED_EXPERTS.search(key):
        raise ValueError(
            f"{key} holds all experts of a rank in one tensor, the layout of Megatron's former GroupedMLP: load the "
            "checkpoint with the version that wrote it, and save it with --ckpt-format torch_dist"
        )
    name = _LAYER.sub(lambda match: f"{match[1]}.{first_layer + int(match[2])}.", canonical_name(key))
    return _EXPERT.sub(lambda match: f"{match[1]}.{first_expert + int(match[2])}.", name)


def _experts_held(path: Path, keys: Sequence[str]) -> int:
    layers: dict[str, set[int]] = defaultdict(set)
    for key in keys:
        name = canonical_name(key)
        match = _EXPERT.search(name)
        assert match is not None
        layers[name[: match.start()]].add(int(match[2]))
    held = {tuple(sorted(experts)) for experts in layers.values()}
    if held and held != {tuple(range(len(max(held, key=len))))}:
        raise ValueError(f"{path} has other experts in one layer than in the next: restore the folder from a copy")
    return len(held.pop()) if held else 0


def _cut_of(name: str, stored: _Stored) -> _Cut:
    if len(stored.shards) == 1:
        return _Cut.WHOLE
    cut = next(cut for cut in _Cut if cut.value.search(name))
    if cut is not _Cut.ROWS_OR_WHOLE:
        return cut
    first, *others = (shard[:1] for _, shard in stored.shards)
    return _Cut.WHOLE if all(torch.equal(first, other) for other in others) else _Cut.ROWS


def _assembled(name: str, stored: _Stored) -> torch.Tensor:
    cut, shards = _cut_of(name, stored), [shard for _, shard in stored.shards]
    if len({shard.shape for shard in shards}) > 1 or len({shard.dtype for shard in shards}) > 1:
        described = "; ".join(f"{path}: {shard.dtype} {list(shard.shape)}" for path, shard in stored.shards)
        raise ValueError(f"{name} has other shapes on one rank than on the next: {described}; restore the folder")
    if cut is _Cut.ROWS:
        return torch.cat(shards)
    if cut is _Cut.COLUMNS:
        return torch.cat(shards, dim=1)
    if cut is _Cut.HALVES:
        gates, ups = zip(*(shard_N.chunk(2) for shard_N in shards), strict=True)
        return torch.cat([*gates, *ups])
    for path, shard in stored.shards[1:]:
        if not torch.equal(shards[0], shard):
            raise ValueError(
                f"{name} differs between {stored.shards[0][0]} and {path}, and tensor-parallel ranks should hold the "
                "same: they drifted apart in training; convert an earlier iteration"
            )
    return shards[0].clone()
