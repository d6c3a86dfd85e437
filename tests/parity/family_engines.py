"""vLLM's own loader and engine for a list of exports, in one process: `python -m tests.parity.family_engines DIR`.

DIR/request.json is a list of cases, {"folder": of an export, "how": one of

    "load"   vLLM builds the model and loads the weights; nothing is prepared for a kernel, so that experts can be seen
             on a CPU that has none for them
    "draft"  the same for the model's layers of multi-token prediction
    "serve"  an engine generates

"mla": whether latent attention is vLLM's own kernel}. For case N DIR/N.safetensors gets what vLLM holds, under a
checkpoint's names, and DIR/N.json {"tokens"} or {"error"}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jetrl_megatron.verify.environment import cpu_engine_environment
from jetrl_megatron.verify.loaded_weights import cuts

PROMPTS = ([3, 4, 5], [9, 8])
TOKENS = 4
# vLLM's classes for layers of multi-token prediction do not say what they merge.
_MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
_DRAFT_LAYER = ".mtp_block"
_ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}


def held_tensors(model: torch.nn.Module, *, linears_alone: bool) -> dict[str, torch.Tensor]:
    """What a vLLM model holds, merged matrices cut apart by vLLM's own description of them.

    Args:
        linears_alone: FP8 linears alone; an engine has rearranged others for its kernels.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        # A tied head is the embedding's parameter, and experts know the router's.
        own = {key: value.data for key, value in module.named_parameters(recurse=False) if id(value) not in seen}
        seen |= {id(value) for value in module.parameters(recurse=False)}
        if linears_alone and not hasattr(getattr(module, "quant_method", None), "fp8_linear"):
            continue
        packed = _MERGED | getattr(model, "packed_modules_mapping", {})
        found.update(_of_module(name.replace(_DRAFT_LAYER, ""), module, own, packed))
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def _of_module(
    name: str, module: torch.nn.Module, own: dict[str, torch.Tensor], packed: dict[str, list[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, LinearBase):
        for cut in cuts(name, module, packed):
            for key, tensor in own.items():
                edge = module.weight_block_size[0] if key == "weight_scale_inv" else 1
                rows = slice(cut.start // edge, -(-(cut.start + cut.rows) // edge))
                yield f"{cut.name}.{key}", tensor[rows]
    elif "w13_weight" in own:
        experts = name.removesuffix(".routed_experts")
        gate, down, up = ("w1", "w2", "w3") if "block_sparse_moe" in name else ("gate_proj", "down_proj", "up_proj")
        for key, tensor in own.items():
            merged, _, kind = key.partition("_")
            for expert, matrix in enumerate(tensor):
                parts = zip((gate, up), matrix.chunk(2), strict=True) if merged == "w13" else [(down, matrix)]
                yield from ((f"{experts}.{expert}.{part}.{kind}", rows) for part, rows in parts)
    elif isinstance(module, VocabParallelEmbedding):
        yield from ((f"{name}.{key}", tensor[: module.org_vocab_size]) for key, tensor in own.items())
    elif not isinstance(module, AttentionLayerBase):
        # Attention's own parameters are scales of the KV cache.
        yield from ((f"{name}.{key}", tensor) for key, tensor in own.items())


def load(folder: str, *, draft: bool) -> torch.nn.Module:
    """The model that vLLM builds for an export, with the export's weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    speculative = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if draft else {}
    # Without the recipe's stamp the plugin does not refuse experts that this CPU would compute in another way.
    arguments = EngineArgs(folder, hf_overrides={"jetrl": None}, **speculative, **_ARGUMENTS)
    config = arguments.create_engine_config()
    model_config = config.speculative_config.draft_model_config if draft else config.model_config
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'store'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config, model_config=model_config)
        get_model_loader(config.load_config).load_weights(model, model_config)
    return model


def serve(folder: str) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Tokens that an engine generates, and its FP8 linears."""
    from vllm import LLM, SamplingParams

    engine = LLM(folder, **_ARGUMENTS)
    parameters = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], parameters, use_tqdm=False)
    (held,) = engine.apply_model(_held_linears)
    return [list(output.outputs[0].token_ids) for output in outputs], held


def _held_linears(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return held_tensors(model, linears_alone=True)


def run(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The result of one case and the tensors that vLLM holds; {} after an error, whose text is the result."""
    from vllm import ModelRegistry
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ["VLLM_MLA_DISABLE"] = "0" if case["mla"] else "1"
    # vLLM would import the model's class in another process, to look at it, and that takes ten seconds.
    for architecture in json.loads((Path(case["folder"]) / "config.json").read_text())["architectures"]:
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    try:
        if case["how"] == "serve":
            tokens, held = serve(case["folder"])
            return {"tokens": tokens}, held
        return {}, held_tensors(load(case["folder"], draft=case["how"] == "draft"), linears_alone=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, {}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def main() -> None:
    """Runs every case."""
    # In this process, so that one import of vLLM is enough for all.
    os.environ.update(
        cpu_engine_environment(1), VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1"
    )
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    work = Path(sys.argv[1])
    for number, case in enumerate(json.loads((work / "request.json").read_text())):
        result, held = run(case)
        save_file(held, work / f"{number}.safetensors")
        (work / f"{number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
