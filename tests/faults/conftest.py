"""Forked runs for every test of the suite; a few seconds to start, once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kit import Zygotes, compile_shim, state_of, write_sft


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygotes]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("the shim finds the paths of open files in /proc")
    # Under make faults the suites run one after another; under make test beside other tests.
    count = min(4, os.cpu_count() or 1) if os.environ.get("STREAMTUNE_FAULTS") else 1
    found = Zygotes(compile_shim(tmp_path_factory.mktemp("shim")), count)
    yield found
    found.close()


@pytest.fixture(scope="session")
def whole(zygotes: Zygotes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], float]:
    """A run of ``kit.SFT`` that nothing happens to: its folder, what it came to, and the seconds it took."""
    folder = tmp_path_factory.mktemp("whole")
    write_sft(folder)
    done = zygotes.run(folder)
    assert done.status == 0, done.output
    return folder, state_of(folder / "runs/tiny"), done.seconds
