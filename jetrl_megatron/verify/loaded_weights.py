"""What a vLLM engine holds: its FP8 linears under the names of the checkpoint, TP shards put together again.

vLLM merges q, k, v and gate, up into one parameter and cuts them over TP ranks. `LoadedWeights` runs inside each
worker and writes the rank's pieces to a file, which `join_pieces` reads back into logical matrices, or tells digests of
them, which `stale_pieces` compares with the matrices that training holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from jetrl_megatron.precision_flow.digests import linear_digest
from jetrl_megatron.tensor import ceil_div
from jetrl_megatron.verify.probe import EngineProbe, fp8_linears

WORKER_EXTENSION = f"{__name__}.LoadedWeights"
"""Value of vLLM's `worker_extension_cls`."""

_FILE = "rank{}.safetensors"
_SEPARATOR = "|"


@dataclass(frozen=True)
class Cut:
    """One logical matrix inside a layer's parameter: rows start .. start + rows are piece `index` of `count`.

    Attributes:
        name: Hugging Face name of the linear, e.g. "model.layers.0.self_attn.q_proj".
        dim: dimension of the logical matrix along which ranks hold pieces.
    """

    name: str
    start: int
    rows: int
    dim: int
    index: int
    count: int


@dataclass(frozen=True)
class ServedPiece:
    """Piece `index` of `count` along `dim` of linear `name`, as a worker holds it."""

    name: str
    dim: int
    index: int
    count: int
    digest: str


class LoadedWeights(EngineProbe):
    """Methods that vLLM mixes into its worker class; call them through `collective_rpc`."""

    def jetrl_write_pieces(self, folder: str) -> None:
        """Writes this rank's codes (as uint8) and scales to a file of its own in `folder`."""
        pieces = {}
        for cut, codes, scale in self._cuts():
            place = _SEPARATOR.join(map(str, (cut.dim, cut.index, cut.count)))
            pieces[f"{cut.name}.weight{_SEPARATOR}{place}"] = codes
            pieces[f"{cut.name}.weight_scale_inv{_SEPARATOR}{place}"] = scale
        save_file(pieces, Path(folder) / _FILE.format(self.rank))

    def jetrl_served_pieces(self) -> list[list[Any]]:
        """What this rank multiplies with: fields of `ServedPiece`, ready for JSON."""
        return [
            [cut.name, cut.dim, cut.index, cut.count, linear_digest(codes, scale)] for cut, codes, scale in self._cuts()
        ]

    def _cuts(self) -> Iterator[tuple[Cut, torch.Tensor, torch.Tensor]]:
        """Each logical matrix that this rank holds a piece of, its codes as uint8, and its scales."""
        model = self.model_runner.get_model()
        packed = getattr(model, "packed_modules_mapping", {})
        for name, layer in fp8_linears(model):
            block = layer.weight_block_size[0]
            for cut in cuts(name, layer, packed):
                codes = layer.weight.data.view(torch.uint8).narrow(0, cut.start, cut.rows)
                scale = layer.weight_scale_inv.data.narrow(0, cut.start // block, ceil_div(cut.rows, block))
                yield cut, codes.contiguous(), scale.contiguous()


def cuts(name: str, layer: Any, packed: dict[str, list[str]]) -> Iterator[Cut]:
    """The logical matrices that a vLLM linear holds on this rank; a replica yields none, its first owner does.

    Args:
        name: vLLM's name of the layer, e.g. "model.layers.0.self_attn.qkv_proj".
        layer: any of vLLM's linear layers.
        packed: the model's `packed_modules_mapping`.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear

    parent, _, leaf = name.rpartition(".")
    names = [f"{parent}.{part}" for part in packed.get(leaf, [leaf])]
    if isinstance(layer, ReplicatedLinear):
        if torch.distributed.get_rank() == 0:
            yield Cut(name, 0, layer.weight.shape[0], 0, 0, 1)
        return
    rank, ranks = layer.tp_rank, layer.tp_size
    if isinstance(layer, RowParallelLinear):
        yield Cut(name, 0, layer.weight.shape[0], 1, rank, ranks)
        return
    replicas = [1] * len(names)
    if isinstance(layer, QKVParallelLinear):
        replicas = [1, layer.num_kv_head_replicas, layer.num_kv_head_replicas]
    start = 0
    for part, rows, copies in zip(names, layer.output_partition_sizes, replicas, strict=True):
        if rank % copies == 0:
            yield Cut(part, start, rows, 0, rank // copies, ranks // copies)
        start += rows


def stale_pieces(codes: torch.Tensor, scale: torch.Tensor, served: Sequence[ServedPiece]) -> list[ServedPiece]:
    """The pieces of one linear that are not training's.

    Args:
        codes: training's, float8_e4m3fn or uint8 [N, K].
        scale: float32 [ceil(N / block), ceil(K / block)].
        served: what engines said of this linear.
    """
    stale = []
    for piece in served:
        parts = (whole.chunk(piece.count, piece.dim)[piece.index] for whole in (codes, scale))
        if linear_digest(*parts) != piece.digest:
            stale.append(piece)
    return stale


def join_pieces(folder: Path) -> dict[str, torch.Tensor]:
    """Logical matrices out of the files of all ranks.

    Returns:
        for every FP8 linear X of the checkpoint `X.weight`, the codes as uint8 [N, K], and `X.weight_scale_inv`,
        float32 [ceil(N / block), ceil(K / block)].

    Raises:
        ValueError: a piece is missing.
    """
    found: dict[str, dict[int, torch.Tensor]] = {}
    places: dict[str, tuple[int, int]] = {}
    for path in sorted(folder.glob(_FILE.format("*"))):
        for key, piece in load_file(path).items():
            name, dim, index, count = key.split(_SEPARATOR)
            found.setdefault(name, {})[int(index)] = piece
            places[name] = int(dim), int(count)
    joined = {}
    for name, pieces in found.items():
        axis, parts = places[name]
        if sorted(pieces) != list(range(parts)):
            raise ValueError(f"{name}: pieces {sorted(pieces)} of {parts} in {folder}: a rank wrote no file")
        joined[name] = torch.cat([pieces[part] for part in range(parts)], axis)
    return joined
