"""From sources to examples ready to train on: read, normalise, render, fit to the length, hold out.

Everything is read and checked before this returns, so that a malformed last row costs seconds and not a night.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamtune.data.holdout import choose_held_out
from streamtune.data.packing import Packs, pack_rows
from streamtune.data.progress import with_progress
from streamtune.data.render import IGNORE_INDEX, Rendered, RowRenderer
from streamtune.data.report import DataReport, length_percentiles
from streamtune.data.rows import ROW_TYPES, Content, detect_type, normalise
from streamtune.data.sources import Source, typed_rows
from streamtune.data.store import Example, ExampleSequence, ExampleWriter, spill
from streamtune.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["OVERLENGTH", "PreparedData", "prepare"]

OVERLENGTH = ("error", "truncate", "drop", "split")
"""Ways to handle a row with more than ``max_length`` tokens."""


@dataclass(frozen=True)
class PreparedData:
    """Rows as token ids, split into a training and a held-out part."""

    train: Sequence[Example]
    validation: Sequence[Example]
    report: DataReport
    fingerprint: str
    """hash of all token ids and labels in order, and of the packs: equal if and only if a run sees the same data"""
    packs: Packs | None = None
    """the sequences that examples of ``train`` share; None without packing"""
    validation_packs: Packs | None = None
    """the same of ``validation``"""


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    overlength: str = "error",
    train_on: str = "assistant",
    val_size: float = 0.0,
    packing: bool = False,
    seed: int = 42,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedData:
    """Read every source and make examples of its rows.

    Args:
        sources: Where the rows come from, in order.
        tokenizer: The model's tokenizer, with its chat template.
        max_length: Tokens an example has at most.
        overlength: What to do with a longer row: refuse them all (``error``), cut its end off (``truncate``), leave it
            out (``drop``), or cut it into consecutive pieces (``split``).
        train_on: ``assistant`` (every assistant turn, or the completion), ``completion`` (the last turn) or ``all``.
        val_size: Rows to hold out: a fraction below 1, or a count. Rows with the same tokens stay together, so that
            no held-out row is trained on.
        packing: Choose examples that share a sequence of at most ``max_length`` tokens.
        seed: Seed of the choice of held-out rows, and of the packs.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, too long or has nothing to train on, or nothing is left.
        ArgumentError: ``overlength`` or ``train_on`` is none of the known ones.
    """
    if overlength not in OVERLENGTH:
        raise ArgumentError(f"overlength is '{overlength}'", where="overlength", mend=f"use {', '.join(OVERLENGTH)}")
    render = RowRenderer(tokenizer, train_on=train_on, notify=notify)
    with spill() as (writer, tables):
        fitting = _Fitting(ExampleWriter(writer), max_length, overlength)
        for content, origin in with_progress(_contents(sources, notify)):
            fitting.add(render(content, origin), origin)
        fitting.check(notify)
    held_out = choose_held_out(fitting.row_digests, val_size, seed)
    rows = np.frombuffer(fitting.row_of_example, dtype=np.int64)
    train = np.flatnonzero(~held_out[rows])
    validation = np.flatnonzero(held_out[rows])
    prepared = PreparedData(
        train=ExampleSequence(tables[0], train),
        validation=ExampleSequence(tables[0], validation),
        report=fitting.report(len(train), len(validation)),
        fingerprint=fitting.fingerprint(train, validation),
    )
    return _packed(prepared, max_length, seed) if packing else prepared


def _packed(prepared: PreparedData, max_length: int, seed: int) -> PreparedData:
    """Return the data with its packs. They are part of the fingerprint: a run resumes only with the same ones."""
    parts = (prepared.train, prepared.validation)
    packs, held_out = (pack_rows(_lengths(part), max_length, seed=seed) for part in parts)
    digest = hashlib.sha256(prepared.fingerprint.encode())
    for part in (packs, held_out):
        digest.update(part.rows.tobytes() + part.starts.tobytes())
    return replace(
        prepared,
        report=replace(prepared.report, packs=len(packs), pack_fill=round(packs.fill_rate(max_length), 4)),
        fingerprint=digest.hexdigest(),
        packs=packs,
        validation_packs=held_out,
    )


def _lengths(examples: Sequence[Example]) -> npt.NDArray[np.int64]:
    assert isinstance(examples, ExampleSequence)
    return examples.lengths()


def _contents(sources: Sequence[Source], notify: Callable[[str], None]) -> Iterator[tuple[Content, str]]:
    """Yield the normal form of every row of every source, with its origin."""
    for row, row_type in typed_rows(sources, ROW_TYPES, detect_type, notify):
        yield normalise(row, row_type), row.origin


@dataclass
class _Fitting:
    """Fits rows to the length, writes the examples, and counts the kept, cut and dropped rows."""

    writer: ExampleWriter
    max_length: int
    overlength: str
    counts: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """of every row as rendered"""
    row_of_example: array[int] = field(default_factory=lambda: array("q"))
    """for every example the number of its row among the kept rows"""
    row_digests: list[bytes] = field(default_factory=list)
    """for every kept row a hash of all its tokens and labels"""
    example_digests: list[bytes] = field(default_factory=list)
    too_long: int = 0
    longest: tuple[int, str] = (0, "")
    """length and origin of the longest row"""

    def add(self, rendered: Rendered, origin: str) -> None:
        """Fit one row to the length, and write the examples made of it."""
        size = len(rendered.input_ids)
        self.lengths.append(size)
        if size > self.longest[0]:
            self.longest = (size, origin)
        if size <= self.max_length:
            self._keep([rendered], origin)
            return
        self.too_long += 1
        if self.overlength == "truncate":
            self._keep(_supervised([_piece(rendered, 0, self.max_length)]), origin, "truncated")
        elif self.overlength == "split":
            pieces = [_piece(rendered, start, self.max_length) for start in range(0, size, self.max_length)]
            kept = _supervised(pieces)
            self.counts["pieces_dropped"] += len(pieces) - len(kept) if kept else 0
            self._keep(kept, origin, "split")
        else:
            self._keep([], origin)

    def _keep(self, pieces: Sequence[Rendered], origin: str, how: str = "kept whole") -> None:
        """Write the examples made of one row; without any, count the row as dropped."""
        if not pieces:
            self.counts["dropped"] += 1
            return
        self.counts[how] += 1
        row_digest = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            ids, labels = np.array(piece.input_ids, dtype=np.int32), np.array(piece.labels, dtype=np.int32)
            digest = hashlib.blake2b(ids.tobytes() + labels.tobytes(), digest_size=16).digest()
            row_digest.update(digest)
            self.example_digests.append(digest)
            self.row_of_example.append(len(self.row_digests))
            self.counts["tokens"] += len(ids)
            self.counts["supervised_tokens"] += int((labels != IGNORE_INDEX).sum())
            self.writer.append(Example(ids, labels, origin))
        self.row_digests.append(row_digest.digest())

    def check(self, notify: Callable[[str], None]) -> None:
        """Raise if rows are too long or none is left; notify the user of the changes.

        Raises:
            DataError: Rows are over the length and ``overlength`` is ``error``, or nothing is left.
        """
        size, origin = self.longest
        if self.too_long and self.overlength == "error":
            rows = "1 row has" if self.too_long == 1 else f"{self.too_long:,} rows have"
            raise DataError(
                f"{rows} more than max_length = {self.max_length:,} tokens; the longest has {size:,}",
                where=origin,
                mend=f"set max_length to {size} or more, or say what to do with them: "
                "overlength: truncate, drop or split",
            )
        if not self.row_digests:
            raise DataError(
                f"no row is left to train on: all {len(self.lengths):,} were dropped",
                where=origin,
                mend=f"the longest has {size:,} tokens, max_length is {self.max_length:,}",
            )
        if self.too_long:
            changed = ", ".join(
                f"{self.counts[how]:,} {how}" for how in ("truncated", "split", "dropped") if self.counts[how]
            )
            notify(f"{self.too_long:,} of {len(self.lengths):,} rows are over {self.max_length:,} tokens: {changed}")

    def report(self, train_examples: int, validation_examples: int) -> DataReport:
        """Return the counts and lengths of the rows."""
        return DataReport(
            rows=len(self.lengths),
            kept=len(self.row_digests),
            truncated=self.counts["truncated"],
            dropped=self.counts["dropped"],
            split=self.counts["split"],
            pieces_dropped=self.counts["pieces_dropped"],
            train_examples=train_examples,
            validation_examples=validation_examples,
            tokens=self.counts["tokens"],
            supervised_tokens=self.counts["supervised_tokens"],
            length_percentiles=length_percentiles(np.frombuffer(self.lengths, dtype=np.int64)),
        )

    def fingerprint(self, train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> str:
        """Return a hash of the examples of both parts in order."""
        total = hashlib.sha256(f"{len(train)} {len(validation)}".encode())
        for index in (*train, *validation):
            total.update(self.example_digests[index])
        return total.hexdigest()


def _piece(rendered: Rendered, start: int, size: int) -> Rendered:
    """Return ``size`` tokens from ``start``; the first is not trained on, as no token comes before it."""
    labels = rendered.labels[start : start + size]
    return Rendered(rendered.input_ids[start : start + size], [IGNORE_INDEX, *labels[1:]])


def _supervised(pieces: Sequence[Rendered]) -> list[Rendered]:
    """Return the pieces with a token that is trained on."""
    return [piece for piece in pieces if any(label != IGNORE_INDEX for label in piece.labels)]
