"""Measure held-out pairs or prompts as the evaluation in training does, by named set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from streamtune import train
from streamtune.programs.evaluate.losses import name_of_set
from streamtune.tasks import Task
from streamtune.tasks.task import Built

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
