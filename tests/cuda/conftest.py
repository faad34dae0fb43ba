"""What only a CUDA device can show. Without one every test here is skipped, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

GIB = 1024**3
LARGE = pytest.mark.xdist_group("large")
"""One at a time, where several processes share the device."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    """The first device, with nothing of an earlier test on it."""
    torch.cuda.empty_cache()
    return torch.device("cuda", 0)


def needs(gib: float) -> None:
    """Skip where less memory is free."""
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free device memory, there are {free / GIB:.1f}")
