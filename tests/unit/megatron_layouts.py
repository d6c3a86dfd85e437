"""What Megatron's ranks save for a Hugging Face model under a parallel layout, made without processes.

The rules are written down here a second time, from Megatron's side: which rank holds which rows, what it calls them,
and how each checkpoint format writes them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

VOCABULARY_MULTIPLE = 64
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc\d)\.(weight)$")
_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_GATED = {"gate_proj": "up_proj", "w1": "w3"}
_ROWS = re.compile(
    r"(word_embeddings|output_layer|linear_qkv|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(weight|bias)$"
)


@dataclass(frozen=True)
class Layout:
    """A parallel layout.

    Attributes:
        tp, pp, vpp, ep, etp: sizes of tensor, pipeline, virtual pipeline, expert and expert tensor parallelism.
        stages: layers of each pipeline chunk in the order of the layers; () divides them evenly.
        fused: TransformerEngine's names: norms inside linears, experts as numbered tensors.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 0
    stages: tuple[int, ...] = ()
    fused: bool = False

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    def chunks(self, layers: int) -> list[range]:
        """The layers of each chunk; chunk i lies on pipeline rank i % pp as its stage i // pp."""
        count = self.pp * self.vpp
        stages = self.stages or (layers // count,) * count
        assert sum(stages) == layers and len(stages) == count
        ends = list(itertools.accumulate(stages))
        return [range(end - size, end) for end, size in zip(ends, stages, strict=True)]

    def places(self) -> list[tuple[int, int, int, int]]:
        """(tensor, pipeline, expert, expert tensor) of each rank that saves: one of each expert data parallel group."""
        found = set()
        for rank in range(max(self.tp, self.ep * self.expert_tp)):
            expert_tensor, expert = rank % self.expert_tp, rank // self.expert_tp % self.ep
            found |= {(rank % self.tp, pipeline, expert, expert_tensor) for pipeline in range(self.pp)}
        return sorted(found)


def megatron_parameters(hf: Mapping[str, torch.Tensor], config: Any, *, fused: bool) -> dict[str, torch.Tensor]:
    """Every parameter of the Megatron model, whole, by its global name; experts are modules of their own."""
    found: dict[str, torch.Tensor] = {}
    names = _fused_names(config) if fused else _local_names(config)
    for name, tensor in hf.items():
        match = _HF_LAYER.match(name)
        if not match:
            found[_outer_name(name)] = _padded(tensor) if tensor.dim() == 2 else tensor
            continue
        layer, inner = int(match[1]), match[2]
        beside = {other: hf[f"model.layers.{layer}.{other}"] for other in _siblings(inner)}
        for key, value in _layer_parameter(inner, tensor, names, config, beside):
            found[_in_layer(layer, key, config)] = value
    return found


def _outer_name(name: str) -> str:
    return {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }[name]


def _in_layer(layer: int, key: str, config: Any) -> str:
    extra = layer - config.num_hidden_layers
    if extra < 0:
        return f"decoder.layers.{layer}.{key}"
    joint = key in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
    return f"mtp.layers.{extra}.{key}" if joint else f"mtp.layers.{extra}.mtp_model_layer.{key}"


def _layer_parameter(
    inner: str, tensor: torch.Tensor, names: dict[str, str], config: Any, beside: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    module, _, kind = inner.rpartition(".")
    linear = module.rpartition(".")[2]
    if inner in names:
        yield names[inner], tensor
    elif module == "self_attn.q_proj":
        yield f"self_attention.linear_qkv.{kind}", _interleaved([tensor, *beside.values()], config)
    elif linear == "gate_up_proj":
        yield f"mlp.linear_fc1.{kind}", tensor
    elif linear in _GATED:
        yield f"{_mlp(module)}.linear_fc1.{kind}", torch.cat([tensor, *beside.values()])
    elif linear in ("down_proj", "w2"):
        yield f"{_mlp(module)}.linear_fc2.{kind}", tensor
    elif linear not in ("k_proj", "v_proj", *_GATED.values()):
        raise AssertionError(inner)


def _siblings(inner: str) -> list[str]:
    """Other tensors of the layer that Megatron stores in one with this, which is the first of them."""
    module, _, kind = inner.rpartition(".")
    linear = module.rpartition(".")[2]
    if module == "self_attn.q_proj":
        return [f"self_attn.{part}_proj.{kind}" for part in "kv"]
    return [inner.replace(linear, _GATED[linear])] if linear in _GATED else []


def _mlp(module: str) -> str:
    module = module.rpartition(".")[0].replace("block_sparse_moe", "mlp")
    return re.sub(r"\.experts\.(\d+)$", r".experts.local_experts.\1", module)


def _interleaved(parts: list[torch.Tensor], config: Any) -> torch.Tensor:
    """q, k, v -> for each KV group its queries, its key, its value."""
    groups = config.num_key_value_heads
    by_group = [part.view(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[0] % VOCABULARY_MULTIPLE
    return torch.cat([tensor, tensor.new_full((missing, tensor.shape[1]), 9.0)])


def _local_names(config: Any) -> dict[str, str]:
    return {
        "input_layernorm.weight": "input_layernorm.weight",
        "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
        "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
        "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_layernorm.weight": "self_attention.q_layernorm.weight",
        "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_layernorm.weight": "self_attention.kv_layernorm.weight",
        "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
        "mlp.gate.weight": "mlp.router.weight",
        "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
        "block_sparse_moe.gate.weight": "mlp.router.weight",
        "post_self_attn_layernorm.weight": "post_self_attn_layernorm.weight",
        "post_mlp_layernorm.weight": "post_mlp_layernorm.weight",
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "shared_head.norm.weight": "final_layernorm.weight",
        **(_GEMMA if config.model_type.startswith("gemma") else {}),
    }


# Gemma has no layer spec without TransformerEngine: its norms behind linears are parts of them.
_GEMMA = {
    "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "pre_feedforward_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
}


def _fused_names(config: Any) -> dict[str, str]:
    names = _local_names(config)
    if getattr(config, "kv_lora_rank", None):
        names["self_attn.q_a_layernorm.weight"] = "self_attention.linear_q_up_proj.layer_norm_weight"
        names["self_attn.kv_a_layernorm.weight"] = "self_attention.linear_kv_up_proj.layer_norm_weight"
        return names
    names["input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    # A router reads the norm's output before the experts do, so theirs stays apart.
    if not config.model_type.startswith("gemma") and "moe" not in config.model_type and config.model_type != "mixtral":
        names["post_attention_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    return names


def _cut(name: str, whole: torch.Tensor, parts: int, rank: int, fused: bool) -> list[tuple[int, int, torch.Tensor]]:
    """What a tensor-parallel rank holds of a parameter: pieces with the row and the column where they lie."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        width = whole.shape[1] // parts
        return [(0, rank * width, whole[:, rank * width : (rank + 1) * width])]
    # TransformerEngine's spec gives each rank all of MLA's down projections; Megatron's own linears cut them.
    if _ROWS.search(name) or (not fused and "_down_proj" in name):
        length = whole.shape[0] // parts
        return [(rank * length, 0, whole[rank * length : (rank + 1) * length])]
    if "linear_fc1.weight" in name:
        half, length = whole.shape[0] // 2, whole.shape[0] // 2 // parts
        starts = (rank * length, half + rank * length)
        return [(start, 0, whole[start : start + length]) for start in starts]
    return [(0, 0, whole)]


def _chunk_of(name: str, chunks: list[range]) -> set[int]:
    match, last = _LAYER.match(name), len(chunks) - 1
    if match:
        return {index for index, layers in enumerate(chunks) if int(match[1]) in layers}
    return {0} if name.startswith("embedding.") else {last}


def save_legacy(
    folder: Path, parameters: dict[str, torch.Tensor], config: Any, layout: Layout, *, args: bool = True
) -> Path:
    """Writes mp_rank_* folders; the last pipeline stage has a copy of a tied embedding as its output layer."""
    chunks, mtp = layout.chunks(config.num_hidden_layers), any(name.startswith("mtp.") for name in parameters)
    parameters = dict(parameters)
    if layout.pp > 1 and "output_layer.weight" not in parameters:
        parameters["output_layer.weight"] = parameters["embedding.word_embeddings.weight"]
    experts = 1 + max((int(match[1]) for name in parameters if (match := _EXPERT.search(name))), default=0)
    for tensor, pipeline, expert, expert_tensor in layout.places():
        models: list[dict[str, Any]] = [{} for _ in range(layout.vpp)]
        for name, whole in parameters.items():
            is_expert = _EXPERT.search(name)
            if is_expert and int(is_expert[1]) // (experts // layout.ep) != expert:
                continue
            parts, rank = (layout.expert_tp, expert_tensor) if is_expert else (layout.tp, tensor)
            pieces = [piece for *_, piece in _cut(name, whole, parts, rank, layout.fused)]
            holders = _chunk_of(name, chunks) | ({len(chunks) - 1} if mtp and name.startswith("embedding.") else set())
            for chunk in holders:
                if chunk % layout.pp == pipeline:
                    key = _legacy_key(name, chunks[chunk].start, experts // layout.ep, layout.fused)
                    models[chunk // layout.pp][key] = torch.cat(pieces)
        path = folder / _legacy_folder(layout, tensor, pipeline, expert)
        path.mkdir(parents=True)
        torch.save(_legacy_content(models, config, layout if args else None), path / "model_optim_rng.pt")
    return folder


def _legacy_key(name: str, first_layer: int, experts: int, fused: bool) -> str:
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) - first_layer}.", name)
    form = r".{1}.{2}{0}" if fused else r".local_experts.{0}.{1}.{2}"
    return _EXPERT.sub(lambda match: form.format(int(match[1]) % experts, match[2], match[3]), name)


def _legacy_folder(layout: Layout, tensor: int, pipeline: int, expert: int) -> str:
    name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if layout.pp > 1 else "")
    return name + (f"_{expert:03d}" if layout.ep > 1 else "")


def _legacy_content(models: list[dict[str, Any]], config: Any, layout: Layout | None) -> dict[str, Any]:
    for model in models:
        model["decoder.layers.0.self_attention.linear_proj._extra_state"] = None
    random_state = {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    content: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 7, "optimizer": {"state": torch.zeros(4)}}
    content["rng_state"] = [random_state]
    if layout is not None:
        content["args"] = argparse.Namespace(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            num_layers=config.num_hidden_layers,
            # Objects of classes that a reader should neither import nor need.
            save=Path("/checkpoints"),
            item_type=WriteItemType.SHARD,
        )
    keys = ["model"] if len(models) == 1 else [f"model{index}" for index in range(len(models))]
    return {**content, **dict(zip(keys, models, strict=True))}


@dataclass(frozen=True)
class _Shard:
    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


def save_torch_dist(
    folder: Path, parameters: dict[str, torch.Tensor], config: Any, layout: Layout, *, stacked: bool = True
) -> Path:
    """Writes a .distcp file for each rank and the index; layers are stacked where all are alike."""
    chunks = layout.chunks(config.num_hidden_layers)
    experts = 1 + max((int(match[1]) for name in parameters if (match := _EXPERT.search(name))), default=0)
    counts = config.num_hidden_layers if stacked else 0, experts
    ranks = []
    for tensor, pipeline, expert, expert_tensor in layout.places():
        shards: list[_Shard] = []
        for name, whole in parameters.items():
            is_expert = _EXPERT.search(name)
            mine = min(_chunk_of(name, chunks)) % layout.pp == pipeline
            if is_expert:
                mine &= int(is_expert[1]) // (experts // layout.ep) == expert
                mine &= tensor == _first_holder(layout, pipeline, expert, expert_tensor)
            else:
                mine &= expert == min(place[2] for place in layout.places() if place[:2] == (tensor, pipeline))
            parts, rank = (layout.expert_tp, expert_tensor) if is_expert else (layout.tp, tensor)
            pieces = _cut(name, whole, parts, rank, layout.fused)
            if not mine or (rank > 0 and pieces[0][2].shape == whole.shape):
                continue
            shards += [_shard(name, whole, piece, counts) for piece in pieces]
        ranks.append(shards)
    _write_ranks(folder, ranks)
    return folder


def _first_holder(layout: Layout, pipeline: int, expert: int, expert_tensor: int) -> int:
    """The tensor-parallel rank that writes an expert's part: one of those that hold it."""
    return min(place[0] for place in layout.places() if place[1:] == (pipeline, expert, expert_tensor))


def _shard(name: str, whole: torch.Tensor, piece: tuple[int, int, torch.Tensor], counts: tuple[int, int]) -> _Shard:
    row, column, tensor = piece
    size, offsets = [*whole.shape], [row, column][: whole.dim()]
    layers, experts = counts
    expert, layer = _EXPERT.search(name), _LAYER.match(name)
    # Local norms are saved under TransformerEngine's names, even where experts follow.
    name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    if expert:
        size, offsets = [experts, *size], [int(expert[1]), *offsets]
        name = _EXPERT.sub(r".experts.\2.\3", name)
    if layer and layers:
        size, offsets = [layers, *size], [int(layer[1]), *offsets]
        name = _LAYER.sub("decoder.layers.", name)
    return _Shard(name, tuple(size), tuple(offsets), tensor.reshape((1,) * (len(size) - tensor.dim()) + tensor.shape))


class _Planner(SavePlanner):
    """Hands the writer the tensors of one rank's plan."""

    def __init__(self, tensors: dict[MetadataIndex, torch.Tensor]) -> None:
        self._tensors = tensors

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: Any) -> Any:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index].contiguous()


def _write_ranks(folder: Path, ranks: list[list[_Shard]]) -> None:
    writer = FileSystemWriter(folder)
    plans, planners = [], []
    for shards in ranks:
        tensors = {MetadataIndex(shard.key, torch.Size(shard.offsets)): shard.tensor for shard in shards}
        plans.append(SavePlan([_write_item(shard) for shard in shards]))
        planners.append(_Planner(tensors))
    plans, metadata = create_default_global_save_plan(plans)
    writer.set_up_storage_writer(True)
    results = []
    for plan, planner in zip(writer.prepare_global_plan(plans), planners, strict=True):
        planner._tensors = {
            item.index: planner._tensors[MetadataIndex(item.index.fqn, item.index.offset)] for item in plan.items
        }
        results.append(writer.write_data(writer.prepare_local_plan(plan), planner).wait())
    writer.finish(metadata, results)


def _write_item(shard: _Shard) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=shard.tensor.shape)
    data = TensorWriteData(
        chunk=chunk, properties=TensorProperties(dtype=shard.tensor.dtype), size=torch.Size(shard.size)
    )
    return WriteItem(MetadataIndex(shard.key, torch.Size(shard.offsets)), WriteItemType.SHARD, tensor_data=data)
