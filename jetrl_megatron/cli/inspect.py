"""`jetrl inspect`: what an FP8 checkpoint holds, and where it contradicts itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Prints the tensors of an FP8 checkpoint in Hugging Face format, ours or another's: dtypes, shapes, grids and range of
the scales, the recipe's fingerprint, and every contradiction: an FP8 tensor without a scale, a wrong grid, a scale that
is zero or not finite, an index and files that disagree. Reads headers and scales, no codes. The status is 1 where there
is a contradiction."""


def register(subcommands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "inspect", help="show what an FP8 checkpoint holds, and where it contradicts itself", description=_DESCRIPTION
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("--json", action="store_true", help="print every tensor and fault as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Inspects and prints; 1 where something contradicts itself."""
    from jetrl_megatron.convert.inspect import inspect_folder

    found = inspect_folder(arguments.folder)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.to_text())
    return 1 if found.faults else 0
