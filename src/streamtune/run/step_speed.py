"""Measure the steps of a run: the operations that its model asks for, and the time, compared with the prediction.

Where time and prediction differ by a third, the run says so and the rates are corrected. The plan is of the longest
rows, so a step's predicted time is the plan's in proportion to its operations (``simulate.workload``). The first step of a
session is left out. So are steps of less than a fourth of the planned operations, and short ones, in which the time of
an operator is Python's. Of several steps the fastest counts, and on a CPU at most its processor time: other work on the
machine can only make a step slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from streamtune import train
from streamtune.base.optimizer_table import PLAIN_STEP, StepKind
from streamtune.plan.budget import device_name
from streamtune.plan.calibrate import correct_rates
from streamtune.plan.planner import Plan
from streamtune.plan.rates import peak_flops_of
from streamtune.plan.simulate.workload import FlopCount, Span
from streamtune.recipe.keys.engine import EngineKeys

COMPARED = 5
"""Steps of which the fastest is compared."""

THIRD = 4 / 3
"""Ratio of seconds to prediction, or the other way around, from which they disagree."""

SHORTEST = 0.25
"""Seconds below which nothing is compared."""


class StepFlops:
    """Counts the operations of optimizer steps, as :mod:`streamtune.plan.simulate.workload` defines them."""

    def __init__(self, model: Any, step: StepKind = PLAIN_STEP) -> None:
        self.step = step
        self.count = FlopCount.of(model)

    def __call__(self, micro_batches: Sequence[train.MicroBatch]) -> int:
        return self.count.step((span for batch in micro_batches for span in _spans(batch)), self.step)


def _spans(batch: train.MicroBatch) -> Iterator[Span]:
    branches = getattr(batch, "branches", None)
    if branches is not None:
        for part in branches.table.parts:
            yield part.trunk_length, part.stop - part.start
    elif batch.position_ids is None:
        yield from ((0, length) for length in batch.attention_mask.sum(1).tolist())
    else:
        for mask, positions in zip(batch.attention_mask, batch.position_ids, strict=True):
            starts = [*(positions[mask.bool()] == 0).nonzero()[:, 0].tolist(), int(mask.sum())]
            yield from ((0, stop - start) for start, stop in pairwise(starts))


def peak_of(recipe: EngineKeys, device: torch.device) -> float | None:
    """Return the FLOP/s that the recipe gives, or the device's data-sheet value; None where neither is known."""
    if recipe.peak_flops is not None:
        return recipe.peak_flops
    return peak_flops_of(device_name(device)) if device.type == "cuda" else None


@dataclass
class StepTimes(train.Listener):
    """Listens to the steps of a run of one rank.

    Args:
        plan: The plan of the longest rows, with rates measured on the device.
        device, dtype: The device and dtype of the measured rates.
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
