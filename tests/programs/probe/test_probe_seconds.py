"""Seconds of a simulated probe are those of a plan, and grow evenly with the length."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from streamtune.programs.probe.probe_recipe import ProbeOptions, probe_recipe
from streamtune.recipe import load_recipe
from streamtune.run.plan import PlanOptions, plan_recipe
from tests.plan.test_golden_plan import RECIPE

GIB = 1 << 30
HOST = {"deepspeed": "zero3_offload", "finetuning_type": "full"}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **HOST}, sort_keys=False), "utf-8")
    return path


def test_the_longest_takes_what_a_plan_says(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    options = ProbeOptions(
        method="simulate", device="rtx-4090", device_bytes=2 * GIB, host_bytes=8 * GIB, most=3000, ranks=1
    )
    report, _ = probe_recipe(loaded, options)
    found = report.limits["stream"]
    assert found.trial is not None
    asked = PlanOptions(device="rtx-4090", device_memory="2GiB", host_memory="8GiB", length=found.fits, ranks=1)
    planned = plan_recipe(loaded, asked).plan
    assert found.trial.outcome.step_seconds == planned.step_seconds
    assert found.trial.outcome.schedule == planned.schedule
    assert [t.outcome.step_seconds for t in report.trials if t.shape.length == found.fits] == [planned.step_seconds]
    assert all(t.outcome.step_seconds is None for t in report.trials if t.shape.length != found.fits)


@pytest.mark.slow
def test_neighbouring_lengths_take_about_as_long(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["engine.chunk_size=256", "engine.head_chunk_size=256", "engine.offload=host"])
    asked = PlanOptions(device="rtx-4090", device_memory="2GiB", host_memory="8GiB", ranks=1)
    lengths = [256 * 20, 256 * 20 + 2, 256 * 20 + 100, 256 * 20 + 255, 256 * 21]
    found = [
        plan_recipe(loaded, PlanOptions(**{**vars(asked), "length": length})).plan.step_seconds for length in lengths
    ]
    for shorter, longer in pairwise(found):
        assert longer == pytest.approx(shorter, rel=0.06)
        assert longer > 0.98 * shorter  # one more chunk, cut smaller, may take as long as a few tokens
