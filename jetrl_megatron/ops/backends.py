"""Which implementation computes an operator: an ordered tuple of candidates, asked once.

Every candidate answers `refusal()`: None, or why it cannot serve. All quantisers are byte-equal, so the choice among
them is one of speed; a GEMM backend may serve a recipe only with the accumulation that the recipe's rollout uses.
"""

from __future__ import annotations

from typing import Protocol

import torch

from jetrl_megatron import reference
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor


class Backend(Protocol):
    """One implementation of quantisers and GEMM."""

    name: str

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        """None when the backend can serve the recipe on the device, else the reason why not."""

    def quantize_weight(
        self, w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None
    ) -> BlockScaledTensor:
        """Codes and scales of a weight, see `jetrl_megatron.ops.quantize_weight`."""

    def quantize_activation(
        self, x_MK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None
    ) -> BlockScaledTensor:
        """Codes and scales of a matrix of activations, see `jetrl_megatron.ops.quantize_activation`."""

    def block_amax(self, x_RC: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
        """Largest magnitude of each block, float32 [ceil(R / block[0]), ceil(C / block[1])]."""

    def prepare(self, operand: BlockScaledTensor) -> torch.Tensor:
        """The operand in the form that `gemm_nt` reads; worth keeping for as long as the codes are valid."""

    def prepare_transposed(self, operand: BlockScaledTensor, prepared: torch.Tensor) -> torch.Tensor:
        """The transposed operand, from the same codes and scales; `prepared` is what `prepare` made of it."""

    def gemm_nt(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Prepared [M, K] times prepared [N, K] transposed: float32 [M, N]."""


class ReferenceBackend:
    """Plain torch, exact summation (`jetrl_megatron.reference`), any device, any recipe."""

    name = "reference"

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        return None

    quantize_weight = staticmethod(reference.quantize_weight)
    quantize_activation = staticmethod(reference.quantize_activation)
    block_amax = staticmethod(reference.block_amax)
    gemm_nt = staticmethod(reference.gemm_nt)

    def prepare(self, operand: BlockScaledTensor) -> torch.Tensor:
        return operand.dequantize(torch.float64)

    def prepare_transposed(self, operand: BlockScaledTensor, prepared: torch.Tensor) -> torch.Tensor:
        return prepared.t()


BACKENDS: tuple[Backend, ...] = (ReferenceBackend(),)


def select(recipe: Fp8BlockRecipe, device: torch.device, request: str | None = None) -> Backend:
    """The first backend that serves the recipe on the device.

    Args:
        request: name of the only backend that is acceptable; it never degrades to another one.

    Raises:
        ValueError: nobody serves; the message lists every candidate's reason.
    """
    candidates = [backend for backend in BACKENDS if request in (None, backend.name)]
    if not candidates:
        raise ValueError(f"backend={request!r} is unknown: use one of {[backend.name for backend in BACKENDS]}")
    refusals = []
    for backend in candidates:
        reason = backend.refusal(recipe, device)
        if reason is None:
            return backend
        refusals.append(f"{backend.name}: {reason}")
    raise ValueError(f"no backend serves this recipe on {device}: {'; '.join(refusals)}")
