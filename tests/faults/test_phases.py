"""SIGTERM in each phase of a run: it ends soon, with the right code, and goes on to the same end."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kit import Zygotes, complete_checkpoints, differences, report, state_of, write_sft

PHASES = ("loading", "forward", "optimizer", "evaluating", "saving", "final")
Whole = tuple[Path, dict[str, Any], float]


@pytest.mark.parametrize("phases", [("forward", "saving"), pytest.param(PHASES, marks=pytest.mark.full)], ids=" ".join)
def test_sigterm_in_every_phase(zygotes: Zygotes, whole: Whole, tmp_path: Path, phases: Sequence[str]) -> None:
    def trial(phase: str) -> tuple[float, list[str]]:
        folder = tmp_path / phase
        write_sft(folder)
        done = zygotes.run(folder, hook="sigterm_while", phase=phase)
        sent = re.search(r"SIGNAL (\d+\.\d+)", done.output)  # what another stream says may follow without a space
        assert sent, done.output
        seconds = time.time() - float(sent[1])
        # Before the first step and after the last there is nothing to save: the system's own default ends it at once.
        # A shell calls both of them 143.
        assert done.status == (-15 if phase in ("loading", "final") else 143), done.output
        assert "Traceback" not in done.output
        assert "this is a bug" not in done.output
        if phase != "loading":
            assert complete_checkpoints(folder / "runs/tiny")
        again = zygotes.run(folder)
        assert again.status == 0, again.output
        found = differences(state_of(folder / "runs/tiny"), whole[1])
        shutil.rmtree(folder)
        return seconds, found

    found = zygotes.each(trial, phases)
    identical = sum(not differs for _, differs in found)
    if phases == PHASES:
        report("phases", trials=len(PHASES), identical=identical, slowest_seconds=round(max(s for s, _ in found), 2))
    assert [differs for _, differs in found if differs] == []
