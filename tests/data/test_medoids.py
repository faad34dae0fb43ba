"""Medoids: the greedy algorithm of facility location, shares of sources, and small sources that are kept."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from streamtune.data import Choice, choose_rows, small_sources
from streamtune.data.batches.optimizer_steps import medoids

RANDOM = np.random.RandomState


def cost(points: np.ndarray, chosen: tuple[int, ...] | list[int]) -> float:
    """The sum over all points of the distance to the nearest chosen one."""
    return float(sum(min(np.linalg.norm(point - points[index]) for index in chosen) for point in points))


@pytest.mark.parametrize("seed", range(6))
def test_each_step_takes_the_point_that_helps_most(seed: int) -> None:
    points = RANDOM(seed).normal(size=(14, 5))
    found = medoids(points, 5)
    for size in range(1, 6):
        before, taken = found[: size - 1], found[size - 1]
        costs = {index: cost(points, [*before, index]) for index in range(14) if index not in before}
        assert costs[taken] == pytest.approx(min(costs.values()), abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_near_the_best_choice_there_is(seed: int) -> None:
    points = RANDOM(seed).normal(size=(11, 3))
    best = min(cost(points, chosen) for chosen in combinations(range(11), 3))
    largest = max(np.linalg.norm(a - b) for a in points for b in points)
    gain = 11 * largest - cost(points, medoids(points, 3))
    assert gain >= (1 - 1 / np.e) * (11 * largest - best)


def test_clusters_have_a_row_each() -> None:
    centres = np.array([[0.0, 0], [10, 0], [0, 10]])
    points = np.concatenate([centre + RANDOM(0).normal(scale=0.1, size=(5, 2)) for centre in centres])
    assert {index // 5 for index in medoids(points, 3)} == {0, 1, 2}


def test_equal_points_are_taken_in_their_order() -> None:
    assert medoids(np.zeros((4, 2)), 3) == [0, 1, 2]
    assert medoids(np.ones((4, 2)), 0) == []
    choice = choose_rows(np.ones((4, 2)), [0] * 4, 4)
    assert choice == Choice((0, 1, 2, 3), 0, 0.0, 0.0)


def test_small_sources_are_those_below_the_mean() -> None:
    assert small_sources([100, 10, 60]) == {1}
    assert small_sources([100, 10, 0, 10]) == {1, 3}
    assert small_sources([7, 7]) == frozenset()
    assert small_sources([5]) == frozenset()


def test_sources_have_their_share_and_small_ones_are_kept() -> None:
    points = RANDOM(1).normal(size=(24, 4))
    sources = [0] * 14 + [1] * 6 + [2] * 4
    choice = choose_rows(points, sources, 14, frozenset([2]))
    counts = np.bincount([sources[place] for place in choice.places]).tolist()
    assert counts == [7, 3, 4]
    assert choice.kept == 4
    assert list(choice.places) == sorted(choice.places)
    gap = np.linalg.norm(points[list(choice.places)].mean(0) - points.mean(0)) / np.linalg.norm(points.mean(0))
    assert choice.gap == pytest.approx(gap)
    whole = points.mean(0)
    draws = [points[RANDOM(seed).choice(24, 14, replace=False)].mean(0) - whole for seed in range(4000)]
    rms = np.sqrt(np.mean([np.sum(draw**2) for draw in draws])) / np.linalg.norm(whole)
    assert choice.chance == pytest.approx(rms, rel=0.03)
    of_source = [place - 14 for place in choice.places if sources[place] == 1]
    assert sorted(of_source) == sorted(medoids(points[14:20], 3)), "medoids within the source"


def test_small_sources_that_would_fill_a_step_are_chosen_from_like_others() -> None:
    choice = choose_rows(RANDOM(2).normal(size=(12, 3)), [0] * 6 + [1] * 6, 4, frozenset([1]))
    assert choice.kept == 0
    assert np.bincount([place // 6 for place in choice.places]).tolist() == [2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_number_of_rows(seed: int) -> None:
    draw = RANDOM(seed)
    rows = 20
    sources = draw.randint(0, 5, size=rows).tolist()
    for count in range(1, rows + 1):
        choice = choose_rows(draw.normal(size=(rows, 3)), sources, count, frozenset([0]))
        assert len(set(choice.places)) == count


def test_rows_without_a_finite_gradient_are_the_last_choice() -> None:
    points = RANDOM(3).normal(size=(6, 2))
    points[1, 0], points[4, 1] = np.nan, np.inf
    choice = choose_rows(points, [0] * 6, 3)
    assert not {1, 4} & set(choice.places)
    assert np.isfinite(choice.gap)
    assert {0, 1, 2, 3, 5} == set(choose_rows(points, [0] * 6, 5).places)
    assert choose_rows(np.full((3, 2), np.nan), [0] * 3, 2).places == (0, 1)
