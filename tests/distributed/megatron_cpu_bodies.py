"""Bodies of test_megatron_cpu.py: Megatron-core and Megatron-Bridge on two CPU ranks.

Every body returns plain numbers, names and small tensors; the test module compares them.
"""

from __future__ import annotations

import functools
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from jetrl_megatron.convert.bridge import import_bridge
from jetrl_megatron.integrations import megatron_cpu
from jetrl_megatron.integrations.megatron_bridge import build_model, export_hf_weights, use_jetrl
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource

megatron_cpu.install()
import_bridge()

FOLDER = "JETRL_TEST_MEGATRON_CPU_FOLDER"
SEQUENCE, MICROBATCHES, VOCABULARY, EXPERTS = 48, 4, 512, 4
SP = {"tensor_parallel": 2, "sequence_parallel": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel": 2},
    "tp2_sp": SP,
    "tp2_sp_recompute": {**SP, **RECOMPUTE},
    "pp2": {"pipeline_parallel": 2},
    "pp2_vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
}


def set_groups(layout: dict[str, Any], **experts: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.get("tensor_parallel", 1), layout.get("pipeline_parallel", 1), layout.get("virtual_pipeline"), **experts
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def train_one_step(recipe: Fp8BlockRecipe | None, layout: dict[str, Any]) -> dict[str, Any]:
    """Builds from the folder, exports, takes a step of Adam, exports again."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    set_groups(layout)
    folder = Path(os.environ[FOLDER])
    models = build_model(folder, recipe=recipe, ddp=True, **layout)
    file = load_file(folder / "model.safetensors")
    loaded = dict(export_hf_weights(models))
    unequal = [name for name, weight in file.items() if not same_bytes(loaded[name], weight)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=0.5,
        ),
        models,
    )
    models[0].config.finalize_model_grads_func = finalize_model_grads
    models[0].config.grad_scale_func = optimizer.scale_loss
    ranks = parallel_state.get_data_parallel_world_size()
    batches = tokens()[parallel_state.get_data_parallel_rank() :: ranks]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in models],
        model=models,
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    _, grad_norm, _ = optimizer.step()
    stepped = {name: weight.clone() for name, weight in export_hf_weights(models) if ".layers.2." in name}
    return {
        "names": sorted(loaded),
        "unequal": unequal,
        "losses": [output["loss"].item() for output in outputs],
        "grad_norm": float(grad_norm),
        "stepped": stepped,
    }


def tokens() -> list[torch.Tensor]:
    """Microbatches of one sequence, int64 [1, SEQUENCE + 1]."""
    generator = torch.Generator().manual_seed(5)
    return list(torch.randint(0, VOCABULARY, (MICROBATCHES, 1, SEQUENCE + 1), generator=generator))


def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(batches)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    losses = model(batch[:, :-1], torch.arange(SEQUENCE)[None], mask, labels=batch[:, 1:])
    return losses, mean_loss


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def mixture_of_experts(expert_parallel: int) -> dict[str, Any]:
    """Loss and gradients of a small mixture of experts, all-to-all; each weight is drawn by its global name."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    set_groups({}, expert_model_parallel_size=expert_parallel)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, ffn_hidden_size=64, num_attention_heads=2, use_cpu_initialization=True,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, num_moe_experts=EXPERTS, moe_router_topk=2, moe_ffn_hidden_size=64,
        moe_token_dispatcher_type="alltoall", expert_model_parallel_size=expert_parallel,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // expert_parallel
    names = {}
    for name, parameter in model.named_parameters():
        head, found, tail = name.partition("local_experts.")
        local, _, rest = tail.partition(".")
        names[name] = f"{head}expert {first + int(local)}.{rest}" if found else name
        generator = torch.Generator().manual_seed(zlib.crc32(names[name].encode()))
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    # Each rank sees its own sequences under expert parallelism; without it, this rank's alone are computed.
    loss, _ = mean_loss(forward_step(iter(tokens()[torch.distributed.get_rank() :]), model)[0])
    loss.backward()
    gradients = {
        names[name]: p.grad for name, p in model.named_parameters() if "experts" in name and p.grad is not None
    }
    return {"loss": loss.item(), "gradients": gradients}


def random_states() -> dict[str, list[float]]:
    """Draws from the tracked states of this rank, one inside another, and from the default generator after it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    set_groups({"tensor_parallel": 2})
    tracker = get_cuda_rng_tracker()
    with tracker.fork("model-parallel-rng"):
        outer = torch.rand(2).tolist()
        with tracker.fork("data-parallel-rng"):
            inner = torch.rand(2).tolist()
        outer += torch.rand(2).tolist()
    after = torch.rand(2).tolist()
    set_groups({"tensor_parallel": 2})
    with get_cuda_rng_tracker().fork("model-parallel-rng"):
        alone = torch.rand(4).tolist()
    return {"outer": outer, "inner": inner, "after": after, "alone": alone, "after_alone": torch.rand(2).tolist()}


def float8_gather() -> torch.Tensor:
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    set_groups({"tensor_parallel": 2})
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)[torch.distributed.get_rank() :: 2].contiguous()
    gathered: torch.Tensor = gather_from_sequence_parallel_region(codes.view(torch.float8_e4m3fn))
    assert gathered.dtype == torch.float8_e4m3fn
    return gathered.view(torch.uint8)


def data_broadcast() -> torch.Tensor:
    from megatron.core.tensor_parallel import broadcast_data

    set_groups({"tensor_parallel": 2})
    data = {"text": torch.arange(6)} if torch.distributed.get_rank() == 0 else {}
    received: torch.Tensor = broadcast_data(["text"], data, torch.int64)["text"]
    return received


def own_provider() -> dict[str, Any]:
    """A provider of Megatron-Bridge, configured by hand, with JetRL's linears put in."""
    set_groups({"tensor_parallel": 2})
    folder = Path(os.environ[FOLDER])
    provider = import_bridge().AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider()
    provider.tensor_model_parallel_size = 2
    for name in ("persist_layer_norm", "masked_softmax_fusion", "gradient_accumulation_fusion", "bias_dropout_fusion"):
        setattr(provider, name, False)
    use_jetrl(provider, Fp8BlockRecipe(ignore=("*.linear_fc2",))).apply_overrides_and_finalize(dtype=torch.bfloat16)
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    layer = models[0].module.decoder.layers[1]
    exported = dict(export_hf_weights(models))
    return {
        "classes": [type(layer.mlp.linear_fc1).__name__, type(layer.self_attention.linear_proj).__name__],
        "unequal": [
            name
            for name, weight in load_file(folder / "model.safetensors").items()
            if not same_bytes(exported[name], weight)
        ],
    }


def isolation() -> dict[str, bool]:
    """That Megatron sees a torch of its own, and everybody else the real one."""
    from megatron.bridge.models import model_provider
    from megatron.core import utils

    megatron_cpu.install()
    return {
        "megatron sees another": utils.torch is not torch and model_provider.torch is utils.torch,
        "its tensors are ordinary": type(utils.torch.zeros(2, device="cuda")) is torch.Tensor,
        "on the CPU": utils.torch.zeros(2, device="cuda").device
        == utils.torch.cuda.current_device()
        == torch.device("cpu"),
        "streams are real": torch.cuda.Stream.__module__ == "torch.cuda.streams",
        "nothing is initialised": not torch.cuda.is_initialized(),
        "one finder": sum(type(finder).__module__ == megatron_cpu.__name__ for finder in sys.meta_path) == 1,
    }


def refusals() -> dict[str, str]:
    """What `build_model` says to wrong arguments."""
    from megatron.core import parallel_state

    folder = Path(os.environ[FOLDER])
    said = {}
    parallel_state.destroy_model_parallel()
    for name, layout, arguments in (
        ("no groups", None, {}),
        ("other size", {"tensor_parallel": 2}, {"pipeline_parallel": 2}),
        ("unknown field", {"tensor_parallel": 2}, {"tensor_parallel": 2, "num_layer": 3}),
        ("architecture", {"tensor_parallel": 2}, {"tensor_parallel": 2, "hf_path": folder / "mixtral"}),
    ):
        if layout is not None:
            set_groups(layout)
        try:
            build_model(**{"hf_path": folder, **arguments})
        except ValueError as error:
            said[name] = str(error)
    try:
        use_jetrl(object())
    except ValueError as error:
        said["no provider"] = str(error)
    return said


def sync_settings() -> dict[str, str]:
    """What a rank is told whose settings of a weight sync are not the other's, by setting."""

    class Everywhere(TensorSource):
        distributed = True

    second, said = torch.distributed.get_rank() == 1, {}
    recipe = Fp8BlockRecipe(scale_format="fp32" if second else "ue8m0")
    different: dict[str, tuple[Fp8BlockRecipe, dict[str, Any]]] = {
        "recipe": (recipe, {}),
        "receivers": (JETRL_FP8, {"receivers": 3 if second else 2}),
        "bucket_bytes": (JETRL_FP8, {"bucket_bytes": 1 << 21 if second else 1 << 20}),
        "timeout": (JETRL_FP8, {"timeout": 7.0 if second else 5.0}),
    }
    for name, (used, options) in different.items():
        try:
            JetRLWeightSynchronizer(Everywhere({"norm.weight": torch.ones(4)}, used), **options)
        except ValueError as error:
            said[name] = str(error)
    return said


BODIES: dict[str, Callable[[], Any]] = {
    **{f"bf16_{name}": functools.partial(train_one_step, None, layout) for name, layout in LAYOUTS.items()},
    "fp8_tp2_sp": functools.partial(train_one_step, JETRL_FP8, SP),
    "fp8_pp2_vpp2": functools.partial(train_one_step, JETRL_FP8, LAYOUTS["pp2_vpp2"]),
    "moe_ep1": functools.partial(mixture_of_experts, 1),
    "moe_ep2": functools.partial(mixture_of_experts, 2),
    "random_states": random_states,
    "float8_gather": float8_gather,
    "data_broadcast": data_broadcast,
    "own_provider": own_provider,
    "isolation": isolation,
    "refusals": refusals,
    "sync_settings": sync_settings,
}
