"""Ranks that share a sequence: the loss on each is that of one process, and their gradients add up to its gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from streamtune import SequenceParallel
from streamtune.errors import ArgumentError
from tests.distributed.rank_group import fork_server

from .sequence_cases import BOUND, cases
from .sequence_ranks import run_rank

Found = list[dict[str, Any]]


def run(size: int, slow: bool, folder: Path) -> Found:
    """One set of ranks, all of its cases. They are forked of a server that has imported everything once."""
    fork_server()
    mp.start_processes(run_rank, args=(size, slow, str(folder)), nprocs=size, start_method="forkserver")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def judged(found: Found, size: int, slow: bool) -> None:
    """Every case ran on every rank, and nothing is further off than rounding explains."""
    wrong: dict[str, Any] = {}
    for case in cases(size, slow):
        for rank, results in enumerate(found):
            result = results.get(case.name, "did not run")
            if isinstance(result, str) or any(not abs(value) <= BOUND for value in result.values()):
                wrong[f"{case.name}, rank {rank}"] = result
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


@pytest.mark.full
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_of_the_ranks_add_up_to_the_gradient(size: int, tmp_path: Path) -> None:
    judged(run(size, False, tmp_path), size, False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_more_families_and_schedules(size: int, tmp_path: Path, error_table: dict[str, dict[str, float]]) -> None:
    judged(run(size, True, tmp_path), size, True)
    for family, errors in json.loads((tmp_path / "largest0.json").read_text()).items():
        row = error_table.setdefault(family, {})
        row |= {f"{size}, {whose}": value for whose, value in errors.items()}


def test_needs_process_groups() -> None:
    with pytest.raises(ArgumentError, match="not initialised"):
        SequenceParallel()
