"""Mixtures of sources: how often an epoch visits the rows of each, and in which order.

A source has a weight. Its share of an epoch is its weight divided by the sum of all weights, counted in rows or in
tokens. An epoch is as long as all sources together, so weights change shares and not the length of a run.

A source is gone through in passes, each in an order drawn from the seed, and an epoch goes on where the one before it
stopped: where it takes a third of a source, three epochs visit each row once; where it takes three times the rows of
one, each is visited three times. The order is a function of seed and epoch, so a run resumes from two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

MIX_BY = ("rows", "tokens")
"""Units of a share."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """The visits of an epoch to each source; units are rows, or packs of rows of one source."""

    bounds: tuple[int, ...]
    """[sources + 1] the first unit of each source, and the number of all units"""
    visits: tuple[int, ...]
    """[sources] units that an epoch takes of each"""

    @property
    def units(self) -> int:
        """Units of an epoch."""
        return sum(self.visits)

    def order(self, epoch: int, *, seed: int, shuffle: bool) -> Numbers:
        """Return the units of an epoch in the order of their visits, [units].

        Args:
            epoch: From 0.
            seed: Seed of the passes and of their mixing.
            shuffle: False goes through each source in its own order, and mixes the sources evenly.
        """
        parts = [self._part(source, epoch, seed, shuffle) for source in range(len(self.visits))]
        units: Numbers = np.concatenate(parts)
        if shuffle:
            return units[_random(seed, epoch, len(parts)).permutation(len(units))]
        places = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts]
        return units[np.argsort(np.concatenate(places), kind="stable")]

    def _part(self, source: int, epoch: int, seed: int, shuffle: bool) -> Numbers:
        """Return the units that an epoch takes of a source: ``visits`` of them, from where the last epoch stopped."""
        first, size = self.bounds[source], self.bounds[source + 1] - self.bounds[source]
        start, count = epoch * self.visits[source], self.visits[source]
        if not count:
            return np.empty(0, dtype=np.int64)
        passes = range(start // size, (start + count - 1) // size + 1)
        orders = [
            _random(seed, source, number, 1).permutation(size) if shuffle else np.arange(size) for number in passes
        ]
        skipped = start - passes[0] * size
        return first + np.concatenate(orders)[skipped : skipped + count].astype(np.int64)


def _random(*seeds: int) -> np.random.RandomState:
    # RandomState's streams are frozen by numpy's compatibility policy; Generator's may change with a release.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))


def mix(weights: Sequence[float], bounds: Sequence[int], sizes: Numbers) -> Mixture | None:
    """Return the mixture of sources by their weights; None if no source with a weight has a unit.

    Args:
        weights: [sources] none negative.
        bounds: [sources + 1] the first unit of each source, and the number of all units.
        sizes: [units] the size of each in the unit of a share: 1 where rows are counted, else its tokens.
    """
    counts = np.diff(bounds)
    totals = np.array([sizes[start:stop].sum() for start, stop in pairwise(bounds)])
    shares = np.where(counts > 0, np.array(weights, dtype=np.float64), 0.0)
    if shares.sum() == 0:
        return None
    wanted = shares / shares.sum() * totals.sum()
    means = totals / np.maximum(counts, 1)
    # A source with a weight is visited, however small its share.
    visits = [max(1, round(float(size / mean))) if size > 0 else 0 for size, mean in zip(wanted, means, strict=True)]
    return Mixture(tuple(int(bound) for bound in bounds), tuple(visits))
