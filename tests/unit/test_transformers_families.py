"""transformers loads an export of every family: the weights on a CPU, and the modules that it would run on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.auto import AutoHfQuantizer

from jetrl_megatron import JETRL_FP8, BlockScaledTensor, Fp8BlockRecipe
from tests.unit.family_models import WHOLE_TILES, export_of_family, family_configs

pytest.importorskip("accelerate")
CONFIGS = family_configs(WHOLE_TILES)
# kv_lora_rank and this make the rows of kv_a_proj_with_mqa, here whole tiles.
CONFIGS["deepseek_v3"] = family_configs({**WHOLE_TILES, "qk_rope_head_dim": 128})["deepseek_v3"]
EXPONENTS = "-exponents"
CUT_TILE = "deepseek_v3, kv_a_proj_with_mqa of 4.5 tiles"
WITH_EXPONENTS = ("qwen3", "glm4_moe")
"""Families that are exported a second time, with scales of one byte."""
WITH_EXPERTS, BF16_EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"), "-bf16-experts"
EXPORTS = [
    *CONFIGS,
    *(family + EXPONENTS for family in WITH_EXPONENTS),
    *(family + BF16_EXPERTS for family in WITH_EXPERTS),
]
LAYERS = WHOLE_TILES["num_hidden_layers"]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    configs = {**CONFIGS, CUT_TILE: family_configs(WHOLE_TILES)["deepseek_v3"]}
    for name, config in configs.items():
        export_of_family(config, root, root / name)
    for family in WITH_EXPONENTS:
        export_of_family(CONFIGS[family], root, root / (family + EXPONENTS), scale_dtype="float8_e8m0fnu")
    for family in WITH_EXPERTS:
        bf16_experts = Fp8BlockRecipe(ignore=("*.mlp.experts.*",))
        export_of_family(CONFIGS[family], root, root / (family + BF16_EXPERTS), recipe=bf16_experts)
    return {path.name: path for path in root.iterdir() if (path / "config.json").exists()}


def is_draft(name: str) -> bool:
    """Whether a tensor is of the layer of multi-token prediction, which transformers has not."""
    return name.startswith(f"model.layers.{LAYERS}.")


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not is_draft(name)}


def unstacked(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A loaded model's tensors under the names of a checkpoint: experts apart."""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(plain, model.state_dict())
    return tensors


@pytest.mark.parametrize("export", EXPORTS)
def test_transformers_loads_and_runs_every_family_exact(exports: dict[str, Path], export: str) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(exports[export], output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["error_msgs"], info
    assert all(map(is_draft, info["unexpected_keys"])), info
    loaded, stored = unstacked(model), stored_tensors(exports[export])
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            # Without a GPU transformers dequantises to BF16, which is exact for powers of two.
            block = JETRL_FP8.weight_block
            tensor = BlockScaledTensor(tensor, stored[f"{name}_scale_inv"].float(), block, JETRL_FP8).dequantize(
                torch.bfloat16
            )
        assert torch.equal(loaded[name].float(), tensor.float()), name
    logits = model(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert logits.shape == (1, 3, WHOLE_TILES["vocab_size"]) and logits.isfinite().all()


def test_transformers_without_a_gpu_refuses_a_cut_tile(exports: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        AutoModelForCausalLM.from_pretrained(exports[CUT_TILE])


@pytest.mark.parametrize("name", [*EXPORTS, CUT_TILE])
def test_transformers_builds_fp8_modules_for_exactly_the_fp8_tensors(exports: dict[str, Path], name: str) -> None:
    config = AutoConfig.from_pretrained(exports[name])
    quantization = FineGrainedFP8Config.from_dict(config.quantization_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        AutoHfQuantizer.from_config(quantization, pre_quantized=True).preprocess_model(model)
    built, stored = model.state_dict(), stored_tensors(exports[name])
    scales = {key: tensor for key, tensor in stored.items() if key.endswith("_scale_inv") and ".experts." not in key}
    scales |= stacked_scales(stored)
    assert {key for key in built if key.endswith("_scale_inv")} == scales.keys()
    for key, tensor in scales.items():
        assert (built[key].dtype, built[key].shape) == (tensor.dtype, tensor.shape), key
        codes = built[key.removesuffix("_scale_inv")]
        assert codes.dtype == torch.float8_e4m3fn, key


def stacked_scales(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The scales of all experts of a layer as transformers stacks them."""
    experts: dict[str, list[tuple[str, int, torch.Tensor]]] = {}
    for key, tensor in stored.items():
        before, _, after = key.partition(".experts.")
        if key.endswith("_scale_inv") and after:
            number, part, _ = after.split(".", 2)
            experts.setdefault(before.replace("block_sparse_moe", "mlp"), []).append((part, int(number), tensor))
    found = {}
    for prefix, parts in experts.items():
        by_part = {(part, number): tensor for part, number, tensor in parts}
        count = 1 + max(number for _, number in by_part)
        gate, up, down = ("w1", "w3", "w2") if ("w1", 0) in by_part else ("gate_proj", "up_proj", "down_proj")
        merged = [torch.cat([by_part[gate, number], by_part[up, number]]) for number in range(count)]
        found[f"{prefix}.experts.gate_up_proj_scale_inv"] = torch.stack(merged)
        found[f"{prefix}.experts.down_proj_scale_inv"] = torch.stack([by_part[down, n] for n in range(count)])
    return found
