"""Rows dealt to ranks by predicted time: every row once, as many batches for each, and no rank waits for long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from streamtune.data import assign_rows

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
        shares = assign_rows(rows, quadratic(lengths), ranks=ranks, batch_size=batch_size, padded=padded)
        assert len(shares) == ranks
        assert {len(share) for share in shares} == {-(-count // (ranks * batch_size))}
        batches = [batch for share in shares for batch in share]
        assert sorted(row for batch in batches for row in batch) == list(range(count))
        assert max(map(len, batches)) <= batch_size
        if ranks == 1:
            assert [row for batch in batches for row in batch] == rows
        if count >= len(batches):
            assert all(batches), "no rank computes nothing where there are rows for all"
        again = assign_rows(rows[::-1], quadratic(lengths), ranks=ranks, batch_size=batch_size, padded=padded)
        assert ranks == 1 or again == shares, "the order of the rows decides nothing"


def test_packs_of_as_many_tokens_go_by_what_they_cost() -> None:
    """Four packs of 4,096 tokens: two of one row, two of 64 rows; with equal tokens nothing could be told apart."""
    costs = {0: 8192.0, 1: 4160.0, 2: 8192.0, 3: 4160.0}
    shares = assign_rows([0, 1, 2, 3], costs.__getitem__, ranks=2, batch_size=1, padded=False)
    assert [sorted(row for batch in share for row in batch) for share in shares] == [[0, 1], [2, 3]]
    assert [share[0] for share in shares] == [[0], [2]], "what takes long is computed at the same time"


def test_rows_that_a_step_lacks_are_lacking_where_they_cost_most() -> None:
    """One long row and eight short ones in batches of up to four: the long one is not made to pad others."""
    lengths = np.array([1000, *[10] * 8])
    shares = assign_rows(range(9), lambda row: float(lengths[row]), ranks=2, batch_size=4)
    assert [0] in [batch for share in shares for batch in share]
