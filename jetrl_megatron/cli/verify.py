"""`jetrl verify`: do training and rollout give the same tokens the same log-probs, bit for bit?"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Checks the rollout folder and the precision flow of both sides, lets vLLM generate at temperature 1, and has a real
Megatron model score the same tokens. Runs on this machine's GPUs, or on its CPUs where it has none. The status is 0
where zero mismatch holds or is not promised (the report says why), 1 where it is promised and does not hold, 2 for bad
input, and 3 where an engine or a rank failed."""
_PLOTS = (".png", ".pdf", ".svg")


def register(subcommands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "verify", help="measure the mismatch between a training model and its rollout", description=_DESCRIPTION
    )
    add = parser.add_argument
    add("--train", metavar="DIR", type=Path, required=True, help="BF16 Hugging Face folder or torch_dist checkpoint")
    add("--rollout", metavar="DIR", type=Path, required=True, help="block FP8 folder that vLLM serves")
    add("--hf-config", metavar="DIR", type=Path, help="config.json of a checkpoint's model (default: --rollout's)")
    add("--tp", metavar="N", type=int, default=1, help="tensor-parallel size of both sides (default: 1)")
    add("--sequence-parallel", action="store_true", help="of training, with --tp 2 or more")
    add("--rollout-tp", metavar="N", type=int, help="of the rollout, if it is another")
    add("--sequences", "--seqs", metavar="M", type=int, default=64, help="sequences (default: 64)")
    add("--tokens", metavar="N", type=int, default=600, help="generated tokens of each (default: 600)")
    add("--further", metavar="MxN", type=_pair, action="append", default=[], help="another batch; may be repeated")
    add("--prompt-tokens", metavar="N", type=int, default=32, help="random tokens before them (default: 32)")
    add("--prompts", metavar="FILE", type=Path, help="JSON list of lists of token ids to continue instead")
    add("--seed", metavar="N", type=int, default=0, help="of the prompts (default: 0)")
    add("--mode", choices=("parity", "default", "bf16"), default="parity", help="how the engine serves")
    add("--compare", action="store_true", help="also score with Megatron's own operators, and in BF16")
    add("--prefill", action="store_true", help="also have the engine score its own tokens")
    add("--steps", metavar="N", type=int, default=0, help="generate again after N optimizer steps and a weight update")
    add("--learning-rate", metavar="X", type=float, default=1e-4, help="of those steps (default: 1e-4)")
    add("--json", metavar="FILE", type=Path, help="write rows, findings and the metrics by position")
    add("--plot", metavar="FILE", type=Path, help="draw |dlogp| and KL against token position")
    add("--keep", metavar="DIR", type=Path, help="folder for requests, results and logs (default: a temporary one)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verifies and prints the report."""
    from jetrl_megatron.verify.child import ChildError
    from jetrl_megatron.verify.run import VerifyOptions, verify

    for path in (arguments.json, arguments.plot):
        _check_output(path)
    if arguments.plot is not None and arguments.plot.suffix not in _PLOTS:
        raise ValueError(f"plot={arguments.plot}: name a file that ends in one of {', '.join(_PLOTS)}")
    options = VerifyOptions(
        train=arguments.train,
        rollout=arguments.rollout,
        hf_config=arguments.hf_config,
        tp=arguments.tp,
        sequence_parallel=arguments.sequence_parallel,
        rollout_tp=arguments.rollout_tp,
        sequences=arguments.sequences,
        tokens=arguments.tokens,
        further=tuple(arguments.further),
        prompt_tokens=arguments.prompt_tokens,
        prompts=read_prompts(arguments.prompts) if arguments.prompts else (),
        seed=arguments.seed,
        mode=arguments.mode,
        variants=("parity", "ordinary", "bf16") if arguments.compare else ("parity",),
        prefill=arguments.prefill,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
    )
    try:
        with _folder(arguments.keep) as work:
            report = verify(options, work, shlex.join(["jetrl", *sys.argv[1:]]))
    except ChildError as error:
        print(f"jetrl verify: {error}", file=sys.stderr)
        return 3
    print(report.to_markdown())
    if arguments.json:
        report.write_json(arguments.json)
    if arguments.plot:
        report.write_plot(arguments.plot)
    return report.status


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: {path.absolute().parent} is no folder: create it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")


def _pair(text: str) -> tuple[int, int]:
    sequences, _, tokens = text.partition("x")
    if not (sequences.isdecimal() and tokens.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 300x600: sequences, and tokens of each")
    return int(sequences), int(tokens)


def read_prompts(path: Path) -> tuple[tuple[int, ...], ...]:
    """Prompts from a JSON file.

    Raises:
        ValueError: it holds anything but a list of lists of token ids.
    """
    try:
        prompts = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"prompts={path} cannot be read ({error.strerror}): name a JSON file") from error
    except ValueError as error:
        raise ValueError(f"prompts={path} is no JSON file: {error}") from error
    if not (isinstance(prompts, list) and prompts and all(_is_prompt(prompt) for prompt in prompts)):
        raise ValueError(f"prompts={path} must hold a list of lists of token ids, e.g. [[1, 2], [3]]")
    return tuple(tuple(prompt) for prompt in prompts)


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="jetrl-verify-") as folder:
            yield Path(folder)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ValueError(f"keep={keep} is no empty folder: name another one, or empty it")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"keep={keep} cannot be created ({error.strerror}): name another folder") from error
    yield keep
