"""Measures of batches: padding, the tokens of a step, and the work of attention.

Attention is counted as the sum of the squares of lengths, of rows as they are computed: a row that is padded has the
length it is padded to, a row in a packed sequence its own. The forward of a layer with H query heads of D channels
takes 2 x H x D x that sum floating-point operations: two products of a query with each key up to its own position.

The reference is concat-and-chunk: all rows end to end, cut into sequences of ``max_length`` in which every token
attends to all before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamtune.data.batches.token_steps import EpochSteps

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """Use of the positions of training batches in the first epoch, and what packing makes or would make of it."""

    batching: str
    """``rows``, ``tokens`` or ``buckets``"""
    batch_size: int
    """sequences of a batch at most"""
    padding: float
    """part of the positions that is padding"""
    steps: int
    """optimizer steps"""
    step_tokens: dict[str, int]
    """tokens of a step without padding: ``min``, ``p50``, ``max``"""
    squared_lengths: int
    """sum of the squares of the lengths of rows, as they are computed"""
    squared_lengths_concat: int
    """the same of concat-and-chunk"""
    attention_ratio: float
    """``squared_lengths_concat / squared_lengths``"""
    packing: bool
    """True if rows share sequences"""
    packs: int
    """sequences that the training examples are, or would be, packed into; 0 where that was not tried"""
    pack_fill: float
    """part of their positions that holds a token"""
    fewest_packs: int
    """no packing could do with fewer sequences"""
    pieces: dict[int, int]
    """``buckets``: pieces by the tokens of their bucket"""


@dataclass(frozen=True)
class EpochLayout:
    """Positions and work of an epoch."""

    positions: int
    """of all batches, padding included"""
    squares: int
    """sum of the squares of the lengths of rows, as they are computed"""
    step_tokens: Numbers
    """[steps] tokens without padding"""


def lay_out(
    epoch: EpochSteps,
    tokens: Numbers,
    squares: Numbers,
    *,
    batch_size: int,
    packed: bool,
    per_sequence: Numbers | None = None,
) -> EpochLayout:
    """Return the measures of an epoch on one rank.

    Args:
        epoch: Its steps.
        tokens: [units] tokens.
        squares: [units] sum of the squares of the lengths of their rows.
        batch_size: Sequences of a batch at most.
        packed: True if rows attend to themselves alone, and padding is a row by itself.
        per_sequence: [units] units of its kind that share a sequence; None is one of each.
    """
    count = len(epoch.units)
    if not count:
        return EpochLayout(0, 0, np.zeros(0, dtype=np.int64))
    tokens, squares = tokens[epoch.units], squares[epoch.units]
    begins = np.concatenate([[0], epoch.stops[:-1]])
    place = np.arange(count) - np.repeat(begins, np.diff(np.concatenate([[0], epoch.stops])))
    together = np.ones(count, dtype=np.int64) if per_sequence is None else per_sequence[epoch.units]
    sequences, batches = np.flatnonzero(place % together == 0), np.flatnonzero(place % (together * batch_size) == 0)
    used = np.add.reduceat(tokens, sequences)
    first = np.searchsorted(sequences, batches)  # the first sequence of each batch
    rows = np.diff(np.concatenate([first, [len(sequences)]]))
    padded = np.repeat(np.maximum.reduceat(used, first), rows)
    work = squares.sum() + ((padded - used) ** 2).sum() if packed else (padded**2).sum()
    return EpochLayout(int(padded.sum()), int(work), np.add.reduceat(tokens, begins))


def concat_squares(tokens: int, max_length: int) -> int:
    """Return the sum of the squares of the lengths of ``tokens`` tokens that are cut into sequences."""
    whole, rest = divmod(tokens, max_length)
    return int(whole) * max_length**2 + int(rest) ** 2
