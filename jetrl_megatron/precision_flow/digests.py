"""Digests of the bytes that linears multiply with, so that a stale weight is found by its name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

_WEIGHT, _SCALE = ".weight", ".weight_scale_inv"


def weight_digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """One digest for each linear, over its codes and scales.

    Args:
        tensors: (name, tensor) with Hugging Face names, as `iter_fp8_weights` yields them, a checkpoint holds them, or
            an engine's pieces join to. Codes may be float8_e4m3fn or the same bytes as uint8. One is held at a time.

    Returns:
        16 hexadecimal digits for each X of "X.weight_scale_inv" or "X.weight", X being the key. Where a linear has
        only one of the two, the digest is over that one.
    """
    parts: dict[str, dict[str, bytes]] = {}
    for name, tensor in tensors:
        suffix = next((suffix for suffix in (_SCALE, _WEIGHT) if name.endswith(suffix)), None)
        if suffix is None:
            continue
        parts.setdefault(name.removesuffix(suffix), {})[suffix] = _of_tensor(tensor)
    return {name: _of_linear(part) for name, part in parts.items()}


def linear_digest(codes: torch.Tensor, scale: torch.Tensor) -> str:
    """The digest of one linear, see `weight_digests`."""
    return _of_linear({_WEIGHT: _of_tensor(codes), _SCALE: _of_tensor(scale)})


def _of_tensor(tensor: torch.Tensor) -> bytes:
    stored = tensor.detach().cpu().contiguous()
    shape = "x".join(map(str, stored.shape)).encode()
    return hashlib.sha256(shape + b":" + stored.flatten().view(torch.uint8).numpy().tobytes()).digest()


def _of_linear(parts: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(suffix.encode() + parts[suffix] for suffix in sorted(parts))).hexdigest()[:16]
