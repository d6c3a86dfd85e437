"""Triton kernels compiled for a Hopper GPU on a machine without one: no spilled registers, 16-byte stores."""

import pytest

from tests.unit.kernel_compile_cases import CASES
from tests.unit.kernels_on_cpu import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str | None]:
    out = tmp_path_factory.mktemp("kernels") / "results.json"
    return launch("tests.unit.kernel_compile_cases", out)


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_hopper(results, case):
    assert results[case] is None, results[case]
