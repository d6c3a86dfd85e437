"""What kernels need to know of a recipe: how an amax becomes a scale, and where codes end."""

from __future__ import annotations

from typing import Any

from jetrl_megatron.recipe import Fp8BlockRecipe


def activation_rule(recipe: Fp8BlockRecipe) -> dict[str, Any]:
    """For activations and gradients: a scale is max(amax, amax_floor) / divisor, and at least scale_floor."""
    return {
        "block": recipe.block,
        "element_max": recipe.element_max,
        "amax_floor": recipe.activation_amax_floor,
        "divisor": recipe.element_max,
        "scale_floor": recipe.activation_scale_floor,
        "power_of_two": recipe.scale_format == "ue8m0",
    }


def weight_rule(recipe: Fp8BlockRecipe) -> dict[str, Any]:
    """The same for weights."""
    rule = activation_rule(recipe)
    divisor = recipe.ue8m0_weight_max if rule["power_of_two"] else recipe.element_max
    return {**rule, "amax_floor": recipe.weight_amax_floor, "divisor": divisor, "scale_floor": 0.0}
