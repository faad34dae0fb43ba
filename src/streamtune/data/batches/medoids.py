"""The choice of a few rows that stand for many: medoids of each source, by facility location.

Of n points with distances D, the set S of b points is sought that is nearest to all of them,

    minimise   sum_i  min_{s in S} D_is

which is the facility location sum_i max_{s in S} (C - D_is) maximised, a monotone submodular function: the greedy
algorithm is within 1 - 1/e of the best. Rows of small sources are kept as they are, for a medoid of all rows is seldom
one of theirs (CoLM, arXiv 2407.19580, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """Rows that were chosen among others."""

    places: tuple[int, ...]
    """their places among all, ascending"""
    kept: int
    """rows of them that were kept because their source is small"""
    gap: float
    """||mean of the chosen points - mean of all|| / ||mean of all||, of the points that are finite"""
    chance: float
    """the root mean square of the same over all choices of as many rows, small sources or not"""


def small_sources(sizes: Sequence[int]) -> frozenset[int]:
    """Return the sources that are smaller than the mean of those that have rows.

    Args:
        sizes: [sources] rows.
    """
    present = [size for size in sizes if size > 0]
    return frozenset(source for source, size in enumerate(sizes) if 0 < size * len(present) < sum(present))


def choose_rows(points: Points, sources: Sequence[int], count: int, small: frozenset[int] = frozenset()) -> Choice:
    """Choose ``count`` rows: all of the small sources, and of each other one its medoids, as many as its share.

    Where the small sources alone have ``count`` rows here or more, none is kept for being small. A row whose point is
    not finite is chosen only where the others are too few.

    Args:
        points: [rows, dimensions]
        sources: [rows] the source of each.
        count: Rows to choose, at most all.
        small: The small sources.
    """
    rows = len(points)
    assert rows == len(sources) >= count > 0, "there are rows to choose from"
    finite = np.isfinite(points).all(axis=1)
    usable = [int(row) for row in np.flatnonzero(finite)]
    if len(usable) < count:
        more = np.flatnonzero(~finite)[: count - len(usable)]
        return Choice(tuple(sorted((*usable, *more.tolist()))), 0, 0.0, 0.0)
    kept = [row for row in usable if sources[row] in small]
    if len(kept) >= count:
        kept = []
    by_source: dict[int, list[int]] = {}
    for row in sorted(set(usable) - set(kept)):
        by_source.setdefault(sources[row], []).append(row)
    candidates = [by_source[source] for source in sorted(by_source)]
    chosen = list(kept)
    for places, budget in zip(candidates, _budgets([len(own) for own in candidates], count - len(kept)), strict=True):
        chosen += [places[index] for index in medoids(points[places], budget)]
    chosen.sort()
    return Choice(tuple(chosen), len(kept), *_gaps(points[chosen], points[usable]))


def medoids(points: Points, count: int) -> list[int]:
    """Return ``count`` points, the first that are found by the greedy algorithm; of equal gains the first point.

    Args:
        points: [n, dimensions] finite; distances are Euclidean.
        count: At most n.
    """
    if count == 0:
        return []
    squares_n = (points**2).sum(axis=1)
    distances_nn = np.sqrt(np.maximum(squares_n[:, None] + squares_n - 2 * points @ points.T, 0))
    np.fill_diagonal(distances_nn, 0)
    nearest_n = np.full(len(points), distances_nn.max() + 1)
    chosen: list[int] = []
    for _ in range(count):
        gains_n = np.maximum(nearest_n[:, None] - distances_nn, 0).sum(axis=0)
        gains_n[chosen] = -1
        chosen.append(int(gains_n.argmax()))
        nearest_n = np.minimum(nearest_n, distances_nn[:, chosen[-1]])
    return chosen


def _budgets(sizes: Sequence[int], count: int) -> list[int]:
    """Divide ``count`` in proportion to sizes, the remainder by the largest fractions; none is above its size."""
    total = sum(sizes)
    budgets = [count * size // total for size in sizes]
    by_fraction = sorted(range(len(sizes)), key=lambda index: (-(count * sizes[index] % total), index))
    for index in by_fraction[: count - sum(budgets)]:
        budgets[index] += 1
    return budgets


def _gaps(chosen: Points, every: Points) -> tuple[float, float]:
    """Return :attr:`Choice.gap` and :attr:`Choice.chance`; the variance is that of draws without replacement."""
    whole, rows, count = every.mean(axis=0), len(every), len(chosen)
    length = max(float(np.linalg.norm(whole)), 1e-30)
    variance = float(((every - whole) ** 2).sum()) / max(1, rows - 1) * (1 - count / rows) / count
    return float(np.linalg.norm(chosen.mean(axis=0) - whole)) / length, float(np.sqrt(variance)) / length
