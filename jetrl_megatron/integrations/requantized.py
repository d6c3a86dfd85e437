"""Weights for a rollout that has other bytes than training: what weight sync sends for baselines and ablations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from jetrl_megatron.convert.fp8_weights import iter_fp8_weights
from jetrl_megatron.convert.hf_model import open_hf_model
from jetrl_megatron.convert.mapping import HfMapping
from jetrl_megatron.integrations.megatron_bridge import export_hf_weights
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
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
    """

    distributed = True

    def __init__(
        self,
        model: list[Any],
        *,
        hf_config: PretrainedConfig | str | os.PathLike[str],
        recipe: Fp8BlockRecipe = JETRL_FP8,
    ) -> None:
        self.recipe = recipe
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
        return dict(iter_fp8_weights(matrices, self.recipe, self._mapping.num_layers))
