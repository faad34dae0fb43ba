"""The rows that ``verify`` compares on where every token predicts the next: few, and cut to what memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamtune import data, train
from streamtune.errors import DataError

__all__ = ["Window", "choose_rows"]

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
    """The first row with something to train on, cut to ``length``; if it is short, following ones beside it.

    The batch has ``length`` tokens at most, padding counted, so short rows cost no more than one long one. Rows are cut
    further where there shall be ``at_least`` so many.

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
    """``length`` tokens of a row, half of them before the first that is trained on if the prompt is long."""
    ids, labels = np.asarray(example.input_ids), np.asarray(example.labels)
    trained = np.flatnonzero(labels[1:] != train.IGNORE_INDEX) + 1
    if not len(trained):
        return None
    start = 0
    if len(ids) > length and trained[0] >= length // 2:
        start = int(min(trained[0] - length // 2, len(ids) - length))
    kept = labels[start : start + length].copy()
    kept[0] = train.IGNORE_INDEX  # nothing before it is there to predict it from
    return Window(data.Example(ids[start : start + length], kept, example.origin), start, len(ids))
