"""What a Hugging Face configuration says about an export: its tensors, their shapes, and the files beside them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from jetrl_megatron.convert.stored import read_config

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
_GENERATION_FILES = ("generation_config.json",)
_SHOWN = 300


@dataclass(frozen=True)
class HfModel:
    """A model's Hugging Face side.

    Attributes:
        config: its configuration, without a quantization_config.
        fields: the fields of config.json, as they stand in the folder where there is one.
        folder: where the configuration was read from, or None.
    """

    config: PretrainedConfig
    fields: dict[str, Any]
    folder: Path | None

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, so that the export has no lm_head tensor."""
        return bool(self.config.tie_word_embeddings)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model by its name in a checkpoint, a tied head included; nothing is allocated.

        Experts are a tensor each, as in the files and not as in transformers' modules, which stack them. MTP layers
        follow the decoder's.
        """
        with named_errors(self.folder), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), trust_remote_code=False)
            tensors = revert_weight_conversion(model, model.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return {**shapes, **self._mtp_shapes(shapes)}

    @property
    def mtp_layers(self) -> int:
        """Layers of multi-token prediction that the checkpoint has behind the decoder's."""
        return int(getattr(self.config, "num_nextn_predict_layers", 0) or 0)

    def _mtp_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        # transformers leaves MTP layers out. Each is one more decoder layer, of the last one's kind, and what joins it
        # to the decoder.
        layers, hidden = self.config.num_hidden_layers, self.config.hidden_size
        last = f"model.layers.{layers - 1}."
        found: dict[str, tuple[int, ...]] = {}
        for layer in range(layers, layers + self.mtp_layers):
            prefix = f"model.layers.{layer}."
            inner = {name: shape for name, shape in shapes.items() if name.startswith(last)}
            found |= {prefix + name.removeprefix(last): shape for name, shape in inner.items()}
            found |= {f"{prefix}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
            found[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        return found

    def files(self, tokenizer_from: str | os.PathLike[str] | None) -> list[Path]:
        """Tokenizer, chat template and generation settings to copy beside the weights.

        Args:
            tokenizer_from: folder with the tokenizer; None takes the one beside config.json, if there is one.

        Raises:
            ValueError: `tokenizer_from` holds no tokenizer.
        """
        generation = _existing([self.folder, tokenizer_from], _GENERATION_FILES)[:1]
        if tokenizer_from is None:
            return _existing([self.folder], _TOKENIZER_FILES) + generation
        tokenizer = _existing([tokenizer_from], _TOKENIZER_FILES)
        if not tokenizer:
            raise ValueError(
                f"tokenizer folder {tokenizer_from} holds none of {', '.join(_TOKENIZER_FILES[:4])}: pass the folder "
                "that tokenizer.save_pretrained wrote, or leave it out to export no tokenizer"
            )
        return tokenizer + generation


def open_hf_model(source: PretrainedConfig | str | os.PathLike[str]) -> HfModel:
    """Reads the configuration from a folder with a config.json, from that file, or from an object.

    Raises:
        ValueError: there is no config.json, or transformers does not know the model.
    """
    if isinstance(source, PretrainedConfig):
        config, folder = copy.deepcopy(source), None
        fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    else:
        folder = Path(source).parent if Path(source).name == "config.json" else Path(source)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: pass the folder of the Hugging Face model")
        fields = read_config(folder)
        with named_errors(folder):
            # Otherwise transformers asks whether to run code beside an unknown model, and waits for an answer.
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for holder in (fields, config.__dict__):
        holder.pop("quantization_config", None)
    if not fields.get("architectures"):
        raise ValueError(
            f"{folder or 'hf_config'}: config.json names no architectures, by which engines choose the model: add "
            'e.g. "architectures": ["Qwen3ForCausalLM"]'
        )
    return HfModel(config, fields, folder)


@contextlib.contextmanager
def named_errors(folder: Path | None) -> Iterator[None]:
    """Has what transformers and Megatron-Bridge make of a configuration fail with the name of its file.

    Raises:
        ValueError: anything failed while entered.
    """
    try:
        yield
    except Exception as error:
        place = folder / "config.json" if folder else "hf_config"
        # Both add pages of advice that has nothing to do with a conversion.
        reason = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
        raise ValueError(
            f"{place} makes no model ({type(error).__name__}: {reason[:_SHOWN]}): pass the folder of the Hugging Face "
            "model that was trained, with its config.json as it was saved"
        ) from error


def _existing(folders: Iterable[str | os.PathLike[str] | None], names: Iterable[str]) -> list[Path]:
    paths = [Path(folder) / name for folder in folders if folder is not None for name in names]
    return [path for path in paths if path.exists()]
