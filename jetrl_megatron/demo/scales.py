"""Codes and scales of FP8 linears as logical matrices, wherever they come from, and their comparison byte for byte.

A set of matrices is a dict with, for every FP8 linear X of the checkpoint, `X.weight`: codes as uint8 [N, K], and
`X.weight_scale_inv`: float32 [ceil(N / block), ceil(K / block)].
"""

# Shape suffixes: N and K rows and columns of a logical matrix.

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from jetrl_megatron.layout import TileLayout
from jetrl_megatron.tensor import ceil_div

if TYPE_CHECKING:
    from jetrl_megatron.layers import Fp8LinearMixin

Matrices = dict[str, torch.Tensor]

_CODES, _SCALE = ".weight", ".weight_scale_inv"
_SEPARATOR = "|"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between two sets of matrices.

    Attributes:
        matrices, scales, codes: how many were compared.
        scales_differing, codes_differing: how many of them are not the same bytes.
        only_one_side: names that one of the two sets lacks, or whose shapes differ.
        first: the first difference in words, None when all is equal.
    """

    matrices: int
    scales: int
    codes: int
    scales_differing: int
    codes_differing: int
    only_one_side: tuple[str, ...]
    first: str | None

    @property
    def equal(self) -> bool:
        """Whether both sides hold the same matrices, byte for byte; nothing compared is not equal."""
        return self.matrices > 0 and self.first is None

    def to_dict(self) -> dict[str, Any]:
        """Every field and `equal`, ready for JSON."""
        return {"equal": self.equal, **dataclasses.asdict(self)}


def compare(left: Matrices, right: Matrices) -> Comparison:
    """Compares two sets of matrices byte for byte."""
    matched = {name for name in left.keys() & right.keys() if left[name].shape == right[name].shape}
    unmatched = tuple(sorted((left.keys() | right.keys()) - matched))
    count, differing = {_CODES: 0, _SCALE: 0}, {_CODES: 0, _SCALE: 0}
    first = f"{unmatched[0]} is missing on one side, or has another shape" if unmatched else None
    for name in sorted(matched):
        kind = _SCALE if name.endswith(_SCALE) else _CODES
        unequal = _bytes(left[name]) != _bytes(right[name])
        count[kind] += unequal.numel()
        differing[kind] += int(unequal.sum())
        if first is None and unequal.any():
            row, column = unequal.nonzero()[0].tolist()
            first = f"{name}[{row}, {column}]: {left[name][row, column].item()} != {right[name][row, column].item()}"
    return Comparison(
        matrices=sum(name.endswith(_SCALE) for name in matched),
        scales=count[_SCALE],
        codes=count[_CODES],
        scales_differing=differing[_SCALE],
        codes_differing=differing[_CODES],
        only_one_side=unmatched,
        first=first,
    )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def read_checkpoint(folder: Path) -> Matrices:
    """The FP8 linears of an exported checkpoint."""
    tensors: Matrices = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    linears = [name.removesuffix(_SCALE) for name in tensors if name.endswith(_SCALE)]
    codes = {name + _CODES: tensors[name + _CODES].view(torch.uint8) for name in linears}
    return {**codes, **{name + _SCALE: tensors[name + _SCALE] for name in linears}}


def write_layers(layers: Iterable[Any], folder: Path, rank: int) -> None:
    """Writes what this rank's FP8 linears compute with in their next forward; `join_layers` puts ranks together.

    Args:
        layers: Megatron transformer layers; `layer_number` counts over all pipeline stages, from 1.
        folder: the same for all ranks; made if need be.
        rank: number of this rank, for the file's name.
    """
    pieces: Matrices = {}
    for layer in layers:
        prefix = f"model.layers.{layer.layer_number - 1}"
        for linear, matrices in _linears(layer):
            for name, piece in _pieces(linear, matrices):
                pieces.update({f"{prefix}.{name}{_SEPARATOR}{part}": tensor for part, tensor in piece.items()})
    folder.mkdir(exist_ok=True)
    save_file(pieces, folder / f"rank{rank}.safetensors")


def _linears(layer: Any) -> Iterator[tuple[Fp8LinearMixin, dict[str, int]]]:
    """The FP8 linears of a Llama-like layer, each with the logical matrices in its rows and their sizes."""
    config, attention, mlp = layer.config, layer.self_attention, layer.mlp
    q, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    ffn = config.ffn_hidden_size
    candidates = (
        (attention.linear_qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
        (attention.linear_proj, {"self_attn.o_proj": config.hidden_size}),
        (mlp.linear_fc1, {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}),
        (mlp.linear_fc2, {"mlp.down_proj": config.hidden_size}),
    )
    return ((linear, matrices) for linear, matrices in candidates if getattr(linear, "quantized", False))


def _pieces(linear: Fp8LinearMixin, matrices: dict[str, int]) -> Iterator[tuple[str, Matrices]]:
    operand = linear.quantized_weight().tensor
    codes, block = operand.data.view(torch.uint8), operand.recipe.block
    rows, columns = linear.layouts
    input_size: Any = linear.input_size
    (held_K,) = _held(columns, [input_size], block)
    for name, held_N in zip(matrices, _held(rows, list(matrices.values()), block), strict=True):
        if not len(held_N.rows.here):
            continue
        yield (
            name,
            {
                "codes": codes[held_N.rows.here][:, held_K.rows.here],
                "scale": operand.scale[held_N.tiles.here][:, held_K.tiles.here],
                "codes_origin": torch.tensor([held_N.rows.origin, held_K.rows.origin]),
                "scale_origin": torch.tensor([held_N.tiles.origin, held_K.tiles.origin]),
            },
        )


@dataclasses.dataclass(frozen=True)
class _Run:
    """Rows that are neighbours in the logical matrix: where they are in the operand, and the first one's number."""

    here: torch.Tensor
    origin: int

    @classmethod
    def of(cls, here: torch.Tensor, logical: torch.Tensor) -> _Run:
        if not len(here):
            return cls(here, 0)
        logical, order = logical.sort()
        assert len(here) == int(logical[-1] - logical[0]) + 1, "a rank holds neighbouring rows"
        return cls(here[order], int(logical[0]))


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a rank holds of one logical matrix, in one dimension."""

    rows: _Run
    tiles: _Run


def _held(layout: TileLayout, sizes: Sequence[int], block: int) -> Iterator[_Held]:
    position = torch.arange(layout.stored) if layout.position is None else torch.tensor(layout.position)
    tiles = torch.tensor(layout.tiles)
    # Row in a space where the tiles of all logical matrices follow each other.
    spread = tiles[position // block] * block + position % block
    first = 0
    for size in sizes:
        count = ceil_div(size, block)
        row, tile = spread - first * block, tiles - first
        rows_of, tiles_of = (row >= 0) & (row < size), (tile >= 0) & (tile < count)
        yield _Held(_Run.of(position[rows_of], row[rows_of]), _Run.of(tiles_of.nonzero()[:, 0], tile[tiles_of]))
        first += count


def join_layers(folder: Path) -> Matrices:
    """Logical matrices out of the files that all ranks wrote with `write_layers`.

    Raises:
        ValueError: a rank's part is missing, or two ranks that share a tile use different scales for it.
    """
    grouped: dict[str, list[Matrices]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        of_rank: dict[str, Matrices] = {}
        for key, tensor in load_file(path).items():
            name, part = key.split(_SEPARATOR)
            of_rank.setdefault(name, {})[part] = tensor
        for name, piece in of_rank.items():
            grouped.setdefault(name, []).append(piece)
    joined: Matrices = {}
    for name, pieces in grouped.items():
        joined[name + _CODES] = _assemble(name, pieces, "codes")
        joined[name + _SCALE] = _assemble(name, pieces, "scale")
    return joined


def _assemble(name: str, pieces: list[Matrices], part: str) -> torch.Tensor:
    ends = torch.stack([piece[f"{part}_origin"] + torch.tensor(piece[part].shape) for piece in pieces])
    whole = pieces[0][part].new_zeros(ends.amax(0).tolist())
    seen = torch.zeros(whole.shape, dtype=torch.bool)
    for piece, end in zip(pieces, ends.tolist(), strict=True):
        place = tuple(slice(start, stop) for start, stop in zip(piece[f"{part}_origin"].tolist(), end, strict=True))
        if (seen[place] & (_bytes(whole[place]) != _bytes(piece[part]))).any():
            raise ValueError(f"{name}: two ranks hold different {part} of the same tile")
        whole[place], seen[place] = piece[part], True
    if not seen.all():
        raise ValueError(f"{name}: {int((~seen).sum())} of {seen.numel()} {part} are on no rank: a rank wrote no file")
    return whole
