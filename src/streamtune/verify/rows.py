"""The rows on which ``verify`` compares next-token prediction: a few, cut to a length that memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamtune import data
from streamtune.errors import DataError
from streamtune.labels import IGNORE_INDEX

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
