"""Weights for a rollout that has other bytes than training: what weight sync sends for baselines and ablations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from jetrl_megatron.convert.fp8_weights import SCALE, WEIGHT, iter_fp8_weights
from jetrl_megatron.convert.hf_model import open_hf_model
from jetrl_megatron.convert.mapping import HfMapping
from jetrl_megatron.integrations.megatron_bridge import export_hf_weights
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.reference import saturating_cast
from jetrl_megatron.sync.manifest import Bucket
from jetrl_megatron.sync.source import TensorSource


class RequantizedSource:
    """A live Megatron model whose BF16 weights are gathered and quantised for each update. Every rank makes one.

    It stands where `MegatronSource` would: for a model that trains in BF16 while the rollout runs in FP8, or by another
    recipe than the rollout. With it, training and rollout differ; that is what it is there to show.

    Args:
        model: what `build_model` returned.
        hf_config: the Hugging Face model that is trained: its folder, config.json or configuration object.
        recipe: of the rollout.
        one_scale: all tiles of a matrix get one scale, as if it were quantised as a whole; engines read it as ever.

    Raises:
        ValueError: `one_scale` with scales that are powers of two.
    """

    distributed = True

    def __init__(
        self,
        model: list[Any],
        *,
        hf_config: PretrainedConfig | str | os.PathLike[str],
        recipe: Fp8BlockRecipe = JETRL_FP8,
        one_scale: bool = False,
    ) -> None:
        if one_scale and recipe.scale_format != "fp32":
            raise ValueError(
                f"one_scale=True with scale_format={recipe.scale_format!r}: a matrix gets the scale that fits it, use "
                "'fp32'"
            )
        self.recipe, self._one_scale = recipe, one_scale
        self._model = model
        self._mapping = HfMapping(open_hf_model(hf_config))
        self._fresh = False
        self._source = TensorSource(self._quantized(), recipe)
        self.tensors = self._source.tensors
        self.device = self._source.device
        self.release()

    def refresh(self) -> list[str]:
        """See `WeightSource`."""
        if not self._fresh:
            self._source.replace(self._quantized())
            self._fresh = True
        return self._source.refresh()

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """See `WeightSource`. Every rank has gathered everything."""
        self._source.fill(bucket, buffer)

    def release(self) -> None:
        """See `WeightSource`."""
        self._fresh = False
        self._source.replace({})

    def _quantized(self) -> Mapping[str, torch.Tensor]:
        exported = (self._mapping.from_hf(*item) for item in export_hf_weights(self._model))
        matrices = self._mapping.without_tied_head(exported)
        if self._one_scale:
            return _with_one_scale(matrices, self.recipe, self._mapping.num_layers)
        return dict(iter_fp8_weights(matrices, self.recipe, self._mapping.num_layers))


def _with_one_scale(
    matrices: Iterable[tuple[str, str, torch.Tensor]], recipe: Fp8BlockRecipe, num_layers: int
) -> dict[str, torch.Tensor]:
    """What `iter_fp8_weights` yields, with all tiles of a matrix quantised by the largest of their scales."""
    matrix = torch.empty(0)

    def watched() -> Iterator[tuple[str, str, torch.Tensor]]:
        nonlocal matrix
        for entry in matrices:
            matrix = entry[-1]
            yield entry

    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in iter_fp8_weights(watched(), recipe, num_layers):
        tensors[name] = tensor
        if name.endswith(SCALE):
            # It follows the codes of the matrix that came last.
            largest = tensor.amax()
            tensors[name] = largest.expand_as(tensor).contiguous()
            tensors[name.removesuffix(SCALE) + WEIGHT] = saturating_cast(matrix.to(torch.float32) / largest, recipe)
    return tensors
