"""What the rollout engine is, in plain values: everything by which vLLM 0.26 decides which bits it computes.

`jetrl_megatron.integrations.vllm_description` makes an `EngineDescription` inside an engine's process; as JSON it
travels to wherever it is compared. This module needs no vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetrl_megatron.recipe import Fp8BlockRecipe

PLUGIN = "jetrl_megatron."
"""Start of the class paths of this package's operators."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineModule:
    """One operator of the model as the engine runs it.

    Attributes:
        name: Hugging Face name of the module; a merged linear is described once for each matrix in it.
        kind: "linear", "rms_norm", "rope", "attention", "activation", "embedding", "head", "experts" or "other".
        implementation: path of the class that computes it, "package.module.Class". For a quantised linear that is the
            kernel that serves it; a class of this package that leaves the work to the class it replaces is described
            as that one.
        quantized: whether a linear's weight is block FP8.
        ue8m0: whether a quantised linear's kernel rounds scales to powers of two.
        bias: whether a linear adds one.
        cache_dtype: of an attention's keys and values.
    """

    name: str
    kind: str
    implementation: str
    quantized: bool = False
    ue8m0: bool | None = None
    bias: bool | None = None
    cache_dtype: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one tensor-parallel rank of a running engine says about itself.

    Attributes:
        rank: its number.
        fingerprint: of the recipe that it serves, None if it knows none.
        plugin: whether the plugin is loaded there.
        operators: number of the operators of each implementation.
        replaced: methods of vLLM's FP8 that somebody else's code has replaced there.
        passes: compiler passes besides vLLM's own, by the paths of their classes.
    """

    rank: int
    fingerprint: str | None
    plugin: bool
    operators: Mapping[str, int]
    replaced: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """A vLLM engine. `from_dict(to_dict())` gives the same description.

    Attributes:
        vllm: its version.
        platform: "cuda" or "cpu".
        architecture: of the checkpoint, e.g. "Qwen3ForCausalLM".
        layers: decoder layers.
        epsilon: of the norms.
        theta, scaling: of RoPE; "default", or "llama3 8" for Llama 3's scaling by a factor of 8, or another name.
        hidden_act: activation of the MLP.
        tied_head: whether lm_head is the embedding.
        attention_bias, output_bias, mlp_bias: whether q, k, v; o; gate, up, down have a bias.
        window: tokens that attention sees, None for all.
        experts: routed experts of a layer, 0 for none.
        dtype: of the model.
        tensor_parallel: ranks that share a layer.
        quantization: method that the engine was asked for or found, None for none.
        serialized_fp8: whether the checkpoint's weights are FP8 already.
        weight_block: rows and columns of a weight tile, None if the scales are not blockwise.
        ignored_layers: names in the checkpoint's quantization_config.
        stamp: what the checkpoint's config.json has under "jetrl".
        operators: what the engine's additional_config has under "jetrl".
        plugin: whether vLLM loads this package's plugin.
        load_format: where weights come from at the start.
        replaced: methods of vLLM's FP8 that somebody else's code has replaced.
        overrides: fields of config.json that hf_overrides replaces.
        extension: whether this package's CUDA extension is built where the engine runs.
        linear_backend: kernel_config.linear_backend.
        flashinfer: whether it is installed.
        deep_gemm, deep_gemm_e8m0, batch_invariant: VLLM_USE_DEEP_GEMM, VLLM_USE_DEEP_GEMM_E8M0, VLLM_BATCH_INVARIANT.
        disabled_kernels: VLLM_DISABLED_KERNELS.
        compiled: whether torch.compile with vLLM's passes runs.
        fusions: vLLM's passes that are on, and others by the paths of their classes.
        custom_ops: compilation_config.custom_ops.
        rms_norm, fused_add_rms_norm: ir_op_priority of each, best first.
        attention_backend: its name, None for automatic.
        flash_attn_version: attention_config.flash_attn_version, None for the newest.
        cpu_splits_kv: whether attention on a CPU may cut the cache.
        decode_context_parallel: ranks that share a sequence's cache in decoding.
        cascade: whether cascade attention may run.
        cache_dtype: cache_config.cache_dtype.
        v2_runner: whether the V2 model runner serves.
        logprobs_mode: which log-probs are returned.
        speculative: method of speculative decoding, None for none.
        lora: whether adapters may be applied.
        modules: the loaded model, None if only the configuration was looked at.
        ranks: reports of the ranks, None if only the configuration was looked at.
        weights: digest of each linear's bytes by Hugging Face name, None if unknown.
        weights_version: number of optimizer steps behind the weights, None if unknown.
    """

    vllm: str
    platform: str
    architecture: str
    layers: int
    epsilon: float
    theta: float
    scaling: str
    hidden_act: str
    tied_head: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    window: int | None
    experts: int
    dtype: str
    tensor_parallel: int
    quantization: str | None
    serialized_fp8: bool
    weight_block: tuple[int, int] | None
    ignored_layers: tuple[str, ...]
    stamp: Mapping[str, Any] | None
    operators: Mapping[str, Any] | None
    plugin: bool
    load_format: str
    replaced: tuple[str, ...]
    overrides: tuple[str, ...]
    extension: bool
    linear_backend: str
    flashinfer: bool
    deep_gemm: bool
    deep_gemm_e8m0: bool
    batch_invariant: bool
    disabled_kernels: tuple[str, ...]
    compiled: bool
    fusions: tuple[str, ...]
    custom_ops: tuple[str, ...]
    rms_norm: tuple[str, ...]
    fused_add_rms_norm: tuple[str, ...]
    attention_backend: str | None
    flash_attn_version: int | None
    cpu_splits_kv: bool
    decode_context_parallel: int
    cascade: bool
    cache_dtype: str
    v2_runner: bool
    logprobs_mode: str
    speculative: str | None
    lora: bool
    modules: tuple[EngineModule, ...] | None = None
    ranks: tuple[RankReport, ...] | None = None
    weights: Mapping[str, str] | None = None
    weights_version: int | None = None

    def __post_init__(self) -> None:
        if self.platform not in ("cuda", "cpu"):
            raise ValueError(f"platform={self.platform!r} is not supported: serve on 'cuda' or 'cpu'")

    @property
    def recipe(self) -> Fp8BlockRecipe | None:
        """The recipe that the checkpoint carries, else the one that the engine was started with."""
        if self.stamp is not None:
            return Fp8BlockRecipe.from_stamp(self.stamp, "config.json")
        if self.operators is not None:
            return Fp8BlockRecipe.from_stamp(self.operators, "additional_config")
        return None

    @property
    def own_operators(self) -> bool:
        """Whether this package's operators serve: on a CPU for checkpoints with a recipe, on CUDA if asked for."""
        return self.plugin and (self.stamp if self.platform == "cpu" else self.operators) is not None

    def custom_op(self, name: str) -> bool:
        """Whether vLLM runs its own kernel for a custom operator, not what torch or its compiler makes of it."""
        if f"-{name}" in self.custom_ops:
            return False
        return f"+{name}" in self.custom_ops or "none" not in self.custom_ops

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> EngineDescription:
        """From the JSON form.

        Raises:
            ValueError: a field is missing or unknown.
        """
        values = _checked(cls, fields)
        for key in ("weight_block", "ignored_layers", "replaced", "overrides", "disabled_kernels", "fusions"):
            values[key] = None if values[key] is None else tuple(values[key])
        for key in ("custom_ops", "rms_norm", "fused_add_rms_norm"):
            values[key] = tuple(values[key])
        for key, kind in (("modules", EngineModule), ("ranks", RankReport)):
            if values.get(key) is not None:
                values[key] = tuple(_part(kind, part) for part in values[key])
        return cls(**values)


def _part(kind: type[EngineModule] | type[RankReport], part: Any) -> EngineModule | RankReport:
    if isinstance(part, kind):
        return part
    values = _checked(kind, part)
    for key in {"replaced", "passes"} & set(values):
        values[key] = tuple(values[key])
    return kind(**values)


def _checked(kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - set(known))
    missing = sorted(
        name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields
    )
    if unknown or missing:
        raise ValueError(
            f"{kind.__name__}: fields {unknown} are unknown and {missing} are missing: describe the engine with the "
            "same version of jetrl_megatron that compares it"
        )
    return dict(fields)
