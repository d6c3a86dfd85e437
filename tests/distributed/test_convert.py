"""One model, saved and exported under several parallel layouts: always the bytes of quantising its own matrices.

The first model is a small one with the awkward widths of Qwen2.5-0.5B: hidden 896, 14 heads of 64, 2 KV heads, tied,
biases on q, k and v; its FFN of 640 is 2.5 tiles a rank at TP 2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jetrl_megatron import JETRL_FP8, BlockScaledTensor, Fp8BlockRecipe, quantize_weight
from tests.distributed.ranks import launch
from tests.distributed.synced import save_synced

pytestmark = pytest.mark.distributed

FOLDER = "JETRL_TEST_CONVERT_FOLDER"
PARTLY_BF16 = Fp8BlockRecipe(ignore=("*.linear_proj",), num_layers_at_end_in_bf16=1, scale_format="fp32")
LEARNING_RATE = 0.125
QWEN2_LAYOUTS = ("tp2", "pp2_vpp2", "pp2")
QWEN3_LAYOUTS = ("tp2_halves", "tp2_sp")


def _root() -> Path:
    return Path(os.environ[FOLDER])


def _build(name: str, recipe: Fp8BlockRecipe, **layout: Any) -> list[Any]:
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from jetrl_megatron.integrations.megatron_bridge import build_model

    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        layout.get("tensor_parallel", 1), layout.get("pipeline_parallel", 1), layout.get("virtual_pipeline")
    )
    model_parallel_cuda_manual_seed(1)
    return build_model(_root() / name, recipe=recipe, **layout)


def _save(models: list[Any], folder: Path, **metadata: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    stages = {f"model{stage}": model.sharded_state_dict(metadata=metadata) for stage, model in enumerate(models)}
    dist_checkpointing.save(stages, folder)


def _qwen2(label: str, **layout: Any) -> Callable[[], None]:
    def body() -> None:
        from jetrl_megatron.convert.export import export_vllm_checkpoint
        from jetrl_megatron.convert.live import unwrapped

        models = _build("qwen2", JETRL_FP8, **layout)
        # Unstacked in one of the layouts: each layer is a tensor of its own then.
        metadata = {"non_homogeneous_layers": True} if label == "pp2" else {}
        _save([unwrapped(model) for model in models], _root() / f"saved/qwen2_{label}", **metadata)
        hf, live = _root() / "qwen2", _root() / "live"
        export_vllm_checkpoint(models, live / f"qwen2_{label}", hf_config=hf, recipe=JETRL_FP8)
        save_synced(models, hf, _root() / f"synced/qwen2_{label}.safetensors")
        if label == "pp2":
            export_vllm_checkpoint(models, live / "qwen2_exponents", hf_config=hf, scale_dtype="float8_e8m0fnu")
        if label == "tp2":
            from jetrl_megatron.integrations.requantized import RequantizedSource

            for name, recipe in (("fp8", JETRL_FP8), ("bf16", Fp8BlockRecipe(ignore=("*",)))):
                source = RequantizedSource(models, hf_config=hf, recipe=recipe)
                save_synced(models, hf, _root() / f"requantized/{name}.safetensors", source)

    return body


def _qwen3(label: str, **layout: Any) -> Callable[[], None]:
    def body() -> None:
        from jetrl_megatron.convert.export import export_vllm_checkpoint
        from jetrl_megatron.convert.live import unwrapped
        from jetrl_megatron.convert.recipe_file import save_recipe

        models = _build("qwen3", PARTLY_BF16, tensor_parallel=2, **layout)
        folder = _root() / f"saved/qwen3_{label}"
        _save([unwrapped(model) for model in models], folder, singleton_local_shards=label == "tp2_halves")
        save_recipe(folder, PARTLY_BF16)
        export_vllm_checkpoint(models, _root() / f"live/qwen3_{label}", hf_config=_root() / "qwen3", rollout_tp=1)
        save_synced(models, _root() / "qwen3", _root() / f"synced/qwen3_{label}.safetensors")

    return body


def _refusals() -> dict[str, str]:
    """What each rank is told when an export fails; each failure must leave the ranks in step for the next."""
    from jetrl_megatron.convert.export import export_vllm_checkpoint
    from jetrl_megatron.convert.live import unwrapped

    models = _build("qwen3", PARTLY_BF16, tensor_parallel=2)
    model, out, hf = unwrapped(models[0]), _root() / "refused", _root() / "qwen3"
    told = {}

    def refused(label: str, **arguments: Any) -> None:
        try:
            export_vllm_checkpoint(models, out, **{"hf_config": hf, **arguments})
        except Exception as error:
            told[label] = f"{type(error).__name__}: {error}"

    refused("other_recipe", recipe=JETRL_FP8)
    refused("no_model", hf_config=_root() / "no_such_model")
    refused("exponents", scale_dtype="float8_e8m0fnu")
    refused("tokenizer", tokenizer_from=_root())
    layer = model.decoder.layers[0]
    for rank in (0, 1):
        # A linear of one rank alone that does not do what its recipe says.
        layer.mlp.linear_fc2.quantized = torch.distributed.get_rank() != rank
        refused(f"one_layer_in_bf16_on_rank_{rank}")
    layer.mlp.linear_fc2.quantized = True
    if torch.distributed.get_rank() == 1:
        layer.mlp.linear_fc2.weight.data[130, 7] = float("nan")
    refused("nan")
    return told


def _after_a_step() -> None:
    """Exports right after a step of the distributed optimizer, when each rank has updated its own half alone."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from jetrl_megatron.convert.export import export_vllm_checkpoint

    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, **overlap)
    models = _build("qwen3", JETRL_FP8, ddp=config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.0,
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        models,
    )
    for parameter in models[0].parameters():
        parameter.main_grad.fill_(1)
    optimizer.step()
    save_synced(models, _root() / "qwen3", _root() / "synced/after_a_step.safetensors")
    export_vllm_checkpoint(models, _root() / "live/after_a_step", hf_config=_root() / "qwen3")


BODIES: dict[str, Callable[[], Any]] = {
    "qwen2_tp2": _qwen2("tp2", tensor_parallel=2),
    "qwen2_pp2_vpp2": _qwen2("pp2_vpp2", pipeline_parallel=2, virtual_pipeline=2),
    "qwen2_pp2": _qwen2("pp2", pipeline_parallel=2),
    "qwen3_tp2_halves": _qwen3("tp2_halves"),
    "qwen3_tp2_sp": _qwen3("tp2_sp", sequence_parallel=True),
    "after_a_step": _after_a_step,
    "refusals": _refusals,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Builds both models, saves and exports them on two ranks, and converts what was saved in this process."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    from jetrl_megatron.convert.export import convert_checkpoint

    root = tmp_path_factory.mktemp("convert")
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    wide = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 640}
    deep = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 768}
    configs = {
        "qwen2": Qwen2Config(**sizes, **wide, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**sizes, **deep, head_dim=128, tie_word_embeddings=False),
    }
    weights = {}
    for name, config in configs.items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(root / name)
        weights[name] = {key: value.clone() for key, value in load_file(root / name / "model.safetensors").items()}
    for folder in ("live", "converted"):
        (root / folder).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(root))
        results = launch("tests.distributed.test_convert", 2, root / "results.pt")
    for folder in sorted((root / "saved").iterdir()):
        convert_checkpoint(folder, root / "converted" / folder.name, hf_config=root / folder.name.split("_")[0])
    expected = {
        "qwen2": _expected(weights["qwen2"], JETRL_FP8, ()),
        "qwen3": _expected(weights["qwen3"], PARTLY_BF16, ("o_proj", "layers.3.")),
    }
    return {**results, "root": root, "weights": weights, "expected": expected}


def _expected(
    weights: dict[str, torch.Tensor], recipe: Fp8BlockRecipe, bf16: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    expected = dict(weights)
    for name, tensor in weights.items():
        if "_proj.weight" in name and not any(part in name for part in bf16):
            quantized = quantize_weight(tensor, recipe)
            expected[name], expected[name + "_scale_inv"] = quantized.data, quantized.scale
    return expected


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("source", ["live", "converted"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [*(("qwen2", layout) for layout in QWEN2_LAYOUTS), *(("qwen3", layout) for layout in QWEN3_LAYOUTS)],
)
def test_every_layout_equals_direct_quantisation_exact(
    ranks: dict[str, Any], source: str, model: str, layout: str
) -> None:
    folder = ranks["root"] / source / f"{model}_{layout}"
    _assert_same(load_file(folder / "model.safetensors"), ranks["expected"][model])
    recipe = JETRL_FP8 if model == "qwen2" else PARTLY_BF16
    assert json.loads((folder / "config.json").read_text())["jetrl"]["fingerprint"] == recipe.fingerprint


@pytest.mark.parametrize(
    ("model", "layout"),
    [*(("qwen2", layout) for layout in QWEN2_LAYOUTS), *(("qwen3", layout) for layout in QWEN3_LAYOUTS)],
)
def test_weight_sync_sends_the_same_from_every_layout_exact(ranks: dict[str, Any], model: str, layout: str) -> None:
    _assert_same(load_file(ranks["root"] / f"synced/{model}_{layout}.safetensors"), ranks["expected"][model])


def test_weight_sync_sends_the_last_step_of_every_rank_exact(ranks: dict[str, Any]) -> None:
    exported = load_file(ranks["root"] / "live/after_a_step/model.safetensors")
    _assert_same(load_file(ranks["root"] / "synced/after_a_step.safetensors"), exported)


def test_requantized_weights_are_those_of_an_export_exact(ranks: dict[str, Any]) -> None:
    _assert_same(load_file(ranks["root"] / "requantized/fp8.safetensors"), ranks["expected"]["qwen2"])
    _assert_same(load_file(ranks["root"] / "requantized/bf16.safetensors"), ranks["weights"]["qwen2"])


@pytest.mark.parametrize(("model", "layouts"), [("qwen2", QWEN2_LAYOUTS), ("qwen3", QWEN3_LAYOUTS)])
def test_files_do_not_depend_on_the_layout_exact(ranks: dict[str, Any], model: str, layouts: tuple[str, ...]) -> None:
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        contents = {
            (ranks["root"] / source / f"{model}_{layout}" / file).read_bytes()
            for source in ("live", "converted")
            for layout in layouts
        }
        assert len(contents) == 1, file


def test_live_export_stores_exponents_of_the_same_scales_exact(ranks: dict[str, Any]) -> None:
    tensors = load_file(ranks["root"] / "live/qwen2_exponents/model.safetensors")
    scales = {name for name in tensors if name.endswith("_scale_inv")}
    assert {tensors[name].dtype for name in scales} == {torch.float8_e8m0fnu}
    wide = {name: tensor.float() if name in scales else tensor for name, tensor in tensors.items()}
    _assert_same(wide, ranks["expected"]["qwen2"])


def test_tied_model_has_one_embedding_and_every_norm(ranks: dict[str, Any]) -> None:
    """Model-Optimizer#876, Megatron-Bridge#919, Megatron-Bridge#4694."""
    folder = ranks["root"] / "converted/qwen2_pp2_vpp2"
    tensors = load_file(folder / "model.safetensors")
    assert list(tensors["model.embed_tokens.weight"].shape) == [300, 896]
    assert "lm_head.weight" not in tensors
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert sum(name.endswith("norm.weight") for name in tensors) == 4 * 2 + 1
    scales = {name: list(tensors[f"model.layers.2.self_attn.{name}_proj.weight_scale_inv"].shape) for name in "qkvo"}
    assert scales == {"q": [7, 7], "k": [1, 7], "v": [1, 7], "o": [7, 7]}


def test_live_export_has_the_last_step_of_every_rank_close(ranks: dict[str, Any]) -> None:
    tensors = load_file(ranks["root"] / "live/after_a_step/model.safetensors")
    for name, before in ranks["weights"]["qwen3"].items():
        after = tensors[name]
        if name + "_scale_inv" in tensors:
            block = JETRL_FP8.weight_block
            after = BlockScaledTensor(after, tensors[name + "_scale_inv"], block, JETRL_FP8).dequantize()
        # Adam's first step with gradient 1 is the learning rate; e4m3 then rounds by up to 1/16.
        torch.testing.assert_close(after.float(), before.float() - LEARNING_RATE, rtol=1 / 15, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("other_recipe", "scale_format: 'ue8m0' != 'fp32'"),
        ("no_model", "no_such_model has no config.json"),
        ("exponents", "scale_dtype='float8_e8m0fnu' holds powers of two alone, and scale_format='fp32'"),
        ("tokenizer", "holds none of tokenizer.json"),
        ("one_layer_in_bf16_on_rank_0", "decoder.layers.0.mlp.linear_fc2 runs in BF16, but the recipe puts it in FP8"),
        ("one_layer_in_bf16_on_rank_1", "decoder.layers.0.mlp.linear_fc2 runs in BF16, but the recipe puts it in FP8"),
        ("nan", "model.layers.0.mlp.down_proj.weight[130, 391] is nan"),
    ],
)
def test_live_export_refuses_on_every_rank(ranks: dict[str, Any], label: str, message: str) -> None:
    for told in ranks["refusals"]:
        assert told[label].startswith("ValueError: ") and message in told[label]
    assert not any("refused" in path.name for path in ranks["root"].iterdir())
