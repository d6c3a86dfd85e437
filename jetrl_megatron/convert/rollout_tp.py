"""Which tensor parallel sizes a vLLM rollout can serve an exported checkpoint at.

vLLM cuts matrices by heads and by columns, then looks scales up by tile. A cut inside a tile is refused when the model
is built, or, in the merged q/k/v and gate/up layers, puts a scale in another's place without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jetrl_megatron.recipe import Fp8BlockRecipe

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class _Width:
    """One size that must be whole tiles on every rank.

    Attributes:
        matrix: the Hugging Face matrices that have it, for the error.
        total: rows or columns of the logical matrix.
        parts: ranks that hold different parts of it.
        linears: Megatron names, inside a layer, of the linears that have it; it matters if one of them is quantised.
    """

    matrix: str
    total: int
    parts: int
    linears: tuple[str, ...]


def check_rollout_tp(hf_config: Any, tp: int, recipe: Fp8BlockRecipe) -> None:
    """Raises unless vLLM serves the checkpoint with every scale in its place at this tensor parallel size.

    Knows decoders with grouped-query or latent attention, dense and with experts; expert parallelism is not considered:
    it leaves experts whole, as TP 1 does.

    Args:
        hf_config: transformers configuration of the model, or the content of its config.json.
        tp: tensor parallel size of the rollout.
        recipe: recipe of the export; layers that it keeps in BF16 are free of its tiles.

    Raises:
        ValueError: names the matrix, the width of a rank's shard, the tile and the sizes that are legal.
    """
    model = _Model(hf_config)
    reason = _refusal(model, tp, recipe)
    if reason is None:
        return
    legal = [size for size in range(1, model.heads + 1) if _refusal(model, size, recipe) is None]
    way_out = (
        f"use rollout TP {', '.join(map(str, legal))}"
        if legal
        else f"no TP is legal: pad the matrix with zeros to whole tiles of {recipe.block}, or keep it in BF16 (ignore)"
    )
    raise ValueError(f"rollout TP {tp}: {reason}; {way_out}")


@dataclass(frozen=True)
class _Latent:
    """Sizes of multi-head latent attention: ranks of the low-rank pairs (0 where q has none), and parts of a head."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    @classmethod
    def of(cls, get: Callable[..., Any]) -> _Latent:
        keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return cls(*(int(get(key, 0)) for key in keys))


class _Model:
    """The sizes of a configuration that matter here."""

    def __init__(self, hf_config: Any) -> None:
        self._config = _text_config(hf_config)
        self.heads = int(self._get("num_attention_heads"))
        self.kv_heads = int(self._get("num_key_value_heads", self.heads))
        self.hidden = int(self._get("hidden_size"))
        self.head_dim = int(self._get("head_dim", self.hidden // self.heads))
        self.layers = int(self._get("num_hidden_layers"))
        self.ffn = self._get("intermediate_size")
        self.experts = next((count for count in map(self._get, _EXPERT_COUNTS) if count), 0)
        # Mixtral has no width of its own for experts: there they are the only feed-forward layers.
        self.expert_ffn = self._get("moe_intermediate_size", self.ffn)
        self.shared_ffn = self._shared_ffn()
        self.latent = _Latent.of(self._get) if self._get("kv_lora_rank") else None

    def _get(self, key: str, default: Any = None) -> Any:
        is_mapping = isinstance(self._config, Mapping)
        value = self._config.get(key) if is_mapping else getattr(self._config, key, None)
        return default if value is None else value

    def _shared_ffn(self) -> int:
        width = self._get("shared_expert_intermediate_size")
        return int(width or self._get("n_shared_experts", 0) * self._get("moe_intermediate_size", 0))

    def feed_forward(self) -> Iterator[tuple[str, int, str]]:
        """For each kind of feed-forward layer: what its matrices are called, their width, the Megatron module."""
        dense_among_moe = (
            self._get("mlp_only_layers")
            or self._get("first_k_dense_replace", 0)
            or self._get("decoder_sparse_step", 1) > 1
        )
        if not self.experts or dense_among_moe:
            yield "", int(self.ffn), "mlp"
        if self.experts:
            # One stands for all: engines make one layer of them, and a recipe that parts them is refused elsewhere.
            yield "experts' ", int(self.expert_ffn), "mlp.experts.local_experts.0"
        if self.experts and self.shared_ffn:
            yield "shared experts' ", self.shared_ffn, "mlp.shared_experts"


def _text_config(hf_config: Any) -> Any:
    if isinstance(hf_config, Mapping):
        return hf_config.get("text_config") or hf_config
    return hf_config.get_text_config()


def _refusal(model: _Model, tp: int, recipe: Fp8BlockRecipe) -> str | None:
    """Why vLLM cannot serve at this size, None when it can."""
    if tp < 1:
        return "tensor parallel sizes are 1 or more"
    if model.heads % tp:
        return f"{model.heads} attention heads are not divisible by it"
    if model.kv_heads % tp and tp % model.kv_heads:
        return f"{model.kv_heads} key/value heads are neither divisible by it nor a divisor of it"
    for width in _widths(model, tp):
        if width.total % width.parts:
            return f"{width.matrix}: {width.total} is not divisible by {width.parts}"
        if not _quantized(width, model.layers, recipe):
            continue
        shard = width.total // width.parts
        if shard % recipe.block:
            cut = f"{width.total} / {width.parts} = {shard}" if width.parts > 1 else f"{shard}"
            return f"{width.matrix}: {cut} is no multiple of the tile, {recipe.block}"
    return None


def _widths(model: _Model, tp: int) -> Iterator[_Width]:
    kinds = list(model.feed_forward())
    first = tuple(f"{module}.linear_fc1" for _, _, module in kinds)
    yield from _attention_widths(model, tp, first) if model.latent is None else _latent_widths(model, tp, first)
    for name, width, module in kinds:
        linears = f"{module}.linear_fc1", f"{module}.linear_fc2"
        yield _Width(f"rows of {name}gate_proj and up_proj, columns of {name}down_proj", width, tp, linears)


def _attention_widths(model: _Model, tp: int, first: tuple[str, ...]) -> Iterator[_Width]:
    qkv = "self_attention.linear_qkv"
    # At any TP: the activation quantiser takes whole groups alone.
    inputs = "columns of q_proj, k_proj, v_proj, gate_proj and up_proj (hidden size)"
    yield _Width(inputs, model.hidden, 1, (qkv, *first))
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield _Width("rows of q_proj", query, tp, (qkv,))
    # At TP 1 too: k comes before v in the merged layer. Key/value heads are copied where there are fewer than ranks.
    yield _Width("rows of k_proj and v_proj", key_value, min(tp, model.kv_heads), (qkv,))
    yield _Width("columns of o_proj", query, tp, ("self_attention.linear_proj",))


def _latent_widths(model: _Model, tp: int, first: tuple[str, ...]) -> Iterator[_Width]:
    latent = model.latent
    assert latent is not None
    down = tuple(f"self_attention.{name}" for name in ("linear_q_down_proj", "linear_q_proj", "linear_kv_down_proj"))
    inputs = "columns of q_a_proj, kv_a_proj_with_mqa, gate_proj and up_proj (hidden size)"
    yield _Width(inputs, model.hidden, 1, (*down, *first))
    # Every rank holds the down projections whole, merged into one layer, of which the second may end inside a tile.
    queries = ("self_attention.linear_q_up_proj",) if latent.q_rank else ("self_attention.linear_q_proj",)
    if latent.q_rank:
        yield _Width("rows of q_a_proj, columns of q_b_proj", latent.q_rank, 1, (down[0], *queries))
    name = "q_b_proj" if latent.q_rank else "q_proj"
    yield _Width(f"rows of {name}", model.heads * (latent.nope + latent.rope), tp, queries)
    up = ("self_attention.linear_kv_up_proj",)
    yield _Width("columns of kv_b_proj", latent.kv_rank, 1, up)
    yield _Width("rows of kv_b_proj", model.heads * (latent.nope + latent.value), tp, up)
    yield _Width("columns of o_proj", model.heads * latent.value, tp, ("self_attention.linear_proj",))


def _quantized(width: _Width, layers: int, recipe: Fp8BlockRecipe) -> bool:
    names = (f"decoder.layers.{index}.{linear}" for index in range(layers) for linear in width.linears)
    return any(recipe.quantizes(name, layers) for name in names)
