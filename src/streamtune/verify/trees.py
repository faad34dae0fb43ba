"""The losses that ``verify`` compares where completions are scored: the recipe's own, computed in two ways.

    streamed   the recipe's layout, prompts shared where the model can; log-probabilities by the engine
    plain      a row for each completion behind its own copy of the prompt; log-probabilities by ordinary logits

In both, the reference's log-probabilities are computed in the same way as the model's. Completions of grpo are random
tokens after the prompts of the first rows: nothing is generated and no reward is computed. Losses on routers are left
out on both sides: a prompt that is shared goes through them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from streamtune import data, train
from streamtune.engine import StreamHandle
from streamtune.errors import DataError
from streamtune.labels import IGNORE_INDEX
from streamtune.run.reference import streamed
from streamtune.simulate.scored import PlainScores
from streamtune.tasks.task import ScoringTask
from streamtune.train.objective import autocast
from streamtune.verify.restore import cast

__all__ = ["TreeLosses", "Window", "choose_rows"]


@dataclass(frozen=True)
class TreeLosses:
    """The recipe's loss on the same completions in two layouts."""

    task: ScoringTask[Any]
    held: Any | None
    """The reference that is held; None where the model is its own, or there is none."""
    shared: train.TreeBatch
    """The batch in the layout that is trained on."""
    apart: train.TreeBatch
    """The batch with a row for each completion."""

    def plain(self, model: nn.Module, bf16: bool) -> Tensor:
        """Compute the loss from ordinary logits, with a row for each completion."""
        scorer: Any = PlainScores(model)
        beside: Any = PlainScores(self.held) if self.held is not None else scorer
        return self._loss(scorer, self._reference(model, beside), self.apart, model, bf16)

    def streamed(self, handle: StreamHandle) -> Callable[[nn.Module, bool], Tensor]:
        """Return a function that computes the loss by the engine, in the layout that is trained on."""
        return partial(self._streamed, handle)

    def _streamed(self, handle: StreamHandle, model: nn.Module, bf16: bool) -> Tensor:
        if self.held is None:
            return self._loss(handle, self._reference(model, handle), self.shared, model, bf16)
        reference = streamed(self.held, handle, temperature=self.task.temperature)
        with reference.handle:
            return self._loss(handle, reference, self.shared, model, bf16)

    def _reference(self, model: nn.Module, scorer: Any) -> train.ModelReference:
        called = model if self.held is None else self.held
        return train.ModelReference(called, scorer, temperature=self.task.temperature)

    def _loss(
        self, scorer: Any, reference: train.Reference, batch: train.TreeBatch, model: nn.Module, bf16: bool
    ) -> Tensor:
        """Return the loss of a step of this batch alone; without ``bf16`` a held reference is in the model's dtype."""
        task = type(self.task)(self.task.recipe.model_copy(update={"bf16": bf16}))
        device = batch.input_ids.device
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        wide = dtype if self.held is not None and not bf16 else None
        with cast(self.held or model, wide), autocast(device, bf16), scorer.routers.silenced():
            batch = task.with_reference(batch, reference)
            objective: Any = task.objective(scorer, reference, device)
            loss: Tensor = objective.score(model, batch, objective.totals([batch])).loss
        return loss


MOST_ROWS = 4
"""Rows of the batch at most."""


@dataclass(frozen=True)
class Window:
    """The part of a row that is used."""

    example: data.Example
    start: int
    row_length: int

    @property
    def length(self) -> int:
        """Tokens used."""
        return len(self.example.input_ids)


def choose_rows(examples: Sequence[data.Example], length: int, at_least: int = 1) -> list[Window]:
    """Return the first row with something to train on, cut to ``length``, and following rows too if it is short.

    The batch has ``length`` tokens at most, padding counted, so short rows cost no more than one long one. Each row is
    cut to ``length // at_least`` tokens, so that there is room for ``at_least`` rows.

    Raises:
        DataError: No row has two tokens of which the second is trained on.
    """
    windows: list[Window] = []
    for example in examples:
        window = _window(example, max(2, length // at_least))
        if window is None:
            continue
        longest = max(window.length, *(other.length for other in windows), 0)
        if windows and (len(windows) == MOST_ROWS or longest * (len(windows) + 1) > length):
            break
        windows.append(window)
    if not windows:
        raise DataError(
            "none of the rows has a token to train on after its first, so there is no gradient to compare",
            where=examples[0].origin,
            mend="use longer rows, or look at train_on",
        )
    return windows


def _window(example: data.Example, length: int) -> Window | None:
    """Cut a row to ``length`` tokens, half of them prompt if the prompt is long; return None if none is trained on."""
    ids, labels = np.asarray(example.input_ids), np.asarray(example.labels)
    trained = np.flatnonzero(labels[1:] != IGNORE_INDEX) + 1
    if not len(trained):
        return None
    start = 0
    if len(ids) > length and trained[0] >= length // 2:
        start = int(min(trained[0] - length // 2, len(ids) - length))
    kept = labels[start : start + length].copy()
    kept[0] = IGNORE_INDEX  # nothing before it is there to predict it from
    return Window(data.Example(ids[start : start + length], kept, example.origin), start, len(ids))
