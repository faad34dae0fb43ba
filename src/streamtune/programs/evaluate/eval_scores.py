"""Evaluation metrics by dataset and position: losses of tokens (``sft``), metrics of preference pairs and of prompts.

Entries of ``eval.json``:

    sets        results of each file or dataset
    positions   losses by token position: 0 to 15, 16 to 31, 32 to 63, and so on
    context     mean loss in the first third of a row's trained positions, minus the mean loss in the last third;
                a positive value suggests that more context helps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from streamtune import data, train
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine import StreamHandle
from streamtune.ops.devices import to_float64
from streamtune.tasks import Task
from streamtune.tasks.task import BuiltRun

SIGNIFICANT_ERRORS = 2.0
"""Number of standard errors from which a difference counts as significant."""
LEAST_TOKENS = 3
"""Minimum number of trained tokens for a row to be split into thirds."""


@dataclass(frozen=True)
class ScoringModel:
    """A model on which ``streamtune.stream`` was called, with its device and the dtype of autocast (None: off)."""

    handle: StreamHandle
    model: Any
    device: torch.device
    autocast_dtype: str | None

    def autocast(self) -> AbstractContextManager[Any]:
        return train.autocast(self.device, self.autocast_dtype)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; the error is None for a single value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


@dataclass
class LossSum:
    """Number, sum and sum of squares of token losses, in nats."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, losses: torch.Tensor) -> None:
        """Add the losses of K tokens, ``[K]``."""
        wide = to_float64(losses)
        self.tokens += wide.numel()
        self.total += float(wide.sum())
        self.squares += float(wide.square().sum())

    def to_json(self) -> dict[str, Any]:
        """Return token count, mean loss (nats), its standard error (tokens taken as independent), and perplexity."""
        if not self.tokens:
            return {"tokens": 0, "loss": None, "standard_error": None, "perplexity": None}
        mean = self.total / self.tokens
        spread = max(0.0, self.squares / self.tokens - mean * mean)
        error = math.sqrt(spread / (self.tokens - 1)) if self.tokens > 1 else None
        perplexity = math.exp(mean) if mean < 700 else None
        return {"tokens": self.tokens, "loss": mean, "standard_error": error, "perplexity": perplexity}


@dataclass
class LossSums:
    """Token losses of a split, summed by dataset and by range of positions."""

    rows: dict[str, int] = field(default_factory=dict)
    sets: dict[str, LossSum] = field(default_factory=dict)
    buckets: dict[int, LossSum] = field(default_factory=dict)
    whole: LossSum = field(default_factory=LossSum)
    thirds: list[tuple[float, float]] = field(default_factory=list)
    """(mean loss in the first third, mean loss in the last third) of the trained positions, for each row."""

    def add(self, name: str, losses_K: torch.Tensor, positions_K: torch.Tensor) -> None:
        """Add the losses of a row's trained tokens to the dataset ``name``; their positions must ascend."""
        self.rows[name] = self.rows.get(name, 0) + 1
        self.sets.setdefault(name, LossSum()).add(losses_K)
        self.whole.add(losses_K)
        for bucket, first, last in _position_buckets(int(positions_K.max()) + 1 if len(positions_K) else 0):
            inside = (positions_K >= first) & (positions_K < last)
            if bool(inside.any()):
                self.buckets.setdefault(bucket, LossSum()).add(losses_K[inside])
        if len(positions_K) >= LEAST_TOKENS:
            part_K = to_float64(positions_K - positions_K[0]) / float(positions_K[-1] - positions_K[0])
            early, late = losses_K[3 * part_K < 1], losses_K[3 * part_K > 2]
            self.thirds.append((float(to_float64(early).mean()), float(to_float64(late).mean())))

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the split in ``eval.json``."""
        bounds = list(_position_buckets(1 << 62))
        return {
            "rows": sum(self.rows.values()),
            **self.whole.to_json(),
            "sets": [{"name": name, "rows": self.rows[name], **found.to_json()} for name, found in self.sets.items()],
            "positions": [
                {"from": bounds[number][1], "to": bounds[number][2], **found.to_json()}
                for number, found in sorted(self.buckets.items())
            ],
            "context": self._last_third_gain(),
        }

    def _last_third_gain(self) -> dict[str, Any] | None:
        """Return the mean drop in loss from the first to the last third of a row; None if all rows are too short.

        The standard error is over rows, not tokens, because tokens of one row are correlated.
        """
        count = len(self.thirds)
        if not count:
            return None
        mean, error = mean_and_error([early - late for early, late in self.thirds])
        return {
            "rows": count,
            "first_third": math.fsum(early for early, _ in self.thirds) / count,
            "last_third": math.fsum(late for _, late in self.thirds) / count,
            "gain": mean,
            "standard_error": error,
        }


def describe_context_gain(context: dict[str, Any] | None) -> str:
    """Return a sentence that says whether more context helps.

    Args:
        context: Entry ``context`` of a split in ``eval.json``.
    """
    if context is None:
        return "Cannot tell whether more context helps: no row has three trained tokens."
    gain, error, rows = context["gain"], context["standard_error"], context["rows"]
    if error is None:
        return (
            f"Cannot tell from one row whether more context helps: its loss in the last third of positions is "
            f"{abs(gain):.3g} nats {'lower' if gain >= 0 else 'higher'} than in the first third."
        )
    figures = f"{abs(gain):.3g} +- {error:.2g} nats {'lower' if gain >= 0 else 'higher'} than in the first third"
    where = f"in the last third of a row's trained part the loss is {figures} ({rows:,} rows)"
    if abs(gain) < SIGNIFICANT_ERRORS * error or gain == 0:
        return f"Cannot tell from these rows whether more context helps: {where}."
    return f"More context {'seems' if gain > 0 else 'does not seem'} to help: {where}."


@torch.no_grad()
def score_rows(
    streamed: ScoringModel,
    rows: Sequence[data.Example],
    *,
    batch_size: int,
    collate: Callable[[Sequence[data.Example]], train.MicroBatch],
    rows_done: Callable[[int, int], None],
    names: Sequence[str] | None = None,
) -> LossSums:
    """Return the token losses of rows, computed in right-padded batches.

    Rows that training packs are scored one by one. The losses are equal, because packed rows do not attend to each
    other.

    Args:
        collate: Function that returns a right-padded batch of rows, with the inputs for their images.
        rows_done: Called after each batch with the number of finished rows and the number of all rows.
        names: Dataset name of each row in the results; None takes the file or dataset that the row comes from.
    """
    sums = LossSums()
    model = streamed.model
    with train.evaluation_mode(model), streamed.handle.routers.without_losses(), streamed.autocast():
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            batch = collate(part).to(streamed.device)
            losses_BT = -streamed.handle.logprobs(targets=batch.shift_labels, model=model, **batch.inputs).logprobs
            for place, row in enumerate(part):
                trained = batch.shift_labels[place].ne(IGNORE_INDEX).nonzero()[:, 0]
                name = set_name_of_origin(row.origin) if names is None else names[start + place]
                sums.add(name, losses_BT[place][trained].cpu(), trained.cpu())
            rows_done(min(start + batch_size, len(rows)), len(rows))
    return sums


def set_name_of_origin(origin: str) -> str:
    """Return ``path`` of an origin ``path:row``; for files of Python's standard library, ``python-stdlib``."""
    if origin.startswith("stdlib:"):
        return "python-stdlib"
    return origin.rpartition(":")[0] or origin


def _position_buckets(length: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(index, first, end)`` of each range of positions: 0 to 15, 16 to 31, 32 to 63, up to ``length``."""
    first, last, number = 0, 16, 0
    while first < length:
        yield number, first, last
        first, last, number = last, 2 * last, number + 1


# --- pairs and prompts ------------------------------------------------------------------------------------------------


SumAndCount = tuple[float, float]


@dataclass
class MetricSums:
    """Sum and count of each metric in each batch, and the number of rows."""

    batches: dict[str, list[SumAndCount]] = field(default_factory=dict)
    rows: int = 0

    def add(self, metrics: Mapping[str, SumAndCount]) -> None:
        for name, part in metrics.items():
            self.batches.setdefault(name, []).append((float(part[0]), float(part[1])))

    def join(self, other: MetricSums) -> None:
        for name, parts in other.batches.items():
            self.batches.setdefault(name, []).extend(parts)
        self.rows += other.rows

    def to_json(self) -> dict[str, Any]:
        """Return the row count, and mean and standard error of each metric."""
        return {"rows": self.rows, "metrics": {name: _mean_over_batches(parts) for name, parts in self.batches.items()}}


def _mean_over_batches(parts: Sequence[SumAndCount]) -> dict[str, float | None]:
    """Return the mean of a metric, weighted by count, and its standard error over batches.

    With one batch the error is None; without counts, both are None.
    """
    parts = [part for part in parts if part[1] > 0]
    count = math.fsum(size for _, size in parts)
    if not count:
        return {"mean": None, "standard_error": None}
    mean = math.fsum(total for total, _ in parts) / count
    error = None
    if (many := len(parts)) > 1:
        spread = math.fsum((total - mean * size) ** 2 for total, size in parts)
        error = math.sqrt(spread * many / (many - 1)) / count
    return {"mean": mean, "standard_error": error}


def measure_rows(
    task: Task[Any],
    make_run: Callable[[Sequence[Any]], BuiltRun],
    rows: Sequence[Any],
    *,
    autocast_dtype: str | None,
    rows_done: Callable[[int, int], None],
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return a split's entry in ``eval.json``: the objective's metrics, for all rows and by dataset.

    Args:
        make_run: Function that returns a run whose held-out rows are the given rows.
        rows: Preference pairs, single completions, or prompts.
        autocast_dtype: Dtype of autocast; None: no autocast.
        rows_done: Called after each batch with the number of finished rows and the number of all rows.
        names: Dataset name of each row in the results; None takes the file or dataset that the row comes from.
    """
    groups: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(set_name_of_origin(row.origin) if names is None else names[place], []).append(row)
    found = {name: MetricSums(rows=len(group)) for name, group in groups.items()}
    done = 0
    for name, group in groups.items():
        built = make_run(group)
        for metrics, size in _measure_batches(task, built, autocast_dtype=autocast_dtype):
            found[name].add(metrics)
            done += size
            rows_done(done, len(rows))
    whole = MetricSums()
    for each in found.values():
        whole.join(each)
    return {**whole.to_json(), "sets": [{"name": name, **each.to_json()} for name, each in found.items()]}


@torch.no_grad()
def _measure_batches(
    task: Task[Any], built: BuiltRun, *, autocast_dtype: str | None
) -> Iterator[tuple[Mapping[str, SumAndCount], int]]:
    """Yield, for each batch, its metrics (loss included) and its number of rows."""
    training = task.make_training(built)
    (make_batches,) = training.held_out.values()  # all rows are of one set
    with train.evaluation_mode(built.model), train.preserve_rng(), built.handle.routers.without_losses():
        for batch in make_batches():
            moved = batch.to(built.device)
            with train.autocast(built.device, autocast_dtype):
                score = training.objective.score(built.model, moved, None)
            losses = dict(zip(("loss",), score.held_out, strict=False))
            yield {**losses, **score.metrics}, len(batch.origins)
