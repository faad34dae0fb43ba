"""The report on prompts and their completions: counted in preparation, shown to the user, written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TreeReport"]


@dataclass(frozen=True)
class TreeReport:
    """Counts of rows, trees and tokens. ``rows = kept + dropped``; of every kept row one tree or prompt is made."""

    rows: int
    """rows read"""
    kept: int
    """rows that are trained or evaluated on, whole or in part"""
    truncated: int
    """kept rows that lost the beginning of their prompt or the end of a completion (``overlength: truncate``)"""
    dropped: int
    """rows left out, for whatever reason"""
    identical: int
    """those of them whose answers are the same (``identical_pairs: drop``, or nothing else was left after a cut)"""
    train_examples: int
    """trees or prompts to train on"""
    validation_examples: int
    """those held out"""
    completions: int
    """completions of all trees; 0 of prompts"""
    tokens: int
    """tokens of all trees, each completion with its own copy of the prompt; of prompts their tokens"""
    tree_tokens: int
    """positions of all trees where a prompt is there once: what is computed and held with a shared prompt"""
    supervised_tokens: int
    """tokens of completions that count"""
    length_percentiles: dict[str, int]
    """prompt and longest completion of every row as rendered: what ``max_length`` is compared with"""
    prompt_lengths: dict[str, int]
    """tokens of the prompts as rendered, before anything was cut"""
    completion_lengths: dict[str, dict[str, int]]
    """tokens of the completions as rendered, by what they are: ``chosen`` and ``rejected``, or ``desirable`` and
    ``undesirable``"""
    tree_lengths: dict[str, int]
    """positions of a kept tree with a shared prompt; empty of prompts"""
    negative_margins: int = 0
    """pairs whose chosen answer has the lower score"""
    split: int = 0
    """always 0: neither a pair nor a prompt is cut into pieces"""

    def to_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return dict(vars(self))

    def describe(self) -> str:
        """Return the report in one line, without counts of zero."""
        parts = [f"{self.rows:,} rows"]
        if self.kept != self.rows:
            parts.append(f"{self.kept:,} kept")
        named = {"dropped": self.dropped, "truncated": self.truncated}
        parts += [f"{count:,} {name}" for name, count in named.items() if count]
        parts.append(f"{self.train_examples:,} to train on")
        if self.validation_examples:
            parts.append(f"{self.validation_examples:,} held out")
        parts.append(f"prompts {_range(self.prompt_lengths)}")
        parts += [f"{name} {_range(lengths)}" for name, lengths in self.completion_lengths.items()]
        if self.completions:
            parts.append(
                f"{self.tokens:,} tokens, {self.tree_tokens:,} with shared prompts, {self.supervised_tokens:,} trained"
            )
        else:
            parts.append(f"{self.tokens:,} tokens")
        return "; ".join(parts)


def _range(lengths: dict[str, int]) -> str:
    return f"{lengths['min']:,} to {lengths['max']:,}, median {lengths['p50']:,}"
