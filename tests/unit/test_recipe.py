"""The recipe: validation, fingerprint, projections."""

import dataclasses
import json
import re

import pytest

from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe, recipe_for_precision


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("scale_format", "e8m0", "'ue8m0', 'fp32'"),
        ("element_format", "float8_e5m2", "'float8_e4m3fn'"),
        ("wgrad", "fp16", "'fp8', 'bf16'"),
    ],
)
def test_recipe_unknown_choice_names_value_and_choices(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field}='{value}' is not supported: use one of {allowed}"):
        Fp8BlockRecipe(**{field: value})


def test_recipe_fingerprint_covers_every_field():
    changed = {
        "element_max": 240.0,
        "block": 64,
        "scale_format": "fp32",
        "ue8m0_weight_max": 448.0,
        "weight_amax_floor": 1e-12,
        "activation_amax_floor": 1e-12,
        "activation_scale_floor": 1e-12,
        "dgrad": "bf16",
        "wgrad": "bf16",
        "saved_activation": "bf16",
        "wgrad_gradient_source": "fp8",
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
        "ignore": ("*.linear_fc2",),
    }
    # element_format has one choice, so it cannot differ; every other field must change the fingerprint.
    assert set(changed) == {field.name for field in dataclasses.fields(Fp8BlockRecipe)} - {"element_format"}
    prints = {dataclasses.replace(JETRL_FP8, **{field: value}).fingerprint for field, value in changed.items()}
    assert len(prints | {JETRL_FP8.fingerprint}) == len(changed) + 1


def test_recipe_default_fingerprint_is_pinned():
    # A change here is a change of bytes: it needs an entry under "Numerics" in CHANGELOG.md.
    assert JETRL_FP8.fingerprint == "67a6d90aa006d1cf"


def test_recipe_dict_round_trips():
    recipe = Fp8BlockRecipe(scale_format="fp32", ignore=("a", "b"), num_layers_at_end_in_bf16=2)
    assert Fp8BlockRecipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(ValueError, match=r"recipe fields \['scale'\] are unknown"):
        Fp8BlockRecipe.from_dict({"scale": 1})


def test_recipe_stamp_that_was_edited_raises():
    stamp = JETRL_FP8.to_stamp()
    assert Fp8BlockRecipe.from_stamp({**stamp, "version": 1}, "config.json") == JETRL_FP8
    edited = {**stamp, "recipe": {**stamp["recipe"], "scale_format": "fp32"}}
    with pytest.raises(ValueError, match="config.json: the stored fingerprint is .* export again"):
        Fp8BlockRecipe.from_stamp(edited, "config.json")
    with pytest.raises(ValueError, match='expected an object with "recipe" and "fingerprint"'):
        Fp8BlockRecipe.from_stamp({"recipe": stamp["recipe"]}, "config.json")


@pytest.mark.parametrize("recipe", [5, {"block": "x"}, {"ignore": 3}])
def test_recipe_stamp_of_other_types_raises(recipe):
    with pytest.raises(ValueError, match="config.json: .* stands for a recipe"):
        Fp8BlockRecipe.from_stamp({"recipe": recipe, "fingerprint": "0"}, "config.json")


def test_recipe_mismatch_names_field_and_both_values():
    with pytest.raises(ValueError, match=r"training\) != .*checkpoint\): scale_format: 'ue8m0' != 'fp32'"):
        JETRL_FP8.require_same(Fp8BlockRecipe(scale_format="fp32"), ours="training", theirs="checkpoint")
    JETRL_FP8.require_same(Fp8BlockRecipe(), ours="training", theirs="checkpoint")


def test_recipe_quantizes_by_layer_number_and_whole_names():
    recipe = Fp8BlockRecipe(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2, ignore=("*.linear_fc2", "mlp"))
    chosen = [recipe.quantizes(f"decoder.layers.{i}.mlp.linear_fc1", 12) for i in range(12)]
    assert chosen == [False] + [True] * 9 + [False] * 2
    assert not recipe.quantizes("decoder.layers.5.mlp.linear_fc2", 12)
    assert recipe.quantizes("mtp.layers.0.mlp.linear_fc1", 12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block", "128"),
        ("block", 128.0),
        ("block", True),
        ("element_max", None),
        ("num_layers_at_start_in_bf16", "1"),
        ("num_layers_at_end_in_bf16", 0.5),
        ("ignore", 5),
        ("ignore", [1]),
    ],
)
def test_recipe_field_of_another_type_raises(field, value):
    with pytest.raises(ValueError, match=f"^{field}={re.escape(repr(value))} must be a "):
        Fp8BlockRecipe(**{field: value})


def test_recipe_number_has_one_fingerprint():
    assert Fp8BlockRecipe.from_dict({"element_max": 448, "ue8m0_weight_max": 464}).fingerprint == JETRL_FP8.fingerprint


def test_recipe_ignore_given_as_string_raises():
    with pytest.raises(ValueError, match=r"write ignore=\('\*\.linear_fc2',\)"):
        Fp8BlockRecipe(ignore="*.linear_fc2")  # type: ignore[arg-type]


def test_precision_misspelt_lists_allowed_values():
    """NeMo-RL#971."""
    assert recipe_for_precision("jetrl_fp8") == JETRL_FP8
    assert recipe_for_precision("bf16") is None
    with pytest.raises(ValueError, match="precision: 'jetrl-fp8' is unknown: use one of bf16, jetrl_fp8"):
        recipe_for_precision("jetrl-fp8")


def test_recipe_vllm_projection_is_complete():
    config = JETRL_FP8.to_vllm_quantization_config(("model.layers.0.mlp.down_proj",))
    assert config == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "ignored_layers": ["model.layers.0.mlp.down_proj"],
        "modules_to_not_convert": ["model.layers.0.mlp.down_proj"],
    }


def test_to_vllm_env_follows_the_scale_format():
    fp32 = Fp8BlockRecipe(scale_format="fp32").to_vllm_env()
    assert JETRL_FP8.to_vllm_env() == {**fp32, "VLLM_USE_DEEP_GEMM_E8M0": "1"}
    assert fp32 == {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}


def test_to_vllm_engine_args_are_json_and_carry_the_recipe():
    recipe = Fp8BlockRecipe(scale_format="fp32")
    arguments = recipe.to_vllm_engine_args()
    assert json.loads(json.dumps(arguments)) == arguments
    assert Fp8BlockRecipe.from_stamp(arguments["additional_config"]["jetrl"], "test") == recipe
    assert not any(arguments["compilation_config"]["pass_config"].values())
    arguments["compilation_config"]["pass_config"]["fuse_norm_quant"] = True
    assert not recipe.to_vllm_engine_args()["compilation_config"]["pass_config"]["fuse_norm_quant"]
