#!/usr/bin/env bash
# Makes .venv in the checkout from requirements/cpu.txt, from nothing: an interrupted run leaves no half-made environment.
# $PYTHON names the interpreter; without it the first Python 3.12 or 3.13 that runs is taken.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=requirements/cpu.txt

# A name on PATH may be a shim that starts nothing, and a distribution's Python may lack venv.
usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions" candidate
    for candidate in python3.12 python3.13 "$pyenv"/3.12*/bin/python "$pyenv"/3.13*/bin/python python3; do
        if usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || {
        echo "PYTHON=$PYTHON does not run as Python 3.12 or 3.13 with venv: name one that does, or leave it out" >&2
        exit 1
    }
    python=$PYTHON
else
    python=$(find_python) || {
        echo "No Python 3.12 or 3.13 with venv was found on PATH or in pyenv: install one (packages python3.12 and" \
            "python3.12-venv, or 'pyenv install 3.12'), or run 'make PYTHON=/path/to/python3.12'" >&2
        exit 1
    }
fi
command -v cc >/dev/null || {
    echo "No C compiler (cc) was found: install one (package build-essential); some packages have no wheel" >&2
    exit 1
}

echo "Making .venv with $("$python" --version) ($python); the packages take about 7 GB"
"$python" -m venv --clear .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^uv==' "$lock")"
# The lock is complete. --no-deps also spares packages whose own metadata asks for what this environment leaves out.
# $VIRTUAL_ENV rather than --python: so uv refuses a folder that is no virtual environment.
quiet=--quiet
[ -t 2 ] && quiet=
VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install $quiet --no-deps --build-constraints "$lock" -r "$lock"
