"""A random Llama with a tokenizer of single characters: small enough to train on a CPU, and knows nothing."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from safetensors.torch import save_file

from jetrl_megatron.recipe import JETRL_FP8

_SPECIAL = ("<unk>", "<end>", "<user>", "<assistant>")
_CHARACTERS = string.ascii_lowercase + " ."
_CHAT = "{% for m in messages %}<user>{{ m.content | lower }}{% endfor %}<assistant>"
_POSITIONS = 256
_SPREAD = 0.05


def write_tiny(out_dir: str | Path, seed: int = 0) -> Path:
    """Writes the model folder: config, BF16 weights, tokenizer with chat template.

    Two layers whose linears are whole tiles for one and two tensor-parallel ranks. Its vocabulary is 32 characters,
    lower-case letters above all, so that what it says at random is sometimes right.

    Args:
        out_dir: the folder; made if it is missing, files of the same names are replaced.
        seed: of the weights.

    Returns:
        the folder.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(out / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<end>"}
    (out / "tokenizer_config.json").write_text(json.dumps(fields))
    (out / "chat_template.jinja").write_text(_CHAT)
    end, block = vocabulary["<end>"], JETRL_FP8.block
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=2 * block,
        intermediate_size=2 * block,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=block // 2,
        max_position_embeddings=_POSITIONS,
        initializer_range=_SPREAD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = LlamaForCausalLM(config).bfloat16().state_dict()
    save_file({name: w.contiguous() for name, w in weights.items()}, out / "model.safetensors", {"format": "pt"})
    config.to_json_file(str(out / "config.json"), use_diff=False)
    return out
