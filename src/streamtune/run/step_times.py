"""Compare the time of a run's steps with the prediction; where they differ by a third, say so and correct the rates.

A step is compared by its operations (``simulate.flops``): the plan is of the longest rows, and a step of half as many
operations is taken to be predicted at half the time. The first step of a session is left out, and so are steps of less
than a fourth of the planned operations, and short ones, in which the time of an operator is that of Python. Of several
steps the fastest counts, and on a CPU not more than its processor time, as where the rates are measured: other work on
the machine can only make a step slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from streamtune import train
from streamtune.plan.calibrate import correct_rates
from streamtune.plan.planner import Plan

COMPARED = 5
"""Steps of which the fastest is compared."""

THIRD = 4 / 3
"""Ratio of seconds to prediction, or the other way around, from which they disagree."""

SHORTEST = 0.25
"""Seconds below which nothing is compared."""


@dataclass
class StepTimes(train.Listener):
    """Listens to the steps of a run of one rank.

    Args:
        plan: The plan of the longest rows, with rates measured on the device.
        device, dtype: What the rates were measured for.
        say: Called once, if they disagree, with the number of the step, the text, and the figures by name.
    """

    plan: Plan
    device: torch.device
    dtype: torch.dtype
    say: Callable[[int, str, dict[str, float]], None]
    _ratios: list[float] = field(default_factory=list, init=False)
    _steps: int = field(default=0, init=False)
    _used: float = field(default=0.0, init=False)
    """Processor time at the end of the step before."""

    def step(self, record: dict[str, Any]) -> None:
        """Take a step; the last that is compared decides."""
        self._steps += 1
        used, self._used = time.process_time() - self._used, time.process_time()
        flops = record.get("flops", 0)
        if self._steps == 1 or len(self._ratios) >= COMPARED or "loss" not in record or 4 * flops < self.plan.flops:
            return
        seconds = record["tokens"] / record["tokens_per_s"]
        if self.device.type == "cpu":
            seconds = min(seconds, used)
        predicted = self.plan.step_seconds * flops / self.plan.flops
        if max(seconds, predicted) < SHORTEST:
            return
        self._ratios.append(seconds / predicted)
        if len(self._ratios) < COMPARED:
            return
        ratio = min(self._ratios)
        if 1 / THIRD < ratio < THIRD:
            return
        correct_rates(self.device, self.dtype, ratio)
        self.say(
            record["step"],
            f"a step takes {ratio * predicted:.3g} s where {predicted:.3g} s were predicted; "
            "later plans on this device are corrected by that",
            {"seconds": ratio * predicted, "predicted": predicted, "ratio": round(ratio, 4)},
        )
