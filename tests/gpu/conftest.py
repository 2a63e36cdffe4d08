"""Fixtures of the tests that need a GPU, which skip without one."""

import os
from collections.abc import Iterator

import pytest
import torch

GPU = os.environ.get("TIEDGPT_TEST_DEVICE", "cuda")
"""The device of these tests; cpu: check the tests themselves on a machine without a GPU."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    skips = GPU.startswith("cuda") and not torch.cuda.is_available()
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if skips:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def fp32_matmuls() -> Iterator[None]:
    """Compute fp32 products in fp32, not in TF32, so that a GPU and a CPU agree."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def gpu() -> torch.device:
    """The device under test."""
    return torch.device(GPU)
