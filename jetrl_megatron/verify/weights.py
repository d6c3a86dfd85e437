"""Whether a rollout folder, and an engine, hold the bytes that training computes with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from jetrl_megatron.convert.bridge import import_bridge
from jetrl_megatron.convert.fp8_weights import SCALE, WEIGHT, iter_fp8_weights
from jetrl_megatron.convert.hf_model import open_hf_model
from jetrl_megatron.convert.live import unwrapped
from jetrl_megatron.convert.mapping import HfMapping
from jetrl_megatron.convert.stored import tensor_files
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.verify.loaded_weights import ServedPiece, stale_pieces


def differing_weights(
    model: list[Any], folder: Path, recipe: Fp8BlockRecipe, served: Sequence[ServedPiece] = ()
) -> list[str]:
    """Compares what an export of the model would hold with what the folder and an engine hold. A collective.

    Args:
        model: what `build_model` returned.
        folder: block FP8 checkpoint in Hugging Face format.
        recipe: of the model.
        served: pieces of linears that the engine multiplies with.

    Returns:
        on rank 0, one line for each tensor that differs, is missing or is not training's, and for each linear that is
        stale in the engine; [] elsewhere.
    """
    hf = open_hf_model(folder)
    bridge = import_bridge().AutoBridge.from_hf_config(hf.config)
    stream = bridge.export_hf_weights([unwrapped(chunk) for chunk in model], show_progress=False)
    if dist.get_rank() != 0:
        for _ in stream:
            pass
        return []
    mapping = HfMapping(hf)
    matrices = mapping.without_tied_head(mapping.from_hf(name, tensor) for name, tensor in stream)
    stored = tensor_files(folder)
    lines, seen = [], set()
    codes: dict[str, torch.Tensor] = {}
    for name, tensor in iter_fp8_weights(matrices, recipe, mapping.num_layers):
        seen.add(name)
        expected = tensor.cpu()
        line = _difference(name, expected, stored)
        lines += [line] if line else []
        if expected.dtype == torch.float8_e4m3fn:
            codes[name.removesuffix(WEIGHT)] = expected
        elif name.endswith(SCALE):
            linear = name.removesuffix(SCALE)
            lines += _stale(linear, codes.pop(linear), expected, [piece for piece in served if piece.name == linear])
    return lines + [f"{name}: training has no such tensor" for name in sorted(set(stored) - seen)]


def _stale(linear: str, codes: torch.Tensor, scale: torch.Tensor, served: Sequence[ServedPiece]) -> list[str]:
    stale = stale_pieces(codes, scale, served)
    if not stale:
        return []
    where = "" if stale[0].count == 1 else f" (parts {[piece.index for piece in stale]} of {stale[0].count})"
    return [f"{linear}: the engine multiplies with other bytes than training{where}: send it the weights again"]


def _difference(name: str, expected: torch.Tensor, stored: dict[str, Path]) -> str | None:
    if name not in stored:
        return f"{name}: missing in the rollout folder"
    with safe_open(stored[name], framework="pt") as file:
        found = file.get_tensor(name)
    if found.dtype == torch.float8_e8m0fnu:
        # A scale's exponent alone; the value is training's float32.
        found = found.float()
    if found.dtype != expected.dtype or found.shape != expected.shape:
        ours, theirs = (f"{x.dtype} {list(x.shape)}" for x in (expected, found))
        return f"{name}: {theirs} in the rollout folder, {ours} in training"
    ours_bytes, theirs_bytes = (x.contiguous().view(-1).view(torch.uint8) for x in (expected, found))
    if torch.equal(ours_bytes, theirs_bytes):
        return None
    size = expected.element_size()
    differing = (ours_bytes != theirs_bytes).view(-1, size).any(1)
    return f"{name}: {int(differing.sum())} of {expected.numel()} values differ from training's"
