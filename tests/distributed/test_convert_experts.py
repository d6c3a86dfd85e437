"""Models with experts, built and saved by Megatron itself on two ranks: always the bytes of their own matrices."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetrl_megatron import JETRL_FP8
from tests.distributed.ranks import launch
from tests.distributed.synced import save_synced
from tests.unit.test_convert_families import CONFIGS, Model, assert_same_tensors

pytestmark = pytest.mark.distributed

FOLDER = "JETRL_TEST_CONVERT_EXPERTS_FOLDER"
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "tp2_ep2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
CASES = [
    ("qwen3_moe", "ep2"),
    ("qwen3_moe", "tp2_ep2"),
    ("qwen3_moe", "pp2"),
    ("mixtral", "ep2"),
    ("mixtral", "tp2"),
]
LIVE = [("qwen3_moe", "ep2"), ("mixtral", "ep2")]
# What needs CUDA or TransformerEngine.
OFF = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "persist_layer_norm",
)


def _root() -> Path:
    return Path(os.environ[FOLDER])


def _build(family: str, layout: dict[str, int], fp8: bool) -> list[Any]:
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from jetrl_megatron.convert.bridge import import_bridge
    from jetrl_megatron.integrations.megatron_bridge import use_jetrl

    bridge = import_bridge()
    from megatron.bridge.models import gpt_provider

    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(**layout)
    model_parallel_cuda_manual_seed(1)
    provider = bridge.AutoBridge.from_hf_pretrained(str(_root() / family)).to_megatron_provider()
    for name, value in {**dict.fromkeys(OFF, False), **layout, "transformer_impl": "local"}.items():
        setattr(provider, name, value)
    provider.transformer_layer_spec = gpt_provider.local_layer_spec
    if fp8:
        use_jetrl(provider)
    provider.apply_overrides_and_finalize(dtype=torch.bfloat16)
    models: list[Any] = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return models


def _saved(family: str, name: str) -> Callable[[], None]:
    def body() -> None:
        from megatron.core import dist_checkpointing
        from megatron.core import parallel_state as mpu
        from megatron.training.checkpointing import get_checkpoint_name

        from jetrl_megatron.convert.export import export_vllm_checkpoint
        from jetrl_megatron.convert.live import unwrapped

        live = (family, name) in LIVE
        models = _build(family, LAYOUTS[name], fp8=live)
        model = unwrapped(models[0])
        folder = _root() / f"saved/{family}_{name}"
        for file_format in ("torch_dist", "legacy"):
            (folder / file_format).mkdir(parents=True, exist_ok=True)
        path = Path(get_checkpoint_name(str(folder / "legacy"), 7))
        path.parent.mkdir(parents=True, exist_ok=True)
        args = argparse.Namespace(**LAYOUTS[name], num_layers=model.config.num_layers)
        torch.save({"args": args, "model": model.state_dict_for_save_checkpoint()}, path)
        torch.distributed.barrier()
        metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, folder / "torch_dist")
        if live:
            out = _root() / f"live/{family}_{name}"
            export_vllm_checkpoint(models, out, hf_config=_root() / family, recipe=JETRL_FP8)
            save_synced(models, _root() / family, _root() / f"synced/{family}_{name}.safetensors")

    return body


BODIES: dict[str, Callable[[], Any]] = {f"{family}_{name}": _saved(family, name) for family, name in CASES}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Model]]:
    """Folder with what two ranks saved and exported, and the models by family."""
    root = tmp_path_factory.mktemp("experts")
    (root / "live").mkdir()
    models = {}
    for family in {family for family, _ in CASES}:
        models[family] = Model(CONFIGS[family], root / family)
        tensors = {name: tensor.contiguous() for name, tensor in models[family].tensors.items()}
        save_file(tensors, root / family / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(root))
        launch("tests.distributed.test_convert_experts", 2, root / "results.pt", timeout=240)
    return root, models


@pytest.mark.parametrize("file_format", ["torch_dist", "legacy"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_saved_by_megatron_equals_direct_quantisation_exact(
    tmp_path: Path, saved: tuple[Path, dict[str, Model]], family: str, name: str, file_format: str
) -> None:
    from jetrl_megatron.convert.export import convert_checkpoint

    root, models = saved
    folder = root / f"saved/{family}_{name}/{file_format}"
    out = convert_checkpoint(folder, tmp_path / "out", hf_config=root / family)
    assert_same_tensors(load_file(out / "model.safetensors"), models[family].expected)


@pytest.mark.parametrize(("family", "name"), LIVE)
def test_live_export_equals_direct_quantisation_exact(
    saved: tuple[Path, dict[str, Model]], family: str, name: str
) -> None:
    root, models = saved
    tensors = load_file(root / f"live/{family}_{name}/model.safetensors")
    assert_same_tensors(tensors, models[family].expected)


@pytest.mark.parametrize(("family", "name"), LIVE)
def test_weight_sync_sends_direct_quantisation_exact(
    saved: tuple[Path, dict[str, Model]], family: str, name: str
) -> None:
    root, models = saved
    assert_same_tensors(load_file(root / f"synced/{family}_{name}.safetensors"), models[family].expected)
