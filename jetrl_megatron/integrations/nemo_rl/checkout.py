"""Where NeMo-RL is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

CONFIGS = Path("examples", "configs")
"""NeMo-RL's configurations, in its checkout."""


def nemo_rl_checkout() -> Path | None:
    """Folder of the NeMo-RL checkout on the import path, found without importing it; None where there is none.

    Raises:
        ValueError: there is a package `nemo_rl`, but no checkout around it.
    """
    spec = importlib.util.find_spec("nemo_rl")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0]).parent
    if not (root / CONFIGS).is_dir():
        raise ValueError(
            f"nemo_rl={root} is no checkout of NeMo-RL: {root / CONFIGS} is missing (PyPI's nemo-rl 0.0.0 is a "
            "placeholder); put a clone of github.com/NVIDIA-NeMo/RL on PYTHONPATH"
        )
    return root


def require_nemo_rl_checkout() -> Path:
    """The same folder.

    Raises:
        ValueError: there is none.
    """
    root = nemo_rl_checkout()
    if root is None:
        raise ValueError("nemo_rl is not on the import path: add a clone of github.com/NVIDIA-NeMo/RL to PYTHONPATH")
    return root
