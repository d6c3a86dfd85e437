#!/usr/bin/env bash
# Resolves pyproject.toml's extras and its group `checkout` into requirements/cpu.txt, for Python 3.12 and 3.13.
# Versions that the file already holds stay, unless --upgrade or --upgrade-package NAME is given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=requirements/cpu.txt
# uv reads the versions to keep from its output file. An unchanged lock is left alone, so that nothing is reinstalled.
new=.venv/cpu.txt
cp "$lock" "$new"

.venv/bin/uv pip compile pyproject.toml --python .venv/bin/python --universal --python-version 3.12 \
    --extra bridge --extra cpu --extra demo --extra test --extra docs --extra dev --group checkout \
    --no-annotate --no-header --no-emit-index-url --quiet --output-file "$new" "$@" >/dev/null
# Every line repeats the platform that pyproject.toml's [tool.uv] names; only what differs between Pythons is kept.
sed -Ei "s/ and (implementation_name|platform_machine|platform_python_implementation|sys_platform) == '[^']*'//g
    s/ ; python_full_version < '3.14'$//" "$new"
sed -i '1i # Written by `make lock`. Complete for Linux on x86-64: install it with --no-deps.' "$new"
cmp --silent "$new" "$lock" || cp "$new" "$lock"
