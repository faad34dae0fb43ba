"""Fit rows, trees and prompts to the length: keep, cut or leave out each, write what is kept, and count.

:class:`LengthFit` counts and hashes; the cut, and the text of its error, differ for rows, trees and prompts.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from streamtune.data.records import Example, IntArray, Prompt, Record, Stored, TableWriter, Tree
from streamtune.data.render import Rendered
from streamtune.data.report import CompletionReport, DataReport, SourceReport, length_percentiles
from streamtune.data.sampler import Packs
from streamtune.data.sources import Source
from streamtune.errors import ArgumentError, DataError
from streamtune.labels import IGNORE_INDEX

__all__ = [
    "COMPLETION_OVERLENGTH",
    "IDENTICAL_PAIRS",
    "OVERLENGTH",
    "LengthFit",
    "LengthPolicy",
    "Measured",
    "Prepared",
    "PromptFit",
    "RowFit",
    "TreeFit",
    "check_choice",
]

OVERLENGTH = ("error", "truncate", "drop", "split")
"""Ways to handle a row with more than ``max_length`` tokens."""

COMPLETION_OVERLENGTH = ("error", "truncate", "drop")
"""Ways to handle a pair or a prompt over the length. It cannot be split."""

IDENTICAL_PAIRS = ("error", "drop")
"""Ways to handle a pair whose answers are the same."""

RecordT = TypeVar("RecordT", bound=Record)
ReportT = TypeVar("ReportT", DataReport, CompletionReport)
Notify = Callable[[str], None]


def check_choice(name: str, value: str, known: tuple[str, ...], mend: str = "") -> None:
    """Raise unless an option is one of the known words.

    Raises:
        ArgumentError: It is none of them.
    """
    if value not in known:
        raise ArgumentError(f"{name} is '{value}'", where=name, mend=mend or f"use {', '.join(known)}")


@dataclass(frozen=True)
class Measured:
    """Sizes that a report sums up: of the rows as rendered, before any cut, and of the records made of them.

    Both in the order of reading; a record's number is its row in the table that ``Prepared.train`` and
    ``Prepared.validation`` take theirs from.
    """

    lengths: npt.NDArray[np.int64]
    """[rows] tokens, as compared with the limit"""
    tokens: npt.NDArray[np.int64]
    """[rows] tokens: of a tree each completion with its own copy of the prompt, else ``lengths``"""
    first_trained: npt.NDArray[np.int64]
    """[rows] place of the first token that is trained on: a row that is cut before it is dropped"""
    trained: npt.NDArray[np.int64]
    """[records] tokens that are trained on"""
    lost: npt.NDArray[np.int64]
    """[records] tokens cut off (``overlength: truncate``); 0 for pieces of a split row"""
    starts: tuple[int, ...]
    """[sources] number of the first record of each source"""


@dataclass(frozen=True)
class Prepared(Generic[RecordT, ReportT]):
    """Rows as token ids, split into a training and a held-out part; rows of one group are never in both."""

    train: Stored[RecordT]
    validation: Stored[RecordT]
    report: ReportT
    fingerprint: str
    """hash of all that is trained and evaluated on, in order: equal if and only if a run sees the same data"""
    measured: Measured
    packs: Packs | None = None
    """the sequences that examples of ``train`` share; None without packing"""
    validation_packs: Packs | None = None
    """the same of ``validation``"""
    bad_rows: Sequence[Mapping[str, str]] = ()
    """rows that were left out as faulty, each with what is wrong with it"""


class LengthFit(ABC, Generic[RecordT, ReportT]):
    """Writes records, and counts the kept, cut and dropped rows they are made of.

    Args:
        writer: Gets the records.
        overlength: What to do with a row over the length, one of :data:`OVERLENGTH`.
        limit: The limit that the longest row is over, for an error.
        over: The limit, for a note.
    """

    record: type[RecordT]
    report_type: type[ReportT]
    noun = "row"

    def __init__(self, writer: TableWriter, overlength: str, *, limit: str, over: str) -> None:
        self.writer, self.overlength, self.limit, self.over = writer, overlength, limit, over
        self.counts: Counter[str] = Counter()
        self.lengths: array[int] = array("q")
        """of every row as rendered"""
        self.longest: tuple[int, str] = (0, "")
        """length and origin of the longest row"""
        self.groups: list[bytes] = []
        """for every kept row a hash of what must not be in both parts"""
        self.row_of_record: array[int] = array("q")
        """for every record the number of its row among the kept ones"""
        self.digests: list[bytes] = []
        """for every record a hash of all that a run reads of it"""
        self.bad_rows: Sequence[Mapping[str, str]] = ()
        """see :class:`Prepared`"""
        self.tokens, self.first_trained = array("q"), array("q")
        """as in :class:`Measured`"""
        self.trained, self.lost = array("q"), array("q")
        self.starts: list[_Start] = []
        """of every source"""

    def begin(self, source: Source) -> None:
        """Count the rows that follow as those of a source."""
        self.starts.append(self._now(source.path, source.name, source.repeat))

    def _now(self, path: str = "", name: str | None = None, repeat: int = 1) -> _Start:
        rows, kept, records = len(self.lengths), len(self.groups), len(self.digests)
        return _Start(path, name, repeat, Counter(self.counts), rows, kept, records)

    def measure(self, size: int, origin: str, *, tokens: int | None = None, first_trained: int = 0) -> None:
        """Record the sizes of a row as rendered; see :class:`Measured`."""
        self.lengths.append(size)
        self.tokens.append(size if tokens is None else tokens)
        self.first_trained.append(first_trained)
        self.longest = max(self.longest, (size, origin), key=lambda pair: pair[0])

    @property
    def rows(self) -> int:
        """Rows seen: those that were rendered, and those that were left out before."""
        return len(self.lengths) + self.counts["identical"] + self.counts["empty"]

    def skip_empty(self) -> None:
        """Leave a row with an empty answer out, and count it."""
        self.counts["empty"] += 1
        self.counts["dropped"] += 1

    def write(self, record: RecordT, digest: bytes, *, trained: int = 0, lost: int = 0) -> None:
        """Write a record of the row whose group comes next."""
        self.row_of_record.append(len(self.groups))
        self.digests.append(digest)
        self.trained.append(trained)
        self.lost.append(lost)
        self.writer.append(record)

    def prepared(self, table: pa.Table, val_size: float, seed: int) -> Prepared[RecordT, ReportT]:
        """Split what was written into a training and a held-out part.

        Args:
            table: What the writer has written.
            val_size: Rows to hold out: a fraction below 1, or a count.
            seed: Seed of the choice.

        Raises:
            DataError: Nothing would be left to train on.
        """
        rows = np.frombuffer(self.row_of_record, dtype=np.int64)
        is_held_out = _choose_held_out(self.groups, val_size, seed)[rows]
        trained: npt.NDArray[np.int64] = self._repeat(np.flatnonzero(~is_held_out))
        held_out: npt.NDArray[np.int64] = np.flatnonzero(is_held_out)
        total = hashlib.sha256(f"{len(trained)} {len(held_out)}".encode())
        for index in (*trained, *held_out):
            total.update(self.digests[index])
        return Prepared(
            train=Stored(self.record, table, trained),
            validation=Stored(self.record, table, held_out),
            report=self.report(len(trained), is_held_out),
            fingerprint=total.hexdigest(),
            measured=self._measured(),
            bad_rows=self.bad_rows,
        )

    def _repeat(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the training records with those of each source as often as it says, source by source."""
        repeats = [start.repeat for start in self.starts]
        if all(repeat == 1 for repeat in repeats):
            return records
        parts = np.split(records, np.searchsorted(records, [start.records for start in self.starts[1:]]))
        return np.concatenate([np.tile(part, repeat) for part, repeat in zip(parts, repeats, strict=True)])

    def _measured(self) -> Measured:
        sizes = (self.lengths, self.tokens, self.first_trained, self.trained, self.lost)
        lengths, tokens, first_trained, trained, lost = (np.frombuffer(each, dtype=np.int64) for each in sizes)
        return Measured(lengths, tokens, first_trained, trained, lost, tuple(start.records for start in self.starts))

    def check(self, notify: Notify) -> None:
        """Raise if rows are too long or none is left; notify the user of the changes.

        Raises:
            DataError: Rows are over the length and ``overlength`` is ``error``, or nothing is left.
        """
        rows, too_long = self.rows, self.counts["too_long"]
        if too_long and self.overlength == "error":
            raise self.too_long()
        if self.counts["identical"]:
            notify(f"{self.counts['identical']:,} of {rows:,} pairs have the same answer twice: dropped")
        if not self.groups:
            size, origin = self.longest
            to_train_on = " to train on" if self.noun == "row" else ""
            raise DataError(
                f"no {self.noun} is left{to_train_on}: all {rows:,} were dropped",
                where=origin,
                mend=f"the longest has {size:,} tokens, {self.limit}" if size else "",
            )
        if too_long:
            notify(f"{too_long:,} of {rows:,} {self.noun}s are over {self.over}: {self.changes()}")

    def changes(self) -> str:
        """Return the changes to rows over the length, for a note."""
        dropped = self.counts["dropped"] - self.counts["identical"] - self.counts["empty"]
        named = {"truncated": self.counts["truncated"], "split": self.counts["split"], "dropped": dropped}
        return ", ".join(f"{count:,} {how}" for how, count in named.items() if count)

    @abstractmethod
    def too_long(self) -> DataError:
        """Return the error for rows over the length."""

    def report(self, train_examples: int, is_held_out: npt.NDArray[np.bool_]) -> ReportT:
        """Return the counts and lengths of the rows; of every record, [records], it is known if it is held out."""
        duplicates, held_out_duplicates = _count_duplicates(self.digests, is_held_out)
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
            length_percentiles=length_percentiles(self.lengths),
            duplicates=duplicates,
            held_out_duplicates=held_out_duplicates,
            sources=self._source_reports(),
            **self.own_counts(),
        )

    def _source_reports(self) -> tuple[SourceReport, ...]:
        reports = []
        for start, end in pairwise([*self.starts, self._now()]):
            counts, lengths = end.counts - start.counts, self.lengths[start.rows : end.rows]
            names = ("truncated", "dropped", "split", "tokens", "supervised_tokens", "tokens_lost")
            reports.append(
                SourceReport(
                    path=start.path,
                    name=start.name,
                    rows=len(lengths) + counts["identical"] + counts["empty"],
                    kept=end.kept - start.kept,
                    length_percentiles=length_percentiles(lengths) if lengths else {},
                    **{name: counts[name] for name in names},
                )
            )
        return tuple(reports)

    @abstractmethod
    def own_counts(self) -> dict[str, Any]:
        """Return the fields of the report that other kinds of rows do not have, or have otherwise."""


@dataclass(frozen=True)
class _Start:
    """The counts at the beginning of a source."""

    path: str
    name: str | None
    repeat: int
    """times that each of its records is visited"""
    counts: Counter[str]
    rows: int
    """measured so far"""
    kept: int
    records: int


def _count_duplicates(digests: Sequence[bytes], is_held_out: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the records that are the same as an earlier one, and those to train on that are held out as well."""
    if not digests:
        return 0, 0
    # 64 of the 128 bits: two of a million records that differ have the same with a probability of 3e-8.
    keys = np.frombuffer(b"".join(digest[:8] for digest in digests), dtype=np.uint64)
    held_out = np.unique(keys[is_held_out])
    return len(keys) - len(np.unique(keys)), int(np.isin(keys[~is_held_out], held_out).sum())


def _choose_held_out(groups: Sequence[bytes], val_size: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the held-out rows, [kept rows]: whole groups, drawn by the seed.

    Raises:
        DataError: Nothing would be left to train on.
    """
    held_out = np.zeros(len(groups), dtype=np.bool_)
    if val_size <= 0:
        return held_out
    wanted = max(1, round(val_size * len(groups))) if val_size < 1 else int(val_size)
    members: dict[bytes, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    order = sorted(members)
    random.Random(seed).shuffle(order)
    count = 0
    for group in order:
        if count >= wanted:
            break
        held_out[members[group]] = True
        count += len(members[group])
    if held_out.all():
        raise DataError(
            f"val_size = {val_size:g} holds out all of the {len(groups):,} rows ({len(members):,} different ones)",
            where="val_size",
            mend="hold out fewer rows, or add data",
        )
    return held_out


def _have(number: int, noun: str) -> str:
    return f"1 {noun} has" if number == 1 else f"{number:,} {noun}s have"


# --- rows -------------------------------------------------------------------------------------------------------------


class RowFit(LengthFit[Example, DataReport]):
    """Fits rows of next tokens; rows with the same tokens and labels are held out together.

    Args:
        writer: Gets the examples.
        overlength: One of :data:`OVERLENGTH`.
        max_length: Tokens an example has at most.
    """

    record = Example
    report_type = DataReport

    def __init__(self, writer: TableWriter, overlength: str, max_length: int) -> None:
        super().__init__(writer, overlength, limit=f"max_length is {max_length:,}", over=f"{max_length:,} tokens")
        self.max_length = max_length

    def add(self, rendered: Rendered, origin: str) -> None:
        """Fit one row to the length, and write the examples made of it."""
        row = _Piece(_int_array(rendered.input_ids), _int_array(rendered.labels))
        size = len(row.input_ids)
        self.measure(size, origin, first_trained=row.first_trained)
        if size <= self.max_length:
            self._keep([row], origin, size)
            return
        self.counts["too_long"] += 1
        if self.overlength == "truncate":
            self._keep(_supervised([row.cut(0, self.max_length)]), origin, size, "truncated")
        elif self.overlength == "split":
            pieces = [row.cut(start, self.max_length) for start in range(0, size, self.max_length)]
            kept = _supervised(pieces)
            self.counts["pieces_dropped"] += len(pieces) - len(kept) if kept else 0
            self._keep(kept, origin, size, "split")
        else:
            self._keep([], origin, size)

    def _keep(self, pieces: Sequence[_Piece], origin: str, size: int, how: str = "kept whole") -> None:
        """Write the examples made of one row of ``size`` tokens; without any, count the row as dropped."""
        lost = size - sum(len(piece.input_ids) for piece in pieces)
        self.counts["tokens_lost"] += lost
        if not pieces:
            self.counts["dropped"] += 1
            return
        self.counts[how] += 1
        row_digest = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            ids, labels = piece.input_ids, piece.labels
            piece_digest = hashlib.blake2b(ids.data, digest_size=16)
            piece_digest.update(labels.data)
            digest = piece_digest.digest()
            row_digest.update(digest)
            trained = int((labels != IGNORE_INDEX).sum())
            self.counts["tokens"] += len(ids)
            self.counts["supervised_tokens"] += trained
            self.write(Example(ids, labels, origin), digest, trained=trained, lost=lost if how == "truncated" else 0)
        self.groups.append(row_digest.digest())

    def too_long(self) -> DataError:
        """See :class:`LengthFit`."""
        size, origin = self.longest
        return DataError(
            f"{_have(self.counts['too_long'], 'row')} more than max_length = {self.max_length:,} tokens; the longest "
            f"has {size:,}",
            where=origin,
            mend=f"set max_length to {size} or more, or say what to do with them: overlength: truncate, drop or split",
        )

    def own_counts(self) -> dict[str, Any]:
        """See :class:`LengthFit`."""
        return {name: self.counts[name] for name in ("split", "pieces_dropped")}


def _int_array(tokens: Sequence[int]) -> IntArray:
    """Return token ids as an array, without a copy where they are in one."""
    return np.frombuffer(tokens, dtype=np.int32) if isinstance(tokens, array) else np.array(tokens, dtype=np.int32)


@dataclass(frozen=True)
class _Piece:
    """A row, or a part of it, as it is stored."""

    input_ids: IntArray
    labels: IntArray

    @property
    def first_trained(self) -> int:
        """The place of the first token that is trained on; the length where there is none."""
        trained = self.labels != IGNORE_INDEX
        return int(trained.argmax()) if trained.any() else len(trained)

    def cut(self, start: int, size: int) -> _Piece:
        """Return ``size`` tokens from ``start``; the first is not trained on, as no token comes before it."""
        labels = self.labels[start : start + size].copy()
        labels[0] = IGNORE_INDEX
        return _Piece(self.input_ids[start : start + size], labels)


def _supervised(pieces: Sequence[_Piece]) -> list[_Piece]:
    return [piece for piece in pieces if piece.first_trained < len(piece.labels)]


# --- trees ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LengthPolicy:
    """Limits on the length of a prompt with its completions, and the handling of longer ones.

    Raises:
        ArgumentError: ``overlength`` is none of :data:`COMPLETION_OVERLENGTH`, or the prompt may fill the whole length.
    """

    max_length: int
    """tokens that the prompt and the longest completion have together at most"""
    max_prompt_length: int | None = None
    """tokens that the prompt has at most"""
    overlength: str = "error"
    """one of :data:`COMPLETION_OVERLENGTH`"""

    def __post_init__(self) -> None:
        split = "a pair or a prompt cannot be split; use " if self.overlength == "split" else "use "
        known = COMPLETION_OVERLENGTH
        check_choice("overlength", self.overlength, known, mend=split + ", ".join(known))
        if self.max_prompt_length is not None and not 0 < self.max_prompt_length < self.max_length:
            raise ArgumentError(
                f"max_prompt_length = {self.max_prompt_length:,} leaves no room for a completion in "
                f"max_length = {self.max_length:,}",
                where="max_prompt_length",
                mend="set it to less than max_length, and to 1 at least",
            )

    def holds(self, tree: Tree) -> bool:
        """Return True if a tree needs no cut."""
        return self.holds_prompt(tree) and tree.longest_row <= self.max_length

    def holds_prompt(self, tree: Tree) -> bool:
        """Return True if the prompt is short enough; completions are not considered."""
        return self.max_prompt_length is None or len(tree.prompt) <= self.max_prompt_length

    def cut(self, tree: Tree) -> Tree | None:
        """Cut the prompt's start and the completions' ends off; None if a completion has no counted token left."""
        prompt = tree.prompt if self.max_prompt_length is None else tree.prompt[-self.max_prompt_length :]
        room = self.max_length - len(prompt)
        if room < 1:
            return None
        completions = [completion[:room] for completion in tree.completions]
        masks = None if tree.masks is None else [mask[:room] for mask in tree.masks]
        if masks is not None and not all(map(any, masks)):
            return None
        return replace(tree, prompt=prompt, completions=completions, masks=masks)


class TreeFit(LengthFit[Tree, CompletionReport]):
    """Fits prompts with their completions; those with the same prompt are held out together.

    Args:
        writer: Gets the trees.
        policy: The limits.
        identical_pairs: One of :data:`IDENTICAL_PAIRS`.
        kinds: Names of the first and the second completion of a tree, or of desirable and undesirable ones.
    """

    record = Tree
    report_type = CompletionReport

    def __init__(self, writer: TableWriter, policy: LengthPolicy, identical_pairs: str, kinds: tuple[str, str]) -> None:
        super().__init__(writer, policy.overlength, limit=f"max_length is {policy.max_length:,}", over="the length")
        self.policy, self.identical_pairs, self.kinds = policy, identical_pairs, kinds
        self.prompt_lengths: array[int] = array("q")
        self.completion_lengths: dict[str, array[int]] = {}
        self.tree_lengths: array[int] = array("q")
        """positions of every kept tree"""
        self.longest_prompt: tuple[int, str] = (0, "")
        """length and origin of the longest prompt"""

    def add(self, tree: Tree, prompt: bytes) -> None:
        """Add one tree, with the hash of its prompt.

        Raises:
            DataError: Its completions are the same, and ``identical_pairs`` is ``error``.
        """
        if _identical(tree):
            self.skip_identical(tree.origin)
            return
        self._measure_tree(tree)
        if self.policy.holds(tree):
            self._keep(tree, prompt)
            return
        self.counts["too_long"] += 1
        self.counts["long_prompts"] += not self.policy.holds_prompt(tree)
        cut = self.policy.cut(tree) if self.overlength == "truncate" else None
        if cut is None or _identical(cut):
            self.counts["dropped"] += 1
            self.counts["tokens_lost"] += tree.num_tokens_separate
        else:
            self.counts["truncated"] += 1
            self._keep(cut, prompt, lost=tree.num_tokens_separate - cut.num_tokens_separate)

    def skip_identical(self, origin: str) -> None:
        """Leave out a pair whose answers are the same.

        Raises:
            DataError: ``identical_pairs`` is ``error``.
        """
        if self.identical_pairs == "error":
            raise DataError(
                f"'{self.kinds[0]}' and '{self.kinds[1]}' are the same: there is nothing to prefer"
                if self.kinds[0] == "chosen"
                else "'chosen' and 'rejected' are the same: one answer cannot be desirable and undesirable",
                where=origin,
                mend="remove the row, or leave out all such rows with identical_pairs: drop",
            )
        self.counts["identical"] += 1
        self.counts["dropped"] += 1

    def _measure_tree(self, tree: Tree) -> None:
        self.measure(tree.longest_row, tree.origin, tokens=tree.num_tokens_separate)
        self.longest_prompt = max(self.longest_prompt, (len(tree.prompt), tree.origin), key=lambda pair: pair[0])
        self.prompt_lengths.append(len(tree.prompt))
        labels = tree.labels or [True, False]
        for label, completion in zip(labels, tree.completions, strict=True):
            kind = self.kinds[0] if label else self.kinds[1]
            self.completion_lengths.setdefault(kind, array("q")).append(len(completion))

    def _keep(self, tree: Tree, prompt: bytes, lost: int = 0) -> None:
        self.write(tree, _tree_digest(tree), trained=tree.num_targets, lost=lost)
        self.counts["tokens_lost"] += lost
        self.groups.append(prompt)
        self.tree_lengths.append(tree.num_tokens)
        self.counts["completions"] += len(tree.completions)
        self.counts["tokens"] += tree.num_tokens_separate
        self.counts["supervised_tokens"] += tree.num_targets
        self.counts["negative_margins"] += tree.margin is not None and tree.margin < 0

    def check(self, notify: Notify) -> None:
        """See :class:`LengthFit`."""
        super().check(notify)
        if self.counts["negative_margins"]:
            notify(f"{_have(self.counts['negative_margins'], 'pair')} a chosen answer with the lower score")

    def too_long(self) -> DataError:
        """See :class:`LengthFit`: it names the prompts or the rows."""
        policy = self.policy
        size, origin = self.longest_prompt
        if self.counts["long_prompts"]:
            return DataError(
                f"{_have(self.counts['long_prompts'], 'prompt')} more than max_prompt_length = "
                f"{policy.max_prompt_length:,} tokens; the longest has {size:,}",
                where=origin,
                mend=f"set max_prompt_length to {size} or more, or say what to do with them: overlength: truncate "
                "(keeps the end of the prompt) or drop",
            )
        if size >= policy.max_length:
            return DataError(
                f"a prompt of {size:,} tokens leaves no room for a completion in max_length = {policy.max_length:,}",
                where=origin,
                mend=f"set max_length to {self.longest[0]} or more; or keep the end of prompts with max_prompt_length "
                "and overlength: truncate; or leave the rows out with overlength: drop",
            )
        size, origin = self.longest
        return DataError(
            f"{_have(self.counts['too_long'], 'row')} more than max_length = {policy.max_length:,} tokens of prompt "
            f"and longest completion; the longest has {size:,}",
            where=origin,
            mend=f"set max_length to {size} or more, or say what to do with them: overlength: truncate or drop",
        )

    def own_counts(self) -> dict[str, Any]:
        """See :class:`LengthFit`."""
        lengths = self.completion_lengths
        return {
            **{name: self.counts[name] for name in ("identical", "completions", "negative_margins")},
            "tree_tokens": sum(self.tree_lengths),
            "prompt_lengths": length_percentiles(self.prompt_lengths),
            "completion_lengths": {kind: length_percentiles(lengths[kind]) for kind in self.kinds if kind in lengths},
            "tree_lengths": length_percentiles(self.tree_lengths),
        }


def _identical(tree: Tree) -> bool:
    """Return True if a pair's answers are the same tokens: a template may write two answers as one."""
    return len(tree.completions) == 2 and tree.completions[0] == tree.completions[1]


def _tree_digest(tree: Tree) -> bytes:
    """Return a hash of everything a step reads of a tree."""
    digest = hashlib.blake2b(repr((tree.labels, tree.margin)).encode(), digest_size=16)
    lists = [tree.prompt, *tree.completions]
    digest.update(np.array([len(items) for items in lists], dtype=np.int64).tobytes())
    for items in lists:
        digest.update(np.array(items, dtype=np.int32).tobytes())
    for mask in tree.masks or ():
        digest.update(np.array(mask, dtype=np.bool_).tobytes())
    return digest.digest()


# --- prompts ----------------------------------------------------------------------------------------------------------


class PromptFit(LengthFit[Prompt, CompletionReport]):
    """Fits prompts that completions are yet to be written for.

    Args:
        writer: Gets the prompts.
        overlength: One of :data:`COMPLETION_OVERLENGTH`.
        max_prompt_length: Tokens a prompt has at most.

    Raises:
        ArgumentError: ``overlength`` is none of the known ones.
    """

    record = Prompt
    report_type = CompletionReport
    noun = "prompt"

    def __init__(self, writer: TableWriter, overlength: str, max_prompt_length: int) -> None:
        limit = f"{max_prompt_length:,}"
        super().__init__(writer, overlength, limit=f"max_prompt_length = {limit}", over=f"{limit} tokens")
        self.max_prompt_length = max_prompt_length

    def add(self, prompt: Prompt, group: bytes) -> None:
        """Fit one prompt to the length, and write it unless it is dropped; prompts of a group are held out together."""
        self.measure(prompt.num_tokens, prompt.origin)
        lost = 0
        if prompt.num_tokens > self.max_prompt_length:
            self.counts["too_long"] += 1
            if self.overlength != "truncate":
                self.counts["dropped"] += 1
                self.counts["tokens_lost"] += prompt.num_tokens
                return
            self.counts["truncated"] += 1
            lost = prompt.num_tokens - self.max_prompt_length
            self.counts["tokens_lost"] += lost
            prompt = replace(prompt, input_ids=prompt.input_ids[-self.max_prompt_length :])
        self.write(prompt, _prompt_digest(prompt), lost=lost)
        self.groups.append(group)
        self.counts["tokens"] += prompt.num_tokens

    def changes(self) -> str:
        """See :class:`LengthFit`: all of them are changed alike."""
        return "truncated" if self.counts["truncated"] else "dropped"

    def too_long(self) -> DataError:
        """See :class:`LengthFit`."""
        size, origin = self.longest
        return DataError(
            f"{_have(self.counts['too_long'], 'prompt')} more than {self.limit} tokens; the longest has {size:,}",
            where=origin,
            mend=f"set max_prompt_length to {size} or more, or say what to do with them: overlength: truncate "
            "(keeps the end) or drop",
        )

    def own_counts(self) -> dict[str, Any]:
        """See :class:`LengthFit`."""
        return {"tree_tokens": self.counts["tokens"], "prompt_lengths": length_percentiles(self.lengths)}


def _prompt_digest(prompt: Prompt) -> bytes:
    """Return a hash of everything a run reads of a prompt: its tokens, its text and its columns."""
    digest = hashlib.blake2b(np.array(prompt.input_ids, dtype=np.int32).tobytes(), digest_size=16)
    digest.update(json.dumps([prompt.prompt, prompt.columns], sort_keys=True, default=repr).encode())
    return digest.digest()
