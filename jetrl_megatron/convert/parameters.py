"""Names of a saved model's parameters, the same whatever format and parallel layout they were saved in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
_GROUPED = re.compile(r"^(.*\.experts)\.(linear_fc\d)\.(weight|bias)(\d+)$")
_STORED_EXPERT = re.compile(r"^(.*\.experts)\.experts\.(\d+)\.(linear_fc\d\..+)$")
# What Megatron-core called the decoder layer inside an MTP layer before 0.17.
_MTP_LAYER = re.compile(r"^(mtp\.layers\.\d+)\.transformer_layer\.")
# A norm that TransformerEngine fuses into the linear behind it. Megatron-core saves others under these names as well,
# even where experts follow, which have no such linear.
_FUSED_NORMS = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),
)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
        name: global Megatron name, e.g. "decoder.layers.3.mlp.linear_fc2.weight" or
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight"; layers and experts are counted over all
            ranks.
        key: the checkpoint's name for the tensor that holds it.
        index: its place in a tensor that stacks layers, experts or both; () in a tensor of its own.
        shape: its own shape, without the stacking axes.
        dtype: its dtype in the checkpoint.
    """

    name: str
    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def canonical_name(name: str) -> str:
    """The one name of a parameter that different versions, specs and expert classes of Megatron name differently.

    Args:
        name: a name with global layer and expert numbers. An expert is a module ("local_experts.7.linear_fc1.weight"),
            a numbered tensor of one module ("linear_fc1.weight7"), or named as torch_dist checkpoints name it
            ("experts.7.linear_fc1.weight").

    Returns:
        the name with a module for each expert and each norm, and with "mtp_model_layer" inside an MTP layer.
    """
    for fused, name_of_norm in _FUSED_NORMS:
        name = fused.sub(name_of_norm, name)
    name = _MTP_LAYER.sub(r"\1.mtp_model_layer.", name)
    name = _GROUPED.sub(r"\1.local_experts.\4.\2.\3", name)
    return _STORED_EXPERT.sub(r"\1.local_experts.\2.\3", name)


def grouped_name(name: str) -> str:
    """The name of an expert's parameter in Megatron's grouped linears: "experts.linear_fc1.weight7"."""
    return re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d)\.(weight|bias)$", r".\2.\3\1", name)


def by_layer(parameter: Parameter) -> tuple[int, int, str]:
    """Sort key: what lies outside of layers, the decoder's layers, MTP layers; names within, numbers by value.

    It is the order in which Megatron-Bridge exports a live model, so that both routes fill the same files.
    """
    layer = _LAYER.match(parameter.name)
    if not layer:
        return 0, -1, parameter.name
    padded = _NUMBER.sub(lambda number: number[0].zfill(6), parameter.name)
    return (1 if layer[1] == "decoder" else 2), int(layer[2]), padded


def joined(names: Sequence[str], most: int = 4) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
