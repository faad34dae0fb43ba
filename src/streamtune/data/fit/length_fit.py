"""Count and hash records that are fitted to the length: the common part of rows, trees and prompts.

The counts are kept in files beside a table of records:

    fit.npz      numbers of rows and records, hashes: everything that grows with the data
    fit.json     the rest
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
from streamtune.data.fit.parts import (
    Digests,
    EvalSet,
    SourceStart,
    choose_held_out,
    count_duplicates,
    make_mixture,
    share_epoch,
    split_sets,
)
from streamtune.data.reading.sources import Source
from streamtune.data.record_table import MappedTable, Record, Stored, TableWriter
from streamtune.errors import DataError

RecordT = TypeVar("RecordT", bound=Record)
ReportT = TypeVar("ReportT", DataReport, CompletionReport)
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """Sizes of the rows as rendered, before any cut, and of the records made of them; both in the order of reading.

    A record's number is its row in the table of ``Prepared.train`` and ``Prepared.validation``.
    """

    lengths: npt.NDArray[np.int64]
    """[rows] tokens, as compared with the limit"""
    tokens: npt.NDArray[np.int64]
    """[rows] tokens: of a tree each completion with its own copy of the prompt, else ``lengths``"""
    first_trained: npt.NDArray[np.int64]
    """[rows] greatest length at which a cut leaves nothing trained, so that the row is dropped: if a row keeps its
    beginning, the place of its first trained token"""
    trained: npt.NDArray[np.int64]
    """[records] trained tokens"""
    lost: npt.NDArray[np.int64]
    """[records] tokens cut off (``overlength: truncate``); 0 for pieces of a split row"""
    starts: tuple[int, ...]
    """[sources] first record of each source"""


@dataclass(frozen=True)
class Prepared(Generic[RecordT, ReportT]):
    """Rows as token ids, split into a training and a held-out part; rows of a group are never in both."""

    train: Stored[RecordT]
    validation: Stored[RecordT]
    report: ReportT
    fingerprint: str
    """hash of all that is trained and evaluated on, in order: equal if and only if a run sees the same data"""
    measured: Measured
    packs: Packs | None = None
    """sequences that examples of ``train`` share; None without packing"""
    validation_packs: Packs | None = None
    """sequences of ``validation``"""
    pieces: Pieces | None = None
    """pieces that examples of ``train`` are cut into; None if they are whole"""
    bad_rows: Sequence[Mapping[str, str]] = ()
    """faulty rows that were left out, each with its fault"""
    bounds: tuple[int, ...] = ()
    """first row in ``train`` of each trained source, and the number of all rows"""
    mixture: Mixture | None = None
    """visits of an epoch to each source, of rows or packs; None without weights"""
    eval_sets: tuple[EvalSet, ...] = ()
    """named parts of ``validation``, which together are all of it; empty without names"""


class LengthFit(ABC, Generic[RecordT, ReportT]):
    """Writes records, and counts the kept, cut and dropped rows they are made of.

    Args:
        overlength: Handling of a row over the length, one of :data:`OVERLENGTH`.
        limit: Name of the limit, for an error.
        over: Name of the limit, for a note.
    """

    record: type[RecordT]
    report_type: type[ReportT]
    noun = "row"
    trains = True
    """True if tokens of the records are trained"""

    def __init__(self, writer: TableWriter, overlength: str, *, limit: str, over: str) -> None:
        self.writer, self.overlength, self.limit, self.over = writer, overlength, limit, over
        self.counts: Counter[str] = Counter()
        self.lengths: array[int] = array("q")
        """tokens of every row as rendered"""
        self.longest: tuple[int, str] = (0, "")
        """length and origin of the longest row"""
        self.is_longest_estimated = False
        self.groups = Digests()
        """for every kept row a hash of what must not be in both parts"""
        self.row_of_record: array[int] = array("q")
        """for every record the number of its row among the kept ones"""
        self.digests = Digests()
        """for every record a hash of all that a run reads of it"""
        self.bad_rows: Sequence[Mapping[str, str]] = ()
        self.tokens, self.first_trained = array("q"), array("q")
        """as in :class:`Measured`"""
        self.trained, self.lost = array("q"), array("q")
        self.starts: list[SourceStart] = []

    def begin(self, source: Source) -> None:
        self.starts.append(self._now(source))

    def _now(self, source: Source) -> SourceStart:
        rows, kept, records = len(self.lengths), len(self.groups), len(self.digests)
        return SourceStart(source, Counter(self.counts), rows, kept, records)

    def measure(
        self,
        size: int,
        origin: str,
        *,
        tokens: int | None = None,
        first_trained: int = 0,
        estimated: bool = False,
    ) -> None:
        """Record the sizes of a row as rendered, as in :class:`Measured`."""
        if size > self.longest[0]:
            self.is_longest_estimated = estimated
        self.lengths.append(size)
        self.tokens.append(size if tokens is None else tokens)
        self.first_trained.append(first_trained)
        self.longest = max(self.longest, (size, origin), key=lambda pair: pair[0])

    @property
    def about_longest(self) -> str:
        return ("about " if self.is_longest_estimated else "") + f"{self.longest[0]:,}"

    @property
    def rows(self) -> int:
        """Rows seen, those included that were left out before they were rendered."""
        return len(self.lengths) + self.counts["identical"] + self.counts["empty"]

    def skip_empty(self) -> None:
        self.counts["empty"] += 1
        self.counts["dropped"] += 1

    def write(self, record: RecordT, digest: bytes, *, trained: int = 0, lost: int = 0) -> None:
        """Write a record of the row whose group is appended next."""
        self.row_of_record.append(len(self.groups))
        self.digests.append(digest)
        self.trained.append(trained)
        self.lost.append(lost)
        self.writer.append(record)

    def prepared(
        self, table: MappedTable, val_size: float, seed: int, notify: Notify = lambda message: None
    ) -> Prepared[RecordT, ReportT]:
        """Split the written records into a training and a held-out part.

        Args:
            val_size: Rows to hold out: a fraction below 1, or a count.
            notify: Called with the rows of eval sets that are trained as well.
        """
        rows = np.frombuffer(self.row_of_record, dtype=np.int64)
        is_held_out = choose_held_out(self.groups, self.starts, val_size, seed)[rows]
        sources = [start.source for start in self.starts if start.source.evaluates is None]
        numbers: npt.NDArray[np.int64]
        numbers, bounds = self._repeat(np.flatnonzero(~is_held_out), sources)
        train = Stored(self.record, table, numbers)
        held_out: npt.NDArray[np.int64] = np.flatnonzero(is_held_out)
        lengths, eval_sets = train.lengths(), split_sets(held_out, self.starts)
        mixture = make_mixture(sources, bounds, np.ones_like(lengths), lengths)
        total = hashlib.sha256(f"{len(numbers)} {len(held_out)}".encode())
        for records in (numbers, held_out):
            total.update(self.digests.bytes()[records].data)
        if eval_sets or mixture is not None:
            total.update(repr((eval_sets, mixture)).encode())
        duplicates, in_both = count_duplicates(self.digests, is_held_out)
        for each in eval_sets:
            if same := int(in_both[held_out[each.start : each.stop]].sum()):
                size = each.stop - each.start
                notify(f"{same:,} of {size:,} {self.noun}s of the eval set '{each.name}' are trained on as well")
        report = self.report(len(numbers), is_held_out, duplicates, int(in_both[~is_held_out].sum()))
        return Prepared(
            train=train,
            validation=Stored(self.record, table, held_out),
            report=replace(report, sources=share_epoch(report.sources, bounds, lengths, mixture)),
            fingerprint=total.hexdigest(),
            measured=self._measured(),
            bad_rows=self.bad_rows,
            bounds=bounds,
            mixture=mixture,
            eval_sets=eval_sets,
        )

    def _repeat(
        self, records: npt.NDArray[np.int64], sources: Sequence[Source]
    ) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
        """Return the training records, each as often as its source's ``repeat``, and the start of each source."""
        if not sources:  # of eval sets alone
            return records, (0,)
        parts = np.split(records, np.searchsorted(records, [start.records for start in self.starts[1 : len(sources)]]))
        repeated: list[npt.NDArray[np.int64]] = [
            np.tile(part, source.repeat) for part, source in zip(parts, sources, strict=True)
        ]
        return np.concatenate(repeated), (0, *np.cumsum([len(part) for part in repeated]).tolist())

    def _measured(self) -> Measured:
        sizes = (self.lengths, self.tokens, self.first_trained, self.trained, self.lost)
        lengths, tokens, first_trained, trained, lost = (np.frombuffer(each, dtype=np.int64) for each in sizes)
        return Measured(lengths, tokens, first_trained, trained, lost, tuple(start.records for start in self.starts))

    def check(self, notify: Notify) -> None:
        """Raise if rows are too long or none is left; notify the user of the changes."""
        rows, too_long = self.rows, self.counts["too_long"]
        if too_long and self.overlength == "error":
            raise self.too_long()
        if self.counts["identical"]:
            notify(f"{self.counts['identical']:,} of {rows:,} pairs have the same answer twice: dropped")
        if not len(self.groups):
            size, origin = self.longest
            to_train_on = " to train on" if self.noun == "row" else ""
            raise DataError(
                f"no {self.noun} is left{to_train_on}: all {rows:,} were dropped",
                where=origin,
                fix=f"the longest has {self.about_longest} tokens, {self.limit}" if size else "",
            )
        if too_long:
            notify(f"{too_long:,} of {rows:,} {self.noun}s are over {self.over}: {self.changes()}{self._lost()}")

    def changes(self) -> str:
        """Return the changes to rows over the length, for a note."""
        dropped = self.counts["dropped"] - self.counts["identical"] - self.counts["empty"]
        named = {"truncated": self.counts["truncated"], "split": self.counts["split"], "dropped": dropped}
        return ", ".join(f"{count:,} {how}" for how, count in named.items() if count)

    def _lost(self) -> str:
        names = ("tokens_lost", "supervised_tokens_lost", "estimated")
        lost, trained, estimated = (self.counts[name] for name in names)
        supervised = f" and {trained:,} trained tokens" if self.trains else ""
        return f"; {'about ' if estimated else ''}{lost:,} tokens{supervised} lost"

    @abstractmethod
    def too_long(self) -> DataError:
        """Return the error for rows over the length."""

    def report(
        self, train_examples: int, is_held_out: npt.NDArray[np.bool_], duplicates: int, held_out_duplicates: int
    ) -> ReportT:
        """Return the counts and lengths of the rows; ``is_held_out`` is [records]."""
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
            **self.own_counts(),
        )

    def _source_reports(self) -> tuple[SourceReport, ...]:
        reports = []
        for start, end in pairwise([*self.starts, self._now(self.starts[-1].source)]):
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
    def own_counts(self) -> dict[str, Any]:
        """Return the fields of the report that depend on the kind of rows."""


def have(number: int, noun: str) -> str:
    """Return "1 row has" or "3 rows have"."""
    return f"1 {noun} has" if number == 1 else f"{number:,} {noun}s have"


_GIVEN = ("writer", "policy", "_group")
"""Attributes that the maker of a fit gives it, and that no file can hold."""


def save_fit(fit: LengthFit[Any, Any], folder: Path) -> None:
    """Write the counts of a fit.

    Raises:
        OSError: A file cannot be written.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in vars(fit).items():
        if name in _GIVEN:
            continue
        if isinstance(value, array):
            arrays[name] = np.frombuffer(value, dtype=np.int64)
        elif isinstance(value, Digests):
            arrays[name] = value.bytes()
        elif isinstance(value, dict) and any(isinstance(item, array) for item in value.values()):
            for key, item in value.items():
                arrays[f"{name}/{key}"] = np.frombuffer(item, dtype=np.int64)
        else:
            plain[name] = _plain(value)
    np.savez(folder / "fit.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its own options
    (folder / "fit.json").write_text(json.dumps(plain), "utf-8")


def load_fit(fit: LengthFit[Any, Any], folder: Path, sources: Sequence[Source]) -> None:
    """Give a new fit the counts that were written, of the same sources; shares and repetitions may be others.

    Raises:
        OSError, ValueError, KeyError: The files cannot be read, or hold something else.
    """
    plain = json.loads((folder / "fit.json").read_text("utf-8"))
    with np.load(folder / "fit.npz", allow_pickle=False) as arrays:
        for name in arrays.files:
            found, (owner, _, key) = arrays[name], name.partition("/")
            if key:
                vars(fit)[owner][key] = array("q", found.tobytes())
            elif found.dtype == np.uint8:
                vars(fit)[owner] = Digests(found.tobytes())
            else:
                vars(fit)[owner] = array("q", found.tobytes())
    for name, value in plain.items():
        before = vars(fit)[name]
        if isinstance(before, Counter):
            value = Counter(value)
        elif isinstance(before, tuple):
            value = tuple(value)
        elif name == "starts":
            value = [
                SourceStart(**{**item, "source": source, "counts": Counter(item["counts"])})
                for item, source in zip(value, sources, strict=True)
            ]
        vars(fit)[name] = value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it.

    Raises:
        TypeError: From ``json``, if a kind of fit gets an attribute that is written here for the first time.
    """
    if isinstance(value, SourceStart):
        return {name: _plain(item) for name, item in vars(value).items() if name != "source"}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
