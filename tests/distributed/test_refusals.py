"""Errors of several ranks with the real command: one error on one screen, and no process left."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.running import Running, command
from tests.distributed.test_launch import TINY
from tests.sft_kit import write_recipe, write_rows

LINES = 24
"""Of a screen."""


@dataclass(frozen=True)
class Case:
    """A recipe that is refused, and parts of the error."""

    said: tuple[str, ...]
    keys: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


CONFLICT = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 7}
CASES = {
    "conflict": Case(
        ("ds.json has gradient_accumulation_steps: 7, but the recipe gives 2", 'set "gradient_accum'),
        {"deepspeed": "ds.json"},
    ),
    "two engines": Case(("'deepspeed' and 'fsdp' exclude each other",), {"deepspeed": "zero2", "fsdp": True}),
    "no such preset": Case(("there is no DeepSpeed configuration zero4", "did you mean"), {"deepspeed": "zero4"}),
    "uneven ranks": Case(
        ("the number of ranks must be a multiple of 2, found 3",), {"sequence_parallel_size": 2}, ranks=3
    ),
    "uneven rows": Case(
        ("train_batch_size must be a multiple of 2, found 3: 2 ranks with", "write a multiple of"),
        {"train_batch_size": 3},
    ),
    "few heads": Case(
        ("cannot be divided among 3 ranks", "set sequence_parallel: ring"),
        {"sequence_parallel_size": 3, "sequence_parallel": "ulysses", "train_batch_size": None},
        ranks=3,
    ),
}


def refused(case: Case, folder: Path) -> list[str]:
    """Return the faults in the end of a case."""
    folder.mkdir()
    write_rows(folder, 20)
    (folder / "ds.json").write_text(json.dumps(CONFLICT))
    write_recipe(folder, {**TINY, **case.keys})
    with Running(folder, command("sft", "tiny.yaml", "--nproc", str(case.ranks))) as running:
        code = running.wait(120)
    said = running.stderr
    error = said[said.rfind("error:") :]
    wrong = [f"{text!r} is not said" for text in case.said if text not in " ".join(error.split())]
    if code != 2 or said.count("error:") != 1 or "Traceback" in said or error.count("\n") > LINES:
        wrong.append(f"exit code {code}")
    if (folder / "run/checkpoints").exists():
        wrong.append("it trained")
    return [f"{text}: {said}" for text in wrong]


@pytest.mark.parametrize(
    "names",
    [
        ["two engines"],
        pytest.param(["conflict"], marks=pytest.mark.full),
        pytest.param(["uneven ranks"], marks=pytest.mark.full),
        pytest.param(list(CASES), marks=pytest.mark.slow),
    ],
    ids=lambda names: names[0] if len(names) == 1 else "all",
)
def test_one_error_of_all_ranks(names: list[str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: refused(CASES[name], tmp_path / name.replace(" ", "-")), names))
    assert dict(zip(names, found, strict=True)) == {name: [] for name in names}
