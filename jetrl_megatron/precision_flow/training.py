"""Training's precision graph, from the modules of a real Megatron model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_pg_size

from jetrl_megatron.convert.live import unwrapped
from jetrl_megatron.layers import (
    Fp8LinearMixin,
    JetRLFlashAttention,
    JetRLLayerNormColumnParallelLinear,
    JetRLMLP,
    JetRLOutputLayer,
    JetRLRMSNorm,
    JetRLSelfAttention,
)
from jetrl_megatron.ops import select_gemm, select_quantizer
from jetrl_megatron.ops.deep_gemm import DeepGemm
from jetrl_megatron.ops.norm import has_extension
from jetrl_megatron.ops.scaled_mm import ScaledMm
from jetrl_megatron.precision_flow.graph import MODEL, Difference, Node, NotPromised, PrecisionGraph, Value, in_order
from jetrl_megatron.precision_flow.mend import TRAINING_MEND
from jetrl_megatron.precision_flow.promises import (
    EXPERTS,
    activation_note,
    bf16_linear_notes,
    dropout_note,
    module_note,
    scaling_note,
    tensor_parallel_note,
)
from jetrl_megatron.recipe import Fp8BlockRecipe

# GEMMs that are proven to give the same bytes share a name.
_SAME_BYTES: Mapping[str, str] = MappingProxyType({ScaledMm.name: DeepGemm.name})
_HF_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.linear_proj": ("self_attn.o_proj",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("mlp.down_proj",),
    }
)
_ABSENT = (IdentityOp, type(None))


def training_graph(
    model: torch.nn.Module,
    *,
    device: torch.device | None = None,
    log_prob: str | None = None,
    exact_sums: bool = False,
    weights: Mapping[str, str] | None = None,
    weights_version: int | None = None,
) -> PrecisionGraph:
    """The precision graph of what one rank holds of a Megatron model; `merge` puts ranks together.

    Args:
        model: GPTModel of any TP or PP rank, or what wraps it (Float16Module, DistributedDataParallel).
        device: where it computes; that of its parameters by default. A model on the meta device needs it, and so does
            one that is described on a machine without the GPU that it will run on.
        log_prob: who computes log-probs from the logits: "vllm_v2" (`ops.log_prob.token_log_probs` on a GPU) or "torch"
            (log_softmax in float32). By default the first where the output layer is JetRL's.
        exact_sums: whether the forward runs under `jetrl_megatron.verify.exact_sums.ExactSums`, as on a CPU it has to.
        weights: digest of each linear's bytes by Hugging Face name, see `weight_digests`.
        weights_version: number of optimizer steps behind the weights.

    Returns:
        the graph; what is unknown in the model is in its `not_promised`.

    Raises:
        ValueError: the model is no GPTModel-like decoder, or a recipe's quantiser or GEMM cannot serve on the device.
    """
    inner = unwrapped(model)
    if not hasattr(inner, "decoder") or not hasattr(inner, "config"):
        raise ValueError(f"model={type(inner).__name__} has no decoder: pass Megatron's GPTModel, or what wraps it")
    if not hasattr(inner, "rotary_scaling"):
        raise ValueError(
            f"model={type(inner).__name__} does not tell its RoPE as Megatron's GPTModel does, which is the only one "
            "that is described: measure the mismatch instead"
        )
    walk = _Walk(inner, device, exact_sums)
    nodes = list(walk.nodes())
    if weights is not None:
        nodes = [_with_digest(node, weights) for node in nodes]
    parity = isinstance(getattr(inner, "output_layer", None), JetRLOutputLayer)
    if getattr(inner, "post_process", True):
        kernel = log_prob or ("vllm_v2" if parity else "torch")
        nodes.append(Node(name="log_prob", operator="log_prob", dtype="float32", result="float32", kernel=kernel))
    return PrecisionGraph(
        side="training",
        nodes=in_order(nodes),
        settings=walk.settings(weights_version),
        faults=walk.faults(),
        not_promised=(*walk.notes, *bf16_linear_notes(nodes, "training")),
        mend=dict(TRAINING_MEND),
    )


def _with_digest(node: Node, weights: Mapping[str, str]) -> Node:
    return dataclasses.replace(node, weights=weights.get(node.name, "absent")) if node.quantized else node


class _Walk:
    """One pass over the modules of a decoder."""

    def __init__(self, model: Any, device: torch.device | None, exact_sums: bool) -> None:
        self.model = model
        self.config: Any = model.config
        parameter = next(model.parameters(), None)
        self.device = device or (torch.device("cpu") if parameter is None else parameter.device)
        if self.device.type == "meta":
            raise ValueError(
                "the model is on the meta device, where no kernel serves: pass device=torch.device('cuda') or 'cpu', "
                "the one that it will compute on"
            )
        self.on_device = parameter is not None and parameter.device.type == self.device.type
        self.exact = "exact" if exact_sums else "torch"
        self.dtype = _dtype(self.config.params_dtype)
        self.residual = "float32" if self.config.fp32_residual_connection else self.dtype
        self.recipes: dict[str, Fp8BlockRecipe] = {}
        self.tensor_parallel = self.config.tensor_model_parallel_size
        self.notes: list[NotPromised] = [note for note in self._model_notes() if note is not None]

    def _model_notes(self) -> Iterator[NotPromised | None]:
        yield tensor_parallel_note(self.tensor_parallel, "training")
        yield scaling_note(self._scaling(), "training")
        yield dropout_note(self.config.hidden_dropout, "training")
        swiglu = self.config.gated_linear_unit and self.config.activation_func is F.silu
        name = "silu" if swiglu else getattr(self.config.activation_func, "__name__", "unknown")
        yield activation_note(name if swiglu or name != "silu" else "silu without gate", "training")
        if self.config.layernorm_zero_centered_gamma:
            yield module_note("model", "a norm with zero-centred gain (weight + 1)", "training")

    def settings(self, weights_version: int | None) -> dict[str, Value]:
        """Values of `MODEL_SETTINGS`; training has one value for what only a rollout can have otherwise."""
        return {
            "recipe": next(iter(self.recipes), None),
            "tensor_parallel": self.tensor_parallel,
            "dtype": self.dtype,
            "layers": self.config.num_layers,
            "tied_head": bool(self.model.share_embeddings_and_output_weights),
            "weights_source": "training",
            "weights_version": weights_version,
            "speculative_decoding": "none",
            "lora": False,
            "logprobs_mode": "raw_logprobs",
            "other_fusions": "none",
            "cuda_extension": has_extension() if self.device.type == "cuda" else None,
        }

    def faults(self) -> tuple[Difference, ...]:
        """A model whose layers have several recipes."""
        if len(self.recipes) < 2:
            return ()
        found = ", ".join(self.recipes)
        setting = "training: layers were built with several recipes: build all of them with jetrl_spec(spec, recipe)"
        return (Difference(node=MODEL, field="recipes", training=found, rollout=None, setting=setting),)

    def nodes(self) -> Iterator[Node]:
        """All nodes of this rank."""
        model = self.model
        if getattr(model, "embedding", None) is not None and model.pre_process:
            yield Node(name="model.embed_tokens", operator="embedding", dtype=self.dtype)
        for layer in model.decoder.layers:
            name = f"model.layers.{layer.layer_number - 1}"
            if isinstance(layer, TransformerLayer):
                yield from self._layer(layer, name)
            else:
                self.notes.append(module_note(name, type(layer).__name__, "training"))
        norm = getattr(model.decoder, "final_layernorm", None) or getattr(model.decoder, "final_norm", None)
        if norm is not None:
            yield self._norm(norm, "model.norm")
        if model.post_process and getattr(model, "output_layer", None) is not None:
            yield self._head(model.output_layer)

    def _layer(self, layer: Any, name: str) -> Iterator[Node]:
        if not isinstance(layer.cross_attention, _ABSENT):
            self.notes.append(module_note(f"{name}.cross_attention", type(layer.cross_attention).__name__, "training"))
        yield Node(name=f"{name}.residual", operator="residual_add", dtype=self.residual, result=self.residual)
        attention, mlp = layer.self_attention, layer.mlp
        if isinstance(attention, SelfAttention):
            yield from self._norm_before(layer.input_layernorm, attention.linear_qkv, f"{name}.input_layernorm")
            yield from self._attention(attention, name)
        elif not isinstance(attention, _ABSENT):
            self.notes.append(module_note(f"{name}.self_attn", type(attention).__name__, "training"))
        if isinstance(mlp, MoELayer):
            self.notes.append(module_note(f"{name}.mlp.experts", EXPERTS, "training"))
            yield self._norm(layer.pre_mlp_layernorm, f"{name}.post_attention_layernorm")
        elif isinstance(mlp, MLP):
            yield from self._norm_before(layer.pre_mlp_layernorm, mlp.linear_fc1, f"{name}.post_attention_layernorm")
            yield from self._mlp(mlp, name)
        elif not isinstance(mlp, _ABSENT):
            self.notes.append(module_note(f"{name}.mlp", type(mlp).__name__, "training"))

    def _norm_before(self, norm: Any, linear: Any, name: str) -> Iterator[Node]:
        if not isinstance(norm, _ABSENT):
            yield self._norm(norm, name)
        elif getattr(linear, "layer_norm_weight", None) is not None:
            yield self._norm(linear, name)

    def _norm(self, norm: Any, name: str) -> Node:
        if isinstance(norm, JetRLRMSNorm):
            kernel = "jetrl"
        elif isinstance(norm, JetRLLayerNormColumnParallelLinear):
            # One kernel computes this norm and the codes; it sums a row in the order of the norm's own kernel.
            kernel = "jetrl" if self._cuda(lambda: norm.fused_norm() is not None) else "torch"
        else:
            kernel = _torch_or_other(norm)
        operator = "rms_norm" if self.config.normalization == "RMSNorm" else self.config.normalization
        epsilon = self.config.layernorm_epsilon
        return Node(name=name, operator=operator, dtype=self.dtype, kernel=kernel, epsilon=epsilon)

    def _attention(self, attention: Any, layer: str) -> Iterator[Node]:
        name = f"{layer}.self_attn"
        yield from self._linears(attention.linear_qkv, layer, "self_attention.linear_qkv")
        for norm, leaf in ((attention.q_layernorm, "q_norm"), (attention.k_layernorm, "k_norm")):
            if not isinstance(norm, _ABSENT):
                yield self._norm(norm, f"{name}.{leaf}")
        yield self._rope(attention, f"{name}.rotary_emb")
        core = attention.core_attention
        flash = isinstance(core, JetRLFlashAttention)
        kernel = "flash_attn_3" if flash else self.exact if type(core).__name__ == "DotProductAttention" else None
        yield Node(
            name=f"{name}.attn",
            operator="attention",
            dtype=self.dtype,
            kernel=kernel or _torch_or_other(core),
            kv_splits="1",
            cascade=False,
            cache_dtype=self.dtype,
            window=_window(self.config.window_size),
        )
        yield from self._linears(attention.linear_proj, layer, "self_attention.linear_proj")

    def _rope(self, attention: Any, name: str) -> Node:
        fused = "transformer_engine" if self.config.apply_rope_fusion else "torch"
        kernel = "vllm_c" if isinstance(attention, JetRLSelfAttention) else fused
        theta = float(self.model.rotary_base)
        return Node(name=name, operator="rope", dtype=self.dtype, kernel=kernel, theta=theta, scaling=self._scaling())

    def _scaling(self) -> str:
        kind = self.model.position_embedding_type
        if kind != "rope":
            return str(kind)
        factor = getattr(getattr(self.model, "rotary_pos_emb", None), "seq_len_interpolation_factor", None)
        if factor is not None:
            return f"linear {factor:.4g}"
        if self.model.rotary_percent != 1:
            return f"default over {self.model.rotary_percent:.4g} of a head"
        if not self.model.rotary_scaling:
            return "default"
        frequencies = self.model.rotary_pos_emb.inv_freq
        if frequencies.device.type == "meta":
            return "llama3 of a model on the meta device"
        # Megatron keeps no factor; the slowest frequency is always divided by it.
        size = 2 * frequencies.numel()
        slowest = float(self.model.rotary_base) ** -((size - 2) / size)
        return f"llama3 {slowest / float(frequencies[-1]):.4g}"

    def _mlp(self, mlp: Any, layer: str) -> Iterator[Node]:
        yield from self._linears(mlp.linear_fc1, layer, "mlp.linear_fc1")
        fuses = isinstance(mlp, JetRLMLP) and self._cuda(mlp._fuses)
        kernel = "jetrl" if fuses else "megatron_fused" if self.config.bias_activation_fusion else "torch"
        yield Node(name=f"{layer}.mlp.act_fn", operator="swiglu", dtype=self.dtype, kernel=kernel)
        yield from self._linears(mlp.linear_fc2, layer, "mlp.linear_fc2")

    def _cuda(self, serves: Callable[[], bool]) -> bool:
        """Whether a fused path of a GPU serves: asked of the module itself where it lies on the device."""
        return self.device.type == "cuda" and (not self.on_device or serves())

    def _linears(self, linear: Any, layer: str, megatron: str) -> Iterator[Node]:
        if not isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
            self.notes.append(module_note(f"{layer}.{megatron}", type(linear).__name__, "training"))
            return
        self.tensor_parallel = get_pg_size(linear.tp_group)
        bias = getattr(linear, "bias", None) is not None
        for leaf in _HF_NAMES[megatron]:
            name = f"{layer}.{leaf}"
            if isinstance(linear, Fp8LinearMixin) and linear.quantized:
                yield from self._fp8(linear.recipe, name, bias)
            else:
                yield Node(name=name, operator="linear", dtype=self.dtype, activation_dtype=self.dtype, bias=bias)

    def _fp8(self, recipe: Fp8BlockRecipe, name: str, bias: bool) -> Iterator[Node]:
        self.recipes.setdefault(recipe.fingerprint, recipe)
        gemm = self._gemm(recipe)
        rounds = recipe.scale_format == "ue8m0"
        yield Node(
            name=name,
            operator="linear",
            dtype=recipe.element_format,
            activation_dtype=recipe.element_format,
            weight_group=recipe.weight_block,
            activation_group=recipe.activation_block,
            scale_format=recipe.scale_format,
            activation_scale_format=recipe.scale_format,
            element_max=recipe.element_max,
            ue8m0_weight_max=recipe.ue8m0_weight_max if rounds else None,
            weight_amax_floor=recipe.weight_amax_floor,
            activation_amax_floor=recipe.activation_amax_floor,
            activation_scale_floor=recipe.activation_scale_floor if rounds else None,
            quantizer="reference",
            kernel=gemm,
            bias=bias,
        )
        for operator, precision in (("dgrad", recipe.dgrad), ("wgrad", recipe.wgrad)):
            dtype = recipe.element_format if precision == "fp8" else self.dtype
            result = self.dtype if operator == "dgrad" else "float32"
            yield Node(name=f"{name}.{operator}", operator=operator, dtype=dtype, result=result, forward=False)

    def _gemm(self, recipe: Fp8BlockRecipe) -> str:
        if self.device.type == "cuda" and not torch.cuda.is_available():
            # Described ahead, on another machine: all candidates of a GPU have one accumulation.
            return DeepGemm.name
        # Every quantiser is byte-equal to the reference; the selection raises where none serves.
        select_quantizer(recipe, self.device)
        name = select_gemm(recipe, self.device).name
        return _SAME_BYTES.get(name, name)

    def _head(self, head: Any) -> Node:
        kernel = "jetrl" if isinstance(head, JetRLOutputLayer) else self.exact
        return Node(name="lm_head", operator="lm_head", dtype=self.dtype, kernel=kernel)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_or_other(module: Any) -> str:
    """The word "torch" for torch's own norms, which Megatron's WrappedTorchNorm builds; else the class's path."""
    kind = type(module)
    return "torch" if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__name__}"


def _window(size: Any) -> int | None:
    # Megatron counts the tokens to the left of the query, Hugging Face the query as well.
    return None if size is None else int(size[0]) + 1
