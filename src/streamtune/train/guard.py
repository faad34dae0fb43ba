"""Watching of steps: numbers that are not finite, memory that runs out, sudden jumps, weights that do not move.

:class:`StepGuard` makes every decision before the weights are touched. Several ranks must decide alike: all of them
call :meth:`StepGuard.skips` at the same place, which combines their flags.
"""

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
from streamtune.schedule import Schedule
from streamtune.train.objective import MicroBatch
from streamtune.train.process import capture_rng, restore_rng
from streamtune.train.records import append_event, read_records, records_backwards
from streamtune.train.rundir import RunDirectory
from streamtune.train.step import GIB, TrainSettings, name_rows, peak_memory_bytes
from streamtune.train.world import WORLD, World

NextSchedule = Callable[[bool], Schedule | None]
"""Finds a schedule that holds less than the one that ran out of memory, None if there is none. Called with True it
installs that schedule in the model's engine as well.
"""

Taken = TypeVar("Taken")

WINDOW = 50
"""Steps that a value is compared with."""
LEAST_STEPS = 10
SPIKE = 6.0
"""A spike exceeds the median of the window by this many deviations (1.4826 x the median distance from the median), and
by ``LEAST_SPIKE`` of the median: a curve without noise has no deviations.
"""
LEAST_SPIKE = 0.5
MOST_REPLANS = 4
"""Schedules tried in one step."""
FIRST_STEPS = 10
"""Steps at the start of a run whose share of changed weights is recorded."""
MOST = 1 << 22
"""Values of a model that are compared."""
WHOLE = 4096
"""Values of a weight up to which all of them are compared."""


def skipped_most(steps: int, skipped: int, run: RunDirectory, dtype: torch.dtype) -> NonFiniteError | None:
    """Return the failure of a run at its end if most of its steps were skipped, with the first of them."""
    if 2 * skipped <= steps:
        return None
    first = next((r for r in read_records(run.metrics) if r.get("skipped")), {})
    event = next((r for r in read_records(run.events) if r.get("event") == "non_finite"), {})
    what = f"{skipped:,} of {steps:,} steps were skipped because they were not finite: the model is hardly trained"
    if first:
        what += f"\n- the first was step {first['step']:,}, at learning rate {first['lr']:.3g}, weights in "
        what += str(dtype).removeprefix("torch.")
    if event.get("what"):
        what += f"\n- {event['what']}"
    narrow = ", dtype: float32 or bf16 instead of float16" if dtype == torch.float16 else ""
    return NonFiniteError(
        what,
        where=event.get("rows") or str(run.events),
        fix="the model and the checkpoints are kept; before training anew look at these rows, lower learning_rate, "
        f"warm up longer{narrow}; on_nan: stop ends a run at the first such step",
    )


class StepGuard:
    """Watches the steps of a run.

    Args:
        next_schedule: Finds another schedule, see :data:`NextSchedule`.
        world: The ranks that train together. With several, running out of memory ends the run: while one of them
            repeats a step, the others would wait in a collective.
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
        losses = (record for record in records_backwards(run.metrics) if "loss" in record)
        before = list(islice(losses, WINDOW))[::-1]
        self._seen = {name: deque((r[name] for r in before), maxlen=WINDOW) for name in ("loss", "grad_norm")}
        self._told: dict[str, int] = {}
        """Step of the last event of each metric; later jumps within a window are counted in the next event."""
        for event in islice((e for e in records_backwards(run.events) if e.get("event") == "spike"), 4 * WINDOW):
            if isinstance(event.get("step"), int):
                self._told.setdefault(str(event.get("metric")), event["step"])
        self._untold: Counter[str] = Counter()

    def skips(self, wrong: NonFiniteError | None, step: int, skipped: int) -> bool:
        """Return True if ``step`` is left out: its gradients are dropped and the learning-rate schedule goes on.

        Args:
            wrong: Error of this rank, if something is not finite.
            step: Number of the step, from 1.
            skipped: Number of steps that the run skipped before.

        Raises:
            NonFiniteError: Something is not finite, and the run is to stop; nothing was changed by this step.
        """
        if not self.world.any(wrong is not None):
            return False
        reports = self.world.gather(None if wrong is None else (wrong.what, wrong.where, wrong.fix))
        what, where, fix = next((each for each in reports if each is not None), (f"step {step} is not finite", "", ""))
        wrong = NonFiniteError(what, where=where, fix=fix)
        if self.settings.on_nan == "stop":
            wrong.fix += "; or write on_nan: skip to go on without such steps"
            raise wrong
        if skipped >= self.settings.max_skips:
            wrong.fix = f"{skipped} steps were skipped, as many as max_skips allows; {wrong.fix}"
            raise wrong
        if self.world.is_main:
            append_event(self.run.events, "non_finite", step=step, what=what, rows=where, skipped=skipped + 1)
        return True

    def attempt(self, take: Callable[[], Taken], undo: Callable[[], None], step: int) -> Taken:
        """Compute the gradients of ``step``; if memory runs out, repeat it with another schedule if asked to.

        The gradient is exact under every schedule. Random numbers repeat the first attempt's, as far as the
        schedule does not decide how they are drawn. ``undo`` frees the gradients of an attempt.

        Raises:
            OutOfMemoryError: With the peak, and the schedule the planner would take next.
        """
        alone = self.world.size == 1
        replans = self.settings.on_oom == "replan" and alone
        began = capture_rng() if replans else None
        for tried in range(MOST_REPLANS + 1):
            try:
                return take()
            except OutOfMemoryError as error:
                peak = peak_memory_bytes(self.device)
                # Without its cause, whose traceback holds the tensors there was no room for.
                failed = OutOfMemoryError(error.what, where=error.where, fix=error.fix)
            failed.what += f" (peak {peak / GIB:.2f} GiB)"
            undo()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            schedule = None
            if alone and tried < MOST_REPLANS:
                # What the planner has to say against it must not hide what happened.
                with suppress(StreamTuneError, RuntimeError, MemoryError):
                    schedule = self.next_schedule(replans)
            details = {"step": step, "what": failed.what, "rows": failed.where, "peak_bytes": peak}
            if schedule is None or began is None:
                if schedule is not None:
                    failed.fix = (
                        f"the planner would take {schedule.describe()} next: write on_oom: replan and it does, for "
                        f"the same gradient; or {failed.fix}"
                    )
                    append_event(self.run.events, "out_of_memory", **details, next_schedule=asdict(schedule))
                raise failed
            append_event(self.run.events, "out_of_memory", **details, replanned=asdict(schedule))
            restore_rng(began)
        raise AssertionError("the last attempt returns or raises")

    def watch(self, step: int, loss: float, grad_norm: float, micro_batches: Sequence[MicroBatch]) -> None:
        """Write an event with this rank's rows if the loss or the gradient norm jumped.

        At most one event is written in a window of steps: a policy's loss and norms jump in most of its steps. The next
        event has the number of jumps since.
        """
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            seen = self._seen[name]
            if len(seen) >= LEAST_STEPS:
                middle = median(seen)
                deviation = 1.4826 * median(abs(other - middle) for other in seen)
                jump = max(SPIKE * deviation, LEAST_SPIKE * abs(middle))
                if value > middle + jump:
                    self._tell(step, name, value, middle, micro_batches)
            seen.append(value)

    def _tell(self, step: int, name: str, value: float, usual: float, micro_batches: Sequence[MicroBatch]) -> None:
        last = self._told.get(name)
        if last is not None and last < step < last + WINDOW:
            self._untold[name] += 1
            return
        self._told[name] = step
        more = {"more": untold} if (untold := self._untold.pop(name, 0)) else {}
        if self.world.is_main:
            rows = name_rows(micro_batches, most=16)
            details = {"step": step, "metric": name, "value": value, "usual": usual, "rows": rows}
            append_event(self.run.events, "spike", **details, **more)


class MovedWeights:
    """Measures the share of the trained weights that a step changes: a step smaller than a rounding changes none.

    Values before a step are kept on the host and compared after it. Models of up to 4 million trained values are
    compared whole. Of a larger model every n-th value of each weight is compared, always the same ones, and weights
    count by their size; a weight of up to 4,096 values is compared whole.

    Args:
        weights: The weights that the optimizer steps, as far as this rank has them.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [x for x in weights if x.numel()]
        every = -(-sum(x.numel() for x in self._weights) // MOST)
        self._every = [1 if x.numel() <= WHOLE else max(1, every) for x in self._weights]
        self._before = [_values(x, n) for x, n in zip(self._weights, self._every, strict=True)]

    def share(self, world: World) -> float:
        """Return the share of the weights of all ranks that differ now."""
        moved = 0.0
        for x, n, before in zip(self._weights, self._every, self._before, strict=True):
            changed = int((_values(x, n) != before).sum())
            moved += changed / len(before) * x.numel()
        found, all_of_them = world.sums([moved, float(sum(x.numel() for x in self._weights))])
        return found / all_of_them if all_of_them else 0.0


def _values(x: Tensor, every: int) -> Tensor:
    return x.detach().reshape(-1)[::every].to("cpu", copy=True)


def describe_moved(share: float, dtypes: Iterable[torch.dtype], learning_rate: float) -> str:
    """Return a note on a step that changed only ``share`` of the trained weights, of these dtypes."""
    narrow = any(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)
    why = "it is smaller than the rounding of bfloat16 weights" if narrow else "it is smaller than a rounding of theirs"
    fix = "delete 'dtype' to train float32 weights, or write weight_rounding: stochastic" if narrow else (
        "raise learning_rate, or look at grad_norm: a gradient of 0 moves nothing"
    )  # fmt: skip
    return f"a step at a learning rate of {learning_rate:g} changes {share:.1%} of the trained weights: {why}; {fix}"
