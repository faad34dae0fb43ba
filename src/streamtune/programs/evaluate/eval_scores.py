"""Scores of rows by named set: losses of tokens by position, and metrics of pairs and prompts as in training.

The losses tell if more context helps.

sets        a file or a dataset
positions   0 to 15, then by powers of two
context     of each row, the mean loss in the first third of its positions less that in the last third; only
            positions from its first trained token to its last count
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from streamtune import data, train
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine import StreamHandle
from streamtune.tasks import Task
from streamtune.tasks.task import Built

DECISIVE = 2.0
"""Standard errors that a difference is from 0 before it is called one."""
LEAST_TOKENS = 3
"""Trained tokens of a row that has thirds."""


@dataclass
class LossSum:
    """The sum of the losses of some tokens, and of their squares."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, losses: torch.Tensor) -> None:
        """Add the losses of some tokens, ``[K]``."""
        wide = losses.double()
        self.tokens += wide.numel()
        self.total += float(wide.sum())
        self.squares += float(wide.square().sum())

    def to_json(self) -> dict[str, Any]:
        """Return the mean in nats, its standard error (tokens taken as independent), perplexity and the count."""
        if not self.tokens:
            return {"tokens": 0, "loss": None, "standard_error": None, "perplexity": None}
        mean = self.total / self.tokens
        spread = max(0.0, self.squares / self.tokens - mean * mean)
        error = math.sqrt(spread / (self.tokens - 1)) if self.tokens > 1 else None
        perplexity = math.exp(mean) if mean < 700 else None
        return {"tokens": self.tokens, "loss": mean, "standard_error": error, "perplexity": perplexity}


@dataclass
class LossSums:
    """The losses of rows: of each set, of each bucket of positions, and of the thirds of each row."""

    rows: dict[str, int] = field(default_factory=dict)
    sets: dict[str, LossSum] = field(default_factory=dict)
    buckets: dict[int, LossSum] = field(default_factory=dict)
    whole: LossSum = field(default_factory=LossSum)
    thirds: list[tuple[float, float]] = field(default_factory=list)
    """of each row: the mean of the first third of its trained positions, and of the last"""

    def add(self, name: str, losses_K: torch.Tensor, positions_K: torch.Tensor) -> None:
        """Add a row.

        Args:
            name: Its set.
            losses_K: Of its trained tokens.
            positions_K: The positions that predict them, from 0 and ascending.
        """
        self.rows[name] = self.rows.get(name, 0) + 1
        self.sets.setdefault(name, LossSum()).add(losses_K)
        self.whole.add(losses_K)
        for bucket, first, last in _buckets(int(positions_K.max()) + 1 if len(positions_K) else 0):
            inside = (positions_K >= first) & (positions_K < last)
            if bool(inside.any()):
                self.buckets.setdefault(bucket, LossSum()).add(losses_K[inside])
        if len(positions_K) >= LEAST_TOKENS:
            part_K = (positions_K - positions_K[0]).double() / float(positions_K[-1] - positions_K[0])
            early, late = losses_K[3 * part_K < 1], losses_K[3 * part_K > 2]
            self.thirds.append((float(early.double().mean()), float(late.double().mean())))

    def to_json(self) -> dict[str, Any]:
        """Return the part of the document that is about one split."""
        bounds = list(_buckets(1 << 62))
        return {
            "rows": sum(self.rows.values()),
            **self.whole.to_json(),
            "sets": [{"name": name, "rows": self.rows[name], **found.to_json()} for name, found in self.sets.items()],
            "positions": [
                {"from": bounds[number][1], "to": bounds[number][2], **found.to_json()}
                for number, found in sorted(self.buckets.items())
            ],
            "context": self._context(),
        }

    def _context(self) -> dict[str, Any] | None:
        """Return how much lower the loss is at the end of rows; None where no row is long enough.

        Rows are compared with themselves, and are what the standard error counts: tokens of one row are alike.
        """
        count = len(self.thirds)
        if not count:
            return None
        gains = [early - late for early, late in self.thirds]
        mean = math.fsum(gains) / count
        error = None
        if count > 1:
            error = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (count - 1) / count)
        return {
            "rows": count,
            "first_third": math.fsum(early for early, _ in self.thirds) / count,
            "last_third": math.fsum(late for _, late in self.thirds) / count,
            "gain": mean,
            "standard_error": error,
        }


def context_sentence(context: dict[str, Any] | None) -> str:
    """Return one sentence that says if more context helps, from ``context`` of a split."""
    if context is None:
        return "Whether more context helps cannot be told: no row has three trained tokens."
    gain, error, rows = context["gain"], context["standard_error"], context["rows"]
    if error is None:
        return (
            f"In the one row that tells, the loss of the last third of positions is {abs(gain):.3g} nats "
            f"{'lower' if gain >= 0 else 'higher'} than that of the first; more rows would say if context helps."
        )
    figures = f"{abs(gain):.3g} +- {error:.2g} nats {'lower' if gain >= 0 else 'higher'} than in the first"
    where = f"in the last third of a row's trained part the loss is {figures} ({rows:,} rows)"
    if abs(gain) < DECISIVE * error or gain == 0:
        return f"Whether more context helps cannot be told from these rows: {where}."
    return f"More context {'seems' if gain > 0 else 'does not seem'} to help: {where}."


@torch.no_grad()
def score_rows(
    handle: StreamHandle,
    model: Any,
    rows: Sequence[data.Example],
    *,
    batch_size: int,
    pad_token_id: int,
    bf16: bool,
    device: torch.device,
    rows_done: Callable[[int, int], None],
    names: Sequence[str] | None = None,
) -> LossSums:
    """Return the losses of rows, one beside another and padded on the right: packed rows do not see each other either.

    Args:
        handle: Streams the model.
        model: In any mode; it is put back.
        rows: The rows.
        batch_size: Rows at a time.
        pad_token_id: Fills shorter rows.
        bf16: Compute in bfloat16.
        device: Of the model.
        rows_done: Called after each batch with the rows that are done and all rows.
        names: The set of each row; without them it is the file or dataset that the row comes from.
    """
    sums = LossSums()
    with train.evaluating(model), handle.routers.silenced(), train.autocast(device, bf16):
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            batch = _collate(part, pad_token_id).to(device)
            losses_BT = -handle.logprobs(targets=batch.shift_labels, model=model, **batch.arguments).logprobs
            for place, row in enumerate(part):
                trained = batch.shift_labels[place].ne(IGNORE_INDEX).nonzero()[:, 0]
                name = name_of_set(row.origin) if names is None else names[start + place]
                sums.add(name, losses_BT[place][trained].cpu(), trained.cpu())
            rows_done(min(start + batch_size, len(rows)), len(rows))
    return sums


def _collate(rows: Sequence[data.Example], pad_token_id: int) -> train.MicroBatch:
    batch = data.collate(rows, pad_token_id=pad_token_id)
    return train.MicroBatch(**batch, origins=tuple(row.origin for row in rows))


def name_of_set(origin: str) -> str:
    """Return the file or dataset of a row's origin, ``file:row``; the built-in library is one dataset of many files."""
    if origin.startswith("stdlib:"):
        return "python-stdlib"
    return origin.rpartition(":")[0] or origin


def _buckets(length: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over ``(number, first, end)`` of the buckets of positions: 0 to 15, then by powers of two."""
    first, last, number = 0, 16, 0
    while first < length:
        yield number, first, last
        first, last, number = last, 2 * last, number + 1


# --- pairs and prompts ------------------------------------------------------------------------------------------------


SumAndCount = tuple[float, float]


@dataclass
class MetricSums:
    """Metrics of batches as sums and counts, with what their standard error needs."""

    batches: dict[str, list[SumAndCount]] = field(default_factory=dict)
    rows: int = 0

    def add(self, metrics: Mapping[str, SumAndCount]) -> None:
        """Add the metrics of a batch: the sum and the count of each."""
        for name, part in metrics.items():
            self.batches.setdefault(name, []).append((float(part[0]), float(part[1])))

    def join(self, other: MetricSums) -> None:
        """Add all batches of other rows."""
        for name, parts in other.batches.items():
            self.batches.setdefault(name, []).extend(parts)
        self.rows += other.rows

    def to_json(self) -> dict[str, Any]:
        """Return the rows, and of each metric its mean and standard error."""
        return {"rows": self.rows, "metrics": {name: _mean(parts) for name, parts in self.batches.items()}}


def _mean(parts: Sequence[SumAndCount]) -> dict[str, float | None]:
    """Return the mean over everything that was counted, and its standard error over batches; None where unknown."""
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
    make_built: Callable[[Sequence[Any]], Built],
    rows: Sequence[Any],
    *,
    bf16: bool,
    rows_done: Callable[[int, int], None],
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the part of the document that is about one split: each metric of the objective, by set.

    Args:
        task: The task of the recipe.
        make_built: Returns the parts of a run whose held-out rows are those it is given.
        rows: Pairs, single completions, or prompts.
        bf16: Compute in bfloat16.
        rows_done: Called after each batch with the rows that are done and all rows.
        names: The set of each row; without them it is the file or dataset that the row comes from.
    """
    groups: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(name_of_set(row.origin) if names is None else names[place], []).append(row)
    found = {name: MetricSums(rows=len(group)) for name, group in groups.items()}
    done = 0
    for name, group in groups.items():
        built = make_built(group)
        for metrics, size in _measure(task, built, bf16=bf16):
            found[name].add(metrics)
            done += size
            rows_done(done, len(rows))
    whole = MetricSums()
    for each in found.values():
        whole.join(each)
    return {**whole.to_json(), "sets": [{"name": name, **each.to_json()} for name, each in found.items()]}


@torch.no_grad()
def _measure(task: Task[Any], built: Built, *, bf16: bool) -> Iterator[tuple[Mapping[str, SumAndCount], int]]:
    """Iterate over the metrics of batches, the loss among them, and the rows of each."""
    training = task.training(built)
    (make_batches,) = training.held_out.values()  # the rows are those of one set
    with train.evaluating(built.model), train.preserve_rng(), built.handle.routers.silenced():
        for batch in make_batches():
            moved = batch.to(built.device)
            with train.autocast(built.device, bf16):
                score = training.objective.score(built.model, moved, None)
            losses = dict(zip(("loss",), score.held_out, strict=False))
            yield {**losses, **score.metrics}, len(batch.origins)
