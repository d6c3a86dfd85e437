"""`jetrl convert`: a Megatron checkpoint becomes a block-FP8 checkpoint for vLLM."""

from __future__ import annotations

import argparse
from typing import Any

_DESCRIPTION = """\
Converts a Megatron torch_dist checkpoint of any parallel layout to a block-FP8 Hugging Face checkpoint that vLLM loads.
One process, no GPU. OUT appears when it is complete."""


def register(subcommands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "convert", help="convert a Megatron checkpoint to a block-FP8 checkpoint for vLLM", description=_DESCRIPTION
    )
    parser.add_argument("src", metavar="SRC", help="torch_dist checkpoint, or training folder with iter_XXXXXXX in it")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument("--hf-config", metavar="DIR", required=True, help="folder with the trained model's config.json")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder with the tokenizer (default: that of --hf-config)")
    parser.add_argument("--recipe", metavar="FILE", help="recipe file (default: the one beside the checkpoint)")
    parser.add_argument("--scale-format", choices=("ue8m0", "fp32"), help="scales: powers of two, or any float32")
    parser.add_argument(
        "--ignore", metavar="PATTERN", nargs="+", help="Megatron linears that stay BF16, e.g. '*.linear_fc2'"
    )
    parser.add_argument("--bf16-start", metavar="N", type=int, help="number of first layers that stay BF16")
    parser.add_argument("--bf16-end", metavar="N", type=int, help="number of last layers that stay BF16")
    parser.add_argument("--rollout-tp", metavar="N", type=int, help="refuse shapes that vLLM cannot cut into N parts")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is an export of this command")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Converts, and prints where the export is and which recipe it carries."""
    from jetrl_megatron.convert.export import convert_checkpoint
    from jetrl_megatron.convert.recipe_file import load_recipe
    from jetrl_megatron.convert.writer import exported_recipe

    asked = {
        "scale_format": arguments.scale_format,
        "ignore": tuple(arguments.ignore) if arguments.ignore else None,
        "num_layers_at_start_in_bf16": arguments.bf16_start,
        "num_layers_at_end_in_bf16": arguments.bf16_end,
    }
    out = convert_checkpoint(
        arguments.src,
        arguments.out,
        hf_config=arguments.hf_config,
        recipe=load_recipe(arguments.recipe) if arguments.recipe else None,
        recipe_fields={field: value for field, value in asked.items() if value is not None},
        tokenizer_from=arguments.tokenizer,
        rollout_tp=arguments.rollout_tp,
        force=arguments.force,
    )
    recipe = exported_recipe(out)
    print(f"{out}: block FP8, {recipe.scale_format} scales, recipe {recipe.fingerprint}")
