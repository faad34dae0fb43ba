"""Steps slower or faster than predicted correct the rates once, with a note."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune.plan import Limits, calibrate
from streamtune.plan.calibrate import CachedRates, cache_file, load_rates
from streamtune.plan.planner import Plan
from streamtune.plan.rates import Rates
from streamtune.plan.simulate.simulate import Simulation, Work
from streamtune.plan.traffic import Traffic
from streamtune.run.listeners import StepTimes
from streamtune.schedule import Schedule

CPU, AWAY = torch.device("cpu"), torch.device("cuda")
RATES = Rates("somewhere", 1e12, 1e11, 1e11, 1e10, 1e9)
STEP = Simulation(1, 0, 0, {"weights": 1}, "forward", {"forward": 1}, Work(1, 1, 0, 0, 1))


def times(said: list[Any]) -> StepTimes:
    plan = Plan(Schedule(), STEP, 4.0, (), "weights", Limits(1, 1), RATES, Traffic((), "", ""), flops=1000)
    return StepTimes(plan, AWAY, torch.float32, lambda *what: said.append(what))


def record(step: int, seconds: float, flops: int = 1000) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "tokens": 100, "tokens_per_s": 100 / seconds, "flops": flops}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_describe_device", str)
    monkeypatch.setattr(calibrate, "measure_rates", lambda device, dtype: RATES)


def test_steps_of_a_third_less_correct_the_rates_once() -> None:
    load_rates(AWAY, torch.float32)
    said: list[Any] = []
    watch = times(said)
    for step, seconds in enumerate([1.0, 2.0, 2.0, 8.0, 3.0, 2.0, 0.5, 0.5], start=1):
        watch.step(record(step, seconds))
    ((step, text, figures),) = said
    assert (step, figures["ratio"]) == (6, 0.5)
    assert "2 s instead of the predicted 4 s" in text
    (kept,) = json.loads(cache_file().read_text().partition("\n")[2]).values()  # behind a line with its checksum
    assert CachedRates.from_json(kept).factor == 0.5


@pytest.mark.parametrize(
    "records",
    [
        [record(n, 3.2) for n in range(1, 9)],  # within a third
        [record(n, 0.2, 10) for n in range(1, 9)],  # short rows say little of long ones
        [record(n, 9.0) for n in range(1, 6)],  # the first step counts for nothing
    ],
)
def test_others_say_nothing(records: list[dict[str, Any]]) -> None:
    said: list[Any] = []
    watch = times(said)
    for each in records:
        watch.step(each)
    assert said == []


def test_a_step_is_compared_by_its_operations() -> None:
    said: list[Any] = []
    watch = times(said)
    for step in range(1, 9):
        watch.step(record(step, 1.0, 250))
    assert said == []
    watch = replace(watch)
    for step in range(1, 9):
        watch.step(record(step, 2.0, 250))
    assert said[0][2]["ratio"] == 2.0
