"""The rows and losses that ``verify`` compares, as long as plain autograd has memory for.

Where completions are scored the loss is the recipe's own, computed in two ways:

    streamed   the recipe's layout, prompts shared where the model can; log-probabilities by the engine
    plain      a row for each completion behind its own copy of the prompt; log-probabilities by ordinary logits

In both, the reference's log-probabilities are computed in the same way as the model's. Completions of grpo are random
tokens after the prompts of the first rows: nothing is generated and no reward is computed. Losses on routers are left
out on both sides: a prompt that is shared goes through them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from streamtune import data, train
from streamtune.base.model_facts import IGNORE_INDEX, model_device
from streamtune.engine import StreamHandle, decoder_layers
from streamtune.errors import DataError
from streamtune.plan.simulate.memory import LiveBytes
from streamtune.plan.simulate.scored import PlainScores
from streamtune.programs.verify.restore import cast
from streamtune.run.reference import streamed
from streamtune.tasks.task import ScoringTask
from streamtune.train.objective import autocast


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
    return Window(replace(example, input_ids=ids[start : start + length], labels=kept), start, len(ids))


MARGIN = 0.8
"""Part of the free memory that is planned with."""

GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """Bytes that are free, and what a forward of T tokens holds: ``per_token T + per_square T^2``.

    Attributes:
        model: The model that was measured.
        measured: The dtype it was measured in.
        free: Free bytes on the model's device.
        host_free: Free bytes on the host, where the truth's gradients are kept.
        per_token, per_square: Bytes; the second where attention weights are kept.
    """

    model: nn.Module
    measured: torch.dtype
    free: int
    host_free: int
    per_token: float
    per_square: float

    def longest(self, dtype: torch.dtype) -> int:
        """Return the most tokens that plain autograd in ``dtype`` has memory for; 0 where not even the weights fit."""
        wider = dtype.itemsize / self.measured.itemsize
        spare = MARGIN * self.free - self._needed(0, dtype)
        if spare <= 0 or self._kept(dtype) > MARGIN * self.host_free:
            return 0
        a, b = wider * self.per_square, wider * self.per_token
        return int(spare / b) if a <= 0 else int((math.sqrt(b * b + 4 * a * spare) - b) / (2 * a))

    def lacks(self, tokens: int, dtype: torch.dtype) -> str:
        """Return the memory that plain autograd in ``dtype`` lacks for so many tokens, in words; empty if none."""
        needs = [("", self._needed(tokens, dtype), self.free), (" of the host", self._kept(dtype), self.host_free)]
        for where, needed, free in needs:
            if needed > MARGIN * free:
                return f"it takes {needed / GIB:.1f} GiB{where} more, {free / GIB:.1f} GiB are free"
        return ""

    def _needed(self, tokens: int, dtype: torch.dtype) -> float:
        """Return the bytes of widened weights, of gradients held at a time, and of activations, wider in proportion."""
        parameters = list(self.model.parameters())
        weights = sum(p.numel() * max(dtype.itemsize - p.dtype.itemsize, 0) for p in parameters)
        on_host = parameters[0].device.type == "cpu"
        largest = max((p.numel() for p in parameters if p.requires_grad), default=0) * dtype.itemsize
        wider = dtype.itemsize / self.measured.itemsize
        activations = wider * (self.per_token * tokens + self.per_square * tokens**2)
        return weights + (self._kept(dtype) if on_host else largest) + activations

    def _kept(self, dtype: torch.dtype) -> int:
        """Return the bytes of the truth's gradients."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad) * dtype.itemsize


def measure_room(model: nn.Module, measured: torch.dtype, forward: Callable[[int], Tensor], tokens: int) -> Room:
    """Measure what two short forwards with their graphs hold, from which follows what a longer one holds.

    Args:
        model: The model, without an adapter's wrapper.
        measured: The dtype that ``forward`` computes in.
        forward: The loss on so many tokens.
        tokens: Tokens of the longer of the two.
    """
    half, whole = tokens // 2, tokens
    held = []
    for size in (half, whole):
        with LiveBytes(model, decoder_layers(model)) as live:
            loss = forward(size)
        held.append(live.peak)
        del loss
    # b T + a T^2 through both points
    square = max(0.0, (held[1] / whole - held[0] / half) / (whole - half))
    per_token = max(1.0, held[1] / whole - square * whole)
    host_free = int(psutil.virtual_memory().available)
    device = model_device(model)
    free = host_free
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(model, measured, free, host_free, per_token, square)
