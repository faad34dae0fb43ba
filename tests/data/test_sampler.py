"""An order that is the same everywhere and can be taken up anywhere."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from streamtune.data import ResumableSampler
from streamtune.errors import CheckpointError


def epochs(sampler: ResumableSampler, count: int, batch_size: int) -> list[list[int]]:
    return [batch for _ in range(count) for batch in sampler.batches(batch_size)]


def test_every_row_once_an_epoch_in_another_order() -> None:
    sampler = ResumableSampler(10, seed=1)
    first, second = list(sampler.batches(3)), list(sampler.batches(3))
    assert [len(batch) for batch in first] == [3, 3, 3, 1]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    assert sampler.batches_per_epoch(3) == 4
    assert (sampler.epoch, sampler.position) == (2, 0)


def test_order_is_a_function_of_seed_and_epoch() -> None:
    assert epochs(ResumableSampler(10, seed=1), 2, 4) == epochs(ResumableSampler(10, seed=1), 2, 4)
    assert epochs(ResumableSampler(10, seed=1), 1, 4) != epochs(ResumableSampler(10, seed=2), 1, 4)
    # pinned: a run must be resumable after numpy was upgraded
    assert ResumableSampler(8, seed=42).order(0).tolist() == [3, 1, 5, 7, 4, 0, 6, 2]


def test_in_order() -> None:
    assert list(ResumableSampler(5, seed=1, shuffle=False).batches(2)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("taken", range(9))
def test_resumes_after_any_batch(taken: int) -> None:
    whole = epochs(ResumableSampler(10, seed=1), 2, 3)
    sampler, seen = ResumableSampler(10, seed=1), []
    while len(seen) < taken:
        for batch in sampler.batches(3):
            seen.append(batch)
            if len(seen) == taken:
                break
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = ResumableSampler(10, seed=1)
    resumed.load_state_dict(state)
    while len(seen) < len(whole):
        seen += resumed.batches(3)
    assert seen == whole


def test_state_of_other_data_is_refused() -> None:
    state = ResumableSampler(10, seed=1).state_dict()
    with pytest.raises(CheckpointError, match="num_rows = 10, this run with 11"):
        ResumableSampler(11, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed = 1, this run with 2"):
        ResumableSampler(10, seed=2).load_state_dict(state)
