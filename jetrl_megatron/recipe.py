"""The recipe: the one object that decides every bit of blockwise FP8.

Training layers, converter, weight sync and the engine settings read it; nothing else owns a block size, a largest
value, a floor or a scale format. The module imports the standard library alone, so that every process of a job can
read a recipe, whatever it has installed.

"scale" always means the multiplier that dequantises: value = code * scale.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

_CHOICES: dict[str, tuple[Any, ...]] = {
    "element_format": ("float8_e4m3fn",),
    "scale_format": ("ue8m0", "fp32"),
    "dgrad": ("fp8", "bf16"),
    "wgrad": ("fp8", "bf16"),
    "saved_activation": ("fp8", "bf16"),
    "wgrad_gradient_source": ("bf16", "fp8"),
}
SCALE_DTYPES = ("float32", "float8_e8m0fnu")
"""Names of the torch dtypes in which an export may store scales; the second is the exponent of a power of two alone."""
VLLM_CONFIG_KEY = "jetrl"
"""Key of vLLM's `additional_config` under which an engine is told its recipe, and so to run the plugin's operators."""
VLLM_PROVIDER = "jetrl"
"""Name of the plugin's implementations of vLLM's IR operators."""
_VLLM_FUSIONS = (
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "fuse_allreduce_rms",
    "fuse_gemm_comms",
    "enable_sp",
    "enable_qk_norm_rope_fusion",
    "fuse_rope_kvcache",
    "fuse_qk_norm_rope_kvcache",
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8BlockRecipe:
    """Blockwise FP8: weights in tiles of `block` x `block`, activations and gradients in groups of 1 x `block`.

    Fields:
        element_format: storage format of the codes. Largest finite value: `element_max`.
        block: edge of a weight tile and length of an activation group, in elements.
        scale_format: "ue8m0" (a power of two, kept in float32) or "fp32" (amax / element_max).
        element_max: largest code value; casts saturate here.
        ue8m0_weight_max: an ue8m0 weight scale is the smallest power of two >= amax / ue8m0_weight_max. 464 is the
            largest value that rounds to 448, so an engine that requantises a stored tile finds nothing to change.
        weight_amax_floor, activation_amax_floor: smallest amax that a scale is computed from. The first is the floor of
            vLLM's load-time requantiser, the second that of its activation quantiser.
        activation_scale_floor: an ue8m0 activation scale is raised to this before it is rounded up.
        dgrad, wgrad: "fp8", or "bf16" as an ablation of that GEMM.
        saved_activation: "fp8" keeps the codes that fprop used; "bf16" keeps the input itself (ablation).
        wgrad_gradient_source: what the M-grouped codes of dy are made from: dy itself ("bf16"), or its N-grouped FP8
            copy ("fp8", ablation).
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: decoder layers that stay BF16, in training and export.
        ignore: glob patterns over Megatron module names ("decoder.layers.0.mlp.linear_fc2", "*.linear_proj"): linears
            that stay BF16, in training and export. A pattern matches a whole name.

    Raises:
        ValueError: a field holds a value outside its choices or range.
    """

    element_format: str = "float8_e4m3fn"
    block: int = 128
    scale_format: str = "ue8m0"
    element_max: float = 448.0
    ue8m0_weight_max: float = 464.0
    weight_amax_floor: float = 1e-4
    activation_amax_floor: float = 1e-10
    activation_scale_floor: float = 1e-10
    dgrad: str = "fp8"
    wgrad: str = "fp8"
    saved_activation: str = "fp8"
    wgrad_gradient_source: str = "bf16"
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field}={value!r} is not supported: use one of {', '.join(map(repr, allowed))}")
        for field in ("element_max", "ue8m0_weight_max", "weight_amax_floor", "activation_amax_floor", "block"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)!r} must be greater than zero; the default is safe")
        for field in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)} counts layers: use 0 or more")

    def _check_types(self) -> None:
        if isinstance(self.ignore, str):
            raise ValueError(f"ignore={self.ignore!r} must be a list of patterns: write ignore=({self.ignore!r},)")
        patterns = tuple(self.ignore) if isinstance(self.ignore, Iterable) else (self.ignore,)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"ignore={self.ignore!r} must be a list of patterns, e.g. ['*.linear_fc2']")
        object.__setattr__(self, "ignore", patterns)
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind is float and type(value) is int:
                # The same number has one fingerprint, however a file writes it.
                object.__setattr__(self, field.name, float(value))
            elif kind in (int, float) and type(value) is not kind:
                raise ValueError(f"{field.name}={value!r} must be a number like the default, {field.default!r}")

    @property
    def weight_block(self) -> tuple[int, int]:
        """Shape of one weight tile: (rows, columns)."""
        return self.block, self.block

    @property
    def activation_block(self) -> tuple[int, int]:
        """Shape of one activation or gradient group: (rows, columns)."""
        return 1, self.block

    def quantizes(self, module_name: str, num_layers: int) -> bool:
        """Whether the linear with this Megatron name runs in FP8.

        Args:
            module_name: global module name, e.g. "decoder.layers.3.self_attention.linear_qkv".
            num_layers: decoder layers of the whole model, all pipeline stages together.
        """
        layer = _LAYER.match(module_name)
        if layer:
            first_of_end = num_layers - self.num_layers_at_end_in_bf16
            if not self.num_layers_at_start_in_bf16 <= int(layer[1]) < first_of_end:
                return False
        return not any(fnmatchcase(module_name, pattern) for pattern in self.ignore)

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return {**dataclasses.asdict(self), "ignore": list(self.ignore)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Fp8BlockRecipe:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a key is no field of the recipe.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"recipe fields {unknown} are unknown: use {', '.join(sorted(known))}")
        return cls(**fields)

    @property
    def fingerprint(self) -> str:
        """Hash of all fields, 16 hexadecimal digits: equal fingerprints mean equal bytes."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_stamp(self) -> dict[str, Any]:
        """What an export carries under "jetrl" in its config.json: all fields and their fingerprint."""
        return {"recipe": self.to_dict(), "fingerprint": self.fingerprint}

    @classmethod
    def from_stamp(cls, stamp: Any, source: str) -> Fp8BlockRecipe:
        """The inverse of `to_stamp`; further keys of the stamp are left alone.

        Args:
            source: where the stamp was read, for the error.

        Raises:
            ValueError: a key is missing, or the recipe does not have the fingerprint that is stored beside it.
        """
        if not isinstance(stamp, Mapping) or not {"recipe", "fingerprint"} <= set(stamp):
            raise ValueError(
                f'{source}: {stamp!r} stands for a recipe: expected an object with "recipe" and "fingerprint"; '
                "export again"
            )
        try:
            recipe = cls.from_dict(stamp["recipe"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {stamp['recipe']!r} stands for a recipe: {error}; export again") from error
        if recipe.fingerprint != stamp["fingerprint"]:
            raise ValueError(
                f"{source}: the stored fingerprint is {stamp['fingerprint']}, but the recipe beside it has "
                f"{recipe.fingerprint}: one of them was edited, or was written by another version; export again"
            )
        return recipe

    def require_same(self, other: Fp8BlockRecipe, *, ours: str, theirs: str) -> None:
        """Checks that two sides use one recipe.

        Args:
            ours, theirs: what each side is called in the error, e.g. "training" and "checkpoint /ckpt".

        Raises:
            ValueError: the fingerprints differ; the message names each differing field with both values.
        """
        if self.fingerprint == other.fingerprint:
            return
        mine, yours = self.to_dict(), other.to_dict()
        fields = "; ".join(f"{key}: {mine[key]!r} != {yours[key]!r}" for key in mine if mine[key] != yours[key])
        raise ValueError(
            f"recipe fingerprint {self.fingerprint} ({ours}) != {other.fingerprint} ({theirs}): {fields}. "
            f"Use one recipe on both sides: export again, or build the model with the recipe of {theirs}"
        )

    def to_vllm_quantization_config(
        self, ignored_layers: tuple[str, ...] = (), scale_dtype: str = "float32"
    ) -> dict[str, Any]:
        """`quantization_config` of an exported config.json: what vLLM, SGLang and transformers call block FP8.

        Args:
            ignored_layers: Hugging Face module names that stay BF16. vLLM reads `ignored_layers`, transformers reads
                `modules_to_not_convert`; both match whole names.
            scale_dtype: in which the export stores its scales, one of `SCALE_DTYPES`.

        Raises:
            ValueError: scale_dtype is unknown, or cannot hold the recipe's scales.
        """
        self.check_scale_dtype(scale_dtype)
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(self.weight_block),
        }
        if scale_dtype != "float32":
            # By this transformers decides the dtype of its parameters; vLLM turns power-of-two scales on.
            config["scale_fmt"] = self.scale_format
        if ignored_layers:
            config["ignored_layers"] = list(ignored_layers)
            config["modules_to_not_convert"] = list(ignored_layers)
        return config

    def check_scale_dtype(self, scale_dtype: str) -> None:
        """Checks that a dtype holds every scale of the recipe.

        Args:
            scale_dtype: one of `SCALE_DTYPES`.

        Raises:
            ValueError: it is unknown, or holds powers of two alone and the recipe has other scales.
        """
        if scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype={scale_dtype!r} is not supported: use one of {', '.join(SCALE_DTYPES)}")
        if scale_dtype != "float32" and self.scale_format != "ue8m0":
            raise ValueError(
                f"scale_dtype={scale_dtype!r} holds powers of two alone, and scale_format={self.scale_format!r} has "
                "other scales: use scale_dtype='float32', or train and export with scale_format='ue8m0'"
            )

    def to_vllm_env(self) -> dict[str, str]:
        """Environment of a vLLM process that serves this recipe.

        `VLLM_USE_DEEP_GEMM_E8M0` on: vLLM rounds activation scales, and requantises weights, to powers of two. The V2
        model runner is the one whose log-probs training reproduces.
        """
        return {
            "VLLM_USE_DEEP_GEMM": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_USE_DEEP_GEMM_E8M0": "1" if self.scale_format == "ue8m0" else "0",
        }

    def to_vllm_engine_args(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM` (0.26, a Hopper GPU) for a rollout with training's numbers, next to `to_vllm_env()`.

        Compiled and with CUDA graphs, as by default. The plugin's operators are on ("jetrl", "CUSTOM"), and off is what
        would change bits: fusions that quantise by another rule, split-KV and cascade attention, other GEMMs, a
        quantised KV cache. Merge your own `compilation_config` into this one instead of replacing it.
        """
        return {
            "dtype": "bfloat16",
            "kv_cache_dtype": "auto",
            "attention_backend": "CUSTOM",
            "disable_cascade_attn": True,
            "linear_backend": "deep_gemm",
            "ir_op_priority": {"rms_norm": [VLLM_PROVIDER], "fused_add_rms_norm": [VLLM_PROVIDER]},
            "compilation_config": {
                "custom_ops": ["none", "+quant_fp8", "+rotary_embedding", "+silu_and_mul"],
                "pass_config": dict.fromkeys(_VLLM_FUSIONS, False),
            },
            "additional_config": {VLLM_CONFIG_KEY: self.to_stamp()},
        }


JETRL_FP8 = Fp8BlockRecipe()
"""The default recipe: ue8m0 scales, all three GEMMs in FP8, saved activations in FP8."""

_PRECISIONS: dict[str, Fp8BlockRecipe | None] = {"bf16": None, "jetrl_fp8": JETRL_FP8}


def recipe_for_precision(precision: str) -> Fp8BlockRecipe | None:
    """The recipe behind a `precision:` key of a configuration file; None for plain BF16.

    Raises:
        ValueError: the name is unknown; the message lists the allowed ones.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision: {precision!r} is unknown: use one of {', '.join(sorted(_PRECISIONS))}")
    return _PRECISIONS[precision]
