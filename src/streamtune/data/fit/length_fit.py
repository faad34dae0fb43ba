"""Fit records to the maximum length, and count and hash them: base class for rows, trees and prompts.

The counts are stored in files next to the table of records:

    fit.npz      lengths, hashes, and indices of rows and records: everything that grows with the data
    fit.json     all other counts
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from streamtune.data.batches.sampler import Mixture, Packs, Pieces
from streamtune.data.data_report import CompletionReport, DataReport, SourceReport, length_percentiles
from streamtune.data.fit.held_out import (
    Digests,
    EvalSet,
    SourceStart,
    add_epoch_counts,
    choose_held_out,
    count_duplicates,
    find_eval_sets,
    make_mixture,
)
from streamtune.data.image_files import have_images
from streamtune.data.reading.sources import Source
from streamtune.data.record_table import MappedTable, Record, Stored, TableWriter
from streamtune.errors import DataError

RecordT = TypeVar("RecordT", bound=Record)
ReportT = TypeVar("ReportT", DataReport, CompletionReport)
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """Lengths of the rows before truncation, and counts of the stored records, both in the order of reading.

    Records have the same indices here as in the Arrow table of the prepared data.
    """

    lengths: npt.NDArray[np.int64]
    """[rows] number of tokens that ``max_length`` limits"""
    tokens: npt.NDArray[np.int64]
    """[rows] number of tokens; each completion counts its own copy of the prompt"""
    largest_untrained_length: npt.NDArray[np.int64]
    """[rows] largest ``max_length`` at which truncation leaves no token to train on, so that the row is dropped. If a
    row keeps its beginning, this is the index of the first token with a label"""
    trained: npt.NDArray[np.int64]
    """[records] number of tokens with a label (not -100), which count in the loss"""
    lost: npt.NDArray[np.int64]
    """[records] number of tokens cut off (``overlength: truncate``); 0 for parts of a split row"""
    starts: tuple[int, ...]
    """[sources] index of each source's first record"""


@dataclass(frozen=True)
class Prepared(Generic[RecordT, ReportT]):
    """Prepared data: training records and held-out (validation) records as token ids, with their counts.

    A record is an :class:`Example`, a :class:`Tree` or a :class:`Prompt`. Rows of one group, such as duplicates, are
    held out together.
    """

    training: Stored[RecordT]
    validation: Stored[RecordT]
    report: ReportT
    fingerprint: str
    """hash of all records that are used for training or evaluation, in order; it is equal only if two runs have equal
    data"""
    measured: Measured
    packs: Packs | None = None
    """packed sequences of ``training``; None without packing"""
    validation_packs: Packs | None = None
    """packed sequences of ``validation``; None without packing"""
    pieces: Pieces | None = None
    """pieces into which examples of ``training`` are cut; None unless ``batching`` is ``buckets``"""
    bad_rows: Sequence[Mapping[str, str]] = ()
    """skipped bad rows, each with its file and line, error and fix"""
    bounds: tuple[int, ...] = ()
    """[sources + 1] index in ``training`` of each training source's first record, then the number of all records"""
    mixture: Mixture | None = None
    """number of rows or packs of each source that an epoch visits; None without weights"""
    eval_sets: tuple[EvalSet, ...] = ()
    """named sets that together make up ``validation``; empty without eval sets"""

    @property
    def has_images(self) -> bool:
        """True if a row has images, to train on or held out."""
        return have_images(self.training) or have_images(self.validation)


class LengthFitter(ABC, Generic[RecordT, ReportT]):
    """Truncates, splits or drops rows that exceed the maximum length; writes the resulting records and counts them.

    Args:
        overlength: Option for rows over the maximum length, one of :data:`OVERLENGTH`.
        limit: Text for the maximum length in errors, such as "max_length is 2,048".
        over: Text for the maximum length in notes, such as "2,048 tokens".
    """

    record: type[RecordT]
    report_type: type[ReportT]
    noun = "row"
    trains = True
    """True if tokens of the records count in the loss, as in all records but prompts"""

    def __init__(self, writer: TableWriter, overlength: str, *, limit: str, over: str) -> None:
        self.writer, self.overlength, self.limit, self.over = writer, overlength, limit, over
        self.counts: Counter[str] = Counter()
        self.lengths: array[int] = array("q")
        """[rows] number of tokens of each row, before truncation"""
        self.longest: tuple[int, str] = (0, "")
        """number of tokens of the longest row, and its file and line"""
        self.is_longest_estimated = False
        self.groups = Digests()
        """[kept rows] hash of each row's group; rows of a group are held out together"""
        self.row_of_record: array[int] = array("q")
        """[records] index of each record's row among the kept rows"""
        self.digests = Digests()
        """[records] hash of everything in a record that training reads"""
        self.bad_rows: Sequence[Mapping[str, str]] = ()
        self.tokens, self.largest_untrained_length = array("q"), array("q")
        """[rows] arrays of :class:`Measured`"""
        self.trained, self.lost = array("q"), array("q")
        self.starts: list[SourceStart] = []

    def start_source(self, source: Source) -> None:
        """Count rows that are added from now on as rows of ``source``."""
        self.starts.append(self._count_so_far(source))

    def _count_so_far(self, source: Source) -> SourceStart:
        rows, kept, records = len(self.lengths), len(self.groups), len(self.digests)
        return SourceStart(source, Counter(self.counts), rows, kept, records)

    def record_row_lengths(
        self,
        size: int,
        origin: str,
        *,
        tokens: int | None = None,
        largest_untrained_length: int = 0,
        estimated: bool = False,
    ) -> None:
        """Record the lengths of a row before truncation.

        Args:
            size: Number of tokens that ``max_length`` limits.
            origin: File and line of the row, for errors.
            tokens: Number of tokens, counting the prompt once for each completion. [default: ``size``]
            largest_untrained_length: Largest ``max_length`` at which truncation leaves no token to train on.
        """
        if size > self.longest[0]:
            self.is_longest_estimated = estimated
        self.lengths.append(size)
        self.tokens.append(size if tokens is None else tokens)
        self.largest_untrained_length.append(largest_untrained_length)
        self.longest = max(self.longest, (size, origin), key=lambda pair: pair[0])

    @property
    def longest_length(self) -> str:
        """Number of tokens of the longest row as text; it begins with "about" if it is an estimate."""
        return ("about " if self.is_longest_estimated else "") + f"{self.longest[0]:,}"

    @property
    def rows(self) -> int:
        """Number of rows read, including rows dropped before their length was known."""
        return len(self.lengths) + self.counts["identical"] + self.counts["empty"]

    def count_empty_row(self) -> None:
        self.counts["empty"] += 1
        self.counts["dropped"] += 1

    def write_record(self, record: RecordT, digest: bytes, *, trained_tokens: int = 0, lost_tokens: int = 0) -> None:
        """Write a record of the current row; the caller then appends the hash of the row's group to ``groups``.

        Args:
            digest: Hash of everything in the record that training reads.
        """
        self.row_of_record.append(len(self.groups))
        self.digests.append(digest)
        self.trained.append(trained_tokens)
        self.lost.append(lost_tokens)
        self.writer.append(record)

    def make_prepared(
        self, table: MappedTable, val_size: float, seed: int, notify: Notify = lambda message: None
    ) -> Prepared[RecordT, ReportT]:
        """Split the written records into a training part and a held-out part.

        Args:
            val_size: Fraction (below 1) or number of the rows to hold out.
            notify: Function that shows the user how many records of eval sets are also in the training data.

        Raises:
            DataError: No row is left to train on, or in an eval set.
        """
        rows = np.frombuffer(self.row_of_record, dtype=np.int64)
        is_held_out = choose_held_out(self.groups, self.starts, val_size, seed)[rows]
        sources = [start.source for start in self.starts if start.source.evaluates is None]
        trained_records: npt.NDArray[np.int64]
        trained_records, bounds = self._repeat_records(np.flatnonzero(~is_held_out), sources)
        train = Stored(self.record, table, trained_records)
        held_out: npt.NDArray[np.int64] = np.flatnonzero(is_held_out)
        lengths, eval_sets = train.lengths(), find_eval_sets(held_out, self.starts)
        mixture = make_mixture(sources, bounds, np.ones_like(lengths), lengths)
        fingerprint_hash = hashlib.sha256(f"{len(trained_records)} {len(held_out)}".encode())
        for records in (trained_records, held_out):
            fingerprint_hash.update(self.digests.to_array()[records].data)
        if eval_sets or mixture is not None:
            fingerprint_hash.update(repr((eval_sets, mixture)).encode())
        duplicates, in_both = count_duplicates(self.digests, is_held_out)
        for eval_set in eval_sets:
            if num_in_both := int(in_both[held_out[eval_set.start : eval_set.stop]].sum()):
                rows_of_set = f"{eval_set.stop - eval_set.start:,} {self.noun}s of the eval set '{eval_set.name}'"
                notify(f"{num_in_both:,} of {rows_of_set} are also in the training data")
        report = self.make_report(len(trained_records), is_held_out, duplicates, int(in_both[~is_held_out].sum()))
        return Prepared(
            training=train,
            validation=Stored(self.record, table, held_out),
            report=replace(report, sources=add_epoch_counts(report.sources, bounds, lengths, mixture)),
            fingerprint=fingerprint_hash.hexdigest(),
            measured=self._collect_measured_lengths(),
            bad_rows=self.bad_rows,
            bounds=bounds,
            mixture=mixture,
            eval_sets=eval_sets,
        )

    def _repeat_records(
        self, records: npt.NDArray[np.int64], sources: Sequence[Source]
    ) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
        """Return the training records, each ``source.repeat`` times, and the bounds of the sources."""
        if not sources:  # all sources belong to eval sets
            return records, (0,)
        parts = np.split(records, np.searchsorted(records, [start.records for start in self.starts[1 : len(sources)]]))
        repeated: list[npt.NDArray[np.int64]] = [
            np.tile(part, source.repeat) for part, source in zip(parts, sources, strict=True)
        ]
        return np.concatenate(repeated), (0, *np.cumsum([len(part) for part in repeated]).tolist())

    def _collect_measured_lengths(self) -> Measured:
        sizes = (self.lengths, self.tokens, self.largest_untrained_length, self.trained, self.lost)
        lengths, tokens, largest_untrained_length, trained, lost = (
            np.frombuffer(each, dtype=np.int64) for each in sizes
        )
        return Measured(
            lengths, tokens, largest_untrained_length, trained, lost, tuple(start.records for start in self.starts)
        )

    def raise_or_notify(self, notify: Notify) -> None:
        """Notify the user of truncated, split and dropped rows.

        Raises:
            DataError: Rows are too long and ``overlength`` is ``error``, or no row is left.
        """
        rows, too_long = self.rows, self.counts["too_long"]
        if too_long and self.overlength == "error":
            raise self.too_long_error()
        if self.counts["identical"]:
            notify(f"{self.counts['identical']:,} of {rows:,} pairs dropped: both answers are the same")
        if not len(self.groups):
            size, origin = self.longest
            to_train_on = " to train on" if self.noun == "row" else ""
            raise DataError(
                f"no {self.noun} is left{to_train_on}: all {rows:,} were dropped",
                where=origin,
                fix=f"the longest has {self.longest_length} tokens, {self.limit}" if size else "",
            )
        if too_long:
            notify(
                f"{too_long:,} of {rows:,} {self.noun}s exceed {self.over}: {self.describe_changes()}"
                f"{self._describe_lost_tokens()}"
            )

    def describe_changes(self) -> str:
        """Return how many long rows were truncated, split and dropped, such as "3 truncated, 1 dropped"."""
        dropped = self.counts["dropped"] - self.counts["identical"] - self.counts["empty"]
        counts_by_change = {"truncated": self.counts["truncated"], "split": self.counts["split"], "dropped": dropped}
        return ", ".join(f"{count:,} {change}" for change, count in counts_by_change.items() if count)

    def long_rows_fix(self, key: str, size: int, otherwise: str) -> str:
        """Return how to train in spite of rows that are too long; rows with images are never cut.

        Args:
            key: Recipe key of the limit.
            size: Length of the longest row.
            otherwise: Text for rows without images, after the advice to raise the limit.
        """
        if self.counts["long_images"]:
            return (
                f"set {key} to {size} or more, write max_pixels if smaller images of this model have fewer tokens, or "
                "drop the rows with overlength: drop"
            )
        return f"set {key} to {size} or more{otherwise}"

    def _describe_lost_tokens(self) -> str:
        names = ("tokens_lost", "supervised_tokens_lost", "estimated")
        lost, trained, estimated = (self.counts[name] for name in names)
        supervised = f" and {trained:,} trained tokens" if self.trains else ""
        return f"; {'about ' if estimated else ''}{lost:,} tokens{supervised} lost"

    @abstractmethod
    def too_long_error(self) -> DataError:
        """Return the error for rows over the maximum length."""

    def make_report(
        self, train_examples: int, is_held_out: npt.NDArray[np.bool_], duplicates: int, held_out_duplicates: int
    ) -> ReportT:
        """Return the counts of all rows.

        Args:
            train_examples: Number of records to train on, repeats included.
            is_held_out: [records] True for held-out records.
            duplicates: Number of records that equal an earlier record.
            held_out_duplicates: Number of training records that equal a held-out record.
        """
        return self.report_type(
            rows=self.rows,
            kept=len(self.groups),
            truncated=self.counts["truncated"],
            dropped=self.counts["dropped"],
            train_examples=train_examples,
            validation_examples=int(is_held_out.sum()),
            tokens=self.counts["tokens"],
            supervised_tokens=self.counts["supervised_tokens"],
            tokens_lost=self.counts["tokens_lost"],
            supervised_tokens_lost=self.counts["supervised_tokens_lost"],
            length_percentiles=length_percentiles(self.lengths),
            duplicates=duplicates,
            held_out_duplicates=held_out_duplicates,
            special_rows=self.counts["special_rows"],
            sources=self._source_reports(),
            **self.extra_report_fields(),
        )

    def _source_reports(self) -> tuple[SourceReport, ...]:
        reports = []
        for start, end in pairwise([*self.starts, self._count_so_far(self.starts[-1].source)]):
            source = start.source
            counts, lengths = end.counts - start.counts, self.lengths[start.rows : end.rows]
            names = (
                "truncated",
                "dropped",
                "split",
                "tokens",
                "supervised_tokens",
                "tokens_lost",
                "supervised_tokens_lost",
            )
            reports.append(
                SourceReport(
                    path=source.path,
                    name=source.name,
                    weight=source.weight,
                    evaluates=source.evaluates,
                    rows=len(lengths) + counts["identical"] + counts["empty"],
                    kept=end.kept - start.kept,
                    length_percentiles=length_percentiles(lengths) if lengths else {},
                    **{name: counts[name] for name in names},
                )
            )
        return tuple(reports)

    @abstractmethod
    def extra_report_fields(self) -> dict[str, Any]:
        """Return the fields of the report, name -> value, that only this subclass has."""


def count_with_verb(count: int, noun: str) -> str:
    """Return a number with its noun and verb, such as "1 row has" or "3 rows have"."""
    return f"1 {noun} has" if count == 1 else f"{count:,} {noun}s have"


_NOT_SAVED = ("writer", "policy", "_group")
"""Attributes that :func:`save_counts` does not write, because the constructor sets them."""


def save_counts(fitter: LengthFitter[Any, Any], folder: Path) -> None:
    """Write the counts, lengths and hashes that ``fitter`` collected to the files ``fit.npz`` and ``fit.json``.

    Raises:
        OSError: A file cannot be written.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in vars(fitter).items():
        if name in _NOT_SAVED:
            continue
        if isinstance(value, array):
            arrays[name] = np.frombuffer(value, dtype=np.int64)
        elif isinstance(value, Digests):
            arrays[name] = value.to_array()
        elif isinstance(value, dict) and any(isinstance(item, array) for item in value.values()):
            for key, item in value.items():
                arrays[f"{name}/{key}"] = np.frombuffer(item, dtype=np.int64)
        else:
            plain[name] = _to_json(value)
    np.savez(folder / "fit.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub mistakes the names for its options
    (folder / "fit.json").write_text(json.dumps(plain), "utf-8")


def load_counts(fitter: LengthFitter[Any, Any], folder: Path, sources: Sequence[Source]) -> None:
    """Replace the counts, lengths and hashes of ``fitter`` by those in the files of :func:`save_counts`.

    Args:
        sources: Sources of the saved rows; their weights and ``repeat`` may differ.

    Raises:
        OSError, ValueError, KeyError: The files cannot be read, or have other content.
    """
    plain = json.loads((folder / "fit.json").read_text("utf-8"))
    with np.load(folder / "fit.npz", allow_pickle=False) as arrays:
        for name in arrays.files:
            saved_array, (owner, _, key) = arrays[name], name.partition("/")
            if key:
                vars(fitter)[owner][key] = array("q", saved_array.tobytes())
            elif saved_array.dtype == np.uint8:
                vars(fitter)[owner] = Digests(saved_array.tobytes())
            else:
                vars(fitter)[owner] = array("q", saved_array.tobytes())
    for name, value in plain.items():
        before = vars(fitter)[name]
        if isinstance(before, Counter):
            value = Counter(value)
        elif isinstance(before, tuple):
            value = tuple(value)
        elif name == "starts":
            value = [
                SourceStart(**{**item, "source": source, "counts": Counter(item["counts"])})
                for item, source in zip(value, sources, strict=True)
            ]
        vars(fitter)[name] = value


def _to_json(value: Any) -> Any:
    if isinstance(value, SourceStart):
        return {name: _to_json(item) for name, item in vars(value).items() if name != "source"}
    if isinstance(value, Mapping):
        return {name: _to_json(item) for name, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, list | tuple) else value
