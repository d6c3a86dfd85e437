"""What a weight update of a live model consists of, put together from its buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BUCKET_BYTES = 100_000
"""Smaller than many tensors, so that they are cut."""


def save_synced(models: list[Any], hf_config: Path, out: Path, source: Any = None) -> None:
    """Saves what a source sends, by default a `MegatronSource`. Every rank checks that it has all of it."""
    from jetrl_megatron.sync.manifest import Manifest, view_of
    from jetrl_megatron.sync.megatron_source import MegatronSource

    source = source or MegatronSource(models, hf_config=hf_config)
    manifest = Manifest(source.tensors, source.recipe, BUCKET_BYTES)
    assert manifest.problems() == [] and source.refresh() == []
    pieces: dict[str, list[torch.Tensor]] = {}
    for bucket in manifest.buckets:
        buffer = torch.full((bucket.nbytes,), 0x7F, dtype=torch.uint8)
        source.fill(bucket, buffer)
        for part in bucket.slices:
            pieces.setdefault(part.name, []).append(view_of(buffer, part, source.tensors[part.name]))
    tensors = {name: torch.cat(found).view(source.tensors[name].shape) for name, found in pieces.items()}
    if torch.distributed.get_rank() == 0:
        out.parent.mkdir(exist_ok=True)
        save_file(tensors, out)
