"""`jetrl convert`: a Megatron checkpoint becomes a block-FP8 checkpoint for vLLM."""

from __future__ import annotations

from typing import Any

from jetrl_megatron.convert.command import DESCRIPTION, add_arguments, run


def register(subcommands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    parser = subcommands.add_parser(
        "convert", help="convert a Megatron checkpoint to a block-FP8 checkpoint for vLLM", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.set_defaults(run=run)
