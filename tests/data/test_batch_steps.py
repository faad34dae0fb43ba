"""Steps that are counted in tokens: every row once an epoch, within the budget, and the same wherever a run resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from streamtune.data import (
    EpochSteps,
    ResumableSampler,
    StepSampler,
    Tree,
    bucket_steps,
    lay_out,
    measure_trees,
    token_steps,
)
from streamtune.data.batches.optimizer_steps import CURRICULA
from streamtune.data.record_table import Stored, spill
from streamtune.errors import CheckpointError


def in_tokens(lengths: np.ndarray[Any, Any], budget: int, *, seed: int, shuffle: bool) -> StepSampler:
    return token_steps(ResumableSampler(len(lengths), seed=seed, shuffle=shuffle), lengths, budget)


LENGTHS = np.random.RandomState(0).lognormal(4, 1, 300).astype(np.int64).clip(2, 1000)
BUCKETS = 64 << np.random.RandomState(1).choice(5, size=400, p=[0.4, 0.25, 0.2, 0.1, 0.05])
MAKERS: dict[str, Callable[[], StepSampler]] = {
    "tokens": lambda: in_tokens(LENGTHS, 1000, seed=7, shuffle=True),
    "in order": lambda: in_tokens(LENGTHS, 1000, seed=7, shuffle=False),
    "uniform": lambda: bucket_steps(BUCKETS, 4096, curriculum="uniform", cycles=4, seed=7),
    "grow-linear": lambda: bucket_steps(BUCKETS, 4096, curriculum="grow-linear", cycles=4, seed=7),
    "grow-p2": lambda: bucket_steps(BUCKETS, 4096, curriculum="grow-p2", cycles=4, seed=7),
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
        steps = epoch_of(bucket_steps(buckets, 4096, curriculum=curriculum, cycles=cycles, seed=3), 0)
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
    steps = bucket_steps(np.array([64, 128, 64, 64, 128, 64]), 128, curriculum="grow-p2", cycles=1, seed=42)
    assert epoch_of(steps, 0) == [[3, 5], [4], [0, 2], [1]]


def test_state_of_other_units_is_refused() -> None:
    state = MAKERS["grow-p2"]().state_dict()
    with pytest.raises(CheckpointError, match="curriculum = grow-p2, this run with uniform"):
        MAKERS["uniform"]().load_state_dict(state)
    with pytest.raises(CheckpointError, match="num_rows = 300, this run with 299"):
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
    found = lay_out(epoch, LENGTHS, LENGTHS**2, batch_size=batch_size, packed=False)
    assert (found.positions, found.squares) == (positions, squares)
    assert found.step_tokens.sum() == LENGTHS.sum()


@pytest.mark.parametrize("share", [True, False])
def test_positions_and_squares_of_trees(share: bool) -> None:
    trees = [
        Tree([1] * prompt, [[2] * common + [3 + index] * size for index, size in enumerate(sizes)], origin="rows:1")
        for prompt, common, sizes in ((5, 0, (3, 4)), (1, 0, (2,)), (9, 2, (1, 6, 2)), (4, 5, (2, 1)))
    ]
    with spill(Tree) as (writer, tables):
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
        assert tree.num_common == {9: 2, 4: 5}.get(prompt, 0)
        assert found == rows - (len(tree.completions) - 1) * (prompt - 1 + tree.num_common) ** 2 * share


def test_positions_and_squares_of_pieces_that_share_sequences() -> None:
    buckets = np.array([64, 64, 64, 128])
    tokens = np.array([64, 30, 64, 128])
    epoch = EpochSteps(np.arange(4), np.array([3, 4]))
    found = lay_out(epoch, tokens, tokens**2, batch_size=2, packed=True, per_sequence=128 // buckets)
    # [64 + 30, 64 padded to 94], [128]
    assert found.positions == 94 + 94 + 128
    assert found.squares == 64**2 + 30**2 + 64**2 + 30**2 + 128**2
    assert found.step_tokens.tolist() == [158, 128]
