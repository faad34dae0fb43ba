"""The rows of an optimizer step: counted in tokens, assigned to ranks, chosen as medoids."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest

from streamtune.data import (
    ChosenRows,
    EpochSteps,
    ResumableSampler,
    StepSampler,
    Tree,
    assign_to_ranks,
    choose_rows_to_train,
    find_small_sources,
    make_bucket_sampler,
    make_token_budget_sampler,
    measure_epoch_layout,
    measure_trees,
)
from streamtune.data.batches.optimizer_steps import CURRICULA, choose_medoids
from streamtune.data.record_table import Stored, open_record_table
from streamtune.errors import CheckpointError


def in_tokens(lengths: np.ndarray[Any, Any], budget: int, *, seed: int, shuffle: bool) -> StepSampler:
    return make_token_budget_sampler(ResumableSampler(len(lengths), seed=seed, shuffle=shuffle), lengths, budget)


LENGTHS = np.random.RandomState(0).lognormal(4, 1, 300).astype(np.int64).clip(2, 1000)
BUCKETS = 64 << np.random.RandomState(1).choice(5, size=400, p=[0.4, 0.25, 0.2, 0.1, 0.05])
MAKERS: dict[str, Callable[[], StepSampler]] = {
    "tokens": lambda: in_tokens(LENGTHS, 1000, seed=7, shuffle=True),
    "in order": lambda: in_tokens(LENGTHS, 1000, seed=7, shuffle=False),
    "uniform": lambda: make_bucket_sampler(BUCKETS, 4096, curriculum="uniform", cycles=4, seed=7),
    "grow-linear": lambda: make_bucket_sampler(BUCKETS, 4096, curriculum="grow-linear", cycles=4, seed=7),
    "grow-p2": lambda: make_bucket_sampler(BUCKETS, 4096, curriculum="grow-p2", cycles=4, seed=7),
}


def epoch_of(sampler: StepSampler, epoch: int) -> list[list[int]]:
    steps = sampler.epoch_steps(epoch)
    return [part.tolist() for part in np.split(steps.units, steps.stops[:-1])]


@pytest.mark.parametrize("kind", MAKERS)
def test_every_unit_once_an_epoch_within_the_budget(kind: str) -> None:
    sampler = MAKERS[kind]()
    sizes, budget = (LENGTHS, 1000) if kind in ("tokens", "in order") else (BUCKETS, 4096)
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)
    for epoch in (first, second):
        assert sorted(chain(*epoch)) == list(range(len(sizes)))
        assert all(0 < sizes[step].sum() <= budget for step in epoch)
    assert (first != second) == (kind != "in order")
    taken = [sampler.next_step() for _ in range(len(first) + len(second))]
    assert taken == first + second


def test_a_step_ends_where_the_next_row_is_over_the_budget() -> None:
    steps = epoch_of(in_tokens(np.array([400, 400, 300, 1200, 100, 900]), 1000, seed=0, shuffle=False), 0)
    assert steps == [[0, 1], [2], [3], [4, 5]]


def test_a_step_of_buckets_has_one_length_and_constant_tokens() -> None:
    for kind in CURRICULA:
        steps = epoch_of(MAKERS[kind](), 0)
        assert all(len({int(BUCKETS[unit]) for unit in step}) == 1 for step in steps)
        short = [step for step in steps if BUCKETS[step].sum() < 4096]
        lengths = [int(BUCKETS[step[0]]) for step in short]
        assert len(set(lengths)) == len(lengths), "only the last batch of a bucket has fewer pieces"


def test_lengths_grow_within_a_cycle() -> None:
    """The mean place of a bucket's batches within their cycle, by curriculum."""
    buckets = np.repeat([64, 256, 1024], [6400, 1600, 400])  # 100 batches of each

    def places(curriculum: str, cycles: int) -> list[float]:
        steps = epoch_of(make_bucket_sampler(buckets, 4096, curriculum=curriculum, cycles=cycles, seed=3), 0)
        assert len(steps) == 300
        lengths = np.array([buckets[step[0]] for step in steps])
        within = np.tile(np.arange(300 // cycles) / (300 // cycles), cycles)
        return [float(within[lengths == size].mean()) for size in (64, 256, 1024)]

    assert places("uniform", 4) == pytest.approx([0.5, 0.5, 0.5], abs=0.08)
    linear, doubling = places("grow-linear", 4), places("grow-p2", 4)
    assert linear[0] < linear[1] < linear[2]
    assert doubling[0] < linear[0] < 0.5 < linear[2] < doubling[2]


@pytest.mark.parametrize("kind", MAKERS)
def test_resumes_after_any_step(kind: str) -> None:
    whole = MAKERS[kind]()
    steps = [step for epoch in range(3) for step in epoch_of(whole, epoch)]
    for taken in range(0, len(steps) - 8, 5):
        before = MAKERS[kind]()
        for _ in range(taken):
            before.next_step()
        resumed = MAKERS[kind]()
        resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert [resumed.next_step() for _ in range(8)] == steps[taken : taken + 8]


def test_orders_are_pinned() -> None:
    """A run must be resumable after numpy was upgraded."""
    steps = make_bucket_sampler(np.array([64, 128, 64, 64, 128, 64]), 128, curriculum="grow-p2", cycles=1, seed=42)
    assert epoch_of(steps, 0) == [[3, 5], [4], [0, 2], [1]]


def test_state_of_other_units_is_refused() -> None:
    state = MAKERS["grow-p2"]().state_dict()
    with pytest.raises(CheckpointError, match="curriculum = grow-p2, this run has uniform"):
        MAKERS["uniform"]().load_state_dict(state)
    with pytest.raises(CheckpointError, match="num_rows = 300, this run has 299"):
        in_tokens(LENGTHS[1:], 1000, seed=7, shuffle=True).load_state_dict(MAKERS["tokens"]().state_dict())
    other = in_tokens(LENGTHS, 2000, seed=7, shuffle=True)  # another budget goes on at the same row
    other.load_state_dict({**MAKERS["tokens"]().state_dict(), "position": 11})
    assert other.next_step()[0] == other.epoch_steps(0).units[11]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_positions_and_squares_of_a_layout(batch_size: int) -> None:
    """Against batches that are laid out one by one."""
    epoch = in_tokens(LENGTHS, 1000, seed=7, shuffle=True).epoch_steps(0)
    positions = squares = 0
    for step in np.split(epoch.units, epoch.stops[:-1]):
        for start in range(0, len(step), batch_size):
            sizes = LENGTHS[step[start : start + batch_size]]
            positions += len(sizes) * int(sizes.max())
            squares += len(sizes) * int(sizes.max()) ** 2
    found = measure_epoch_layout(epoch, LENGTHS, LENGTHS**2, batch_size=batch_size, packed=False)
    assert (found.positions, found.squares) == (positions, squares)
    assert found.step_tokens.sum() == LENGTHS.sum()


@pytest.mark.parametrize("share", [True, False])
def test_positions_and_squares_of_trees(share: bool) -> None:
    trees = [
        Tree([1] * prompt, [[2] * common + [3 + index] * size for index, size in enumerate(sizes)], origin="rows:1")
        for prompt, common, sizes in ((5, 0, (3, 4)), (1, 0, (2,)), (9, 2, (1, 6, 2)), (4, 5, (2, 1)))
    ]
    with open_record_table(Tree) as (writer, tables):
        for tree in trees:
            writer.append(tree)
            writer.flush()
    order = [2, 0, 1, 3, 2]
    tokens, squares = measure_trees(Stored(Tree, tables[0], np.array(order)), share=share)
    chosen = [trees[index] for index in order]
    assert tokens.tolist() == [tree.num_tokens if share else tree.num_tokens_separate for tree in chosen]
    for tree, found in zip(chosen, squares, strict=True):
        prompt = len(tree.prompt)
        rows = sum((prompt + len(completion)) ** 2 for completion in tree.completions)
        assert tree.num_common_tokens == {9: 2, 4: 5}.get(prompt, 0)
        assert found == rows - (len(tree.completions) - 1) * (prompt - 1 + tree.num_common_tokens) ** 2 * share


def test_positions_and_squares_of_pieces_that_share_sequences() -> None:
    buckets = np.array([64, 64, 64, 128])
    tokens = np.array([64, 30, 64, 128])
    epoch = EpochSteps(np.arange(4), np.array([3, 4]))
    found = measure_epoch_layout(epoch, tokens, tokens**2, batch_size=2, packed=True, per_sequence=128 // buckets)
    # [64 + 30, 64 padded to 94], [128]
    assert found.positions == 94 + 94 + 128
    assert found.squares == 64**2 + 30**2 + 64**2 + 30**2 + 128**2
    assert found.step_tokens.tolist() == [158, 128]


# ---------- Rows dealt to ranks by predicted time: every row once, as many batches for each, and no rank waits for long

RANDOM = np.random.RandomState


def quadratic(lengths: np.ndarray) -> Callable[[int], float]:
    return lambda row: float(lengths[row] * (1 + lengths[row] / 4096))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_row_once_and_as_many_batches_for_each_rank(padded: bool, ranks: int, batch_size: int) -> None:
    for count in (1, 2, 5, 8, 31, 32, 33, 100):
        lengths = RANDOM(count).lognormal(6, 1.2, count).astype(int) + 2
        rows = RANDOM(count + 1).permutation(count).tolist()
        shares = assign_to_ranks(rows, quadratic(lengths), ranks=ranks, batch_size=batch_size, padded=padded)
        assert len(shares) == ranks
        assert {len(share) for share in shares} == {-(-count // (ranks * batch_size))}
        batches = [batch for share in shares for batch in share]
        assert sorted(row for batch in batches for row in batch) == list(range(count))
        assert max(map(len, batches)) <= batch_size
        if ranks == 1:
            assert [row for batch in batches for row in batch] == rows
        if count >= len(batches):
            assert all(batches), "no rank computes nothing where there are rows for all"
        again = assign_to_ranks(rows[::-1], quadratic(lengths), ranks=ranks, batch_size=batch_size, padded=padded)
        assert ranks == 1 or again == shares, "the order of the rows decides nothing"


def test_packs_of_as_many_tokens_go_by_what_they_cost() -> None:
    """Four packs of 4,096 tokens: two of one row, two of 64 rows; with equal tokens nothing could be told apart."""
    costs = {0: 8192.0, 1: 4160.0, 2: 8192.0, 3: 4160.0}
    shares = assign_to_ranks([0, 1, 2, 3], costs.__getitem__, ranks=2, batch_size=1, padded=False)
    assert [sorted(row for batch in share for row in batch) for share in shares] == [[0, 1], [2, 3]]
    assert [share[0] for share in shares] == [[0], [2]], "what takes long is computed at the same time"


def test_rows_that_a_step_lacks_are_lacking_where_they_cost_most() -> None:
    """One long row and eight short ones in batches of up to four: the long one is not made to pad others."""
    lengths = np.array([1000, *[10] * 8])
    shares = assign_to_ranks(range(9), lambda row: float(lengths[row]), ranks=2, batch_size=4)
    assert [0] in [batch for share in shares for batch in share]


# --------------- Medoids: the greedy algorithm of facility location, shares of sources, and small sources that are kept


def cost(points: np.ndarray, chosen: tuple[int, ...] | list[int]) -> float:
    """The sum over all points of the distance to the nearest chosen one."""
    return float(sum(min(np.linalg.norm(point - points[index]) for index in chosen) for point in points))


@pytest.mark.parametrize("seed", range(6))
def test_each_step_takes_the_point_that_helps_most(seed: int) -> None:
    points = RANDOM(seed).normal(size=(14, 5))
    found = choose_medoids(points, 5)
    for size in range(1, 6):
        before, taken = found[: size - 1], found[size - 1]
        costs = {index: cost(points, [*before, index]) for index in range(14) if index not in before}
        assert costs[taken] == pytest.approx(min(costs.values()), abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_near_the_best_choice_there_is(seed: int) -> None:
    points = RANDOM(seed).normal(size=(11, 3))
    best = min(cost(points, chosen) for chosen in combinations(range(11), 3))
    largest = max(np.linalg.norm(a - b) for a in points for b in points)
    gain = 11 * largest - cost(points, choose_medoids(points, 3))
    assert gain >= (1 - 1 / np.e) * (11 * largest - best)


def test_clusters_have_a_row_each() -> None:
    centres = np.array([[0.0, 0], [10, 0], [0, 10]])
    points = np.concatenate([centre + RANDOM(0).normal(scale=0.1, size=(5, 2)) for centre in centres])
    assert {index // 5 for index in choose_medoids(points, 3)} == {0, 1, 2}


def test_equal_points_are_taken_in_their_order() -> None:
    assert choose_medoids(np.zeros((4, 2)), 3) == [0, 1, 2]
    assert choose_medoids(np.ones((4, 2)), 0) == []
    choice = choose_rows_to_train(np.ones((4, 2)), [0] * 4, 4)
    assert choice == ChosenRows((0, 1, 2, 3), 0, 0.0, 0.0)


def test_small_sources_are_those_below_the_mean() -> None:
    assert find_small_sources([100, 10, 60]) == {1}
    assert find_small_sources([100, 10, 0, 10]) == {1, 3}
    assert find_small_sources([7, 7]) == frozenset()
    assert find_small_sources([5]) == frozenset()


def test_sources_have_their_share_and_small_ones_are_kept() -> None:
    points = RANDOM(1).normal(size=(24, 4))
    sources = [0] * 14 + [1] * 6 + [2] * 4
    choice = choose_rows_to_train(points, sources, 14, frozenset([2]))
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
    assert sorted(of_source) == sorted(choose_medoids(points[14:20], 3)), "medoids within the source"


def test_small_sources_that_would_fill_a_step_are_chosen_from_like_others() -> None:
    choice = choose_rows_to_train(RANDOM(2).normal(size=(12, 3)), [0] * 6 + [1] * 6, 4, frozenset([1]))
    assert choice.kept == 0
    assert np.bincount([place // 6 for place in choice.places]).tolist() == [2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_number_of_rows(seed: int) -> None:
    draw = RANDOM(seed)
    rows = 20
    sources = draw.randint(0, 5, size=rows).tolist()
    for count in range(1, rows + 1):
        choice = choose_rows_to_train(draw.normal(size=(rows, 3)), sources, count, frozenset([0]))
        assert len(set(choice.places)) == count


def test_rows_without_a_finite_gradient_are_the_last_choice() -> None:
    points = RANDOM(3).normal(size=(6, 2))
    points[1, 0], points[4, 1] = np.nan, np.inf
    choice = choose_rows_to_train(points, [0] * 6, 3)
    assert not {1, 4} & set(choice.places)
    assert np.isfinite(choice.gap)
    assert {0, 1, 2, 3, 5} == set(choose_rows_to_train(points, [0] * 6, 5).places)
    assert choose_rows_to_train(np.full((3, 2), np.nan), [0] * 3, 2).places == (0, 1)
