"""Reports on prepared data: counted during preparation, shown to the user, written as JSON."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Counts of the rows of a source, as :class:`DataReport` and :class:`CompletionReport` have them of all sources."""

    path: str
    name: str | None
    """configuration or task"""
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
    """empty if no row was rendered: all pairs were identical"""
    weight: float | None = None
    """weight in the mixture"""
    evaluates: str | None = None
    """eval set of its rows; None for rows to train on"""
    epoch_rows: int = 0
    """rows that an epoch visits, repeats included; with packs of weighted sources the mean"""
    epoch_tokens: int = 0
    """tokens of these rows; trees count their prompt once"""

    @property
    def title(self) -> str:
        evaluates = f"(eval {self.evaluates})" if self.evaluates else None
        return " ".join(filter(None, (self.path, self.name, evaluates)))


EPOCH_COLUMNS = ("weight", "rows", "of rows", "tokens", "of tokens")


def epoch_table(sources: Sequence[SourceReport]) -> list[list[str]]:
    """Return an epoch's share of each weighted source: its title, then :data:`EPOCH_COLUMNS`."""
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
    """rows left out: too long (``overlength: drop``), or nothing trained was left"""
    split: int
    """kept rows cut into pieces (``overlength: split``)"""
    pieces_dropped: int
    """pieces of split rows left out for want of trained tokens"""
    train_examples: int
    """sequences to train on: rows or pieces of rows"""
    validation_examples: int
    """sequences held out"""
    tokens: int
    """tokens of all examples"""
    supervised_tokens: int
    """tokens that are predicted: the loss is a mean over them"""
    length_percentiles: dict[str, int]
    """lengths of the rows in tokens as rendered, before any cut"""
    packs: int = 0
    """sequences that training examples are packed into; 0 without packing"""
    pack_fill: float = 0.0
    """part of ``packs * max_length`` positions that hold a token"""
    shared_tokens: int = 0
    """tokens of these sequences if rows share their beginnings; otherwise 0"""
    pieces: int = 0
    """pieces that training examples are cut into; 0 without buckets"""
    piece_tokens_lost: int = 0
    """tokens of training examples in no piece"""
    piece_targets_lost: int = 0
    """trained tokens that no piece predicts, since it begins with them"""
    tokens_lost: int = 0
    """tokens of the rendered rows in no example: cut off, dropped, or in dropped pieces"""
    supervised_tokens_lost: int = 0
    """trained tokens among them, and the first token of what begins behind a cut"""
    tokens_repeated: int = 0
    """tokens in two examples: the context of pieces (``split_overlap``)"""
    estimated: int = 0
    """rows left out as too long before they were tokenised to their end: their lengths and lost tokens are estimates"""
    duplicates: int = 0
    """examples with the tokens and labels of an earlier one"""
    special_rows: int = 0
    """rows whose text spells special tokens"""
    held_out_duplicates: int = 0
    """training examples that are held out as well: in an eval set, or pieces that different rows share"""
    sources: tuple[SourceReport, ...] = ()
    """counts of each entry of ``datasets``, in order"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
        """Return the report in a line, without counts of zero."""
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
    """Counts of rows, trees and tokens. ``rows = kept + dropped``; every kept row makes one tree or prompt."""

    rows: int
    kept: int
    """rows that are trained or evaluated on, whole or in part"""
    truncated: int
    """kept rows that lost the beginning of their prompt or the end of a completion (``overlength: truncate``)"""
    dropped: int
    """rows left out, for whatever reason"""
    identical: int = 0
    """dropped rows whose answers are the same (``identical_pairs: drop``, or nothing else was left after a cut)"""
    train_examples: int
    """trees or prompts to train on"""
    validation_examples: int
    completions: int = 0
    """completions of all trees; 0 for prompts"""
    tokens: int
    """tokens of all trees, each completion with its own copy of the prompt; or of all prompts"""
    tree_tokens: int
    """positions of all trees with common beginnings once: what is computed and held with ``share_prefix``"""
    supervised_tokens: int
    """completion tokens that count"""
    length_percentiles: dict[str, int]
    """prompt and longest completion of every row as rendered, which ``max_length`` limits"""
    prompt_lengths: dict[str, int]
    """tokens of the prompts as rendered, before any cut"""
    completion_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    """tokens of the completions as rendered, for ``chosen`` and ``rejected`` or ``desirable`` and ``undesirable``"""
    tree_lengths: dict[str, int] = field(default_factory=dict)
    """positions of a kept tree, counted as ``tree_tokens``; empty for prompts"""
    negative_margins: int = 0
    """pairs whose chosen answer has the lower score"""
    split: int = 0
    """always 0: neither a pair nor a prompt is split"""
    tokens_lost: int = 0
    """tokens of the rendered rows in no tree, counted as ``tokens``; identical pairs do not count"""
    supervised_tokens_lost: int = 0
    """lost tokens that count; 0 for prompts"""
    duplicates: int = 0
    """trees or prompts equal to an earlier one in all that a run reads"""
    special_rows: int = 0
    held_out_duplicates: int = 0
    """training records that are in an eval set as well; rows with the same prompt are held out together"""
    sources: tuple[SourceReport, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
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
    """Return the counts of rows as phrases, without counts of zero."""
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
    number = report.special_rows
    return [f"{number:,} {'row spells' if number == 1 else 'rows spell'} special tokens"] if number else []


def _describe_lost(report: DataReport | CompletionReport) -> list[str]:
    """Return the lost and the repeated tokens as phrases."""
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
    """Return the shortest, median, upper percentiles and longest of row lengths, each the length of an actual row."""
    points = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    values = np.percentile(np.array(lengths, dtype=np.int64), list(points.values()), method="higher")
    return {name: int(value) for name, value in zip(points, values, strict=True)}
