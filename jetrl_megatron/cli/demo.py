"""`jetrl demo`: a real model, trained in FP8 by Megatron and served in FP8 by vLLM, on a CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Trains SmolLM2-135M-Instruct for some steps in FP8 with Megatron-core, exports it with the training's scales, lets vLLM
generate from it, and compares scales and log-probs of both sides. Needs no GPU and no network. The status is 1 where a
phase failed, or where two places that should hold the same scales do not."""


def register(subcommands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "demo", help="train a small model in FP8, serve it in FP8, and measure the mismatch", description=_DESCRIPTION
    )
    parser.add_argument("--steps", metavar="N", type=int, default=8, help="optimizer steps (default: 8)")
    parser.add_argument("--tp", metavar="N", type=int, default=2, help="tensor-parallel ranks of training (default: 2)")
    parser.add_argument("--pp", metavar="N", type=int, default=1, help="pipeline stages of training (default: 1)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/demo"), help="default: out/demo")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of problems and sampling (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo and prints its report."""
    from jetrl_megatron.demo.options import DemoOptions
    from jetrl_megatron.demo.run import run_demo
    from jetrl_megatron.verify.child import ChildError

    options = DemoOptions(steps=arguments.steps, tp=arguments.tp, pp=arguments.pp, seed=arguments.seed)
    try:
        report = run_demo(options, arguments.out)
    except ChildError as error:
        print(f"jetrl demo: {error}", file=sys.stderr)
        return 1
    print(report.to_markdown())
    print(f"{arguments.out}: report.json, report.md, report.png")
    return 0 if report.scales_equal else 1
