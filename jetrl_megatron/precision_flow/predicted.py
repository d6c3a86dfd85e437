"""Which modules and kernels vLLM 0.26 chooses for a configuration, where no loaded model was looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from jetrl_megatron.precision_flow.engine import PLUGIN, EngineDescription, EngineModule

# Candidates for block FP8 on CUDA in vLLM's order, and the --linear-backend that each belongs to.
_CANDIDATES: Mapping[str, str] = MappingProxyType(
    {
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": "flashinfer_cutlass",
        "DeepGemmFp8BlockScaledMMKernel": "deep_gemm",
        "CutlassFp8BlockScaledMMKernel": "cutlass",
        "MarlinFP8ScaledMMLinearKernel": "marlin",
        "TritonFp8BlockScaledMMKernel": "triton",
        "HummingFP8ScaledMMLinearKernel": "humming",
    }
)
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_PACKED: Mapping[str, tuple[str, ...]] = MappingProxyType({"qkv_proj": _QKV, "gate_up_proj": _GATE_UP})
_PARENTS: Mapping[str, str] = MappingProxyType({"qkv_proj": "self_attn", "gate_up_proj": "mlp"})


def predicted_modules(description: EngineDescription) -> list[EngineModule]:
    """The modules of a dense decoder, in Hugging Face names, as vLLM would build them.

    Raises:
        ValueError: the checkpoint ignores some but not all matrices of a layer that vLLM merges.
    """
    d = description
    modules = [EngineModule(name="model.embed_tokens", kind="embedding", implementation="VocabParallelEmbedding")]
    for layer in range(d.layers):
        modules.extend(_layer(d, f"model.layers.{layer}"))
    modules.append(_module(d, "model.norm", "rms_norm", "RMSNorm"))
    modules.append(_module(d, "lm_head", "head", "LogitsProcessor"))
    return modules


def is_ignored(name: str, ignored: tuple[str, ...]) -> bool:
    """Whether vLLM keeps the linear with this Hugging Face name in BF16: names match as a whole, never in part.

    Args:
        name: e.g. "model.layers.3.mlp.gate_proj".
        ignored: `ignored_layers` of the checkpoint; merged names ("...mlp.gate_up_proj") count for all their matrices.

    Raises:
        ValueError: some but not all matrices of a merged layer are ignored, which vLLM refuses.
    """
    parent, _, leaf = name.rpartition(".")
    merged = next((key for key, parts in _PACKED.items() if leaf in parts), None)
    if merged is None:
        return name in ignored
    if f"{parent}.{merged}" in ignored:
        return True
    inside = [f"{parent}.{part}" in ignored for part in _PACKED[merged]]
    if any(inside) != all(inside):
        raise ValueError(
            f"ignored_layers has some but not all of {parent}.{{{', '.join(_PACKED[merged])}}}, which vLLM merges: "
            "ignore all or none, by ignoring linear_qkv or linear_fc1 in the recipe"
        )
    return all(inside)


def _layer(d: EngineDescription, layer: str) -> Iterator[EngineModule]:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    yield _module(d, f"{layer}.input_layernorm", "rms_norm", "RMSNorm")
    for part in _QKV:
        yield _linear(d, f"{attention}.{part}", d.attention_bias)
    if d.architecture == "Qwen3ForCausalLM":
        for part in ("q_norm", "k_norm"):
            yield _module(d, f"{attention}.{part}", "rms_norm", "RMSNorm")
    plain = d.scaling == "default" or d.scaling.startswith("llama3 ")
    yield _module(d, f"{attention}.rotary_emb", "rope", "RotaryEmbedding" if plain else d.scaling)
    yield _module(d, f"{attention}.attn", "attention", "Attention")
    yield _linear(d, f"{attention}.o_proj", d.output_bias)
    yield _module(d, f"{layer}.post_attention_layernorm", "rms_norm", "RMSNorm")
    if d.experts:
        yield EngineModule(name=f"{mlp}.experts", kind="experts", implementation="FusedMoE")
        return
    for part in _GATE_UP:
        yield _linear(d, f"{mlp}.{part}", d.mlp_bias)
    yield _module(d, f"{mlp}.act_fn", "activation", "SiluAndMul")
    yield _linear(d, f"{mlp}.down_proj", d.mlp_bias)


def _module(d: EngineDescription, name: str, kind: str, base: str) -> EngineModule:
    replaced = {
        "cpu": ("RMSNorm", "RotaryEmbedding", "LogitsProcessor", "Attention"),
        "cuda": ("SiluAndMul", "LogitsProcessor"),
    }[d.platform]
    own = d.own_operators and base in replaced
    own = own or (kind == "attention" and d.platform == "cuda" and d.attention_backend == "CUSTOM" and d.plugin)
    return EngineModule(name=name, kind=kind, implementation=f"{PLUGIN}integrations.{base}" if own else f"vllm.{base}")


def _linear(d: EngineDescription, name: str, bias: bool) -> EngineModule:
    blockwise = d.quantization == "fp8" and d.serialized_fp8 and d.weight_block is not None
    quantized = blockwise and not is_ignored(name, d.ignored_layers)
    kernel = _kernel(d) if quantized else "UnquantizedLinearMethod"
    return EngineModule(name=name, kind="linear", implementation=kernel, quantized=quantized, bias=bias)


def _kernel(d: EngineDescription) -> str:
    if d.platform == "cpu":
        candidates = ["W8A8BlockLinear"] if d.plugin else []
        candidates.append("CPUFp8BlockScaledMMKernel")
    else:
        absent = [] if d.flashinfer and d.deep_gemm else ["FlashInferFp8DeepGEMMDynamicBlockScaledKernel"]
        absent += [] if d.deep_gemm else ["DeepGemmFp8BlockScaledMMKernel"]
        asked = [name for name, group in _CANDIDATES.items() if d.linear_backend in ("auto", group)]
        candidates = [name for name in asked if name not in absent]
    return next((name for name in candidates if name not in d.disabled_kernels), "none")
