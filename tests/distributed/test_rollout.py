"""A rollout on several ranks: every rank has all of it, in order, and what ends it on one ends it on all."""

from __future__ import annotations

from .rank_group import run_ranks


def test_ranks_share_a_rollout_and_how_it_ends() -> None:
    found = run_ranks(2, "tests.distributed.rollout_cases", ["", "stop", "judge"])
    assert found[""] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    assert found["stop"] == ["WritingStopped: "] * 2
    assert found["judge"] == ["RunError: rank 1 failed: _BrokenError: no", "_BrokenError: no"]
