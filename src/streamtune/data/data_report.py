"""Reports on prepared data: counts of rows and tokens that are shown to the user and written as JSON."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Counts of the rows of one dataset; fields without a description are as in :class:`DataReport`."""

    path: str
    name: str | None
    """configuration of the dataset, or the task if the dataset is ``demo-arithmetic``"""
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
    """percentiles of the row lengths in tokens; empty if the length of no row is known"""
    weight: float | None = None
    """weight of the dataset in the mixture; None if the recipe has no weights"""
    evaluates: str | None = None
    """name of the eval set to which the rows belong; None for rows to train on"""
    epoch_rows: int = 0
    """number of rows that an epoch visits, repeats included; the mean over epochs if weighted sources are packed"""
    epoch_tokens: int = 0
    """number of tokens of ``epoch_rows``; the prompt of several completions counts once"""

    @property
    def title(self) -> str:
        evaluates = f"(eval {self.evaluates})" if self.evaluates else None
        return " ".join(filter(None, (self.path, self.name, evaluates)))


EPOCH_COLUMNS = ("weight", "rows", "of rows", "tokens", "of tokens")


def format_epoch_shares(sources: Sequence[SourceReport]) -> list[list[str]]:
    """Return one table row for each dataset with a weight: its title, then the cells of :data:`EPOCH_COLUMNS`."""
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
    """number of rows read, without skipped bad rows"""
    kept: int
    """number of rows that are used for training or evaluation, whole or in part"""
    truncated: int
    """number of kept rows that were truncated (``overlength: truncate``)"""
    dropped: int
    """number of rows dropped: too long (``overlength: drop``), with an empty answer (``on_empty: drop``), or without a
    token to train on"""
    split: int
    """number of kept rows that were split (``overlength: split``)"""
    pieces_dropped: int
    """number of parts of split rows that were dropped because they have no token to train on"""
    train_examples: int
    """number of sequences to train on: rows, or parts of split rows"""
    validation_examples: int
    tokens: int
    """number of tokens of all examples, held-out examples included"""
    supervised_tokens: int
    """number of tokens with a label (not -100), which count in the loss"""
    length_percentiles: dict[str, int]
    """percentiles of the row lengths in tokens, before truncation or splitting"""
    packs: int = 0
    """number of packed training sequences; 0 without packing"""
    pack_fill: float = 0.0
    """fraction of the ``packs * max_length`` positions that hold a token"""
    shared_tokens: int = 0
    """number of tokens of packed sequences in which common prefixes of rows occur once; 0 without such sequences"""
    pieces: int = 0
    """number of pieces into which training examples are cut; 0 unless ``batching`` is ``buckets``"""
    piece_tokens_lost: int = 0
    """number of tokens of training examples that are in no piece"""
    piece_targets_lost: int = 0
    """number of tokens to train on that are not predicted, because a piece begins with them"""
    tokens_lost: int = 0
    """number of tokens of rows that are in no example: cut off, in dropped rows, or in dropped parts"""
    supervised_tokens_lost: int = 0
    """number of tokens to train on that are lost, or are not predicted because an example begins with them"""
    tokens_repeated: int = 0
    """number of tokens that occur in two parts of a split row (``split_overlap``)"""
    estimated: int = 0
    """number of dropped rows with an estimated length, because only a part was tokenised"""
    duplicates: int = 0
    """number of examples with the same tokens and labels as an earlier example"""
    special_rows: int = 0
    """number of rows whose text contains special tokens, such as ``<|im_end|>``"""
    held_out_duplicates: int = 0
    """number of training examples that equal a held-out example"""
    sources: tuple[SourceReport, ...] = ()
    """counts of each entry of the recipe's ``datasets``, in order"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
        """Return the report as one line of text, without counts of zero."""
        parts = _describe_rows(self, pieces_dropped=self.pieces_dropped)
        if self.shared_tokens:
            parts.append(f"{self.packs:,} sequences, {self.shared_tokens:,} tokens with shared beginnings counted once")
        elif self.packs:
            parts.append(f"packed into {self.packs:,} sequences, {self.pack_fill:.1%} full")
        parts.append(f"{self.tokens:,} tokens, {self.supervised_tokens:,} of them trained")
        if self.pieces:
            lost = f"{self.piece_targets_lost:,} trained tokens are not predicted, because a piece begins with them"
            outside = f", {self.piece_tokens_lost:,} tokens are in no piece" if self.piece_tokens_lost else ""
            parts.append(f"cut into {self.pieces:,} pieces: {lost}{outside}")
        parts += _describe_special_token_rows(self) + _describe_lost_tokens(self)
        cut = " before they were cut" if self.truncated or self.split else ""
        parts.append(f"lengths {_describe_length_range(self.length_percentiles)}{cut}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class CompletionReport:
    """Counts of prompts, with or without completions. ``rows = kept + dropped``."""

    rows: int
    """number of rows read, without skipped bad rows"""
    kept: int
    """number of rows that are used for training or evaluation, whole or in part"""
    truncated: int
    """number of kept rows that lost a part of the prompt, or the end of a completion (``overlength: truncate``)"""
    dropped: int
    """number of rows dropped because they were too long, or because both answers are the same"""
    identical: int = 0
    """number of rows dropped because both answers are the same (``identical_pairs: drop``)"""
    train_examples: int
    """number of prompts to train on"""
    validation_examples: int
    """number of held-out prompts"""
    completions: int = 0
    """number of completions; 0 for prompts without completions"""
    tokens: int
    """number of tokens; each completion counts its own copy of the prompt"""
    tree_tokens: int
    """number of tokens if common prefixes of completions are stored once, as with ``share_prefix``"""
    supervised_tokens: int
    """number of completion tokens that count in the loss"""
    length_percentiles: dict[str, int]
    """percentiles of the length in tokens of a prompt with its longest completion, before any cut"""
    prompt_lengths: dict[str, int]
    """percentiles of the prompt lengths in tokens, before any cut"""
    completion_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    """percentiles of the completion lengths in tokens, before any cut, by kind: ``chosen`` and ``rejected``, or
    ``desirable`` and ``undesirable``"""
    tree_lengths: dict[str, int] = field(default_factory=dict)
    """percentiles of ``tree_tokens`` over all kept prompts; empty for prompts without completions"""
    negative_margins: int = 0
    """number of pairs whose chosen answer has the lower score"""
    split: int = 0
    """always 0, because neither a pair nor a prompt can be split"""
    tokens_lost: int = 0
    """number of tokens cut off or in dropped rows; pairs of identical answers are excluded"""
    supervised_tokens_lost: int = 0
    """number of lost tokens that would count in the loss; 0 for prompts without completions"""
    duplicates: int = 0
    """number of rows that equal an earlier row in everything that training reads"""
    special_rows: int = 0
    """number of rows whose text contains special tokens, such as ``<|im_end|>``"""
    held_out_duplicates: int = 0
    """number of training rows that equal a held-out row"""
    sources: tuple[SourceReport, ...] = ()
    """counts of each entry of the recipe's ``datasets``, in order"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
        """Return the report as one line of text, without counts of zero."""
        parts = _describe_rows(self)
        parts.append(f"prompts {_describe_length_range(self.prompt_lengths)}")
        parts += [f"{name} {_describe_length_range(lengths)}" for name, lengths in self.completion_lengths.items()]
        if self.completions:
            shares = self.tree_tokens < self.tokens
            together = f", {self.tree_tokens:,} with shared beginnings counted once" if shares else ""
            parts.append(f"{self.tokens:,} tokens{together}, {self.supervised_tokens:,} trained")
        else:
            parts.append(f"{self.tokens:,} tokens")
        parts += _describe_special_token_rows(self) + _describe_lost_tokens(self)
        return "; ".join(parts)


def _describe_rows(report: DataReport | CompletionReport, pieces_dropped: int = 0) -> list[str]:
    counts = {
        "kept": 0 if report.kept == report.rows else report.kept,
        "dropped": report.dropped,
        "truncated": report.truncated,
        "split": report.split,
        "parts without trained tokens dropped": pieces_dropped,
    }
    parts = [f"{report.rows:,} rows", *(f"{count:,} {name}" for name, count in counts.items() if count)]
    parts.append(f"{report.train_examples:,} to train on")
    if any(source.weight is not None for source in report.sources):
        parts.append(f"{sum(source.epoch_rows for source in report.sources):,} rows per epoch, by weight")
    if report.validation_examples:
        parts.append(f"{report.validation_examples:,} held out")
    return parts


def _describe_special_token_rows(report: DataReport | CompletionReport) -> list[str]:
    number = report.special_rows
    return [f"{number:,} {'row contains' if number == 1 else 'rows contain'} special tokens"] if number else []


def _describe_lost_tokens(report: DataReport | CompletionReport) -> list[str]:
    lost, trained = report.tokens_lost, report.supervised_tokens_lost
    repeated = report.tokens_repeated if isinstance(report, DataReport) else 0
    parts = [f"{repeated:,} tokens repeated as context"] if repeated else []
    if lost:
        share = 100 * lost / (report.tokens - repeated + lost)
        about = "about " if isinstance(report, DataReport) and report.estimated else ""
        parts.append(f"{about}{lost:,} tokens lost ({share:.2g}% of all)")
    return [*parts, *([f"{trained:,} trained tokens lost"] if trained else [])]


def _describe_length_range(lengths: dict[str, int]) -> str:
    return f"{lengths['min']:,} to {lengths['max']:,}, median {lengths['p50']:,}"


def length_percentiles(lengths: Sequence[int] | array[int]) -> dict[str, int]:
    """Return ``min``, ``p50``, ``p90``, ``p95``, ``p99`` and ``max`` of row lengths; each is the length of a row."""
    points = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    values = np.percentile(np.array(lengths, dtype=np.int64), list(points.values()), method="higher")
    return {name: int(value) for name, value in zip(points, values, strict=True)}
