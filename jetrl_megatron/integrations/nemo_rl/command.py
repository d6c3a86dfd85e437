"""`python -m jetrl_megatron.integrations.nemo_rl grpo`: NeMo-RL's own GRPO script with a resolved configuration."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from jetrl_megatron.integrations.nemo_rl.checkout import nemo_rl_checkout, require_nemo_rl_checkout
from jetrl_megatron.integrations.nemo_rl.files import LoadedConfig, leaves, load_config
from jetrl_megatron.integrations.nemo_rl.resolution import ResolvedConfig, resolve
from jetrl_megatron.integrations.nemo_rl.seams import check_checkout

SCRIPTS = {"grpo": Path("examples", "run_grpo.py")}
"""NeMo-RL's scripts that the command runs, by name."""
COMMAND_LINE = "command line"
"""Origin of a key that an override set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of NeMo-RL's scripts in this process.

    Args:
        arguments: command line without the program's name; None takes the process's own.

    Returns:
        0, or 2 after an error of the user, of which the message alone is printed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jetrl_megatron.integrations.nemo_rl",
        description="NeMo-RL with precision: jetrl_fp8. Further arguments override keys, in NeMo-RL's syntax.",
    )
    parser.add_argument("algorithm", choices=sorted(SCRIPTS))
    parser.add_argument("--config", required=True, type=Path, metavar="FILE")
    parser.add_argument("--overlay", type=Path, metavar="FILE", action="append", default=[], help="file on top of it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    # Intermixed: overrides stand behind options.
    parsed = parser.parse_intermixed_args(arguments)
    try:
        script, resolved = prepare(parsed.algorithm, parsed.config, parsed.overlay, parsed.overrides)
    except ValueError as error:
        print(f"jetrl: error: {error}", file=sys.stderr)
        return 2
    for note in resolved.notes:
        print(f"jetrl: note: {note}")
    run_script(script, resolved)
    return 0


def prepare(
    algorithm: str, config: Path, overlays: Sequence[Path], overrides: Sequence[str]
) -> tuple[Path, ResolvedConfig]:
    """Everything that can fail before Ray starts: the checkout, its seams, the configuration.

    Returns:
        NeMo-RL's script and the configuration for it.

    Raises:
        ValueError: there is no checkout, it is another than this package knows, or the configuration is wrong.
    """
    root = require_nemo_rl_checkout()
    resolved = read_config(config, overlays, overrides)
    from jetrl_megatron.integrations.nemo_rl.driver import register_workers

    check_checkout(root)
    register_workers()
    return root / SCRIPTS[algorithm], resolved


def read_config(config: Path, overlays: Sequence[Path] = (), overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Reads and resolves a configuration.

    Args:
        config: YAML file.
        overlays: files on top of it.
        overrides: "key=value" in NeMo-RL's (hydra's) syntax; NeMo-RL has to be there to read them.

    Raises:
        ValueError: a file, a key or an override is wrong.
    """
    loaded = load_config(config, overlays)
    _override(loaded, overrides)
    return resolve(loaded)


def run_script(script: Path, resolved: ResolvedConfig) -> None:
    """Runs NeMo-RL's script as if it was called with the configuration."""
    with tempfile.TemporaryDirectory(prefix="jetrl-nemo-rl-") as folder:
        path = Path(folder) / "config.yaml"
        OmegaConf.save(OmegaConf.create(resolved.values), path)
        arguments, sys.argv = sys.argv, [str(script), "--config", str(path)]
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv = arguments


def _override(loaded: LoadedConfig, overrides: Sequence[str]) -> None:
    if not overrides:
        return
    if nemo_rl_checkout() is None:
        raise ValueError(f"overrides={list(overrides)} need NeMo-RL, which reads them: add its checkout to PYTHONPATH")
    theirs = importlib.import_module("nemo_rl.utils.config")
    before = _plain_leaves(loaded.values)
    try:
        loaded.values = theirs.parse_hydra_overrides(loaded.values, list(overrides))
    except theirs.OverridesError as error:
        raise ValueError(f"overrides={list(overrides)}: {error}") from error
    OmegaConf.set_struct(loaded.values, False)
    after = _plain_leaves(loaded.values)
    named = [override.lstrip("+~").partition("=")[0] for override in overrides]
    for key in before.keys() - after.keys():
        loaded.origins.pop(key, None)
    for key, value in after.items():
        if key not in before or before[key] != value or any(f"{key}.".startswith(f"{name}.") for name in named):
            loaded.origins[key] = COMMAND_LINE


def _plain_leaves(values: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(values, resolve=False)
    return dict(leaves(plain))
