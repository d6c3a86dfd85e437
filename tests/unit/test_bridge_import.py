"""Megatron-Bridge without TransformerEngine: it imports, and nobody else is fooled."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_megatron.convert import bridge as bridge_module
from jetrl_megatron.convert.bridge import import_bridge, release_of

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

ROOT = Path(__file__).parents[2]
FRESH = """
import logging, sys
from importlib.util import find_spec
before = (list(sys.meta_path), list(logging.root.handlers), logging.root.level)
from jetrl_megatron.convert.bridge import import_bridge
assert import_bridge() is import_bridge() is sys.modules["megatron.bridge"]
assert (list(sys.meta_path), list(logging.root.handlers), logging.root.level)[1:] == before[1:]
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("jetrl_megatron")]
from megatron.core import fp8_utils
from megatron.core.extensions import transformer_engine as extension
if find_spec("transformer_engine") is None:
    assert not fp8_utils.HAVE_TE and not extension.HAVE_TE
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
if find_spec("vllm") is not None:
    import vllm
    assert vllm.LLM.__name__ == "LLM"
"""


def test_import_bridge_leaves_the_process_as_it_was():
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:megatron", "-c", FRESH],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "megatron" not in run.stdout.lower()


@pytest.mark.parametrize(
    ("name", "parameter", "expected"),
    [
        ("JetRLColumnParallelLinear", "weight", "column"),
        ("JetRLRowParallelLinear", "weight", "row"),
        ("JetRLLayerNormColumnParallelLinear", "weight", "column"),
        ("JetRLLayerNormColumnParallelLinear", "bias", "column"),
        ("JetRLLayerNormColumnParallelLinear", "layer_norm_weight", "replicated"),
    ],
)
def test_import_bridge_registers_our_linears(name, parameter, expected):
    import_bridge()
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    mapping = AutoMapping(f"decoder.layers.0.linear.{parameter}", "model.layers.0.linear.weight")
    assert mapping._detect_parallelism_type(type(name, (), {})()) == expected


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_import_bridge_stand_in_says_what_is_missing():
    import_bridge()
    from megatron.bridge.peft import lora_layers

    assert not isinstance(object(), (lora_layers.te.Linear, lora_layers.te.LayerNormLinear))
    with pytest.raises(ImportError, match=r"transformer_engine.pytorch.ops.Sequential needs TransformerEngine"):
        lora_layers.te.ops.Sequential()


def test_import_bridge_of_another_release_raises(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.bridge", raising=False)
    monkeypatch.setattr(bridge_module, "release_of", lambda package: (0, 9, 1))
    with pytest.raises(ValueError, match=r"megatron-bridge 0.9.1 is installed; release 0.6.x is supported: install"):
        import_bridge()
    assert "megatron.bridge" not in sys.modules


def test_release_of_missing_package_raises():
    assert release_of("megatron.core") >= (0, 19, 0)
    with pytest.raises(ImportError, match=r"megatron.no_such_part is not installed; install it with: pip install"):
        release_of("megatron.no_such_part")
