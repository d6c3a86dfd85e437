"""What a quantiser and a GEMM must offer, and the plain torch ones that serve where nothing faster does.

Every candidate answers `refusal()`: None, or why it cannot serve. All quantisers are byte-equal, so the choice among
them is one of speed; a GEMM may serve a recipe only with the accumulation that the recipe's rollout uses.
"""

# Shape suffixes: M tokens, N and K rows and columns of a weight, C features, F features of a gated pair's half,
# Mp tokens padded with zero to whole groups.

from __future__ import annotations

from typing import Any, Protocol

import torch

from jetrl_megatron import reference
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor


class Backend(Protocol):
    """What `select` asks of a candidate."""

    name: str

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        """None when the candidate can serve the recipe on the device, else the reason why not."""


class Quantizer(Backend, Protocol):
    """Codes and scales of weights, activations and gradients.

    "Along tokens" means transposed, in groups along M: [C, Mp] from [M, C]. That is what wgrad contracts.

    Attributes:
        fused: whether norm and SwiGLU write codes directly. Layers call the methods below `requantize_along_tokens`
            only where it is true.
    """

    fused: bool

    def weight(
        self, w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
    ) -> tuple[BlockScaledTensor, BlockScaledTensor | None]:
        """See `jetrl_megatron.ops.quantize_weight`; and the transposed matrix where it costs no further read."""

    def activation(
        self, x_MK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
    ) -> BlockScaledTensor:
        """See `jetrl_megatron.ops.quantize_activation`; x is a matrix here."""

    def both(self, x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        """`activation` and `along_tokens` of one matrix."""

    def along_tokens(self, x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
        """x^T in groups along M: [C, Mp]."""

    def requantize_along_tokens(self, codes: BlockScaledTensor) -> BlockScaledTensor:
        """`along_tokens` of what codes [M, C] of `activation` stand for: NaN only where a scale is not finite."""

    def rms_norm(
        self, x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, torch.Tensor]:
        """RMSNorm, rounded to BF16, then `activation`: codes [M, K] and float32 [M] 1 / rms."""

    def rms_norm_backward(
        self, dy_MK: torch.Tensor, x_MK: torch.Tensor, weight_K: torch.Tensor, rstd_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of x, BF16 [M, K], and of the weight, float32 [K]."""

    def swiglu(self, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
        """silu(gate) * up, each rounded to BF16, then `activation`: [M, F]. gate is the first half of y."""

    def swiglu_backward(
        self, dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        """`both` of the gradient of y, BF16 [M, 2F]."""


class Gemm(Backend, Protocol):
    """Products of quantised matrices, both with the contraction as their last axis."""

    def prepare(self, operand: BlockScaledTensor) -> Any:
        """The operand in the form that products read; worth keeping for as long as the codes are valid."""

    def prepare_transposed(self, operand: BlockScaledTensor, prepared: Any) -> Any:
        """The transposed operand, from the same codes and scales; `prepared` is what `prepare` made of it."""

    def nt(self, a: Any, b: Any) -> torch.Tensor:
        """Prepared activations [M, K] times prepared weight [N, K] transposed: BF16 [M, N]."""

    def accumulate_nt(self, a: Any, b: Any, out_NK: torch.Tensor) -> None:
        """Adds prepared [N, M] times prepared [K, M] transposed, both in groups of 1 x block, to float32 [N, K]."""


class ReferenceQuantizer:
    """Plain torch (`jetrl_megatron.reference`), any device, any recipe."""

    name = "reference"
    fused = False

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        return None

    def weight(
        self, w_NK: torch.Tensor, recipe: Fp8BlockRecipe, *, amax: torch.Tensor | None = None
    ) -> tuple[BlockScaledTensor, BlockScaledTensor | None]:
        return reference.quantize_weight(w_NK, recipe, amax=amax), None

    activation = staticmethod(reference.quantize_activation)
    along_tokens = staticmethod(reference.quantize_along_tokens)

    def both(self, x_MC: torch.Tensor, recipe: Fp8BlockRecipe) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        return self.activation(x_MC, recipe), self.along_tokens(x_MC, recipe)

    def requantize_along_tokens(self, codes: BlockScaledTensor) -> BlockScaledTensor:
        return self.along_tokens(codes.dequantize(), codes.recipe)

    def rms_norm(
        self, x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, torch.Tensor]:
        y_MK, rstd_M = reference.rms_norm(x_MK, weight_K, eps)
        return self.activation(y_MK, recipe), rstd_M

    rms_norm_backward = staticmethod(reference.rms_norm_backward)

    def swiglu(self, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe) -> BlockScaledTensor:
        return self.activation(reference.swiglu(y_M2F), recipe)

    def swiglu_backward(
        self, dh_MF: torch.Tensor, y_M2F: torch.Tensor, recipe: Fp8BlockRecipe
    ) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        return self.both(reference.swiglu_backward(dh_MF, y_M2F), recipe)


class ReferenceGemm:
    """Exact summation in float64 (`jetrl_megatron.reference`): what a CPU trains and serves with."""

    name = "reference"

    def refusal(self, recipe: Fp8BlockRecipe, device: torch.device) -> str | None:
        if device.type == "cpu":
            return None
        return "it sums in float64, which no rollout engine does there; it serves a CPU"

    def prepare(self, operand: BlockScaledTensor) -> torch.Tensor:
        return operand.dequantize(torch.float64)

    def prepare_transposed(self, operand: BlockScaledTensor, prepared: torch.Tensor) -> torch.Tensor:
        return prepared.t()

    def nt(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return reference.gemm_nt(a, b).to(torch.bfloat16)

    def accumulate_nt(self, a: torch.Tensor, b: torch.Tensor, out_NK: torch.Tensor) -> None:
        out_NK.add_(reference.gemm_nt(a, b))
