"""What a checkpoint's configuration says about its quantisation, in the places and words that tools write it in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_megatron.convert.stored import read_object

_MODELOPT = "hf_quant_config.json"


def read_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config of a folder; {} where it has none.

    It stands in config.json, there in the text_config of a model with several parts, or in a file of ModelOpt's.

    Args:
        config: content of config.json.

    Raises:
        ValueError: it is no JSON object.
    """
    text = config.get("text_config")
    holders = [config, text if isinstance(text, dict) else {}]
    found = [holder.get(key) for holder in holders for key in ("quantization_config", "compression_config")]
    quantization, file = next(filter(None, found), None), "config.json"
    if quantization is None and (folder / _MODELOPT).is_file():
        fields = read_object(folder / _MODELOPT, "ModelOpt's description of a quantisation").get("quantization")
        quantization, file = {"quant_method": "modelopt", **fields} if isinstance(fields, dict) else fields, _MODELOPT
    if quantization is None:
        return {}
    if not isinstance(quantization, dict):
        raise ValueError(f"{folder / file}: quantization_config is {quantization!r}, not an object")
    return quantization


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a tile; None where scales belong to no tiles.

    Raises:
        ValueError: it says something else than two numbers.
    """
    key, block = "weight_block_size", quantization.get("weight_block_size")
    if block is None:
        key, block = "block_structure", _block_of_groups(quantization.get("config_groups"))
    if block is None:
        return None
    if isinstance(block, list) and len(block) == 2 and all(type(edge) is int and edge > 0 for edge in block):
        return block[0], block[1]
    raise ValueError(f"{key} is {block!r}, not [rows, columns]")


def _block_of_groups(groups: Any) -> Any:
    """What compressed-tensors says, if it says the same of all weights."""
    if not isinstance(groups, dict):
        return None
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    blocks = [scheme.get("block_structure") for scheme in schemes if isinstance(scheme, dict)]
    return blocks[0] if blocks and all(block == blocks[0] for block in blocks) else None
