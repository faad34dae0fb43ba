"""Reports on prepared data, shown to the user and written as JSON."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Counts of the rows of one dataset; the fields mean the same as in the report of all rows, :class:`DataReport`."""

    path: str
    """path of the source"""
    name: str | None
    """configuration of the dataset, or task of ``demo-arithmetic``"""
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
    """percentiles of the row lengths; empty if no row was rendered, because all pairs were identical"""
    weight: float | None = None
    """weight in the mixture; None without weights"""
    evaluates: str | None = None
    """eval set of its rows; None for rows to train on"""
    epoch_rows: int = 0
    """number of rows that an epoch visits, repeats included; the mean over epochs if weighted sources are packed"""
    epoch_tokens: int = 0
    """number of tokens of these rows; a tree counts its prompt once"""

    @property
    def title(self) -> str:
        """Path, configuration and eval set of the dataset, joined by blanks."""
        evaluates = f"(eval {self.evaluates})" if self.evaluates else None
        return " ".join(filter(None, (self.path, self.name, evaluates)))


EPOCH_COLUMNS = ("weight", "rows", "of rows", "tokens", "of tokens")


def format_epoch_shares(sources: Sequence[SourceReport]) -> list[list[str]]:
    """Return one table row for each weighted source: its title, then its share of an epoch (:data:`EPOCH_COLUMNS`)."""
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
    """number of rows read"""
    kept: int
    """number of rows that are trained or evaluated on, whole or in part"""
    truncated: int
    """number of kept rows that were truncated (``overlength: truncate``)"""
    dropped: int
    """number of rows dropped, because they were too long (``overlength: drop``) or no trained token was left"""
    split: int
    """number of kept rows that were split (``overlength: split``)"""
    pieces_dropped: int
    """number of parts of split rows that were dropped because they have no trained token"""
    train_examples: int
    """number of sequences to train on: rows, or parts of split rows"""
    validation_examples: int
    """number of held-out sequences"""
    tokens: int
    """number of tokens of all examples"""
    supervised_tokens: int
    """number of trained tokens; the loss is a mean over them"""
    length_percentiles: dict[str, int]
    """percentiles of the row lengths in tokens, as rendered, before any cut"""
    packs: int = 0
    """number of packed training sequences; 0 without packing"""
    pack_fill: float = 0.0
    """fraction of ``packs * max_length`` positions that hold a token"""
    shared_tokens: int = 0
    """number of tokens in packed sequences whose rows share their beginnings; 0 otherwise"""
    pieces: int = 0
    """number of pieces that training examples are cut into; 0 without buckets"""
    piece_tokens_lost: int = 0
    """number of training tokens that are in no piece"""
    piece_targets_lost: int = 0
    """number of trained tokens that are not predicted, because a piece begins with them"""
    tokens_lost: int = 0
    """number of rendered tokens that are in no example: cut off, in dropped rows, or in dropped parts"""
    supervised_tokens_lost: int = 0
    """number of trained tokens lost: those among ``tokens_lost``, and the first token after each cut"""
    tokens_repeated: int = 0
    """number of tokens that are in two examples, as context of parts (``split_overlap``)"""
    estimated: int = 0
    """number of dropped rows that were only tokenised in part: their lengths and lost tokens are estimates"""
    duplicates: int = 0
    """number of examples with the same tokens and labels as an earlier example"""
    special_rows: int = 0
    """number of rows whose text contains names of special tokens"""
    held_out_duplicates: int = 0
    """number of training examples that are held out too: in an eval set, or as an equal part of another row"""
    sources: tuple[SourceReport, ...] = ()
    """counts of each entry of ``datasets``, in order"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
        """Return the report in one line, without counts of zero."""
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
    """Counts of rows with prompts and completions. ``rows = kept + dropped``; a kept row makes one record."""

    rows: int
    """number of rows read"""
    kept: int
    """number of rows that are trained or evaluated on, whole or in part"""
    truncated: int
    """number of kept rows that lost the start of a prompt or the end of a completion (``overlength: truncate``)"""
    dropped: int
    """number of rows dropped for any reason"""
    identical: int = 0
    """number of rows dropped because their answers are the same (``identical_pairs: drop``)"""
    train_examples: int
    """number of trees or prompts to train on"""
    validation_examples: int
    """number of held-out trees or prompts"""
    completions: int = 0
    """number of completions of all trees; 0 for prompts"""
    tokens: int
    """number of tokens of all trees, each completion with its own copy of the prompt; or of all prompts"""
    tree_tokens: int
    """number of positions of all trees if common beginnings are stored once, as ``share_prefix`` does"""
    supervised_tokens: int
    """number of completion tokens that count in the loss"""
    length_percentiles: dict[str, int]
    """percentiles of the row lengths as rendered, prompt and longest completion; ``max_length`` limits these"""
    prompt_lengths: dict[str, int]
    """percentiles of the prompt lengths in tokens, as rendered, before any cut"""
    completion_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    """percentiles of the completion lengths as rendered, by ``chosen`` and ``rejected``, or ``desirable`` and
    ``undesirable``"""
    tree_lengths: dict[str, int] = field(default_factory=dict)
    """percentiles of the positions of kept trees, counted as in ``tree_tokens``; empty for prompts"""
    negative_margins: int = 0
    """number of pairs whose chosen answer has the lower score"""
    split: int = 0
    """always 0: neither a pair nor a prompt is split"""
    tokens_lost: int = 0
    """number of rendered tokens that are in no tree, counted as in ``tokens``; identical pairs do not count"""
    supervised_tokens_lost: int = 0
    """number of lost tokens that would count in the loss; 0 for prompts"""
    duplicates: int = 0
    """number of trees or prompts that equal an earlier one in everything that training reads"""
    special_rows: int = 0
    """number of rows whose text contains names of special tokens"""
    held_out_duplicates: int = 0
    """number of training records that are in an eval set too; rows with the same prompt are held out together"""
    sources: tuple[SourceReport, ...] = ()
    """counts of each entry of ``datasets``, in order"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sources": [dict(vars(source)) for source in self.sources]}

    def describe(self) -> str:
        """Return the report in one line, without counts of zero."""
        parts = _describe_rows(self)
        parts.append(f"prompts {_describe_length_range(self.prompt_lengths)}")
        parts += [f"{name} {_describe_length_range(lengths)}" for name, lengths in self.completion_lengths.items()]
        if self.completions:
            together = f"{self.tree_tokens:,} with shared beginnings counted once"
            parts.append(f"{self.tokens:,} tokens, {together}, {self.supervised_tokens:,} trained")
        else:
            parts.append(f"{self.tokens:,} tokens")
        parts += _describe_special_token_rows(self) + _describe_lost_tokens(self)
        return "; ".join(parts)


def _describe_rows(report: DataReport | CompletionReport, pieces_dropped: int = 0) -> list[str]:
    """Return phrases such as "5 rows", "1 dropped"; counts of zero are left out."""
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
    """Return phrases such as "12 tokens lost (3% of all)"; counts of zero are left out."""
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
    """Return ``min``, ``p50``, ``p90``, ``p95``, ``p99`` and ``max`` of row lengths, each the length of a row."""
    points = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    values = np.percentile(np.array(lengths, dtype=np.int64), list(points.values()), method="higher")
    return {name: int(value) for name, value in zip(points, values, strict=True)}
