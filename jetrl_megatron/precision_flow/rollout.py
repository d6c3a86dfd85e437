"""The rollout's precision graph, from a description of the vLLM engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jetrl_megatron.precision_flow.engine import PLUGIN, EngineDescription, EngineModule, RankReport
from jetrl_megatron.precision_flow.graph import Difference, Node, NotPromised, PrecisionGraph, Value, in_order
from jetrl_megatron.precision_flow.mend import ROLLOUT_MEND
from jetrl_megatron.precision_flow.predicted import predicted_modules
from jetrl_megatron.precision_flow.promises import (
    EXPERTS,
    activation_note,
    architecture_note,
    bf16_linear_notes,
    module_note,
    scaling_note,
    tensor_parallel_note,
)
from jetrl_megatron.recipe import JETRL_FP8, VLLM_PROVIDER, Fp8BlockRecipe

# Whose bytes vLLM's block FP8 kernels give; those that are missing have a name of their own on no other side.
_LINEAR_KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "DeepGemmFp8BlockScaledMMKernel": "deep_gemm",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": "flashinfer below 32 tokens, deep_gemm above",
        "CutlassFp8BlockScaledMMKernel": "cutlass",
        "TritonFp8BlockScaledMMKernel": "triton",
        "MarlinFP8ScaledMMLinearKernel": "marlin",
        "HummingFP8ScaledMMLinearKernel": "humming",
        "CPUFp8BlockScaledMMKernel": "vllm_cpu",
        "W8A8BlockLinear": "reference",
    }
)
_WEIGHT_ONLY = frozenset({"marlin", "humming", "vllm_cpu"})

# The operator that each pass replaces together with a neighbour. Passes that are not named here change the graph too.
_FUSIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fuse_norm_quant": ("input_layernorm", "post_attention_layernorm"),
        "fuse_allreduce_rms": ("input_layernorm", "post_attention_layernorm", "model.norm"),
        "enable_qk_norm_rope_fusion": ("q_norm", "k_norm", "rotary_emb"),
        "fuse_qk_norm_rope_kvcache": ("q_norm", "k_norm", "rotary_emb"),
        "fuse_rope_kvcache": ("rotary_emb",),
        "fuse_act_quant": ("act_fn",),
        "fuse_attn_quant": ("attn",),
        "enable_sp": ("o_proj", "down_proj"),
        "fuse_gemm_comms": ("o_proj", "down_proj"),
    }
)
_FLASH_ATTENTION = 3  # the version that vLLM takes on Hopper
_HARMLESS = frozenset({"eliminate_noops"})


def rollout_graph(description: EngineDescription | Mapping[str, Any]) -> PrecisionGraph:
    """The precision graph of a vLLM engine.

    Args:
        description: what `jetrl_megatron.integrations.vllm_description` found, or its JSON form. Where it holds the
            loaded model, that counts; else the operators are those that vLLM 0.26 would choose for the configuration.

    Raises:
        ValueError: a field is missing or unknown, or a recipe's stamp was edited.
    """
    if not isinstance(description, EngineDescription):
        description = EngineDescription.from_dict(description)
    recipe = description.recipe
    modules = predicted_modules(description) if description.modules is None else description.modules
    found = [(module, _node(description, recipe, module)) for module in modules]
    nodes = [node for _, node in found if node is not None]
    notes = [*_unknown(description), *(_note(module) for module, node in found if node is None)]
    nodes += [*_residuals(description), _log_prob(description)]
    passes = description.fusions if description.compiled else ()
    fused = {node: name for name in passes for node in _FUSIONS.get(name, ())}
    nodes = [dataclasses.replace(node, fused_by=_fused_by(node.name, fused)) for node in nodes]
    notes += bf16_linear_notes(nodes, "rollout")
    return PrecisionGraph(
        side="rollout",
        nodes=in_order(nodes),
        settings=_settings(description, recipe),
        faults=(*_two_recipes(description), *rank_faults(description)),
        not_promised=tuple(notes),
        mend=dict(ROLLOUT_MEND),
    )


def rank_faults(description: EngineDescription) -> list[Difference]:
    """What the ranks of a running engine report that they should not.

    Every rank has to report, with the recipe that the engine serves, the plugin loaded, the operators of rank 0 and
    nobody's replacement for vLLM's FP8. Nothing is expected of a description of the configuration alone.
    """
    if description.ranks is None and description.modules is None:
        return []
    expected = description.recipe.fingerprint if description.recipe else None
    reports = {report.rank: report for report in description.ranks or ()}
    first = reports.get(0)
    faults = []
    for rank in range(description.tensor_parallel):
        report = reports.get(rank)
        for field, wanted, value in _rank_values(report, expected, first):
            setting = (
                f"rollout: rank {rank} must report {wanted}: load the plugin jetrl_megatron in every worker process "
                "(same environment, VLLM_PLUGINS and package on each host) and start it from one checkpoint"
            )
            faults.append(Difference(node=f"rank {rank}", field=field, training=wanted, rollout=value, setting=setting))
    return faults


def _rank_values(
    report: RankReport | None, expected: str | None, first: RankReport | None
) -> Iterator[tuple[str, Value, Value]]:
    if report is None:
        yield "report", f"recipe {expected}", None
        return
    rows: list[tuple[str, Value, Value]] = [
        ("recipe", expected, report.fingerprint),
        ("plugin", True, report.plugin),
        ("replaced", "none", ", ".join(report.replaced) or "none"),
    ]
    if first is not None:
        rows.append(("operators", _operators(first), _operators(report)))
    yield from (row for row in rows if row[1] != row[2])


def _operators(report: RankReport) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(report.operators.items()))


def _two_recipes(description: EngineDescription) -> list[Difference]:
    if description.stamp is None or description.operators is None:
        return []
    carried = Fp8BlockRecipe.from_stamp(description.stamp, "config.json")
    asked = Fp8BlockRecipe.from_stamp(description.operators, "additional_config")
    if carried.fingerprint == asked.fingerprint:
        return []
    setting = "rollout: additional_config has another recipe than the checkpoint: start the engine with its "
    setting += "recipe.to_vllm_engine_args()"
    return [
        Difference(
            node="model",
            field="additional_config",
            training=carried.fingerprint,
            rollout=asked.fingerprint,
            setting=setting,
        )
    ]


def _settings(description: EngineDescription, recipe: Fp8BlockRecipe | None) -> dict[str, Value]:
    known = _HARMLESS | set(_FUSIONS)
    # The package's own pass calls kernels that give the bytes of what they replace.
    others = [name for name in description.fusions if name not in known and not name.startswith(PLUGIN)]
    return {
        "recipe": recipe.fingerprint if recipe else None,
        "tensor_parallel": description.tensor_parallel,
        "dtype": description.dtype,
        "layers": description.layers,
        "tied_head": description.tied_head,
        "weights_source": _weights_source(description),
        "weights_version": description.weights_version,
        "speculative_decoding": description.speculative or "none",
        "lora": description.lora,
        "logprobs_mode": description.logprobs_mode,
        "other_fusions": ", ".join(others) if others and description.compiled else "none",
        "cuda_extension": description.extension if description.platform == "cuda" else None,
    }


def _weights_source(description: EngineDescription) -> str:
    replaced = list(description.replaced)
    replaced += [name for report in description.ranks or () for name in report.replaced]
    if replaced:
        return f"requantised by {', '.join(dict.fromkeys(replaced))}"
    if "quantization_config" in description.overrides:
        return "requantised: hf_overrides has a quantization_config that the checkpoint has not"
    if description.quantization and not description.serialized_fp8:
        return f"quantised online by vLLM ({description.quantization})"
    if description.load_format == "dummy" and description.weights is None:
        return "random numbers (load_format='dummy'), unless somebody has loaded others since"
    if description.recipe is None:
        return "a checkpoint without a recipe"
    return "training"


def _fused_by(name: str, fused: Mapping[str, str]) -> str | None:
    return fused.get(name) or fused.get(name.rpartition(".")[2])


def _node(d: EngineDescription, recipe: Fp8BlockRecipe | None, module: EngineModule) -> Node | None:
    own = module.implementation.startswith(PLUGIN) and d.plugin
    cpu = d.platform == "cpu"
    name, dtype = module.name, d.dtype
    if module.kind == "linear":
        return _linear(d, recipe, module)
    if module.kind == "rms_norm":
        return Node(name=name, operator="rms_norm", dtype=dtype, kernel=_norm_kernel(d, name, own), epsilon=d.epsilon)
    if module.kind == "rope":
        native = ("torch" if own else "vllm_cpu") if cpu else "inductor" if d.compiled else "vllm native"
        kernel = "vllm_c" if d.custom_op("rotary_embedding") and not cpu else native
        return Node(name=name, operator="rope", dtype=dtype, kernel=kernel, theta=d.theta, scaling=d.scaling)
    if module.kind == "attention":
        return _attention(d, module, own)
    if module.kind == "activation":
        return Node(name=name, operator="swiglu", dtype=dtype, kernel=_swiglu_kernel(d, own))
    if module.kind == "embedding":
        return Node(name=name, operator="embedding", dtype=dtype)
    if module.kind == "head":
        kernel = ("exact" if cpu else "jetrl") if own else "vllm_cpu" if cpu else "cublas"
        return Node(name=name, operator="lm_head", dtype=dtype, kernel=kernel)
    return None


def _linear(d: EngineDescription, recipe: Fp8BlockRecipe | None, module: EngineModule) -> Node:
    if not module.quantized:
        return Node(
            name=module.name, operator="linear", dtype=d.dtype, activation_dtype=d.dtype, bias=bool(module.bias)
        )
    leaf = module.implementation.rpartition(".")[2]
    kernel = _LINEAR_KERNELS.get(leaf, leaf)
    deep_gemm, own = "deep_gemm" in kernel, kernel == "reference"
    # The default recipe's floors are those of vLLM's activation quantiser.
    floors = recipe if own and recipe else JETRL_FP8
    stored = recipe.scale_format if recipe else "unknown"
    rounds = deep_gemm and (d.deep_gemm_e8m0 if module.ue8m0 is None else module.ue8m0)
    activations = "ue8m0" if rounds or (own and stored == "ue8m0") else "fp32"
    quantizer = "reference" if own or (d.platform == "cuda" and d.custom_op("quant_fp8")) else "vllm native"
    block = d.weight_block
    node = Node(
        name=module.name,
        operator="linear",
        dtype=JETRL_FP8.element_format,
        activation_dtype=d.dtype if kernel in _WEIGHT_ONLY else JETRL_FP8.element_format,
        weight_group=block,
        activation_group=None if block is None else (1, block[1]),
        scale_format="ue8m0" if rounds else stored,
        activation_scale_format=activations,
        element_max=floors.element_max,
        ue8m0_weight_max=recipe.ue8m0_weight_max if recipe and stored == "ue8m0" else None,
        weight_amax_floor=recipe.weight_amax_floor if recipe else None,
        activation_amax_floor=floors.activation_amax_floor,
        activation_scale_floor=floors.activation_scale_floor if activations == "ue8m0" else None,
        quantizer=quantizer,
        kernel=kernel,
        bias=bool(module.bias),
        weights=None if d.weights is None else d.weights.get(module.name, "absent"),
    )
    if kernel not in _WEIGHT_ONLY:
        return node
    return dataclasses.replace(
        node,
        activation_group=None,
        activation_scale_format=None,
        activation_amax_floor=None,
        activation_scale_floor=None,
        quantizer=None,
    )


def _norm_kernel(d: EngineDescription, name: str, own: bool) -> str:
    if d.platform == "cpu":
        return "torch" if own else "vllm_cpu"
    if d.batch_invariant:
        return "vllm_batch_invariant"
    first = name == "model.layers.0.input_layernorm" or name.endswith(("q_norm", "k_norm"))
    priority = d.rms_norm if first else d.fused_add_rms_norm
    provider = priority[0] if priority else "native"
    if provider == VLLM_PROVIDER:
        return "jetrl" if d.plugin else "native"
    return "inductor" if provider == "native" and d.compiled else provider


def _swiglu_kernel(d: EngineDescription, own: bool) -> str:
    if d.platform == "cpu":
        return "inductor" if d.compiled else "torch"
    if d.custom_op("silu_and_mul"):
        return "jetrl" if own else "vllm_c"
    return "inductor" if d.compiled else "torch"


def _attention(d: EngineDescription, module: EngineModule, own: bool) -> Node:
    if d.platform == "cpu":
        # The plugin's attention never splits; vLLM's may.
        kernel, splits = ("exact", "1") if own else ("vllm_cpu", "varying" if d.cpu_splits_kv else "1")
    else:
        # A loaded model tells its backend, a configuration what was asked for.
        leaf = module.implementation.rpartition(".")[2]
        asked = (d.attention_backend or "FLASH_ATTN") if leaf == "Attention" else leaf
        flash = own or asked in ("FLASH_ATTN", "FlashAttentionBackend")
        kernel = f"flash_attn_{d.flash_attn_version or _FLASH_ATTENTION}" if flash else asked
        splits = "1" if own or d.batch_invariant else "varying"
    if d.decode_context_parallel > 1:
        splits = f"{d.decode_context_parallel} ranks"
    cache = module.cache_dtype or d.cache_dtype
    return Node(
        name=module.name,
        operator="attention",
        dtype=d.dtype,
        kernel=kernel,
        kv_splits=splits,
        cascade=d.cascade and d.platform == "cuda",
        cache_dtype=d.dtype if cache == "auto" else cache,
        window=d.window,
    )


def _residuals(d: EngineDescription) -> Iterator[Node]:
    for layer in range(d.layers):
        yield Node(name=f"model.layers.{layer}.residual", operator="residual_add", dtype=d.dtype, result=d.dtype)


def _log_prob(d: EngineDescription) -> Node:
    kernel = "vllm_v2" if d.platform == "cuda" and d.v2_runner else "torch"
    return Node(name="log_prob", operator="log_prob", dtype="float32", result="float32", kernel=kernel)


def _unknown(d: EngineDescription) -> list[NotPromised]:
    """What the description names that nobody has proven equal."""
    notes = [
        tensor_parallel_note(d.tensor_parallel, "rollout"),
        scaling_note(d.scaling, "rollout"),
        activation_note(d.hidden_act, "rollout"),
        architecture_note(d.architecture, "rollout"),
    ]
    return [note for note in notes if note is not None]


def _note(module: EngineModule) -> NotPromised:
    return module_note(module.name, EXPERTS if module.kind == "experts" else module.implementation, "rollout")
