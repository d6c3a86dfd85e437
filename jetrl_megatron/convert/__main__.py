"""`python -m jetrl_megatron.convert`: what `jetrl convert` does, for launchers that start a module."""

from __future__ import annotations

import argparse
import sys

from jetrl_megatron.convert.command import DESCRIPTION, add_arguments, run


def main() -> int:
    """Runs the command; 2 after an error of the user, of which the message alone is printed."""
    parser = argparse.ArgumentParser(prog="python -m jetrl_megatron.convert", description=DESCRIPTION)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except (ValueError, OSError) as error:
        print(f"jetrl: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
