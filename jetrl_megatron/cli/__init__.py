"""The command `jetrl`.

Each module of this package is a subcommand: its `register(subcommands)` adds a parser and sets `run`, a function that
takes the parsed arguments. Modules import what is heavy inside `run`, so that `jetrl --help` waits for torch alone.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

from jetrl_megatron import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        arguments: command line without the program's name; None takes the process's own.

    Returns:
        the exit status: 0, or 2 after an error of the user, of which the message alone is printed.
    """
    parsed = _parser().parse_args(arguments)
    try:
        status: int | None = parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"jetrl: error: {error}", file=sys.stderr)
        return 2
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jetrl", description="FP8 reinforcement learning for Megatron-core and vLLM.")
    parser.add_argument("--version", action="version", version=f"jetrl {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}").register(subcommands)
    return parser
