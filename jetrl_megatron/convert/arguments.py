"""What a training run's own arguments, where a checkpoint carries them, say about the layout of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jetrl_megatron.convert.mapping import HfMapping


def check_arguments(folder: Path, arguments: Mapping[str, Any], mapping: HfMapping) -> None:
    """Refuses a model whose heads or norms are other than those that were trained.

    Heads of another number and size may have as many rows as the right ones, and then no shape tells.

    Args:
        folder: of the checkpoint.
        arguments: of Megatron-LM; those that are missing are not compared.

    Raises:
        ValueError: one contradicts the model; the message has both values.
    """
    for name, said, wanted in _pairs(arguments, mapping):
        if said != wanted:
            raise ValueError(
                f"{folder}: its own arguments say {name}={said}, and the Hugging Face model has {wanted}: pass the "
                "--hf-config of the model that was trained"
            )


def _pairs(arguments: Mapping[str, Any], mapping: HfMapping) -> Iterator[tuple[str, Any, Any]]:
    heads, groups, size = mapping.heads
    known = {"num_attention_heads": heads, "apply_layernorm_1p": mapping.zero_centered_norms}
    if not mapping.latent:
        known["kv_channels"] = size
        # Megatron-LM has a number of groups even where it does not use it.
        known |= {"num_query_groups": groups} if arguments.get("group_query_attention") else {}
    for name, wanted in known.items():
        said = arguments.get(name)
        if isinstance(said, int):
            yield name, said, wanted
