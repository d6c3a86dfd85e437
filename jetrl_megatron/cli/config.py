"""`jetrl config`: a NeMo-RL configuration as the workers get it, and where each key came from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Prints a NeMo-RL configuration with `precision: jetrl_fp8` resolved into NeMo-RL's own keys: one line for each key, with
the file that set it, or what of the recipe it follows from. With a NeMo-RL checkout on PYTHONPATH its defaults are in
it, and overrides may follow, as on NeMo-RL's command line: policy.train_global_batch_size=64."""


def register(subcommands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "config", help="print a NeMo-RL configuration, resolved, with the origin of each key", description=_DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="YAML file, e.g. conf/grpo_qwen3_8b_1n8g.yaml")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides in NeMo-RL's syntax")
    parser.add_argument("--overlay", metavar="FILE", type=Path, action="append", default=[], help="file on top of it")
    parser.add_argument("--json", action="store_true", help="print values and origins as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Resolves and prints; an error names the key, its value and where it came from."""
    from jetrl_megatron.integrations.nemo_rl.command import read_config

    resolved = read_config(arguments.file, arguments.overlay, arguments.overrides)
    if arguments.json:
        print(json.dumps({"values": resolved.values, "origins": resolved.origins, "notes": resolved.notes}, indent=1))
        return 0
    print(resolved.to_text())
    for note in resolved.notes:
        print(f"note: {note}")
    return 0
