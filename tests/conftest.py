"""What every test has in common: marks by folder, a reason for GPU tests to be skipped, and repeatable properties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

TESTS = Path(__file__).parent
# The same examples on every machine, and no deadline: the first call of an operator is slow.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by their folder, and skips GPU tests where there is no Hopper GPU."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in ("distributed", "gpu"):
            item.add_marker(getattr(pytest.mark, folder))
        if not hopper and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
