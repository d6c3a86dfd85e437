"""NeMo-RL's Megatron worker with our layers, on a CPU: it scores, trains and is ready to send."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_megatron.integrations.nemo_rl.checkout import nemo_rl_checkout
from jetrl_megatron.integrations.nemo_rl.seams import UnsupportedNemoRL, check_checkout

ROOT = Path(__file__).parents[2]
NEEDED = ("ray", "modelopt", "megatron.bridge")


def _missing() -> str | None:
    root = nemo_rl_checkout()
    if root is None:
        return "no NeMo-RL checkout on PYTHONPATH"
    try:
        check_checkout(root)
    except UnsupportedNemoRL as error:
        return str(error)
    return next((f"needs {name}" for name in NEEDED if importlib.util.find_spec(name) is None), None)


if reason := _missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `nemo_rl_policy` saw."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = subprocess.run(
        [sys.executable, "-O", "-m", "tests.parity.nemo_rl_policy", str(tmp_path_factory.mktemp("nemo_rl")), str(port)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_policy_worker_has_our_linears_and_can_send(seen):
    assert seen["linears"] == ["JetRLColumnParallelLinear"] * 4 + ["JetRLRowParallelLinear"] * 4
    assert seen["endpoints"] == 1 and seen["synchronizer"] == 0


def test_policy_worker_trains(seen):
    assert seen["finite"] and seen["spread"] > 0.01
    assert seen["grad_norm"] > 0 and seen["moved"] > 0


def test_policy_worker_has_no_mismatch_with_its_own_log_probs(seen):
    # Sums over microbatches, each weighted by its tokens.
    assert seen["token_mult_prob_error"] == 1 and seen["gen_kl_error"] == 0 and seen["probs_ratio"] == 1


def test_policy_worker_frees_quantised_weights_for_the_rollout(seen):
    assert seen["held"] == seen["released"] == len(seen["linears"])


def test_policy_worker_leaves_nemo_rls_spec_in_checkpoints(seen):
    assert "jetrl" not in seen["spec"]
