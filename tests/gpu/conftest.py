"""What GPU tests share; the folder is marked and skipped by the conftest above."""

import pytest
import torch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
