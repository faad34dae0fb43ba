"""A rank that is killed within a save of several ranks: the run goes on, and ends as one that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.running import Running, command
from tests.distributed.test_launch import GONE_SECONDS
from tests.faults.figures import full, tell
from tests.faults.kit import complete_checkpoints, differences, state_of
from tests.faults.rank_trap import SAVE
from tests.faults.test_ranks import CODES, RECIPE, START_SECONDS, Case, await_trap, trapped
from tests.sft_kit import write_recipe, write_rows


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_ranks_killed_within_a_save_go_on_bit_for_bit(engine: str, tmp_path: Path) -> None:
    """Rank 0 at each part of it and rank 1 at its own; what was committed before is there, and the run goes on."""
    recipe = {**RECIPE, "max_steps": 8, "save_steps": 2} | ({"deepspeed": engine} if engine != "ddp" else {})
    cases = [Case("SIGKILL", part, 0) for part in SAVE] + [Case("SIGKILL", "its own part", 1)]
    cases = cases if full() else cases[-1:]
    alone = tmp_path / "alone"
    alone.mkdir()
    whole = finish(alone, recipe)
    wrong = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        with trapped(case, folder, "--nproc", "2", recipe=recipe) as running:
            await_trap(running, folder)
            assert running.wait(GONE_SECONDS) == CODES["SIGKILL"], running.stderr
        left = complete_checkpoints(folder / "runs/tiny")
        differs = differences(finish(folder, recipe), whole)
        wrong += [f"{case}: {left} left; differs in {differs}"] if differs or left not in ([2], [2, 4]) else []
    tell(f"ranks_killed_within_a_save_of_{engine}", len(cases) - len(wrong), len(cases))
    assert wrong == []


def finish(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Run to the end, from wherever it is."""
    write_rows(folder, 20)
    write_recipe(folder, recipe)
    with Running(folder, command("sft", "tiny.yaml", "--nproc", "2")) as running:
        assert running.wait(START_SECONDS) == 0, running.stderr
    return state_of(folder / "runs/tiny")
