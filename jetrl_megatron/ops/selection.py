"""Which quantiser and which GEMM serve: ordered candidates, asked once for a recipe and a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jetrl_megatron.ops.backends import Backend, Gemm, Quantizer, ReferenceGemm, ReferenceQuantizer
from jetrl_megatron.ops.deep_gemm import DeepGemm
from jetrl_megatron.ops.gpu_quantizers import CudaQuantizer, TritonQuantizer
from jetrl_megatron.ops.scaled_mm import ScaledMm
from jetrl_megatron.recipe import Fp8BlockRecipe

QUANTIZERS: tuple[Quantizer, ...] = (CudaQuantizer(), TritonQuantizer(), ReferenceQuantizer())
GEMMS: tuple[Gemm, ...] = (DeepGemm(), ScaledMm(), ReferenceGemm())


def select_quantizer(recipe: Fp8BlockRecipe, device: torch.device, request: str | None = None) -> Quantizer:
    """The first quantiser that serves the recipe on the device; see `select`."""
    return select("quantiser", QUANTIZERS, recipe, device, request)


def select_gemm(recipe: Fp8BlockRecipe, device: torch.device, request: str | None = None) -> Gemm:
    """The first GEMM that serves the recipe on the device; see `select`. Never chosen by the number of tokens."""
    return select("GEMM", GEMMS, recipe, device, request)


def select[Candidate: Backend](
    what: str, candidates: Sequence[Candidate], recipe: Fp8BlockRecipe, device: torch.device, request: str | None
) -> Candidate:
    """The first candidate that serves.

    Args:
        what: what the candidates are called in errors.
        request: name of the only candidate that is acceptable; it never degrades to another one.

    Raises:
        ValueError: nobody serves; the message lists every candidate's reason.
    """
    asked = [candidate for candidate in candidates if request in (None, candidate.name)]
    if not asked:
        names = ", ".join(candidate.name for candidate in candidates)
        raise ValueError(f"{what} {request!r} is unknown: use one of {names}")
    reasons = []
    for candidate in asked:
        reason = candidate.refusal(recipe, device)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    raise ValueError(
        f"no {what} serves recipe {recipe.fingerprint} on {device}: {'; '.join(reasons)}. `jetrl doctor` tells more"
    )
