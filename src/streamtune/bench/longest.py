"""Search for the longest sequence of each row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from streamtune.bench.tables import Entry, TableRow
from streamtune.bench.tabulate import MeasureGroup
from streamtune.plan.budget import Budget
from streamtune.plan.search import Attempt, Range, search_largest
from streamtune.probe.trial import Outcome

__all__ = ["TryLength", "longest_by"]

WITHIN = Range(first=2048, least=256, most=1 << 27, step=256, grain=64)
"""Tokens: where to begin, where to stop; a multiple of the grain."""

TryLength = Callable[[Entry, int], Outcome]
"""A step of so many tokens, real or simulated."""


def longest_by(attempt: TryLength, budget: Budget, notify: Callable[[str], None]) -> MeasureGroup:
    """Return a function that measures rows by a search over lengths.

    Args:
        attempt: Tries a length.
        budget: The budget that a step has to fit.
        notify: Called with what is being tried.
    """

    def measure(todo: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        for entry in todo:
            yield _longest(entry, attempt, budget, notify)

    return measure


def _longest(entry: Entry, attempt: TryLength, budget: Budget, notify: Callable[[str], None]) -> TableRow:
    fitted: dict[int, Outcome] = {}
    failed: dict[int, Outcome] = {}

    def tried(length: int) -> Attempt:
        notify(f"{entry.label}: {length:,} tokens")
        outcome = attempt(entry, length)
        (fitted if outcome.fits else failed)[length] = outcome
        return Attempt(outcome.fits, budget.share_of(outcome.peak_bytes, outcome.host_bytes, outcome.disk_bytes))

    found = search_largest(tried, WITHIN).fits
    row = replace(entry.new_row(), max_length=found)
    if not found:
        return replace(row, error=f"not even {min(failed):,} tokens: {failed[min(failed)].reason}")
    best = fitted[found]
    return replace(
        row,
        peak_bytes=best.peak_bytes,
        host_bytes=best.host_bytes,
        disk_bytes=best.disk_bytes,
        terms=best.terms,
    )
