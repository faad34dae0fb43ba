"""Checks of training steps: non-finite numbers, out of memory, spikes, and updates lost in rounding."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from streamtune.errors import NonFiniteError, OutOfMemoryError, StreamTuneError
from streamtune.ops.devices import empty_cache
from streamtune.schedule import Schedule
from streamtune.train.loss_scale import LossScale
from streamtune.train.objective import MicroBatch, StepScore
from streamtune.train.process import capture_rng, restore_rng
from streamtune.train.records import append_event, read_records, read_records_backwards
from streamtune.train.rundir import RunDirectory
from streamtune.train.step import GIB, TrainSettings, describe_rows, peak_memory_bytes
from streamtune.train.world import WORLD, World

NextSchedule = Callable[[bool], Schedule | None]
"""Function that returns a schedule with less memory than the one that ran out of memory, or None. Called with True, it
also installs that schedule in the model's engine.
"""

T = TypeVar("T")

SPIKE_WINDOW = 50
"""Number of earlier steps with which a value is compared."""
MIN_WINDOW_STEPS = 10
"""Smallest number of earlier steps for a comparison."""
SPIKE_DEVIATIONS = 6.0
"""Number of deviations by which a spike exceeds the median of the window. A deviation is 1.4826 times the median
distance from the median.
"""
MIN_SPIKE_FRACTION = 0.5
"""Fraction of the median by which a spike must also exceed it, because a curve without noise has no deviations."""
MAX_REPLANS = 4
"""Largest number of schedules tried in one step after out of memory."""
FIRST_STEPS = 10
"""Number of steps at the start of a run for which the share of changed weights is recorded."""
MAX_COMPARED_VALUES = 1 << 22
"""Largest number of a model's values that are compared."""
MAX_FULLY_COMPARED_VALUES = 4096
"""Largest number of values of a weight that is always compared whole."""


def mostly_skipped_error(
    steps: int, skipped: int, overflows: int, run: RunDirectory, dtype: torch.dtype
) -> NonFiniteError | None:
    """Return an error that names the first skipped step if most steps were skipped; else None.

    Args:
        steps: Number of steps of the run.
        skipped: Number of steps that were skipped because a loss or gradient was not finite.
        overflows: Number of steps that were skipped because a gradient overflowed float16.
        run: Directory of the run.
        dtype: Dtype of the weights.
    """
    if 2 * (skipped + overflows) <= steps:
        return None
    if overflows > skipped:
        return NonFiniteError(
            f"{overflows:,} of {steps:,} steps were skipped because a gradient overflowed float16",
            where=str(run.metrics),
            fix="train more steps: each skipped step halves the loss scale, and a resumed run keeps it; or write "
            "fp16: false",
        )
    first = next((r for r in read_records(run.metrics) if r.get("skipped") and not r.get("overflow")), {})
    event = next((r for r in read_records(run.events) if r.get("event") == "non_finite"), {})
    what = f"{skipped:,} of {steps:,} steps were skipped because a loss or gradient was not finite"
    if first:
        what += f"\n- the first was step {first['step']:,}, with learning rate {first['lr']:.3g} and weights in "
        what += str(dtype).removeprefix("torch.")
    if event.get("what"):
        what += f"\n- {event['what']}"
    narrow = ", dtype: float32 or bf16 instead of float16" if dtype == torch.float16 else ""
    return NonFiniteError(
        what,
        where=event.get("rows") or str(run.events),
        fix="look at these rows, lower learning_rate, "
        f"warm up longer{narrow}; on_nan: stop ends a run at the first such step; model and checkpoints are kept",
    )


class StepGuard:
    """Decides if a step is skipped or repeated with less memory, and logs spikes of loss and gradient norm.

    Args:
        settings: Settings of the run.
        run: Directory of the run.
        device: Device whose memory is measured.
        next_schedule: Function that returns a schedule with less memory; called with True, it also installs the
            schedule.
        world: Ranks of the run. With several ranks, out of memory ends the run.
    """

    def __init__(
        self,
        settings: TrainSettings,
        run: RunDirectory,
        device: torch.device,
        *,
        next_schedule: NextSchedule = lambda install: None,
        world: World = WORLD,
    ) -> None:
        self.settings, self.run, self.device = settings, run, device
        self.next_schedule, self.world = next_schedule, world
        losses = (record for record in read_records_backwards(run.metrics) if "loss" in record)
        earlier = list(islice(losses, SPIKE_WINDOW))[::-1]
        self._recent_values = {
            name: deque((r[name] for r in earlier), maxlen=SPIKE_WINDOW) for name in ("loss", "grad_norm")
        }
        self._event_steps: dict[str, int] = {}
        """Step of the last event of each metric; spikes within a window after it are counted in the next event."""
        for event in islice(
            (e for e in read_records_backwards(run.events) if e.get("event") == "spike"), 4 * SPIKE_WINDOW
        ):
            if isinstance(event.get("step"), int):
                self._event_steps.setdefault(str(event.get("metric")), event["step"])
        self._unreported: Counter[str] = Counter()

    def should_skip(self, not_finite: NonFiniteError | None, step: int, skipped: int) -> bool:
        """Return True on all ranks if ``step`` must be skipped. Called by all ranks.

        Args:
            not_finite: Error of this rank if its loss or gradient is not finite; else None.
            step: Number of the step, counted from 1.
            skipped: Number of steps that the run has skipped so far.

        Raises:
            NonFiniteError: A loss or gradient is not finite, and ``on_nan`` or ``max_skips`` ends the run.
        """
        if not self.world.any_rank(not_finite is not None):
            return False
        reports = self.world.gather_data_ranks(
            None if not_finite is None else (not_finite.what, not_finite.where, not_finite.fix)
        )
        what, where, fix = next(
            (each for each in reports if each), (f"a loss or gradient of step {step} is not finite", "", "")
        )
        not_finite = NonFiniteError(what, where=where, fix=fix)
        if self.settings.on_nan == "stop":
            not_finite.fix += "; or set on_nan: skip to skip such steps"
            raise not_finite
        if skipped >= self.settings.max_skips:
            not_finite.fix = f"max_skips ({self.settings.max_skips}) is reached; {not_finite.fix}"
            raise not_finite
        if self.world.is_main:
            append_event(self.run.events, "non_finite", step=step, what=what, rows=where, skipped=skipped + 1)
        return True

    def has_overflowed(self, scale: LossScale | None, score: StepScore, grad_norm: float) -> bool:
        """Return True on all ranks if the step's gradient overflowed float16, and the loss of every rank is finite.

        Called by all ranks, which have the same ``grad_norm``.
        """
        if scale is None or not scale.is_overflow(grad_norm):
            return False
        return not self.world.any_rank(score.not_finite is not None)

    def run_or_replan(self, compute: Callable[[], T], drop_gradients: Callable[[], None], step: int) -> T:
        """Return ``compute()``; with ``on_oom: replan``, repeat it with less memory if memory runs out.

        All schedules give the same gradient, up to rounding. Each repetition starts from the same random state.

        Args:
            compute: Function that computes the gradients of the step.
            drop_gradients: Function that frees the gradients of a failed attempt.
            step: Number of the step, counted from 1.

        Raises:
            OutOfMemoryError: Memory ran out; the error has the peak memory and a schedule with less memory.
        """
        alone = self.world.size == 1
        can_replan = self.settings.on_oom == "replan" and alone
        rng = capture_rng() if can_replan else None
        for attempt in range(MAX_REPLANS + 1):
            try:
                return compute()
            except OutOfMemoryError as error:
                peak = peak_memory_bytes(self.device)
                # Made anew without its cause, because the traceback keeps the step's tensors alive.
                failure = OutOfMemoryError(error.what, where=error.where, fix=error.fix)
            failure.what += f" (peak {peak / GIB:.2f} GiB)"
            drop_gradients()
            gc.collect()
            empty_cache(self.device)
            schedule = None
            if alone and attempt < MAX_REPLANS:
                # An error of the planner must not hide the out-of-memory error.
                with suppress(StreamTuneError, RuntimeError, MemoryError):
                    schedule = self.next_schedule(can_replan)
            details = {"step": step, "what": failure.what, "rows": failure.where, "peak_bytes": peak}
            if schedule is None or rng is None:
                if schedule is not None:
                    failure.fix = (
                        f"set on_oom: replan to continue with {schedule.describe()}, which gives the same gradient; "
                        f"or {failure.fix}"
                    )
                    append_event(self.run.events, "out_of_memory", **details, next_schedule=asdict(schedule))
                raise failure
            append_event(self.run.events, "out_of_memory", **details, replanned=asdict(schedule))
            restore_rng(rng)
        raise AssertionError("unreachable: the last attempt returns or raises an error")

    def record_spikes(self, step: int, loss: float, grad_norm: float, micro_batches: Sequence[MicroBatch]) -> None:
        """Write an event if the loss or the gradient norm spiked, at most one per metric in :data:`SPIKE_WINDOW`
        steps."""
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            recent = self._recent_values[name]
            if len(recent) >= MIN_WINDOW_STEPS:
                usual = median(recent)
                deviation = 1.4826 * median(abs(recent_value - usual) for recent_value in recent)
                threshold_gap = max(SPIKE_DEVIATIONS * deviation, MIN_SPIKE_FRACTION * abs(usual))
                if value > usual + threshold_gap:
                    self._write_spike_event(step, name, value, usual, micro_batches)
            recent.append(value)

    def _write_spike_event(
        self, step: int, name: str, value: float, usual: float, micro_batches: Sequence[MicroBatch]
    ) -> None:
        last = self._event_steps.get(name)
        if last is not None and last < step < last + SPIKE_WINDOW:
            self._unreported[name] += 1
            return
        self._event_steps[name] = step
        more = {"more": unreported} if (unreported := self._unreported.pop(name, 0)) else {}
        if self.world.is_main:
            rows = describe_rows(micro_batches, max_rows=16)
            details = {"step": step, "metric": name, "value": value, "usual": usual, "rows": rows}
            append_event(self.run.events, "spike", **details, **more)


class ChangedWeights:
    """Measures the fraction of trained weights that a step changes; updates smaller than the rounding change nothing.

    Values before the step are copied to the host. Of models with more than 4 million trained values only every n-th
    value is compared, except in weights of up to 4,096 values.

    Args:
        weights: Trained weights, or this rank's shards.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [x for x in weights if x.numel()]
        stride = -(-sum(x.numel() for x in self._weights) // MAX_COMPARED_VALUES)
        self._strides = [1 if x.numel() <= MAX_FULLY_COMPARED_VALUES else max(1, stride) for x in self._weights]
        self._before = [_every_nth_value(x, n) for x, n in zip(self._weights, self._strides, strict=True)]

    def changed_fraction(self, world: World) -> float:
        """Return the fraction (0 to 1) of values on all ranks that changed since this object was created."""
        total = 0.0
        for x, n, before in zip(self._weights, self._strides, self._before, strict=True):
            changed = int((_every_nth_value(x, n) != before).sum())
            total += changed / len(before) * x.numel()
        changed_values, all_values = world.sum_over_ranks([total, float(sum(x.numel() for x in self._weights))])
        return changed_values / all_values if all_values else 0.0


def _every_nth_value(x: Tensor, stride: int) -> Tensor:
    return x.detach().reshape(-1)[::stride].to("cpu", copy=True)


def describe_unchanged_weights(changed_fraction: float, dtypes: Iterable[torch.dtype], learning_rate: float) -> str:
    """Return a note that a step changed only a fraction of the trained weights."""
    narrow = any(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)
    why = f"most updates are lost in rounding{' of 16-bit weights' if narrow else ''}"
    fix = "delete 'dtype' to train float32 weights, or set weight_rounding: stochastic" if narrow else (
        "raise learning_rate, or check grad_norm: a gradient of 0 changes nothing"
    )  # fmt: skip
    found = f"a step with learning rate {learning_rate:g} changed {changed_fraction:.1%} of the trained weights"
    return f"{found}: {why}; {fix}"
