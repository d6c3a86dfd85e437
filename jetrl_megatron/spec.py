"""Layer specs with FP8 linears: any ModuleSpec tree, Megatron's builders, and module-level specs for `--spec`."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from jetrl_megatron.layers import (
    Fp8LinearMixin,
    JetRLColumnParallelLinear,
    JetRLFlashAttention,
    JetRLLayerNormColumnParallelLinear,
    JetRLMLP,
    JetRLRMSNorm,
    JetRLRowParallelLinear,
    JetRLSelfAttention,
)
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

# Linears that rollout engines keep in BF16: the multi-token-prediction projection, and mixers that are no attention.
_BF16_FIELDS = frozenset({"eh_proj"})
_BF16_MODULES = (MambaMixer, GatedDeltaNet, DSAIndexer)


def _fp8_classes() -> list[tuple[object, type]]:
    return [
        (ColumnParallelLinear, JetRLColumnParallelLinear),
        (RowParallelLinear, JetRLRowParallelLinear),
        (te.TEColumnParallelLinear, JetRLColumnParallelLinear),
        (te.TERowParallelLinear, JetRLRowParallelLinear),
        (te.TELayerNormColumnParallelLinear, JetRLLayerNormColumnParallelLinear),
    ]


def _stand_ins() -> list[tuple[object, type]]:
    """Megatron's own modules for those of TransformerEngine, where that is not installed and cannot be built."""
    if te.HAVE_TE:
        return []
    return [(te.TENorm, WrappedTorchNorm), (te.TEDotProductAttention, DotProductAttention)]


def _parity_classes() -> list[tuple[object, type]]:
    """Operators around the linears with the rollout's bytes, for Megatron's and TransformerEngine's."""
    norms = (te.TENorm, WrappedTorchNorm, FusedLayerNorm)
    cores = (te.TEDotProductAttention, DotProductAttention)
    return [
        *((norm, JetRLRMSNorm) for norm in norms),
        *((core, JetRLFlashAttention) for core in cores),
        (SelfAttention, JetRLSelfAttention),
    ]


class _Swap:
    """A pure, recursive transformation of spec trees: returns new specs and leaves the given ones alone."""

    def __init__(self, recipe: Fp8BlockRecipe, *, parity: bool = False) -> None:
        self._recipe = recipe
        self._named = bool(recipe.ignore or recipe.num_layers_at_start_in_bf16 or recipe.num_layers_at_end_in_bf16)
        self._fp8 = _fp8_classes()
        self._others = _parity_classes() if parity else _stand_ins()

    def __call__(self, spec: Any) -> Any:
        # Compared by identity: without TransformerEngine its classes are placeholder objects, not types.
        for old, new in self._fp8:
            if spec is old:
                return self._with_recipe(new)
        for old, new in self._others:
            if spec is old:
                return new
        if isinstance(spec, types.MethodType) and spec.__self__ is MLP:
            # `MLP.as_mlp_submodule`, the builder of dense layers' MLPs.
            return getattr(JetRLMLP, spec.__name__)
        if isinstance(spec, type):
            return self._layer(spec)
        if isinstance(spec, ModuleSpec):
            return self._module_spec(spec)
        if isinstance(spec, functools.partial) and spec.func is TEGroupedMLP:
            # Grouped GEMMs have no FP8 twin here; leaving them would train experts in BF16 that the rollout quantises.
            return functools.partial(SequentialMLP, submodules=self._expert_submodules(spec.keywords["submodules"]))
        if isinstance(spec, functools.partial):
            arguments = [self(argument) for argument in spec.args]
            return functools.partial(self(spec.func), *arguments, **self._fields(spec.keywords))
        if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
            names = [field.name for field in dataclasses.fields(spec) if field.init]
            return dataclasses.replace(spec, **self._fields({name: getattr(spec, name) for name in names}))
        if isinstance(spec, (list, tuple)):
            return type(spec)(self(item) for item in spec)
        return spec

    def _expert_submodules(self, grouped: Any) -> MLPSubmodules:
        column, row = self(ColumnParallelLinear), self(RowParallelLinear)
        return MLPSubmodules(linear_fc1=column, linear_fc2=row, activation_func=grouped.activation_func)

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value if name in _BF16_FIELDS else self(value) for name, value in fields.items()}

    def _module_spec(self, spec: ModuleSpec) -> ModuleSpec:
        module = import_module(spec.module) if isinstance(spec.module, tuple) else spec.module
        if module in _BF16_MODULES:
            return spec
        swapped = self(module)
        params = self._fields(spec.params)
        if isinstance(swapped, ModuleSpec):
            swapped, params = swapped.module, {**params, **swapped.params}
        return dataclasses.replace(spec, module=swapped, params=params, submodules=self(spec.submodules))

    def _with_recipe(self, linear: type) -> type | ModuleSpec:
        if self._recipe == JETRL_FP8:
            return linear
        # A ModuleSpec, not a partial: Megatron's builders take either a class or something with `.module`.
        return ModuleSpec(module=linear, params={"recipe": self._recipe})

    def _layer(self, module: type) -> type:
        return named_layer(module) if self._named and issubclass(module, BaseTransformerLayer) else module


class _NamesItsLinears:
    """Tells the FP8 linears of a decoder layer their global names, which Megatron does not pass down everywhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        stack = "mtp" if getattr(layer, "is_mtp_layer", False) else "decoder"
        for name, module in layer.named_modules():
            if isinstance(module, Fp8LinearMixin):
                module.name_linear(f"{stack}.layers.{layer.layer_number - 1}.{name}", layer.config.num_layers)


@functools.cache
def named_layer(layer: type) -> type:
    """The transformer layer class, with linears that know their names; it keeps the class's own name."""
    if issubclass(layer, _NamesItsLinears):
        return layer
    return type(layer.__name__, (_NamesItsLinears, layer), {"__module__": __name__, "__doc__": layer.__doc__})


def jetrl_spec(spec: Any, recipe: Fp8BlockRecipe = JETRL_FP8, *, parity: bool = False) -> Any:
    """The same spec with FP8 linears.

    Column- and RowParallelLinear, Megatron's own or TransformerEngine's, become JetRL's, wherever they stand in the
    tree; TransformerEngine's fused norm + linear becomes one with the same state-dict keys, its grouped experts become
    SequentialMLP, and the MLP of a dense layer becomes `JetRLMLP`. Norms, attention, routers, the
    multi-token-prediction projection, Mamba and gated-delta-net mixers, embeddings and the output layer stay. Where
    TransformerEngine is not installed, its norm and attention placeholders become Megatron's own modules.

    With `parity`, norms, RoPE and attention become operators whose forward gives vLLM's bytes (`JetRLRMSNorm`,
    `JetRLSelfAttention`, `JetRLFlashAttention`), where the rollout runs with `recipe.to_vllm_engine_args()`. Final norm
    and output layer are no part of a layer spec: `use_parity_head(model)` swaps those. `parity_block_spec` is for
    sequence parallelism without TransformerEngine.

    Args:
        spec: ModuleSpec, a submodules dataclass, functools.partial, list, or class. Not modified.
        recipe: how to quantise, and which linears stay BF16.
        parity: swap the operators around the linears too. They need a Hopper GPU and vLLM's FlashAttention 3.

    Returns:
        a spec of the same kind.

    Raises:
        ValueError: nothing in the spec is a linear that can be swapped.
    """
    swapped = _Swap(recipe, parity=parity)(spec)
    if not _holds_fp8_linear(swapped):
        raise ValueError(
            f"spec={spec!r} holds no Column- or RowParallelLinear to swap: pass a layer spec or a block spec with its "
            "submodules, e.g. get_gpt_layer_local_spec()"
        )
    return swapped


def parity_block_spec(
    config: TransformerConfig, spec: Any, recipe: Fp8BlockRecipe = JETRL_FP8, *, vp_stage: int | None = None
) -> Any:
    """`jetrl_spec(..., parity=True)` for all layers of this pipeline stage, with the final norm.

    A layer's spec leaves the final norm to Megatron, whose own one, without TransformerEngine, refuses sequence
    parallelism.

    Args:
        config: of the model; says how many layers the stage has.
        spec: a layer's ModuleSpec; a block's spec is taken as `jetrl_spec` takes it.
        recipe: how to quantise, and which linears stay BF16.
        vp_stage: virtual pipeline stage.

    Returns:
        TransformerBlockSubmodules for a layer's spec, else a spec of the same kind.

    Raises:
        ValueError: as for `jetrl_spec`.
    """
    swapped = jetrl_spec(spec, recipe, parity=True)
    if not isinstance(swapped, ModuleSpec) or not issubclass(swapped.module, BaseTransformerLayer):
        return swapped
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[swapped] * layers, layer_norm=JetRLRMSNorm)


def _holds_fp8_linear(spec: Any) -> bool:
    if isinstance(spec, type):
        return issubclass(spec, Fp8LinearMixin)
    if isinstance(spec, ModuleSpec):
        return any(map(_holds_fp8_linear, (spec.module, spec.submodules, *spec.params.values())))
    if isinstance(spec, functools.partial):
        return any(map(_holds_fp8_linear, (spec.func, *spec.args, *spec.keywords.values())))
    if dataclasses.is_dataclass(spec):
        return any(_holds_fp8_linear(getattr(spec, field.name)) for field in dataclasses.fields(spec))
    return isinstance(spec, (list, tuple)) and any(map(_holds_fp8_linear, spec))


class JetRLSpecProvider(LocalSpecProvider):
    """Megatron's BackendSpecProvider with FP8 linears, for builders that take a provider.

    Args:
        recipe: how to quantise. A recipe with an ignore list or BF16 layers needs `jetrl_spec`, which names the layers.

    Raises:
        ValueError: the recipe names layers.
    """

    def __init__(self, recipe: Fp8BlockRecipe = JETRL_FP8) -> None:
        swap = _Swap(recipe)
        if swap._named:
            raise ValueError(
                f"recipe.ignore={recipe.ignore!r} and BF16 layers go by layer names, which a provider does not see: "
                "use jetrl_spec(spec, recipe)"
            )
        self._column = swap(ColumnParallelLinear)
        self._row = swap(RowParallelLinear)
        self._layernorm_column = swap(te.TELayerNormColumnParallelLinear)

    def column_parallel_linear(self) -> type:
        """JetRLColumnParallelLinear."""
        linear: type = self._column
        return linear

    def row_parallel_linear(self) -> type:
        """JetRLRowParallelLinear."""
        linear: type = self._row
        return linear

    def fuse_layernorm_and_linear(self) -> bool:
        """True: `column_parallel_layer_norm_linear` exists."""
        return True

    def column_parallel_layer_norm_linear(self) -> type | None:
        """JetRLLayerNormColumnParallelLinear."""
        linear: type = self._layernorm_column
        return linear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., Any]:
        """SequentialMLP over FP8 linears; there is no grouped FP8 MLP, so `moe_use_grouped_gemm` changes nothing."""
        submodules = MLPSubmodules(
            linear_fc1=self._column, linear_fc2=self._row, activation_func=self.activation_func()
        )
        return functools.partial(SequentialMLP, submodules=submodules)


def get_gpt_layer_jetrl_spec(
    *args: Any, recipe: Fp8BlockRecipe = JETRL_FP8, parity: bool = False, **kwargs: Any
) -> ModuleSpec:
    """`get_gpt_layer_local_spec` with FP8 linears: the same arguments, `recipe` and `parity` of `jetrl_spec`."""
    spec: ModuleSpec = jetrl_spec(get_gpt_layer_local_spec(*args, **kwargs), recipe, parity=parity)
    return spec


# Megatron-LM imports `--spec MODULE NAME` and does not call it, so each variant is an object.
gpt_layer_spec = get_gpt_layer_jetrl_spec(normalization="RMSNorm")
"""Dense GPT layer with RMSNorm: Llama, Qwen2, Mistral. `--spec jetrl_megatron.spec gpt_layer_spec`."""

gpt_layer_qk_norm_spec = get_gpt_layer_jetrl_spec(normalization="RMSNorm", qk_layernorm=True)
"""Dense GPT layer with RMSNorm and q/k norm: Qwen3. `--spec jetrl_megatron.spec gpt_layer_qk_norm_spec`."""
