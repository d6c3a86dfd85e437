"""A pass over vLLM's compiled graph: norm and SwiGLU write the next linear's codes, where training's kernels do.

Without it, vLLM 0.26 runs the plugin's operators and its own quantiser one after the other. vLLM's passes that fuse
them are off in a parity engine, since they quantise by another rule. This one calls training's fused kernels, whose
bytes are those of the parts:

| in the graph                                  | replaced by           | needs                        |
|-----------------------------------------------|-----------------------|------------------------------|
| rms_norm, then the quantiser                  | rms_norm_quantize     | the CUDA extension           |
| fused_add_rms_norm, then the quantiser        | add_rms_norm_quantize | the CUDA extension           |
| the plugin's silu_and_mul, then the quantiser | silu_and_mul_quantize | the CUDA extension or Triton |

Anything else stays as it is: an output that somebody besides quantisers reads, another quantiser or another layout of
scales, a norm that another provider computes, an engine that is not compiled or has a pass of somebody else.
"""

# Shape suffixes: M tokens, K features of a norm, F features of a gated pair's half.

from __future__ import annotations

import functools
import inspect
import json
import operator
import sys
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._ops import OpOverload
from vllm.compilation.passes.fx_utils import find_getitem_maybe
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.compilation.passes.ir.utils import get_ir_op
from vllm.compilation.passes.vllm_inductor_pass import VllmPatternMatcherPass
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform

from jetrl_megatron.ops.norm import has_extension
from jetrl_megatron.ops.quantized_outputs import (
    norm_quantize,
    norm_quantizes,
    scale_stride,
    swiglu_quantize,
    swiglu_quantizes,
)
from jetrl_megatron.recipe import JETRL_FP8, VLLM_PROVIDER, Fp8BlockRecipe
from jetrl_megatron.tensor import ceil_div

MATCHES = "jetrl_quantized_outputs"
"""Key of vLLM's `get_match_table()` under which the pass counts the operators that it replaced in this process."""

_QUANTIZER = "_C.per_token_group_fp8_quant.default"
_Pair = tuple[torch.Tensor, torch.Tensor]


class QuantizedOutputs(InductorPass):
    """The pass; the recipe is the engine's."""

    def __init__(self, recipe: Fp8BlockRecipe) -> None:
        self.recipe = recipe

    def uuid(self) -> str:
        """Key of the compiler's caches: all that the pass's work depends on besides the graph."""
        source = inspect.getsource(sys.modules[__name__])
        key: str = self.hash_dict({"source": source, "recipe": self.recipe.fingerprint, "extension": has_extension()})
        return key

    def __call__(self, graph: fx.Graph) -> None:
        """Replaces what matches, in place."""
        # One after the other: what is replaced may be an argument of what comes later.
        for node in list(graph.nodes):
            match = _match(node, self.recipe)
            if match is not None:
                _replace(graph, match)
                VllmPatternMatcherPass.match_table[MATCHES] += 1


def offer_quantized_outputs(config: VllmConfig, recipe: Fp8BlockRecipe) -> None:
    """Adds the pass to an engine that compiles and has no other custom pass; may be called any number of times.

    To be called while the model is built: vLLM reads its passes after that.
    """
    compilation = config.compilation_config
    if compilation.mode == CompilationMode.VLLM_COMPILE and compilation.backend == "inductor":
        compilation.inductor_compile_config.setdefault(current_platform.pass_key, QuantizedOutputs(recipe))


class _Match(NamedTuple):
    """An operator, the fused one with its arguments, and the outputs of the first."""

    node: fx.Node
    fused: OpOverload
    arguments: tuple[Any, ...]
    y: fx.Node
    total: fx.Node | None = None

    @property
    def quantizers(self) -> list[fx.Node]:
        """Who reads `y`."""
        return list(self.y.users)


def _match(node: fx.Node, recipe: Fp8BlockRecipe) -> _Match | None:
    match = _swiglu(node, recipe) or _norm(node, recipe)
    if match is None or not match.quantizers or not all(_is_quantizer(reader, recipe) for reader in match.quantizers):
        return None
    return match


def _swiglu(node: fx.Node, recipe: Fp8BlockRecipe) -> _Match | None:
    operators = torch.ops.jetrl_megatron
    if node.target != operators.silu_and_mul.default:
        return None
    (gate_up,) = node.args
    if _value(gate_up).dim() != 2 or not swiglu_quantizes(_value(gate_up), recipe):
        return None
    return _Match(node, operators.silu_and_mul_quantize.default, (gate_up, recipe_text(recipe)), node)


def _norm(node: fx.Node, recipe: Fp8BlockRecipe) -> _Match | None:
    op = get_ir_op(node)
    if op is None or op.name not in ("rms_norm", "fused_add_rms_norm") or _value(node.args[0]).dim() != 2:
        return None
    if op.dispatch(*fx.map_arg(node.args, _value)).provider != VLLM_PROVIDER:
        return None
    operators, adds = torch.ops.jetrl_megatron, op.name == "fused_add_rms_norm"
    arguments = (*node.args[: 4 if adds else 3], recipe_text(recipe))
    if not norm_quantizes(_value(node.args[0]), _value(node.args[2 if adds else 1]), recipe):
        return None
    if not adds:
        return _Match(node, operators.rms_norm_quantize.default, arguments, node)
    y, total = find_getitem_maybe(node, 0), find_getitem_maybe(node, 1)
    if y is None or len(node.users) != 1 + (total is not None):
        return None
    return _Match(node, operators.add_rms_norm_quantize.default, arguments, y, total)


def _is_quantizer(node: fx.Node, recipe: Fp8BlockRecipe) -> bool:
    """Whether the node is vLLM's quantiser, by the recipe's rule, into the layout of scales that DeepGEMM reads."""
    if node.target != auto_functionalized or str(node.args[0]) != _QUANTIZER:
        return False
    # The operator has this floor built in.
    if recipe.activation_scale_floor != JETRL_FP8.activation_scale_floor:
        return False
    wanted = {
        "group_size": recipe.block,
        "eps": recipe.activation_amax_floor,
        "fp8_min": -recipe.element_max,
        "fp8_max": recipe.element_max,
        "scale_ue8m0": recipe.scale_format == "ue8m0",
        "dummy_is_scale_transposed": True,
        "dummy_is_tma_aligned": True,
    }
    outputs = {user.args[1] for user in node.users if user.target is operator.getitem}
    return outputs <= {1, 2} and len(outputs) == len(node.users) and wanted.items() <= node.kwargs.items()


def _replace(graph: fx.Graph, match: _Match) -> None:
    with graph.inserting_before(match.node):
        fused = graph.call_function(match.fused, match.arguments)
        inputs = fx.map_arg(match.arguments, _value)
        # Inductor holds inputs to the strides of "eager_input_vals".
        fused.meta = {**match.node.meta, "val": match.fused(*inputs), "eager_input_vals": (inputs, {})}
        outputs = [graph.call_function(operator.getitem, (fused, index)) for index in range(len(fused.meta["val"]))]
    for output, value in zip(outputs, fused.meta["val"], strict=True):
        output.meta = {"val": value}
    codes, scale = outputs[:2]
    for quantizer in match.quantizers:
        for user in list(quantizer.users):
            user.replace_all_uses_with(codes if user.args[1] == 1 else scale)
            graph.erase_node(user)
        graph.erase_node(quantizer)
    if match.total is not None:
        match.total.replace_all_uses_with(outputs[2])
    for node in dict.fromkeys((match.total, match.y, match.node)):
        if node is not None:
            graph.erase_node(node)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


@functools.cache
def _recipe(text: str) -> Fp8BlockRecipe:
    return Fp8BlockRecipe.from_dict(json.loads(text))


def recipe_text(recipe: Fp8BlockRecipe) -> str:
    """The recipe as the operators below take it: torch.compile passes no objects of other classes."""
    return json.dumps(recipe.to_dict())


@torch.library.custom_op("jetrl_megatron::rms_norm_quantize", mutates_args=())
def _norm_quantize(x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: str) -> _Pair:
    codes, _ = norm_quantize(x_MK, weight_K, eps, _recipe(recipe))
    return codes.data, codes.scale


@_norm_quantize.register_fake
def _(x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: str) -> _Pair:
    return _empty_codes(x_MK, x_MK.shape[1], recipe)


@torch.library.custom_op("jetrl_megatron::add_rms_norm_quantize", mutates_args=())
def _add_norm_quantize(
    x_MK: torch.Tensor, residual: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, total = norm_quantize(x_MK, weight_K, eps, _recipe(recipe), residual)
    assert total is not None
    return codes.data, codes.scale, total


@_add_norm_quantize.register_fake
def _(
    x_MK: torch.Tensor, residual: torch.Tensor, weight_K: torch.Tensor, eps: float, recipe: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *_empty_codes(x_MK, x_MK.shape[1], recipe), x_MK.new_empty(x_MK.shape)


@torch.library.custom_op("jetrl_megatron::silu_and_mul_quantize", mutates_args=())
def _swiglu_quantize(y_M2F: torch.Tensor, recipe: str) -> _Pair:
    codes = swiglu_quantize(y_M2F, _recipe(recipe))
    return codes.data, codes.scale


@_swiglu_quantize.register_fake
def _(y_M2F: torch.Tensor, recipe: str) -> _Pair:
    return _empty_codes(y_M2F, y_M2F.shape[1] // 2, recipe)


def _empty_codes(like: torch.Tensor, features: int, recipe: str) -> _Pair:
    tokens, groups = like.shape[0], ceil_div(features, _recipe(recipe).block)
    codes = like.new_empty(tokens, features, dtype=torch.float8_e4m3fn)
    return codes, like.new_empty_strided((tokens, groups), (1, scale_stride(tokens)), dtype=torch.float32)
