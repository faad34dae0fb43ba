"""Micro-batches of completions in proportion to the largest of a run's own data.

A length is the number that ``max_length`` limits: a row, or a prompt with its longest completion. ``plan``,
``probe-max-len`` and ``bench`` do not read the data, so there a shape follows from the recipe's keys
(:meth:`Task.completions`).
"""

from __future__ import annotations

from collections.abc import Callable

from streamtune.simulate.scored import Completions, Scored, Trees

__all__ = ["in_proportion"]


def in_proportion(scored: Callable[[Trees], Scored], trees: Trees, longest: int) -> Completions:
    """Return the micro-batch of ``trees`` as a function of the length: with a smaller one every part is in proportion.

    Args:
        scored: Makes a micro-batch of trunks and branches.
        trees: At ``longest``.
        longest: Tokens of the longest completion with its prompt.
    """

    def at(length: int, batch_size: int) -> Scored:
        part = min(1.0, length / longest)
        return scored(
            tuple((int(part * trunk), tuple(max(2, int(part * size)) for size in sizes)) for trunk, sizes in trees)
        )

    return at
