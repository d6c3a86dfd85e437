"""Megatron-Bridge with JetRL's linears: Hugging Face folder -> Megatron model -> Hugging Face tensors.

`build_model` makes a model from a folder; `use_jetrl` is for those who configure a Megatron-Bridge provider themselves.
Both only set the provider's `transformer_layer_spec`; weights go in and out through Megatron-Bridge's own mappings.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.convert.bridge import import_bridge
from jetrl_megatron.integrations import megatron_cpu
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""`model_type` of the Hugging Face configurations that `build_model` takes: dense decoders."""

# Fusions that run on CUDA alone, or come from TransformerEngine or Apex.
_FUSIONS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)
_NOT_FOR_USERS = ("ModelProviderMixin-based model configuration is deprecated", "full scope is deprecated")


def build_model(
    hf_path: str | Path,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    sequence_parallel: bool = False,
    virtual_pipeline: int | None = None,
    recipe: Fp8BlockRecipe | None = None,
    parity: bool = False,
    load_weights: bool = True,
    ddp: Any = False,
    **overrides: Any,
) -> list[Any]:
    """Builds this rank's part of a dense Llama, Qwen2, Qwen2.5 or Qwen3 model, with BF16 parameters.

    `torch.distributed` and Megatron's `parallel_state` must be initialised, and the random-state tracker seeded if
    weights are not loaded. On a machine without CUDA the model is built for the CPU (`megatron_cpu.install` is called)
    with Megatron's local layer spec, as it is where TransformerEngine is absent.

    Args:
        hf_path: folder with config.json and safetensors.
        tensor_parallel, pipeline_parallel: sizes of the groups that are initialised.
        sequence_parallel: split activations along the sequence between tensor-parallel linears.
        virtual_pipeline: model chunks a pipeline stage, or None.
        recipe: which linears run in FP8 and how; None builds Megatron's own BF16 model.
        parity: the operators around the linears give vLLM's bytes too, see `jetrl_spec`. Needs a recipe.
        load_weights: read the folder's weights; False initialises at random.
        ddp: True wraps in DistributedDataParallel for the distributed optimizer, with gradients reduced in FP32; a
            DistributedDataParallelConfig wraps with that one.
        overrides: further fields of the Megatron-Bridge provider, e.g. `recompute_granularity="full"`.

    Returns:
        one wrapped model a virtual stage; its `config` is the provider.

    Raises:
        ValueError: the process groups are missing or of other sizes, the architecture is not supported, an override
            is no field of the provider, or `parity` is asked for without a recipe.
        ImportError: Megatron-core or Megatron-Bridge is missing.
    """
    if parity and recipe is None:
        raise ValueError("parity=True needs a recipe: a BF16 model has no FP8 rollout to equal; pass recipe=JETRL_FP8")
    if not torch.cuda.is_available():
        megatron_cpu.install()
    bridge = import_bridge()
    _require_groups(tensor_parallel, pipeline_parallel)
    _require_supported(hf_path)
    layout = {
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        "virtual_pipeline_model_parallel_size": virtual_pipeline,
        "sequence_parallel": sequence_parallel and tensor_parallel > 1,
    }
    fields = {**layout, **_fields_of_interleaving(virtual_pipeline), **_fields_without_te(), **overrides}
    with _quietly():
        provider = bridge.AutoBridge.from_hf_pretrained(str(hf_path)).to_megatron_provider(load_weights=load_weights)
        _set_fields(provider, fields)
        if recipe is not None:
            use_jetrl(provider, recipe, parity=parity)
        provider.apply_overrides_and_finalize(dtype=torch.bfloat16)
        models: list[Any] = provider.provide_distributed_model(
            wrap_with_ddp=bool(ddp), ddp_config=_ddp_config(ddp), use_cpu_initialization=not torch.cuda.is_available()
        )
    if parity:
        from jetrl_megatron.layers import use_parity_head

        models = [use_parity_head(model) for model in models]
    return models


def use_jetrl(provider: Any, recipe: Fp8BlockRecipe = JETRL_FP8, *, parity: bool = False) -> Any:
    """Puts JetRL's FP8 linears into a Megatron-Bridge provider, in the place of those that its layer spec names.

    Where TransformerEngine is absent, Megatron's local layer spec stands in for the provider's default one.

    Args:
        provider: a GPTModelProvider, before `provide` or `provide_distributed_model` is called; modified.
        recipe: which linears run in FP8 and how.
        parity: see `jetrl_spec`; call `use_parity_head` on the models that the provider makes.

    Returns:
        the provider.

    Raises:
        ValueError: the provider has no `transformer_layer_spec`.
    """
    if not hasattr(provider, "transformer_layer_spec"):
        raise ValueError(
            f"provider={type(provider).__name__} has no transformer_layer_spec: pass what to_megatron_provider() "
            "returns for a decoder, a GPTModelProvider"
        )
    import_bridge()
    specs = importlib.import_module("megatron.bridge.models.gpt_provider")
    layer_spec = provider.transformer_layer_spec
    if layer_spec is specs.default_layer_spec and not _has_transformer_engine():
        layer_spec = specs.local_layer_spec
    provider.transformer_layer_spec = functools.partial(
        jetrl_layer_spec, layer_spec=layer_spec, recipe=recipe, parity=parity
    )
    return provider


def jetrl_layer_spec(
    config: Any, vp_stage: int | None = None, *, layer_spec: Any, recipe: Fp8BlockRecipe, parity: bool = False
) -> Any:
    """The layer spec that a provider would have used, with FP8 linears.

    Args:
        config: the provider.
        vp_stage: virtual pipeline stage, for layer specs that ask for it.
        layer_spec: a ModuleSpec, or a callable `(config)` or `(config, vp_stage)` that returns one.
        recipe: which linears run in FP8 and how.
        parity: see `jetrl_spec`; a layer's spec becomes the block spec of its stage, with the final norm in it.
    """
    from jetrl_megatron.spec import jetrl_spec, parity_block_spec

    if callable(layer_spec):
        takes_stage = "vp_stage" in inspect.signature(layer_spec).parameters
        layer_spec = layer_spec(config, vp_stage=vp_stage) if takes_stage else layer_spec(config)
    if parity:
        return parity_block_spec(config, layer_spec, recipe, vp_stage=vp_stage)
    return jetrl_spec(layer_spec, recipe)


def export_hf_weights(models: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a model's weights under their Hugging Face names, gathered over tensor and pipeline ranks.

    A collective: every rank must consume it to the end, and every rank gets every tensor. Weights that the Hugging Face
    folder ties are yielded once. A tensor may be a view of the model's own: clone what must outlive an optimizer step.

    Args:
        models: what `build_model` returned.

    Yields:
        (name, BF16 tensor) in the order of the folder's files.

    Raises:
        ValueError: the model does not say from which Hugging Face folder it was built.
    """
    config = importlib.import_module("megatron.core.utils").get_model_config(models[0])
    hf_path = getattr(config, "hf_model_id", None)
    if hf_path is None:
        raise ValueError(
            f"models[0].config ({type(config).__name__}) has no hf_model_id, so its Hugging Face names are unknown: "
            "build the model with build_model, or set provider.hf_model_id to the folder"
        )
    hf = import_bridge().AutoBridge.from_hf_pretrained(hf_path)
    yield from hf.export_hf_weights(models, show_progress=False)


def _require_groups(tensor_parallel: int, pipeline_parallel: int) -> None:
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "Megatron's process groups are not initialised: call torch.distributed.init_process_group and "
            f"parallel_state.initialize_model_parallel({tensor_parallel}, {pipeline_parallel}) first"
        )
    for name, asked, found in (
        ("tensor_parallel", tensor_parallel, parallel_state.get_tensor_model_parallel_world_size()),
        ("pipeline_parallel", pipeline_parallel, parallel_state.get_pipeline_model_parallel_world_size()),
    ):
        if asked != found:
            raise ValueError(f"{name}={asked}, but the initialised group has {found} ranks: give both the same size")


def _require_supported(hf_path: str | Path) -> None:
    model_type = importlib.import_module("transformers").AutoConfig.from_pretrained(str(hf_path)).model_type
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model_type={model_type!r} of {hf_path} is not supported here: use one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}, or build the provider with Megatron-Bridge and call use_jetrl on it"
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _NOT_FOR_USERS:
            warnings.filterwarnings("ignore", message=message)
        yield


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _fields_without_te() -> dict[str, Any]:
    if torch.cuda.is_available() and _has_transformer_engine():
        return {}
    return {
        **dict.fromkeys(_FUSIONS, False),
        "transformer_layer_spec": importlib.import_module("megatron.bridge.models.gpt_provider").local_layer_spec,
        "transformer_impl": "local",
        # Megatron's own attention takes its softmax in BF16 otherwise.
        "attention_softmax_in_fp32": True,
    }


def _fields_of_interleaving(virtual_pipeline: int | None) -> dict[str, Any]:
    # In one batch, two stages that send each other several tensors match them up wrongly.
    return {"overlap_p2p_comm": True, "batch_p2p_comm": False} if virtual_pipeline else {}


def _set_fields(provider: Any, fields: dict[str, Any]) -> None:
    unknown = sorted(name for name in fields if not hasattr(provider, name))
    if unknown:
        raise ValueError(f"{unknown} are no fields of {type(provider).__name__}: use those of Megatron's config")
    for name, value in fields.items():
        setattr(provider, name, value)


def _ddp_config(ddp: Any) -> Any:
    if isinstance(ddp, bool):
        config = importlib.import_module("megatron.core.distributed").DistributedDataParallelConfig
        return config(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return ddp
