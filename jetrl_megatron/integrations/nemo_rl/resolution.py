"""`policy.precision: jetrl_fp8`, resolved into NeMo-RL's own keys and those of this package, before a worker starts.

NeMo-RL looks a precision up in tables of dtypes, in several places and in several processes, so it must never see
`jetrl_fp8`. What replaces it is derived from the recipe; a value of the user's that contradicts it is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from jetrl_megatron.integrations.nemo_rl.files import REFERENCE, LoadedConfig, leaves
from jetrl_megatron.precision_flow.promises import EXACT_TENSOR_PARALLEL
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

PRECISION = "jetrl_fp8"
PRECISIONS = ("bfloat16", "float16", "float32", PRECISION)
"""Values of `policy.precision`: NeMo-RL's own, and ours."""
SECTION = "jetrl"
"""Section of `policy` with our own keys, `recipe` and `parity`; its resolved form is in `policy.generation` as well."""
ENDPOINTS = "jetrl_endpoints"
"""Key of NeMo-RL's refit information under which engines find the trainer's senders."""

_SECTIONS = ("policy", "policy.megatron_cfg", "policy.generation", "policy.generation.vllm_cfg", "loss_fn", "cluster")
_BF16 = "bfloat16"
_LOGPROB_CHUNK = 4096
# Engine arguments that NeMo-RL passes itself.
_NEMO_RL_ARGUMENTS = frozenset({"dtype"})


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration that NeMo-RL takes.

    Attributes:
        values: for NeMo-RL's `MasterConfig`.
        origins: for each key of a value, where it came from.
        recipe: the recipe of both sides, None where the precision is not ours.
        notes: what is not an error, and worth knowing: zero mismatch that cannot be promised, missing defaults.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    recipe: Fp8BlockRecipe | None
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """One line for each key: the value and where it came from."""
        lines = [(f"{key}: {value!r}", self.origins.get(key, "interpolated")) for key, value in leaves(self.values)]
        width = min(max(len(left) for left, _ in lines), 72)
        return "\n".join(f"{left:{width}}  # {origin}" for left, origin in lines)


def resolve(loaded: LoadedConfig) -> ResolvedConfig:
    """Resolves a configuration; one whose precision is NeMo-RL's own stays as it is.

    Args:
        loaded: modified.

    Raises:
        ValueError: the precision or a key of `policy.jetrl` is unknown, a section is missing, or a key contradicts
            `precision: jetrl_fp8`.
    """
    _check_sections(loaded)
    notes = [f"{name} is not in it: no NeMo-RL checkout on PYTHONPATH" for name in loaded.missing]
    precision = _precision(loaded)
    if precision != PRECISION:
        _check_no_section(loaded, precision)
        return _finished(loaded, None, notes)
    recipe, parity = _read_section(loaded)
    loaded.set("policy.precision", _BF16, _origin("dtype of parameters; FP8 is in policy.jetrl"))
    _check_backends(loaded)
    for requirement in _requirements(recipe, parity):
        _require(loaded, requirement)
    _set_chunk(loaded, parity)
    _check_sequence_parallel(loaded)
    stamp = {**recipe.to_stamp(), "parity": parity}
    for key in (f"policy.{SECTION}", f"policy.generation.{SECTION}"):
        loaded.remove(key)
        loaded.set(key, stamp, _origin("read by the workers"))
    return _finished(loaded, recipe, [*notes, *_not_promised(loaded, parity)])


def _finished(loaded: LoadedConfig, recipe: Fp8BlockRecipe | None, notes: list[str]) -> ResolvedConfig:
    values = {name: loaded.get(str(name)) for name in loaded.values}
    return ResolvedConfig(values, dict(loaded.origins), recipe, tuple(notes))


def _origin(why: str) -> str:
    return f"{PRECISION}: {why}"


def _check_sections(loaded: LoadedConfig) -> None:
    for section in _SECTIONS:
        if not isinstance(loaded.get(section), Mapping):
            raise ValueError(
                f"section {section} is missing: a policy needs {', '.join(_SECTIONS)}; inherit NeMo-RL's defaults with "
                f'defaults: "{REFERENCE}", or add it'
            )


def _precision(loaded: LoadedConfig) -> str:
    precision = loaded.get("policy.precision")
    if precision in PRECISIONS:
        return str(precision)
    near = get_close_matches(str(precision), PRECISIONS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"policy.precision: {precision!r} (from {loaded.origin('policy.precision')}) is unknown: use one of "
        f"{', '.join(PRECISIONS)}{hint}"
    )


def _check_no_section(loaded: LoadedConfig, precision: str) -> None:
    key = f"policy.{SECTION}"
    if loaded.get(key) is not None:
        raise ValueError(
            f"{key} (from {loaded.origin(key)}) contradicts policy.precision: {precision!r}, which has no recipe: set "
            f"policy.precision: {PRECISION}, or {key}: null"
        )


def _read_section(loaded: LoadedConfig) -> tuple[Fp8BlockRecipe, bool]:
    key = f"policy.{SECTION}"
    section = loaded.get(key)
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ValueError(f"{key}: {section!r} must be a section with the keys recipe and parity")
    unknown = sorted(set(section) - {"recipe", "parity"})
    if unknown:
        raise ValueError(f"{key}.{unknown[0]} is unknown: use recipe (fields of Fp8BlockRecipe) and parity")
    parity = section.get("parity", True)
    if not isinstance(parity, bool):
        raise ValueError(f"{key}.parity: {parity!r} must be true or false")
    fields = section.get("recipe")
    if fields is None:
        return JETRL_FP8, parity
    if not isinstance(fields, Mapping):
        raise ValueError(f"{key}.recipe: {fields!r} must hold fields of Fp8BlockRecipe, e.g. scale_format: ue8m0")
    try:
        return Fp8BlockRecipe.from_dict(fields), parity
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}.recipe: {error}") from error


def _check_backends(loaded: LoadedConfig) -> None:
    for key, wanted, way_out in (
        ("policy.megatron_cfg.enabled", True, "the FP8 layers are Megatron's"),
        ("policy.dtensor_cfg.enabled", False, "the FP8 layers are Megatron's, not DTensor's"),
        ("policy.generation.backend", "vllm", "the rollout is vLLM's"),
    ):
        found = loaded.get(key)
        if found != wanted and not (found is None and wanted is False):
            raise ValueError(
                f"{key}={found!r} (from {loaded.origin(key)}) contradicts precision: {PRECISION}: {way_out}; set "
                f"{key}={wanted!r}"
            )


@dataclass(frozen=True)
class _Requirement:
    """A key that `precision: jetrl_fp8` decides.

    Attributes:
        key, value: what it must be.
        why: for whoever reads the resolved configuration, or the error.
        only_if_present: leave it out where NeMo-RL's defaults do not have it.
        for_parity: whether `parity: false` would do without it.
    """

    key: str
    value: Any
    why: str
    only_if_present: bool = False
    for_parity: bool = False


def _requirements(recipe: Fp8BlockRecipe, parity: bool) -> Iterator[_Requirement]:
    megatron, generation = "policy.megatron_cfg", "policy.generation"
    engine = f"{generation}.vllm_cfg"
    yield _Requirement(f"{megatron}.pipeline_dtype", _BF16, "what stages send each other")
    yield _Requirement(f"{megatron}.fp8_cfg.enabled", False, "our linears replace TransformerEngine's FP8")
    yield _Requirement(f"{megatron}.peft.enabled", False, "adapters are not exported to FP8", only_if_present=True)
    yield _Requirement("policy.draft.enabled", False, "draft models are not exported to FP8", only_if_present=True)
    yield _Requirement("policy.quant_cfg", None, "two quantisers for one layer", only_if_present=True)
    yield _Requirement(f"{generation}.quant_cfg", None, "two quantisers for one layer", only_if_present=True)
    yield _Requirement(f"{generation}.refit_transport", None, "our synchroniser sends weights", only_if_present=True)
    yield _Requirement(f"{engine}.precision", _BF16, "keeps NeMo-RL from quantising weights in the engine")
    yield _Requirement(f"{engine}.kv_cache_dtype", "auto", "a quantised KV cache has other numbers than training")
    for end, key in (("start", "num_first_layers_in_bf16"), ("end", "num_last_layers_in_bf16")):
        why = f"read by NeMo-RL's quantiser alone; use policy.{SECTION}.recipe.num_layers_at_{end}_in_bf16"
        yield _Requirement(f"{engine}.{key}", 0, why, only_if_present=True)
    for name, value in recipe.to_vllm_env().items():
        yield _Requirement(f"{engine}.env_vars.{name}", value, "recipe.to_vllm_env()")
    yield _Requirement("loss_fn.use_importance_sampling_correction", True, "weights are exactly 1 at zero mismatch")
    if parity:
        for requirement in _parity_requirements(recipe):
            yield dataclasses.replace(requirement, for_parity=True)


def _parity_requirements(recipe: Fp8BlockRecipe) -> Iterator[_Requirement]:
    megatron, generation = "policy.megatron_cfg", "policy.generation"
    yield _Requirement(f"{megatron}.defer_fp32_logits", True, "log-probs are taken from BF16 logits, as vLLM does")
    yield _Requirement(f"{megatron}.apply_rope_fusion", False, "RoPE is computed with vLLM's rounding")
    yield _Requirement(f"{megatron}.bias_activation_fusion", False, "SwiGLU is computed with vLLM's rounding")
    yield _Requirement(f"{megatron}.context_parallel_size", 1, "parity attention sees whole sequences")
    fused = f"{megatron}.use_fused_linear_logprobs"
    yield _Requirement(fused, False, "log-probs are taken from logits", only_if_present=True)
    yield _Requirement(f"{megatron}.cuda_graph_impl", "none", "FP8 layers are not captured", only_if_present=True)
    for key, value in (("temperature", 1.0), ("top_p", 1.0), ("top_k", None)):
        yield _Requirement(f"{generation}.{key}", value, "log-probs are those of the unchanged distribution")
    arguments = {k: v for k, v in recipe.to_vllm_engine_args().items() if k not in _NEMO_RL_ARGUMENTS}
    for key, value in leaves(arguments, f"{generation}.vllm_kwargs."):
        yield _Requirement(key, value, "recipe.to_vllm_engine_args()")


def _require(loaded: LoadedConfig, requirement: _Requirement) -> None:
    key, found, origin = requirement.key, loaded.get(requirement.key), loaded.origin(requirement.key)
    if origin is None and requirement.only_if_present:
        return
    if found == requirement.value and (origin is not None or found is None):
        return
    # A default of NeMo-RL's is nobody's decision, and neither is an empty value.
    if origin is not None and origin not in loaded.defaults and found is not None:
        without = f", or set policy.{SECTION}.parity: false" if requirement.for_parity else ""
        raise ValueError(
            f"{key}={found!r} (from {origin}) contradicts policy.precision: {PRECISION} ({requirement.why}): leave it "
            f"out, set it to {requirement.value!r}{without}"
        )
    loaded.set(key, requirement.value, _origin(requirement.why))


def _set_chunk(loaded: LoadedConfig, parity: bool) -> None:
    if parity and loaded.get("policy.logprob_chunk_size") is None:
        # Without a chunk size NeMo-RL widens all logits to float32 at once.
        loaded.set("policy.logprob_chunk_size", _LOGPROB_CHUNK, _origin("tokens at a time, so that logits stay BF16"))


def _check_sequence_parallel(loaded: LoadedConfig) -> None:
    key = "policy.make_sequence_length_divisible_by"
    ranks, multiple = _tensor_parallel(loaded), loaded.get(key)
    if not loaded.get("policy.megatron_cfg.sequence_parallel") or multiple is None or multiple % ranks == 0:
        return
    if loaded.origin(key) not in loaded.defaults:
        raise ValueError(
            f"{key}={multiple} (from {loaded.origin(key)}) is no multiple of the {ranks} tensor-parallel ranks that "
            f"sequence_parallel cuts a sequence over: set it to {ranks}"
        )
    loaded.set(key, ranks, _origin("sequence parallelism cuts sequences over the tensor-parallel ranks"))


def _tensor_parallel(loaded: LoadedConfig) -> int:
    return int(loaded.get("policy.megatron_cfg.tensor_model_parallel_size") or 1)


def _not_promised(loaded: LoadedConfig, parity: bool) -> Iterator[str]:
    """Why the mismatch may not be zero."""
    if not parity:
        yield f"zero mismatch is not promised: policy.{SECTION}.parity is false"
        return
    training = _tensor_parallel(loaded)
    rollout = int(loaded.get("policy.generation.vllm_cfg.tensor_parallel_size") or 1)
    if training != rollout:
        yield (
            f"zero mismatch is not promised: TP {training} in training and {rollout} in the rollout add row-parallel "
            "sums differently; use the same TP"
        )
    elif training > EXACT_TENSOR_PARALLEL:
        yield (
            f"zero mismatch is not promised: sums over {training} tensor-parallel ranks depend on their order; use TP "
            f"{EXACT_TENSOR_PARALLEL} or 1, and pipeline parallelism"
        )
