"""Model families that the converter knows."""

from __future__ import annotations

from typing import Any

from jetrl_megatron.convert.bridge import import_bridge

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "glm4",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "deepseek_v3",
)
"""`model_type` of the Hugging Face configurations that the converter takes; tests prove each, byte for byte."""


def check_family(hf_config: Any) -> None:
    """Checks that a model is of a known family.

    Args:
        hf_config: transformers configuration of the model.

    Raises:
        ValueError: the converter does not know the family.
    """
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ValueError(
            f"model_type={family!r} is no family that this converter knows ({', '.join(FAMILIES)}), and a wrong guess "
            "of how Megatron stores its matrices would load and be wrong: export the model in BF16 with "
            "Megatron-Bridge's save_hf_pretrained, and let the engine quantise it"
        )


def family_bridge(hf_config: Any) -> Any:
    """Megatron-Bridge's AutoBridge for a model of a known family.

    Args:
        hf_config: transformers configuration of the model.

    Raises:
        ValueError: the converter does not know the family, or Megatron-Bridge the class that `architectures` names.
    """
    check_family(hf_config)
    return import_bridge().AutoBridge.from_hf_config(hf_config)
