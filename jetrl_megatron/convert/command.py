"""The command line of a conversion, the same for `jetrl convert` and for torchrun."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from jetrl_megatron.recipe import SCALE_DTYPES

if TYPE_CHECKING:
    from jetrl_megatron.convert.conversion import Conversion
    from jetrl_megatron.convert.ranks import Ranks

DESCRIPTION = """\
Converts a Megatron checkpoint of any parallel layout to a block-FP8 Hugging Face checkpoint that vLLM loads, without a
GPU. OUT appears when it is complete; after a kill the same command goes on where it was. `torchrun -m
jetrl_megatron.convert` with the same arguments shares the work among ranks that see the same folders. The status is 1
where --verify finds a difference in an export that is there, and 2 after an error."""

# What a shell reports for a command that Ctrl-C ended.
_INTERRUPTED = 130
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add("src", metavar="SRC", help="checkpoint, or training folder with iter_XXXXXXX in it")
    add("out", metavar="OUT", help="folder to make")
    add("--hf-config", metavar="DIR", required=True, help="folder with the trained model's config.json")
    add("--tokenizer", metavar="DIR", help="folder with the tokenizer (default: that of --hf-config)")
    add("--recipe", metavar="FILE", help="recipe file (default: the one beside the checkpoint)")
    add("--scale-format", choices=("ue8m0", "fp32"), help="scales: powers of two, or any float32")
    add("--scale-dtype", choices=SCALE_DTYPES, help="in which scales are stored (default: float32)")
    add("--ignore", metavar="PATTERN", nargs="+", help="Megatron linears that stay BF16, e.g. '*.linear_fc2'")
    add("--bf16-layers", metavar="FIRST/LAST", type=_pair, help="numbers of first and last layers that stay BF16")
    add("--bf16-start", metavar="N", type=int, help="number of first layers alone")
    add("--bf16-end", metavar="N", type=int, help="number of last layers alone")
    add("--rollout-tp", metavar="N", type=int, help="refuse shapes that vLLM cannot cut into N parts")
    add("--max-shard-size", metavar="SIZE", type=_size, help="largest weight file, e.g. 500MB (default: 5GB)")
    add("--workers", metavar="N", type=int, help="threads (default: the cores, at most 8)")
    add("--dry-run", action="store_true", help="print what would be written, and write nothing")
    add("--verify", action="store_true", help="compare the weights with the source again, before OUT appears")
    add("--force", action="store_true", help="replace OUT if it is an export of this command")


def run(arguments: argparse.Namespace) -> int:
    """Converts, plans or compares, and prints what came of it."""
    from pathlib import Path

    from jetrl_megatron.convert.conversion import open_conversion
    from jetrl_megatron.convert.ranks import ranks_of_launcher

    fields = _recipe_fields(arguments)
    with ranks_of_launcher() as ranks:
        options = _options(arguments, fields)
        conversion = ranks.agree(lambda: open_conversion(arguments.src, arguments.out, options))
        if arguments.dry_run:
            _say(ranks, conversion.to_text())
            return 0
        if arguments.verify and not arguments.force and Path(arguments.out).exists():
            return _compare(conversion, ranks)
        try:
            conversion.run(force=arguments.force, verify=arguments.verify, ranks=ranks)
        except KeyboardInterrupt:
            _say(ranks, f"interrupted; the same command goes on, or remove {conversion.work.folder}")
            return _INTERRUPTED
        recipe = conversion.job.recipe
        _say(ranks, f"{arguments.out}: block FP8, {recipe.scale_format} scales, recipe {recipe.fingerprint}")
        return 0


def _compare(conversion: Conversion, ranks: Ranks) -> int:
    lines = ranks.agree(lambda: conversion.differences(conversion.out, ranks))
    for line in lines:
        print(line)
    differ = ranks.any(bool(lines))
    if not differ:
        _say(
            ranks, f"{conversion.out}: every byte is what the source makes, recipe {conversion.job.recipe.fingerprint}"
        )
    return 1 if differ else 0


def _options(arguments: argparse.Namespace, fields: dict[str, Any]) -> Any:
    from jetrl_megatron.convert.conversion import ConvertOptions
    from jetrl_megatron.convert.recipe_file import load_recipe
    from jetrl_megatron.convert.writer import SHARD_BYTES

    return ConvertOptions(
        hf_config=arguments.hf_config,
        recipe=load_recipe(arguments.recipe) if arguments.recipe else None,
        recipe_fields=fields,
        tokenizer_from=arguments.tokenizer,
        rollout_tp=arguments.rollout_tp,
        scale_dtype=arguments.scale_dtype or SCALE_DTYPES[0],
        max_shard_size=SHARD_BYTES if arguments.max_shard_size is None else arguments.max_shard_size,
        workers=arguments.workers,
    )


def _recipe_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    first, last = arguments.bf16_layers or (None, None)
    if arguments.bf16_layers and (arguments.bf16_start, arguments.bf16_end) != (None, None):
        raise ValueError(
            f"--bf16-layers {first}/{last} already says how many first and last layers stay BF16: leave out "
            "--bf16-start and --bf16-end"
        )
    asked = {
        "scale_format": arguments.scale_format,
        "ignore": tuple(arguments.ignore) if arguments.ignore else None,
        "num_layers_at_start_in_bf16": arguments.bf16_start if first is None else first,
        "num_layers_at_end_in_bf16": arguments.bf16_end if last is None else last,
    }
    return {field: value for field, value in asked.items() if value is not None}


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text)


def _pair(text: str) -> tuple[int, int]:
    first, _, last = text.partition("/")
    if not (first.isdecimal() and last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1/2: first layers / last layers")
    return int(first), int(last)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?B?)", text.upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write e.g. 500MB or 5GB")
    return size
