"""Trainers of other libraries on several ranks, with DeepSpeed: the same losses streamed and plain."""

from __future__ import annotations

import pytest

from .rank_group import run_ranks
from .trainer_cases import STEPS


@pytest.mark.parametrize(
    ("stage", "adapters"), [(3, True), *(pytest.param(stage, False, marks=pytest.mark.full) for stage in (2, 3))]
)
def test_transformers_trainer(stage: int, adapters: bool) -> None:
    """The model is streamed before the Trainer hands it to DeepSpeed, which then gathers layers whole."""
    case = {"stage": stage, "adapters": adapters}
    (found,) = run_ranks(2, "tests.distributed.trainer_cases", [case], 200).values()
    assert len(found["plain"]) == STEPS
    assert found["plain"][-1] != pytest.approx(found["plain"][0], rel=1e-3), "it learns"
    assert found["streamed"] == pytest.approx(found["plain"], rel=1e-5)
