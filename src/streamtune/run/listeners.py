"""Listeners of a run: the user's callbacks, and a comparison of step times with the plan.

A callback is a user's class whose methods are called during the run:

    class Audit:                                # callbacks: [audit.py:Audit]
        def on_start(self, run): ...            # before the first step
        def on_step(self, record): ...          # after a step: its line of metrics.jsonl
        def on_evaluate(self, record): ...      # after an evaluation: its line of metrics.jsonl
        def on_end(self, outcome): ...          # at the end: finished, stopped or failed

Each method is optional and gets a copy of one dictionary. Random state, grad mode, working directory and standard
streams are restored after each call.

If measured and planned step times differ by a third, the run prints a note and corrects later plans. The prediction of
a step is the planned time of the longest rows, scaled by the FLOPs of the step. The first step and short steps are not
compared. Of several steps the fastest counts, because other work on the machine only makes steps slower.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from streamtune import train
from streamtune.base.optimizer_table import PLAIN_STEP, StepKind
from streamtune.errors import ArgumentError, RunError, did_you_mean
from streamtune.plan.calibrate import correct_rates
from streamtune.plan.planner import Plan
from streamtune.plan.simulate.workload import FlopCount, Span
from streamtune.tasks.rewards.spec import import_user_module, restore_globals
from streamtune.train.progress import Listener, RunFacts

EVENTS = ("on_start", "on_step", "on_evaluate", "on_end")
CALLBACK_PATTERN = re.compile(r"(?P<target>.+?):(?P<name>[A-Za-z_]\w*)")


class Callback(Listener):
    """Listener that calls the methods of a user's callback.

    Args:
        name: Name of the callback in the recipe, for messages.
        target: Object with some of the methods :data:`EVENTS`.
    """

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target

    def started(self, facts: RunFacts) -> None:
        self._call("on_start", {**asdict(facts), "directory": str(facts.directory)})

    def step(self, record: dict[str, Any]) -> None:
        self._call("on_step", record)

    def evaluated(self, record: dict[str, Any]) -> None:
        self._call("on_evaluate", record)

    def finished(self, outcome: dict[str, Any]) -> None:
        self._call("on_end", outcome)

    def _call(self, event: str, payload: dict[str, Any]) -> None:
        method: Callable[[dict[str, Any]], Any] | None = getattr(self.target, event, None)
        if method is None:
            return
        try:
            with train.preserve_rng(), restore_globals():
                method(payload)
        except (Exception, SystemExit) as error:
            raise RunError(
                f"{event} of the callback {self.name} raised {type(error).__name__}: {error}",
                where=_callback_line(error),
                fix="fix the callback, or delete it from callbacks, and run the same command again: the run resumes "
                "from its last checkpoint",
            ) from error


def load_callbacks(specs: Sequence[str], *, allow_code: bool, directory: Path, is_main: bool) -> list[Listener]:
    """Return a listener for each callback of a recipe; an empty list on ranks other than 0.

    Args:
        specs: ``file.py:Name`` or ``module:Name`` of each callback.
        allow_code: True if code that the recipe names may run.
        directory: Folder in which relative paths and modules are looked up.
        is_main: True on rank 0. Other ranks only import the code, so that all ranks raise the same errors.

    Raises:
        ArgumentError: A class does not exist or has none of the four methods, or code may not run.
    """
    listeners: list[Listener] = []
    for index, spec in enumerate(specs):
        where = f"callbacks.{index}"
        if not allow_code:
            raise ArgumentError(
                f"the callback '{spec}' is Python code, and code is not allowed to run",
                where=where,
                fix="read the code; if you trust it, run with --allow-code or set allow_code: true",
            )
        match = CALLBACK_PATTERN.fullmatch(spec.strip())
        if match is None:
            raise ArgumentError(
                f"the callback must be file.py:Name or module:Name, found '{spec}'",
                where=where,
                fix="write file.py:Name or module:Name",
            )
        try:
            module = import_user_module(match["target"], directory)
        except ArgumentError as error:
            if error.where == "reward_funcs":  # the importer serves reward functions too
                error.where = where
            error.fix = error.fix.replace(":function", ":Name")
            raise
        target = getattr(module, match["name"], None)
        if target is None:
            names = [name for name, value in vars(module).items() if isinstance(value, type)]
            raise ArgumentError(
                f"{match['target']} has no class '{match['name']}'",
                where=where,
                fix=did_you_mean(match["name"], names) or f"it has: {', '.join(names) or 'none'}",
            )
        _check_methods(spec, target, where)
        if is_main:
            listeners.append(Callback(spec, _make_callback(spec, target, where)))
    return listeners


def _check_methods(spec: str, target: Any, where: str) -> None:
    methods = [name for name in dir(target) if name.startswith("on_") and callable(getattr(target, name))]
    unknown = [name for name in methods if name not in EVENTS]
    if unknown or not methods:
        problem = f"has '{unknown[0]}', which is never called" if unknown else "has none of the methods of a callback"
        fix = did_you_mean(unknown[0], EVENTS) if unknown else ""
        raise ArgumentError(
            f"the callback {spec} {problem}", where=where, fix=fix or f"define any of {', '.join(EVENTS)}"
        )


def _make_callback(spec: str, target: Any, where: str) -> Any:
    if not isinstance(target, type):
        return target  # an object of the module
    try:
        with train.preserve_rng(), restore_globals():
            return target()
    except (Exception, SystemExit) as error:
        raise ArgumentError(
            f"creating the callback {spec} raised {type(error).__name__}: {error}", where=_callback_line(error) or where
        ) from error


def _callback_line(error: BaseException) -> str:
    """Return ``file:line`` of the last traceback frame in the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else ""


COMPARED_STEPS = 5
"""Number of timed steps; the fastest is compared with its prediction."""

CORRECTED_RATIO = 4 / 3
"""Ratio of measured to predicted seconds. Rates are corrected if the ratio is at least this, or at most 1 / this."""

SHORTEST_SECONDS = 0.25
"""Minimum seconds: a step is not compared if its measured and its predicted time are both shorter."""


class StepFlops:
    """Counts the model FLOPs of optimizer steps, without recomputation."""

    def __init__(self, model: Any, step: StepKind = PLAIN_STEP) -> None:
        self.step = step
        self.flop_count = FlopCount.from_model(model)

    def count_flops(self, micro_batches: Sequence[train.MicroBatch]) -> int:
        return self.flop_count.step_flops(
            (span for batch in micro_batches for span in _attention_spans(batch)), self.step
        )


def _attention_spans(batch: train.MicroBatch) -> Iterator[Span]:
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


@dataclass
class StepTimes(train.Listener):
    """Listener that compares measured step times with the plan, and corrects later plans; for runs on one rank.

    Args:
        plan: Plan of a step with the longest rows.
        device: Device whose measured speeds the plan uses.
        dtype: Dtype of the measured speeds.
        report: Function called with step, message and values, at most once, if measured and planned times differ.
    """

    plan: Plan
    device: torch.device
    dtype: torch.dtype
    report: Callable[[int, str, dict[str, float]], None]
    _ratios: list[float] = field(default_factory=list, init=False)
    _steps: int = field(default=0, init=False)
    _processor_seconds: float = field(default=0.0, init=False)
    """``time.process_time()`` at the end of the previous step."""

    def step(self, record: dict[str, Any]) -> None:
        """Record a step; after :data:`COMPARED_STEPS` steps, compare the fastest with the plan."""
        self._steps += 1
        processor_seconds, self._processor_seconds = time.process_time() - self._processor_seconds, time.process_time()
        flops = record.get("flops", 0)
        if (
            self._steps == 1
            or len(self._ratios) >= COMPARED_STEPS
            or "loss" not in record
            or 4 * flops < self.plan.flops
        ):
            return
        seconds = record["tokens"] / record["tokens_per_s"]
        if self.device.type == "cpu":
            seconds = min(seconds, processor_seconds)
        predicted = self.plan.step_seconds * flops / self.plan.flops
        if max(seconds, predicted) < SHORTEST_SECONDS:
            return
        self._ratios.append(seconds / predicted)
        if len(self._ratios) < COMPARED_STEPS:
            return
        ratio = min(self._ratios)
        if 1 / CORRECTED_RATIO < ratio < CORRECTED_RATIO:
            return
        correct_rates(self.device, self.dtype, ratio)
        self.report(
            record["step"],
            f"a step takes {ratio * predicted:.3g} s instead of the predicted {predicted:.3g} s; later plans on this "
            "device are corrected by this ratio",
            {"seconds": ratio * predicted, "predicted": predicted, "ratio": round(ratio, 4)},
        )
