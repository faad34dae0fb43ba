"""Measure rows and batches: lengths, tokens lost at other maximum lengths, padding, packing, and attention cost.

Attention cost is given as the sum of squared row lengths. A padded row counts with its padded length, a row in a packed
sequence with its own length. In the forward pass, a layer with H query heads of D channels needs 2 x H x D times this
sum in floating-point operations. These are two products of each query with every key up to its position.

The sum is compared with concat-and-chunk: all rows are concatenated and cut into sequences of ``max_length`` tokens, in
which every token attends to all tokens before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streamtune.base.palette import INK, with_default_style
from streamtune.data.batches.optimizer_steps import EpochSteps
from streamtune.data.batches.sampler import Mixture, Numbers, ResumableSampler, pack_rows
from streamtune.data.fit import Measured
from streamtune.data.options import DataOptions

MOST_BINS = 14
FEWEST_CHOICES, MOST_CHOICES = 6, 8


@dataclass(frozen=True)
class LengthBin:
    """A bin of a histogram of row lengths."""

    shortest: int
    """smallest row length of the bin in tokens"""
    longest: int
    """largest row length of the bin in tokens"""
    rows: int


def length_histogram(lengths: Numbers, max_length: int, max_bins: int = MOST_BINS) -> list[LengthBin]:
    """Return a histogram of row lengths with bins of growing width.

    Args:
        lengths: [rows] number of tokens of each row; at least one row.
        max_length: Length at which a bin ends, so that no bin has rows both below and above this length.
        max_bins: Approximate maximum number of bins.
    """
    low, high = int(lengths.min()), int(lengths.max())
    if high - low < max_bins:
        counts = np.bincount(lengths - low)
        return [LengthBin(low + place, low + place, int(rows)) for place, rows in enumerate(counts)]
    ratio = max(2 ** (1 / 4), (high / low) ** (1 / max_bins)) if high > low else 2.0
    # Ratios whose powers include powers of two, which are easy to read.
    ratio = next(step for step in (2 ** (1 / 4), 2**0.5, 2.0, 4.0, 8.0, 16.0, 2.0**40) if step >= ratio * 0.999)
    first = math.floor(math.log(low) / math.log(ratio) + 1e-9)
    edges = [max(1, round(ratio**first))]
    while edges[-1] <= high:
        edges.append(max(edges[-1] + 1, round(ratio ** (first + len(edges)))))
    if low <= max_length < high:
        edges = [
            edges[0],
            *(edge for edge in edges[1:-1] if abs(math.log(edge / (max_length + 1), ratio)) > 0.3),
            edges[-1],
        ]
        edges = sorted({*edges, max_length + 1})
    counts, _ = np.histogram(lengths, bins=np.array(edges) - 0.5)
    return [LengthBin(start, stop - 1, int(rows)) for start, stop, rows in zip(edges, edges[1:], counts, strict=False)]


@dataclass(frozen=True, kw_only=True)
class MaxLengthEffect:
    """Effects of one value of ``max_length``: rows that exceed it, tokens lost, padding, packed sequences."""

    max_length: int
    rows_over: int
    """number of rows that exceed ``max_length``"""
    lost_if_truncated: int | None
    """number of tokens lost with ``overlength: truncate``; None if rows have several completions"""
    lost_if_dropped: int
    """number of tokens lost with ``overlength: drop``"""
    padding: float | None = None
    """fraction of batch positions that is padding (``overlength: error`` counts as ``truncate``), or None"""
    packs: int | None = None
    """number of packed sequences; None if not computed"""
    pack_fill: float | None = None
    """fraction of the positions of packed sequences that hold a token"""


def compare_max_lengths(
    measured: Measured,
    current_max_length: int,
    options: DataOptions,
    *,
    batch_size: int | None,
    shuffle: bool = True,
    cuts_rows: bool = True,
) -> list[MaxLengthEffect]:
    """Return the effects of several values of ``max_length``: the current value, and powers of two near the row
    lengths.

    Args:
        options: Options for preparing the rows. With ``overlength: split``, parts are assumed to end at any token.
        batch_size: Number of rows of a batch; None computes neither padding nor packing.
        cuts_rows: False if rows cannot be truncated: prompts with completions, and rows with images.
    """
    choices = []
    overlap, seed = options.split_overlap, options.seed
    for length in _lengths_to_compare(measured.lengths, current_max_length):
        if overlap >= length // 2 and length != current_max_length:  # more than half of each part would be context
            continue
        exceeds = measured.lengths > length
        tokens_lost = np.where(measured.largest_untrained_length < length, measured.lengths - length, measured.lengths)
        padding = packs = fill = None
        if batch_size is not None:
            sizes = _predict_example_lengths(measured, length, options.overlength, overlap)
            padding = padding_share(sizes, batch_size, seed=seed, shuffle=shuffle)
            packed = pack_rows(sizes, length, seed=seed)
            packs, fill = len(packed), round(packed.fill_rate(length), 4)
        choices.append(
            MaxLengthEffect(
                max_length=length,
                rows_over=int(exceeds.sum()),
                lost_if_truncated=int(tokens_lost[exceeds].sum()) if cuts_rows else None,
                lost_if_dropped=int(measured.tokens[exceeds].sum()),
                padding=padding,
                packs=packs,
                pack_fill=fill,
            )
        )
    return choices


def _lengths_to_compare(lengths: Numbers, current_max_length: int) -> list[int]:
    """Return the current value, and powers of two near the row lengths; if these are few, also lengths half-way between
    them.
    """
    top = max(2, math.ceil(math.log2(int(lengths.max()))))
    middle = int(math.log2(max(4.0, float(np.median(lengths)))))
    powers = [2**power for power in range(max(middle - 1, top - MOST_CHOICES + 2, 2), top + 1)]
    between = [3 * power // 2 for power in reversed(powers[:-1])][: max(0, FEWEST_CHOICES - len(powers))]
    return sorted({*powers, *between, current_max_length})


def _predict_example_lengths(measured: Measured, max_length: int, overlength: str, overlap: int) -> Numbers:
    lengths = measured.lengths
    if overlength == "split":
        context = min(overlap, max_length - 1)
        whole, rest = np.divmod(np.maximum(lengths - context, 1), max_length - context)
        rest += np.where(rest > 0, context, 0)
        sizes = np.concatenate([np.full(int(whole.sum()), max_length, dtype=np.int64), rest[rest > 0]])
        order = np.argsort(np.concatenate([np.repeat(np.arange(len(lengths)), whole), np.flatnonzero(rest)]))
        return sizes[order]
    fits = lengths <= max_length
    if overlength == "drop":
        return lengths[fits]
    return np.minimum(lengths, max_length)[fits | (measured.largest_untrained_length < max_length)]


def padding_share(
    lengths: Numbers, batch_size: int, *, seed: int, shuffle: bool = True, mixture: Mixture | None = None
) -> float:
    """Return the fraction of positions that is padding, over all batches of the first epoch.

    Args:
        lengths: [rows] number of tokens of each row.
        mixture: Number of rows of each source per epoch; None visits each row once.
    """
    if not len(lengths):
        return 0.0
    order = lengths[ResumableSampler(len(lengths), seed=seed, shuffle=shuffle, mixture=mixture).epoch_order(0)]
    batches = -(-len(order) // batch_size)
    padded = np.zeros(batches * batch_size, dtype=np.int64)
    padded[: len(order)] = order
    rows = np.full(batches, batch_size)
    rows[-1] = len(order) - (batches - 1) * batch_size
    positions = int((padded.reshape(batches, batch_size).max(axis=1) * rows).sum())
    return round(1 - int(order.sum()) / positions, 4)


def fewest_packs(lengths: Numbers, max_length: int) -> int:
    """Return a lower bound on the number of packed sequences: the number of tokens / ``max_length``, rounded up."""
    return -(-int(lengths.sum()) // max_length)


@with_default_style
def draw_length_histogram(bins: list[LengthBin], max_length: int, title: str, limit_name: str = "max_length") -> bytes:
    """Return the histogram as a PNG image, with a line at the maximum length."""
    from io import BytesIO

    # Imported here because it is slow. Figures made without pyplot need no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    edges = [each.shortest for each in bins] + [bins[-1].longest + 1]
    for each in bins:
        over = each.shortest > max_length
        axes.bar(
            each.shortest,
            each.rows,
            width=each.longest + 1 - each.shortest,
            align="edge",
            color="#e4572e" if over else "#2f6fde",
            edgecolor="white",
            linewidth=0.8,
            hatch="//" if over else None,
        )
    axes.set_xscale("log", base=2)
    axes.axvline(max_length + 0.5, color=INK, linestyle="--", linewidth=1.3)
    over_rows = sum(each.rows for each in bins if each.shortest > max_length)
    text = f"{limit_name} {max_length:,}: {over_rows:,} row{'' if over_rows == 1 else 's'} over"
    right = max_length > math.sqrt(edges[0] * max(edges[-1], max_length))
    axes.annotate(
        text, (max_length, 0.97), xycoords=("data", "axes fraction"), xytext=(-6 if right else 6, 0),
        textcoords="offset points", ha="right" if right else "left", va="top", color=INK, fontsize=10,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2},
    )  # fmt: skip
    powers = [2**power for power in range(0, 60) if edges[0] * 0.7 <= 2**power <= max(edges[-1], max_length) * 1.5]
    axes.set_xticks(powers, [f"{power:,}" for power in powers], rotation=35 if len(powers) > 9 else 0)
    axes.minorticks_off()
    axes.set_xlabel("tokens of a row, before any cut", color=INK)
    axes.set_ylabel("rows", color=INK)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    written = BytesIO()
    FigureCanvasAgg(figure).print_png(written)
    return written.getvalue()


@dataclass(frozen=True, kw_only=True)
class BatchStatistics:
    """Padding, packing and attention cost of the training batches of the first epoch."""

    batching: str
    """``rows``, ``tokens`` or ``buckets``"""
    batch_size: int
    """maximum number of sequences of a batch"""
    padding: float
    """fraction of positions that is padding"""
    steps: int
    step_tokens: dict[str, int]
    """number of tokens of an optimizer step without padding: ``min``, ``p50``, ``max``"""
    squared_lengths: int
    """sum of squared row lengths; a padded row counts with its padded length"""
    squared_lengths_concat: int
    """sum of squared sequence lengths if rows were concatenated and cut to ``max_length`` tokens"""
    attention_ratio: float
    """``squared_lengths_concat / squared_lengths``"""
    packing: bool
    packs: int
    """number of packed sequences, with or without ``packing``; 0 if this number was not computed"""
    pack_fill: float
    """fraction of the positions of packed sequences that hold a token"""
    fewest_packs: int
    """lower bound on the number of packed sequences"""
    pieces: dict[int, int]
    """length of a bucket in tokens -> number of its pieces (``batching: buckets``)"""


@dataclass(frozen=True)
class EpochLayout:
    """Number of positions and attention cost of an epoch."""

    positions: int
    """number of positions of all batches, padding included"""
    squares: int
    """sum of squared row lengths; a padded row counts with its padded length"""
    step_tokens: Numbers
    """[steps] number of tokens of each step, without padding"""


def measure_epoch_layout(
    epoch: EpochSteps,
    tokens: Numbers,
    squares: Numbers,
    *,
    batch_size: int,
    packed: bool,
    per_sequence: Numbers | None = None,
) -> EpochLayout:
    """Compute the number of positions and the attention cost (squared lengths) of an epoch's batches on one rank.

    Args:
        epoch: Units (rows, packs or pieces of rows) of the epoch, divided into steps.
        tokens: [units] number of tokens of each unit.
        squares: [units] sum of the squared lengths of each unit's rows.
        packed: Whether sequences are packed: a row attends only to itself, and padding counts as a row.
        per_sequence: [units] number of units of the same length that share a sequence; None means one each.
    """
    count = len(epoch.units)
    if not count:
        return EpochLayout(0, 0, np.zeros(0, dtype=np.int64))
    tokens, squares = tokens[epoch.units], squares[epoch.units]
    begins = np.concatenate([[0], epoch.stops[:-1]])
    place = np.arange(count) - np.repeat(begins, np.diff(np.concatenate([[0], epoch.stops])))
    together = np.ones(count, dtype=np.int64) if per_sequence is None else per_sequence[epoch.units]
    sequences, batches = np.flatnonzero(place % together == 0), np.flatnonzero(place % (together * batch_size) == 0)
    sequence_tokens = np.add.reduceat(tokens, sequences)
    first = np.searchsorted(sequences, batches)  # the first sequence of each batch
    rows = np.diff(np.concatenate([first, [len(sequences)]]))
    padded = np.repeat(np.maximum.reduceat(sequence_tokens, first), rows)
    work = squares.sum() + ((padded - sequence_tokens) ** 2).sum() if packed else (padded**2).sum()
    return EpochLayout(int(padded.sum()), int(work), np.add.reduceat(tokens, begins))


def concat_squared_lengths(tokens: int, max_length: int) -> int:
    """Return the sum of squared sequence lengths if ``tokens`` tokens are cut into sequences of ``max_length``."""
    whole, rest = divmod(tokens, max_length)
    return int(whole) * max_length**2 + int(rest) ** 2
