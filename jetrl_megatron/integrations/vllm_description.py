"""What a vLLM engine really is, told in plain values: `jetrl_megatron.precision_flow` compares it with training.

Read inside the engine's processes: its configuration with every default filled in, the environment as vLLM understands
it, the loaded model. Attributes are read by name and never guessed: a vLLM that renames one makes this fail.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import vllm
import vllm.envs as envs
from vllm.compilation.passes.inductor_pass import CallableInductorPass
from vllm.config import CompilationMode, VllmConfig
from vllm.config.compilation import PassConfig
from vllm.ir.op import IrOp
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.utils.flashinfer import has_flashinfer

from jetrl_megatron.integrations.vllm import carried_recipe
from jetrl_megatron.ops.norm import has_extension
from jetrl_megatron.precision_flow import EngineDescription, EngineModule, RankReport
from jetrl_megatron.precision_flow.engine import PLUGIN
from jetrl_megatron.recipe import VLLM_CONFIG_KEY, VLLM_PROVIDER, Fp8BlockRecipe

if TYPE_CHECKING:
    from vllm import LLM

WORKER_EXTENSION = f"{__name__}.PrecisionReport"
"""Value of vLLM's `worker_extension_cls`, where no other extension inherits `PrecisionReport`."""

_KINDS: tuple[tuple[type, str], ...] = (
    (RMSNorm, "rms_norm"),
    (RotaryEmbeddingBase, "rope"),
    (Attention, "attention"),
    (SiluAndMul, "activation"),
    (LogitsProcessor, "head"),
    (VocabParallelEmbedding, "embedding"),
)
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
# Llama 3's constants, which Megatron has as well; only the factor may vary.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class PrecisionReport:
    """Method that vLLM mixes into its worker class; call it through `collective_rpc`."""

    model_runner: Any
    vllm_config: VllmConfig
    rank: int

    def jetrl_precision_report(self) -> dict[str, Any]:
        """{"rank": `RankReport`, "modules": list of `EngineModule`}, ready for JSON."""
        modules = describe_modules(self.model_runner.get_model())
        report = rank_report(self.vllm_config, modules, self.rank)
        return {"rank": dataclasses.asdict(report), "modules": [dataclasses.asdict(module) for module in modules]}


def describe_engine(engine: LLM, **known: Any) -> EngineDescription:
    """Describes a running engine, every rank of it.

    Args:
        engine: an LLM whose `worker_extension_cls` is or inherits `PrecisionReport`.
        known: `weights` and `weights_version` of `EngineDescription`.
    """
    reports: list[dict[str, Any]] = engine.collective_rpc("jetrl_precision_report")
    fields = describe_config(engine.llm_engine.vllm_config).to_dict()
    modules = reports[0]["modules"] if reports else []
    return EngineDescription.from_dict(
        {**fields, **known, "modules": modules, "ranks": [report["rank"] for report in reports]}
    )


def describe_config(config: VllmConfig) -> EngineDescription:
    """Describes a configuration, e.g. of `EngineArgs(...).create_engine_config()`, in this process's environment.

    Raises:
        ValueError: the platform is neither CUDA nor a CPU, or there is no model.
        AttributeError: this vLLM has other attributes than the release that the package knows.
    """
    model = config.model_config
    if model is None:
        raise ValueError("config.model_config=None: describe the configuration of an engine with a model")
    compilation, attention, kernels = config.compilation_config, config.attention_config, config.kernel_config
    additional = config.additional_config
    return EngineDescription(
        vllm=vllm.__version__,
        platform="cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else "other",
        dtype=str(model.dtype).removeprefix("torch."),
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        quantization=model.quantization,
        stamp=getattr(model.hf_config, VLLM_CONFIG_KEY, None),
        operators=additional.get(VLLM_CONFIG_KEY) if isinstance(additional, dict) else None,
        plugin=plugin_is_loaded(),
        load_format=str(config.load_config.load_format),
        replaced=replaced_methods(),
        overrides=tuple(model.hf_overrides) if isinstance(model.hf_overrides, dict) else (repr(model.hf_overrides),),
        extension=has_extension(),
        linear_backend=kernels.linear_backend,
        flashinfer=has_flashinfer(),
        deep_gemm=envs.VLLM_USE_DEEP_GEMM,
        deep_gemm_e8m0=envs.VLLM_USE_DEEP_GEMM_E8M0,
        batch_invariant=envs.VLLM_BATCH_INVARIANT,
        disabled_kernels=tuple(envs.VLLM_DISABLED_KERNELS),
        compiled=compilation.mode != CompilationMode.NONE,
        fusions=(*_fusions(compilation.pass_config), *custom_passes(config)),
        custom_ops=tuple(compilation.custom_ops),
        rms_norm=tuple(kernels.ir_op_priority.rms_norm),
        fused_add_rms_norm=tuple(kernels.ir_op_priority.fused_add_rms_norm),
        attention_backend=None if attention.backend is None else attention.backend.name,
        flash_attn_version=attention.flash_attn_version,
        cpu_splits_kv=envs.VLLM_CPU_ATTN_SPLIT_KV,
        decode_context_parallel=config.parallel_config.decode_context_parallel_size,
        cascade=not model.disable_cascade_attn,
        cache_dtype=config.cache_config.cache_dtype,
        v2_runner=bool(config.use_v2_model_runner),
        logprobs_mode=model.logprobs_mode,
        speculative=None if config.speculative_config is None else str(config.speculative_config.method),
        lora=config.lora_config is not None,
        **_architecture(model),
        **_quantization(config.quant_config),
    )


def describe_modules(model: torch.nn.Module) -> tuple[EngineModule, ...]:
    """The operators of a loaded vLLM model, in Hugging Face names, with the class that computes each."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: list[EngineModule] = []
    # vLLM shares one RoPE among the layers, so duplicates are wanted.
    for name, module in model.named_modules(remove_duplicate=False):
        found.extend(_described(name, module, packed))
    return tuple(found)


def rank_report(config: VllmConfig, modules: tuple[EngineModule, ...], rank: int) -> RankReport:
    """What this rank serves, from its own configuration, modules and process."""
    additional = config.additional_config
    asked = additional.get(VLLM_CONFIG_KEY) if isinstance(additional, dict) else None
    recipe = carried_recipe(config.model_config.hf_config)
    if recipe is None and asked is not None:
        recipe = Fp8BlockRecipe.from_stamp(asked, "additional_config")
    return RankReport(
        rank=rank,
        fingerprint=recipe.fingerprint if recipe else None,
        plugin=plugin_is_loaded(),
        operators=dict(Counter(module.implementation.rpartition(".")[2] for module in modules)),
        replaced=replaced_methods(),
        passes=custom_passes(config),
    )


def custom_passes(config: VllmConfig) -> tuple[str, ...]:
    """Compiler passes besides vLLM's own: the plugin's once a model is built that has it, and anybody's."""
    found = config.compilation_config.inductor_compile_config.get(current_platform.pass_key)
    if found is None:
        return ()
    function = found.callable if isinstance(found, CallableInductorPass) else type(found)
    return (_path(function),)


def plugin_is_loaded() -> bool:
    """Whether `jetrl_megatron.integrations.vllm.register` has run in this process, and took effect."""
    if current_platform.is_cpu():
        return any(kernel.__module__.startswith(PLUGIN) for kernel in _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU])
    return VLLM_PROVIDER in IrOp.registry["rms_norm"].impls


def replaced_methods() -> tuple[str, ...]:
    """Methods of vLLM's FP8 classes that other code than vLLM's has put there in this process, as "module.name"."""
    found = []
    for owner in (Fp8Config, Fp8LinearMethod, Fp8MoEMethod):
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            module = getattr(function, "__module__", None)
            if callable(function) and module and module.partition(".")[0] != "vllm":
                found.append(f"{module}.{name}")
    return tuple(found)


def _fusions(passes: PassConfig) -> tuple[str, ...]:
    names = [field.name for field in dataclasses.fields(passes)]
    return tuple(name for name in names if getattr(passes, name) is True)


def _quantization(quant_config: Any) -> dict[str, Any]:
    if not isinstance(quant_config, Fp8Config):
        return {"serialized_fp8": False, "weight_block": None, "ignored_layers": ()}
    block = quant_config.weight_block_size
    return {
        "serialized_fp8": quant_config.is_checkpoint_fp8_serialized,
        "weight_block": None if block is None else tuple(block),
        "ignored_layers": tuple(quant_config.ignored_layers),
    }


def _architecture(model: Any) -> dict[str, Any]:
    text = model.hf_text_config
    name = model.architecture
    bias = bool(getattr(text, "attention_bias", name == "Qwen2ForCausalLM"))
    rope: Mapping[str, Any] = text.rope_parameters
    sliding = getattr(text, "sliding_window", None)
    return {
        "architecture": name,
        "layers": text.num_hidden_layers,
        "epsilon": text.rms_norm_eps,
        "theta": float(rope["rope_theta"]),
        "scaling": _scaling(rope),
        "hidden_act": text.hidden_act,
        "tied_head": bool(text.tie_word_embeddings),
        "attention_bias": bias,
        "output_bias": bias and name == "LlamaForCausalLM",
        "mlp_bias": bool(getattr(text, "mlp_bias", False)),
        "window": sliding if getattr(text, "use_sliding_window", True) else None,
        "experts": next((int(getattr(text, field)) for field in _EXPERT_FIELDS if getattr(text, field, None)), 0),
    }


def _scaling(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type", "default")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1:
        return f"{kind}: {dict(rope)}"
    if kind == "llama3" and all(float(rope[key]) == value for key, value in _LLAMA3.items()):
        return f"llama3 {float(rope['factor']):.4g}"
    return str(kind) if kind == "default" else f"{kind}: {dict(rope)}"


def _described(name: str, module: torch.nn.Module, packed: Mapping[str, list[str]]) -> Iterator[EngineModule]:
    if isinstance(module, LinearBase):
        yield from _linear(name, module, packed)
        return
    if isinstance(module, RoutedExperts):
        yield EngineModule(name=name, kind="experts", implementation=_path(type(module)))
        return
    if isinstance(module, ParallelLMHead):
        return  # LogitsProcessor computes with it
    kind = next((kind for known, kind in _KINDS if isinstance(module, known)), None)
    if kind is None:
        if any(True for _ in module.parameters(recurse=False)):
            yield EngineModule(name=name, kind="other", implementation=_path(type(module)))
        return
    if kind == "attention":
        cache = str(module.kv_cache_dtype)
        yield EngineModule(name=name, kind=kind, implementation=_attention(module), cache_dtype=cache)
        return
    if kind == "embedding" and name.rpartition(".")[2] == "lm_head":
        return  # tied
    yield EngineModule(
        name="lm_head" if kind == "head" else name, kind=kind, implementation=_implementation(module, module)
    )


def _linear(name: str, layer: Any, packed: Mapping[str, list[str]]) -> Iterator[EngineModule]:
    parent, _, leaf = name.rpartition(".")
    method = layer.quant_method
    kernel = getattr(method, "fp8_linear", None)
    fp8 = isinstance(method, Fp8LinearMethod)
    known = fp8 or isinstance(method, UnquantizedLinearMethod)
    for part in packed.get(leaf, [leaf]):
        yield EngineModule(
            name=f"{parent}.{part}" if parent else part,
            kind="linear" if known else "other",
            implementation=_path(type(method) if kernel is None else type(kernel)),
            quantized=fp8,
            ue8m0=getattr(kernel, "use_deep_gemm_e8m0", None),
            bias=layer.bias is not None,
        )


def _attention(module: Any) -> str:
    return _implementation(module.impl, module.attn_backend)


def _implementation(decides: Any, of: Any) -> str:
    """Path of the class of `of`; of vLLM's own below it where `decides`, a class of ours, leaves the work to that."""
    kind = of if isinstance(of, type) else type(of)
    gives_way = getattr(decides, "as_megatron", None) is False or getattr(decides, "parity", None) is False
    if not gives_way:
        return _path(kind)
    return next(_path(base) for base in kind.__mro__ if not base.__module__.startswith(PLUGIN))


def _path(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
