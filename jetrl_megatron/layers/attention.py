"""Self-attention whose RoPE and core give vLLM's bytes."""

# Shape suffixes: T tokens, H query heads, G key and value heads, D head size.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp

from jetrl_megatron.layers.hooks import run_forward_pre_hooks
from jetrl_megatron.layers.rms_norm import JetRLRMSNorm
from jetrl_megatron.ops.attention import Packing, attention_refusal, flash_attention, head_size_refusal
from jetrl_megatron.ops.qkv import Rotation, split_heads
from jetrl_megatron.ops.rope import cos_sin_cache, rope

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig


class JetRLFlashAttention(torch.nn.Module):
    """Drop-in for Megatron's core attention: FlashAttention 3 of vLLM's build, causal, packed or not.

    Query float [s, b, H, D] and key, value [s, b, G, D] give [s, b, H * D]; with `packed_seq_params` in "thd" format
    [T, H, D] and [T, G, D] give [T, H * D].

    Raises:
        ValueError: the configuration asks for something that the rollout's kernel does not compute alike, or the
            machine cannot run it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for name, value, allowed in (
            ("attention_dropout", dropout, 0),
            ("context_parallel_size", config.context_parallel_size, 1),
            ("window_size", config.window_size, None),
            ("apply_query_key_layer_scaling", config.apply_query_key_layer_scaling, False),
            ("softmax_type", config.softmax_type, "vanilla"),
            ("attention_type", attention_type, "self"),
        ):
            if value != allowed:
                raise ValueError(
                    f"config.{name}={value!r}: parity attention computes with {allowed!r} alone; set it so, or use "
                    "jetrl_spec(..., parity=False)"
                )
        _check_mask_type(attn_mask_type)
        if (reason := head_size_refusal(config.kv_channels)) is not None:
            raise ValueError(f"config.kv_channels={config.kv_channels}: {reason}; use jetrl_spec(..., parity=False)")
        self.config = config
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Causal attention within each sequence; the mask is not read."""
        refusal = attention_refusal(query.device)
        if refusal is not None:
            raise ValueError(f"parity attention cannot run: {refusal}")
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported by parity attention: use jetrl_spec(..., parity=False)")
        if attn_mask_type is not None:
            _check_mask_type(attn_mask_type)
        if key.shape[0] != query.shape[0]:
            raise ValueError(
                f"{key.shape[0]} keys for {query.shape[0]} queries: parity attention has no key-value cache; generate "
                "with the rollout engine"
            )
        if packed_seq_params is not None:
            packing = _packing(packed_seq_params, query.shape[0])
            out = flash_attention(query, key, value, packing, scale=self.softmax_scale)
            return out.flatten(1)
        length, batch = query.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
        packing = Packing(starts, length, equal=True)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = flash_attention(q, k, v, packing, scale=self.softmax_scale)
        return out.view(batch, length, -1).transpose(0, 1).contiguous()


def _check_mask_type(mask_type: AttnMaskType) -> None:
    if mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ValueError(f"attn_mask_type={mask_type}: parity attention is causal alone; use parity=False")


def _packing(packed: PackedSeqParams, tokens: int) -> Packing:
    if packed.qkv_format != "thd":
        raise ValueError(f"packed_seq_params.qkv_format={packed.qkv_format!r}: parity attention takes 'thd'")
    # Once for all layers, since the lengths are read on the host.
    starts = _starts(packed)
    made: Packing = _kept(
        packed, "jetrl_packing", starts, (tokens,), lambda: _read_packing(starts.to(torch.int32), tokens)
    )
    return made


def _kept(holder: Any, name: str, starts: torch.Tensor | None, key: tuple[int, ...], make: Callable[[], Any]) -> Any:
    """What `make` makes of the lengths and the key, kept on the holder under this name until one of them is another."""
    version = None if starts is None else starts._version
    known = getattr(holder, name, None)
    if known is None or known[0] is not starts or known[1] != (version, key):
        known = starts, (version, key), make()
        setattr(holder, name, known)
    return known[2]


def _read_packing(starts: torch.Tensor, tokens: int) -> Packing:
    # Padding behind a sequence is attended by itself alone; nobody reads what comes out. `max_seqlen_q` may leave it
    # out, and tokens behind the last sequence may be in no sequence.
    lengths = starts.diff().tolist()
    rest = tokens - sum(lengths)
    if rest < 0:
        raise ValueError(f"packed_seq_params holds {sum(lengths)} tokens, and {tokens} came")
    if rest:
        starts, lengths = torch.cat([starts, starts.new_tensor([tokens])]), [*lengths, rest]
    return Packing(starts, max(lengths), equal=len(set(lengths)) == 1)


def _starts(packed: PackedSeqParams) -> torch.Tensor:
    starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    assert isinstance(starts, torch.Tensor)
    return starts


def _positions(
    tokens: int, batch: int, packed: PackedSeqParams | None, device: torch.device, rows: int
) -> torch.Tensor:
    """Position of each row of [s, b, ...], flattened: int64 [T]. Padding may have more than the `rows` angles."""
    index = torch.arange(tokens, device=device)
    if packed is None:
        return index // batch
    starts = _starts(packed).long()
    return (index - starts[torch.searchsorted(starts, index, right=True) - 1]).clamp_max(rows - 1)


class JetRLSelfAttention(SelfAttention):
    """Drop-in for Megatron's SelfAttention, with RoPE as vLLM rounds it: float32 products of BF16 cosines and sines."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, allowed in (
            ("rotary_interleaved", False),
            ("mrope_section", None),
            ("hidden_dropout", 0),
            ("flash_decode", False),
            ("multi_latent_attention", False),
        ):
            if getattr(config, name, allowed) != allowed:
                raise ValueError(f"config.{name}={getattr(config, name)!r}: parity attention knows {allowed!r} alone")
        if getattr(self, "_yarn_concentration_factor", 1.0) != 1.0:
            raise ValueError("YaRN's scaled RoPE is not among the parity operators: use jetrl_spec(..., parity=False)")
        self._angles: torch.Tensor | None = None
        self._packed: PackedSeqParams | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """See Megatron's SelfAttention; RoPE is applied where query and key are made.

        Raises:
            ValueError: an inference context is given, whose keys and positions lie in a cache.
        """
        # Of the positional parameters the mask comes first, key_value_states second, the context third.
        context = args[2] if len(args) > 2 else kwargs.get("inference_context")
        if context is not None or kwargs.get("inference_params") is not None:
            raise ValueError(
                "Megatron's inference is not among the parity operators: generate with the rollout engine, or build "
                "the model with jetrl_spec(..., parity=False)"
            )
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        no_rope = self.config.no_rope_freq
        self._angles = None if no_rope and no_rope[self.layer_number - 1] else angles
        self._packed = packed_seq_params
        try:
            return super().forward(
                hidden_states, *args, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **kwargs
            )
        finally:
            self._angles = self._packed = None

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """See Megatron's SelfAttention; query and key come back rotated."""
        if self._angles is not None and hidden_states.dtype == torch.bfloat16 and self._splits_at_once():
            mixed, _ = self.linear_qkv(hidden_states)
            return self._split(mixed, self._angles)
        query, key, *others = super().get_query_key_value_tensors(hidden_states, key_value_states, **kwargs)
        if self._angles is not None:
            query, key = self._rotated(query, key, self._angles)
        return query, key, *others

    def _splits_at_once(self) -> bool:
        """Whether norm and rotation may read q and k where the projection wrote them."""
        config: Any = self.config
        if config.attention_output_gate or config.test_mode or config.num_query_groups < self.world_size:
            return False
        norms, size = self._head_norms(), self.hidden_size_per_attention_head
        if not all(type(norm) is JetRLRMSNorm and norm.weight.numel() == size for norm in norms):
            return False
        # The kernel sums a head as that of the norm alone does if its rows are aligned.
        return not norms or (len(norms) == 2 and norms[0].eps == norms[1].eps and size % 16 == 0)

    def _head_norms(self) -> list[Any]:
        norms = self.q_layernorm, self.k_layernorm
        return [norm for norm in norms if norm is not None and not isinstance(norm, IdentityOp)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _split(self, mixed: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length, batch, size = *mixed.shape[:2], self.hidden_size_per_attention_head
        rotation = self._rotation(angles, length, batch, size)
        norms, weights = self._head_norms(), {}
        for norm in norms:
            run_forward_pre_hooks(norm)
        if norms:
            weights = {"q_weight": norms[0].weight, "k_weight": norms[1].weight, "eps": norms[0].eps}
        qkv = mixed.reshape(length * batch, self.num_query_groups_per_partition, -1, size)
        q, k, v = (x.view(length, batch, *x.shape[1:]) for x in split_heads(qkv, rotation, **weights))
        return q, k, v

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _rotated(
        self, query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length, batch, _, size = query.shape
        rotation = self._rotation(angles, length, batch, size)
        rotated = (rope(x.flatten(0, 1), rotation.positions, rotation.cos_sin).view(x.shape) for x in (query, key))
        return next(rotated), next(rotated)

    def _rotation(self, angles: torch.Tensor, length: int, batch: int, size: int) -> Rotation:
        if angles.shape[-1] != size:
            raise ValueError(
                f"RoPE over {angles.shape[-1]} of {size} elements of a head (rotary_percent < 1) is not "
                "among the parity operators: use jetrl_spec(..., parity=False)"
            )
        cos_sin = getattr(angles, "jetrl_cos_sin", None)
        if cos_sin is None:
            # Megatron hands the same tensor to every layer and, for one length, in every step.
            cos_sin = angles.jetrl_cos_sin = cos_sin_cache(angles)  # type: ignore[attr-defined]
        return Rotation(self._known_positions(angles, length, batch, len(cos_sin)), cos_sin)

    def _known_positions(self, angles: torch.Tensor, length: int, batch: int, rows: int) -> torch.Tensor:
        """Positions, made by the first layer and kept with what they come from for the others."""
        packed = self._packed

        def make() -> torch.Tensor:
            return _positions(length * batch, batch, packed, angles.device, rows)

        if angles.is_cuda and torch.cuda.is_current_stream_capturing():
            # A replay of the graph finds other lengths in the same tensor.
            return make()
        holder, starts = (angles, None) if packed is None else (packed, _starts(packed))
        made: torch.Tensor = _kept(holder, "jetrl_positions", starts, (length, batch, rows), make)
        return made
