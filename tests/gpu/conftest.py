"""Everything here needs a Hopper GPU; elsewhere it is skipped, with the reason."""

from pathlib import Path

import pytest
import torch

from jetrl_megatron.ops.deep_gemm import hopper_refusal

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = hopper_refusal(DEVICE)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
