"""The reports on prepared data: counted during preparation, shown to the user, written as JSON."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Counts of the rows of one source, as :class:`DataReport` and :class:`CompletionReport` have them of all."""

    path: str
    """as the recipe writes it"""
    name: str | None
    """the configuration or task, where the recipe gives one"""
    rows: int
    kept: int
    truncated: int
    dropped: int
    split: int
    tokens: int
    supervised_tokens: int
    tokens_lost: int
    supervised_tokens_lost: int
    length_percentiles: dict[str, int]
    """empty where no row was rendered: all pairs were identical"""
    weight: float | None = None
    """of the source in the mixture, where the recipe gives one"""
    evaluates: str | None = None
    """the eval set that its rows belong to; None of rows to train on"""
    epoch_rows: int = 0
    """rows that an epoch visits: more than it has where they are repeated; with packs of weighted sources the mean"""
    epoch_tokens: int = 0
    """their tokens; of trees with the prompt once"""

    @property
    def title(self) -> str:
        """Return the path, the configuration, and the eval set that the rows belong to."""
        evaluates = f"(eval {self.evaluates})" if self.evaluates else None
        return " ".join(filter(None, (self.path, self.name, evaluates)))


EPOCH_COLUMNS = ("weight", "rows", "of rows", "tokens", "of tokens")
"""Columns of the table of an epoch, see :func:`epoch_table`."""


def epoch_table(sources: Sequence[SourceReport]) -> list[list[str]]:
    """Return what an epoch takes of each source with a weight, a line each: its title, then :data:`EPOCH_COLUMNS`."""
    weighted = [source for source in sources if source.weight is not None]
    rows, tokens = (sum(getattr(source, name) for source in weighted) for name in ("epoch_rows", "epoch_tokens"))
    return [
        [
            source.title,
            f"{source.weight:g}",
            f"{source.epoch_rows:,}",
            f"{source.epoch_rows / max(1, rows):.1%}",
            f"{source.epoch_tokens:,}",
            f"{source.epoch_tokens / max(1, tokens):.1%}",
        ]
        for source in weighted
    ]


@dataclass(frozen=True)
class DataReport:
    """Counts of rows, examples and tokens. ``rows = kept + dropped``."""

    rows: int
    """rows read"""
    kept: int
    """rows that are trained or evaluated on, whole or in part"""
    truncated: int
    """kept rows that lost a part (``overlength: truncate``)"""
    dropped: int
    """rows left out: too long (``overlength: drop``), or nothing trained was left of them"""
    split: int
    """kept rows cut into pieces (``overlength: split``)"""
    pieces_dropped: int
    """pieces of split rows left out because none of their tokens is trained on"""
    train_examples: int
    """sequences to train on: rows or pieces of rows"""
    validation_examples: int
    """sequences held out"""
    tokens: int
    """tokens of all examples"""
    supervised_tokens: int
    """tokens that are predicted: those the loss is a mean over"""
    length_percentiles: dict[str, int]
    """lengths of the rows in tokens as rendered, before anything was cut"""
    packs: int = 0
    """sequences the training examples are packed into; 0 without packing"""
    pack_fill: float = 0.0
    """part of ``packs * max_length`` positions that hold a token"""
    shared_tokens: int = 0
    """tokens of these sequences, where rows share their beginnings; 0 where they do not"""
    pieces: int = 0
    """pieces that the training examples are cut into; 0 without buckets"""
    piece_tokens_lost: int = 0
    """tokens of them that are in no piece"""
    piece_targets_lost: int = 0
    """trained tokens of them that no piece predicts, since it begins with them"""
    tokens_lost: int = 0
    """tokens of the rows as rendered that are in no example: cut off, dropped, or in pieces that were dropped"""
    supervised_tokens_lost: int = 0
    """tokens of the rows as rendered that would be trained on and are not: those of them in no example, and the first
    token of what begins behind a cut"""
    tokens_repeated: int = 0
    """tokens that are in two examples: the context of pieces (``split_overlap``)"""
    estimated: int = 0
    """rows that were left out as too long before they were tokenised to their end: their lengths, and the tokens lost
    with them, are estimated from what was read"""
    duplicates: int = 0
    """examples with the tokens and labels of an earlier one"""
    special_rows: int = 0
    """rows whose text spells special tokens"""
    held_out_duplicates: int = 0
    """examples to train on that are held out as well: in an eval set, or pieces that different rows have in common"""
    sources: tuple[SourceReport, ...] = ()
    """the same counts for each entry of ``datasets``, in their order"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
        """Return the report in one line, without counts of zero."""
        parts = _describe_rows(self, pieces_dropped=self.pieces_dropped)
        if self.shared_tokens:
            parts.append(f"{self.packs:,} sequences, {self.shared_tokens:,} tokens with common beginnings once")
        elif self.packs:
            parts.append(f"packed into {self.packs:,} sequences, {self.pack_fill:.1%} full")
        parts.append(f"{self.tokens:,} tokens, {self.supervised_tokens:,} of them trained")
        if self.pieces:
            lost = f"{self.piece_targets_lost:,} trained tokens begin one and are not predicted"
            outside = f", {self.piece_tokens_lost:,} tokens are in none" if self.piece_tokens_lost else ""
            parts.append(f"cut into {self.pieces:,} pieces: {lost}{outside}")
        parts += _describe_specials(self) + _describe_lost(self)
        cut = " before they were cut" if self.truncated or self.split else ""
        parts.append(f"lengths {_range(self.length_percentiles)}{cut}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class CompletionReport:
    """Counts of rows, trees and tokens. ``rows = kept + dropped``; of every kept row one tree or prompt is made."""

    rows: int
    """rows read"""
    kept: int
    """rows that are trained or evaluated on, whole or in part"""
    truncated: int
    """kept rows that lost the beginning of their prompt or the end of a completion (``overlength: truncate``)"""
    dropped: int
    """rows left out, for whatever reason"""
    identical: int = 0
    """those of them whose answers are the same (``identical_pairs: drop``, or nothing else was left after a cut)"""
    train_examples: int
    """trees or prompts to train on"""
    validation_examples: int
    """those held out"""
    completions: int = 0
    """completions of all trees; 0 of prompts"""
    tokens: int
    """tokens of all trees, each completion with its own copy of the prompt; of prompts their tokens"""
    tree_tokens: int
    """positions of all trees where what completions begin with is there once, the prompt and whatever they share behind
    it: what is computed and held with ``share_prefix``"""
    supervised_tokens: int
    """tokens of completions that count"""
    length_percentiles: dict[str, int]
    """prompt and longest completion of every row as rendered: what ``max_length`` is compared with"""
    prompt_lengths: dict[str, int]
    """tokens of the prompts as rendered, before anything was cut"""
    completion_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    """tokens of the completions as rendered, by what they are: ``chosen`` and ``rejected``, or ``desirable`` and
    ``undesirable``"""
    tree_lengths: dict[str, int] = field(default_factory=dict)
    """positions of a kept tree, counted as ``tree_tokens`` is; empty of prompts"""
    negative_margins: int = 0
    """pairs whose chosen answer has the lower score"""
    split: int = 0
    """always 0: neither a pair nor a prompt is cut into pieces"""
    tokens_lost: int = 0
    """tokens of the rows as rendered that are in no tree, counted as ``tokens`` is; identical pairs do not count"""
    supervised_tokens_lost: int = 0
    """those of them that count; 0 of prompts"""
    duplicates: int = 0
    """trees or prompts that are the same as an earlier one, with all that a run reads of them"""
    special_rows: int = 0
    """rows whose text spells special tokens"""
    held_out_duplicates: int = 0
    """those to train on that are in an eval set as well; rows with the same prompt are held out together"""
    sources: tuple[SourceReport, ...] = ()
    """the same counts for each entry of ``datasets``, in their order"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
        """Return the report in one line, without counts of zero."""
        parts = _describe_rows(self)
        parts.append(f"prompts {_range(self.prompt_lengths)}")
        parts += [f"{name} {_range(lengths)}" for name, lengths in self.completion_lengths.items()]
        if self.completions:
            together = f"{self.tree_tokens:,} with shared beginnings"
            parts.append(f"{self.tokens:,} tokens, {together}, {self.supervised_tokens:,} trained")
        else:
            parts.append(f"{self.tokens:,} tokens")
        parts += _describe_specials(self) + _describe_lost(self)
        return "; ".join(parts)


def _describe_rows(report: DataReport | CompletionReport, pieces_dropped: int = 0) -> list[str]:
    """Return the counts of rows, phrase by phrase, without counts of zero."""
    counts = {
        "kept": 0 if report.kept == report.rows else report.kept,
        "dropped": report.dropped,
        "truncated": report.truncated,
        "split": report.split,
        "pieces without trained tokens dropped": pieces_dropped,
    }
    parts = [f"{report.rows:,} rows", *(f"{count:,} {name}" for name, count in counts.items() if count)]
    parts.append(f"{report.train_examples:,} to train on")
    if any(source.weight is not None for source in report.sources):
        parts.append(f"{sum(source.epoch_rows for source in report.sources):,} in an epoch, by weight")
    if report.validation_examples:
        parts.append(f"{report.validation_examples:,} held out")
    return parts


def _describe_specials(report: DataReport | CompletionReport) -> list[str]:
    """Return the rows that spell special tokens, as a phrase."""
    number = report.special_rows
    return [f"{number:,} {'row spells' if number == 1 else 'rows spell'} special tokens"] if number else []


def _describe_lost(report: DataReport | CompletionReport) -> list[str]:
    """Return the tokens that are in no record, and those that are in two, phrase by phrase."""
    lost, trained = report.tokens_lost, report.supervised_tokens_lost
    repeated = report.tokens_repeated if isinstance(report, DataReport) else 0
    parts = [f"{repeated:,} tokens repeated as context"] if repeated else []
    if lost:
        share = 100 * lost / (report.tokens - repeated + lost)
        about = "about " if isinstance(report, DataReport) and report.estimated else ""
        parts.append(f"{about}{lost:,} tokens lost ({share:.2g}% of all)")
    return [*parts, *([f"{trained:,} trained tokens lost"] if trained else [])]


def _range(lengths: dict[str, int]) -> str:
    return f"{lengths['min']:,} to {lengths['max']:,}, median {lengths['p50']:,}"


def length_percentiles(lengths: Sequence[int] | array[int]) -> dict[str, int]:
    """Return the shortest, median, upper percentiles and longest of row lengths in tokens, each of an actual row."""
    points = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    values = np.percentile(np.array(lengths, dtype=np.int64), list(points.values()), method="higher")
    return {name: int(value) for name, value in zip(points, values, strict=True)}
