"""The only producer of FP8 weights: what it yields is what a checkpoint holds and what weight sync sends."""

# Shape suffixes: N rows and K columns of a weight.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch

from jetrl_megatron.ops import quantize_weight
from jetrl_megatron.recipe import Fp8BlockRecipe

WEIGHT = ".weight"
SCALE = ".weight_scale_inv"

# Megatron names its parallel linears linear_*; routers, norms and the mixers that stay BF16 have other names.
_DECODER_LINEAR = re.compile(r"^(?:decoder|mtp)\.layers\.\d+\.(?:.*\.)?linear_\w+$")


def is_decoder_linear(module: str) -> bool:
    """Whether a Megatron module name is that of a decoder linear, the kind of module that a recipe decides about.

    The decoder layer inside a layer of multi-token prediction has such linears too.
    """
    return bool(_DECODER_LINEAR.match(module))


def iter_fp8_weights(
    matrices: Iterable[tuple[str, str, torch.Tensor]],
    recipe: Fp8BlockRecipe,
    num_layers: int,
    scale_dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantises the decoder linears that the recipe quantises; passes everything else on as it is.

    Args:
        matrices: (Megatron module name, Hugging Face tensor name, tensor), each a whole logical matrix: bfloat16 [N, K]
            for weights. Lazy: one is held at a time.
        recipe: how to quantise, and which linears stay BF16.
        num_layers: decoder layers of the whole model.
        scale_dtype: of the scales, one that holds them.

    Yields:
        (name, tensor). For a quantised X.weight, X.weight float8_e4m3fn [N, K] and then X.weight_scale_inv
        [ceil(N/block), ceil(K/block)]; for the rest, the given tensor.

    Raises:
        ValueError: a tensor holds NaN or infinity, or, at the end, a pattern of recipe.ignore matched no linear.
    """
    linears = set()
    for module, name, tensor in matrices:
        require_finite(name, tensor)
        if not (is_decoder_linear(module) and name.endswith(WEIGHT) and tensor.dim() == 2):
            yield name, tensor
            continue
        linears.add(module)
        if not recipe.quantizes(module, num_layers):
            yield name, tensor
            continue
        quantized = quantize_weight(tensor, recipe)
        yield name, quantized.data
        yield scale_name(name), quantized.scale.to(scale_dtype)
    check_ignore(recipe, linears)


def scale_name(weight_name: str) -> str:
    """Name of the scale beside "X.weight": "X.weight_scale_inv"."""
    return weight_name.removesuffix(WEIGHT) + SCALE


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuses NaN and infinity, which a tile's amax may hide and a cast may turn into a number.

    Raises:
        ValueError: with the name, the position and the value.
    """
    # aminmax hands a NaN on, unlike fmax, and reads the tensor once; the search below is for the message alone.
    if tensor.numel() == 0 or torch.stack(torch.aminmax(tensor)).isfinite().all():
        return
    position = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    value = tensor[tuple(position)].item()
    raise ValueError(
        f"{name}{position} is {value}: weights must be finite; the training run diverged, convert an earlier iteration"
    )


def check_ignore(recipe: Fp8BlockRecipe, linears: Iterable[str]) -> None:
    """Checks that each pattern of the ignore list names a linear of the model.

    Args:
        linears: Megatron names of all decoder linears.

    Raises:
        ValueError: a pattern matches none, so that a misspelt layer would be quantised; the message names near ones.
    """
    names = sorted(set(linears))
    for pattern in recipe.ignore:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"ignore pattern {pattern!r} matches no decoder linear: patterns match whole Megatron names; near ones "
                f"are {_near(pattern, names)}"
            )


def _near(pattern: str, names: list[str]) -> str:
    suffixes = sorted({"*." + name.rpartition(".")[2] for name in names})
    close = get_close_matches(pattern, suffixes + names, n=4, cutoff=0.4)
    return ", ".join(map(repr, close or suffixes + names[:2]))
