"""Block FP8 linear for vLLM's CPU backend with the numbers of training: W8A8, exact sum, BF16 output."""

# Shape suffixes: M tokens, N and K rows and columns of the weight that the rank holds, Nb and Kb the same in tiles.

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig
from vllm.platforms import current_platform

from jetrl_megatron import reference
from jetrl_megatron.integrations.vllm import carried_recipe
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor

_WORD = np.dtype(np.int64)


@dataclass(frozen=True)
class PreparedWeight:
    """A weight in the form that the GEMM reads, with the bytes that it was made from.

    Attributes:
        value_NK: dequantised, float64.
        codes_NK: private copy of the codes, uint8.
        scale_NbKb: private copy of the scales, float32.
    """

    value_NK: torch.Tensor
    codes_NK: torch.Tensor
    scale_NbKb: torch.Tensor

    @classmethod
    def of(cls, codes_NK: torch.Tensor, scale_NbKb: torch.Tensor, recipe: Fp8BlockRecipe) -> PreparedWeight:
        """Prepares float8_e4m3fn codes and float32 scales."""
        weight = BlockScaledTensor(codes_NK, scale_NbKb, recipe.weight_block, recipe)
        return cls(weight.dequantize(torch.float64), codes_NK.view(torch.uint8).clone(), scale_NbKb.clone())


@torch.library.custom_op("jetrl_megatron::w8a8_block_linear", mutates_args=())
def w8a8_block_linear(
    x_MK: torch.Tensor,
    codes_NK: torch.Tensor,
    scale_NbKb: torch.Tensor,
    prepared_value_NK: torch.Tensor,
    prepared_codes_NK: torch.Tensor,
    prepared_scale_NbKb: torch.Tensor,
    recipe: str,
) -> torch.Tensor:
    """x times the weight transposed, opaque to torch.compile.

    The prepared tensors are a cache of (codes, scale). They are compared with them at every call and made anew when
    they differ, because a write through `Parameter.data`, which is how vLLM loads, leaves no other trace. The
    comparison reads two bytes for every eight that the GEMM reads.

    Args:
        x_MK: bfloat16.
        codes_NK: float8_e4m3fn, the layer's parameter.
        scale_NbKb: float32, the layer's parameter.
        prepared_value_NK, prepared_codes_NK, prepared_scale_NbKb: the fields of `PreparedWeight`.
        recipe: `Fp8BlockRecipe.to_dict` as JSON.

    Returns:
        bfloat16 [M, N]: the exact sum, rounded to float32 and then to bfloat16, as in training.
    """
    parsed = _parse(recipe)
    if not (_same_bytes(codes_NK, prepared_codes_NK) and _same_bytes(scale_NbKb, prepared_scale_NbKb)):
        fresh = PreparedWeight.of(codes_NK, scale_NbKb, parsed)
        prepared_value_NK.copy_(fresh.value_NK)
        prepared_codes_NK.copy_(fresh.codes_NK)
        prepared_scale_NbKb.copy_(fresh.scale_NbKb)
    quantized = reference.quantize_activation(x_MK, parsed)
    return reference.gemm_nt(quantized.dequantize(torch.float64), prepared_value_NK).to(torch.bfloat16)


@w8a8_block_linear.register_fake
def _(x_MK: torch.Tensor, codes_NK: torch.Tensor, *_: Any) -> torch.Tensor:
    return x_MK.new_empty(x_MK.shape[0], codes_NK.shape[0], dtype=torch.bfloat16)


@functools.lru_cache(maxsize=8)
def _parse(recipe: str) -> Fp8BlockRecipe:
    return Fp8BlockRecipe.from_dict(json.loads(recipe))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # numpy on 64-bit words: twice as fast as torch.equal on them, and 16 times as fast as torch.equal on bytes.
    a_bytes, b_bytes = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (a, b))
    if a_bytes.size % _WORD.itemsize == 0:
        a_bytes, b_bytes = a_bytes.view(_WORD), b_bytes.view(_WORD)
    return bool((a_bytes == b_bytes).all())


class W8A8BlockLinear(Fp8BlockScaledMMLinearKernel):
    """vLLM kernel: activations in 1 x block, weights in block x block, both FP8; reference GEMM; BF16 output.

    The layer's `weight` and `weight_scale_inv` stay the bytes of the checkpoint.
    """

    apply_input_quant = False

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        carried = carried_recipe(_hf_config())
        self.recipe = carried or JETRL_FP8
        self.recipe_json = json.dumps(self.recipe.to_dict())
        self.powers_of_two = carried is not None and carried.scale_format == "ue8m0"
        self.prepared: PreparedWeight | None = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Any CPU will do: the operator is plain torch."""
        if not current_platform.is_cpu():
            return False, "requires a CPU"
        return True, None

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the layer has the recipe's blocks, and BF16 in and out.

        Raises:
            ValueError: the checkpoint carries a recipe that cannot be followed. vLLM's next candidate would serve other
                numbers than those of training, without a word.
        """
        hf_config = _hf_config()
        carried = carried_recipe(hf_config)
        reason = _refusal(config, carried or JETRL_FP8)
        if carried is not None:
            reason = reason or _experts_refusal(hf_config, carried)
            if reason:
                raise ValueError(f"this checkpoint carries recipe {carried.fingerprint}, but {reason}")
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Checks the scales and prepares the weight; runs after the first load and after every reload.

        Raises:
            ValueError: a scale was never written, or is no scale of the recipe that the checkpoint carries.
        """
        codes_NK, scale_NbKb = self._loaded(layer)
        self._check_scale(scale_NbKb, getattr(layer, "prefix", type(layer).__name__))
        self.prepared = PreparedWeight.of(codes_NK, scale_NbKb, self.recipe)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """x W^T, rounded to bfloat16, then + bias in bfloat16.

        Args:
            x: bfloat16 [..., K].
            bias: bfloat16 [N].

        Returns:
            bfloat16 [..., N].
        """
        assert self.prepared is not None, "process_weights_after_loading comes first"
        codes_NK, scale_NbKb = self._loaded(layer)
        y_MN: torch.Tensor = w8a8_block_linear(
            x.reshape(-1, x.shape[-1]),
            codes_NK,
            scale_NbKb,
            self.prepared.value_NK,
            self.prepared.codes_NK,
            self.prepared.scale_NbKb,
            self.recipe_json,
        )
        if bias is not None:
            y_MN = y_MN + bias
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """Not part of this kernel: `apply_weights` quantises the activations itself."""
        raise NotImplementedError("W8A8BlockLinear.apply_weights does not go through apply_block_scaled_mm")

    def _loaded(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        params = self._get_layer_params(layer)
        scale = params.weight_scale if params.weight_scale_inv is None else params.weight_scale_inv
        assert scale is not None, "a block FP8 layer has weight_scale_inv or weight_scale"
        return params.weight.data, scale.data

    def _check_scale(self, scale_NbKb: torch.Tensor, name: str) -> None:
        bad = ~(torch.isfinite(scale_NbKb) & (scale_NbKb > 0))
        constraint = "scales are finite and greater than zero"
        if self.powers_of_two:
            bad |= reference.round_up_to_power_of_two(scale_NbKb) != scale_NbKb
            constraint = "scales of an ue8m0 recipe are powers of two"
        if not bad.any():
            return
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: scale[{row}, {column}] = {scale_NbKb[row, column].item()!r} of {list(scale_NbKb.shape)}: "
            f"{constraint}; was every weight_scale_inv written, and sent with its weight?"
        )


def _hf_config() -> Any:
    model_config = get_current_vllm_config().model_config
    return None if model_config is None else model_config.hf_config


def _refusal(config: FP8ScaledMMLinearLayerConfig, recipe: Fp8BlockRecipe) -> str | None:
    weight, activation = config.weight_quant_key.scale.group_shape, config.activation_quant_key.scale
    if tuple(weight) != recipe.weight_block or tuple(activation.group_shape) != recipe.activation_block:
        return (
            f"weight blocks {tuple(weight)} and activation groups {tuple(activation.group_shape)} are not the recipe's "
            f"{recipe.weight_block} and {recipe.activation_block}"
        )
    if activation.static:
        return "activation scales are static; the recipe's are dynamic"
    if {config.input_dtype, config.out_dtype} != {torch.bfloat16}:
        return f"the model runs in {config.input_dtype}; use dtype=bfloat16"
    return None


def _experts_refusal(hf_config: Any, recipe: Fp8BlockRecipe) -> str | None:
    experts = any(getattr(hf_config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    layers = getattr(hf_config, "num_hidden_layers", 0)
    names = [f"decoder.layers.{index}.mlp.experts.linear_fc1" for index in range(layers)]
    if not experts or not any(recipe.quantizes(name, layers) for name in names):
        return None
    return "vLLM's CPU backend runs routed experts as W8A16; serve this model on a GPU, or keep the experts in BF16"
