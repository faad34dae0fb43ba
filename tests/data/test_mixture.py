"""Mixtures of sources by weight: shares, passes, packs; and eval sets, which are never trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preparing import prepare

from streamtune.data import ResumableSampler, Source
from streamtune.data.batches.sampler import Mixture, weighted_mixture
from streamtune.errors import DataError

Write = Callable[..., str]


def visits(mixture: Mixture, order: np.ndarray) -> list[int]:
    """Return how often an order visits each source."""
    return np.histogram(order, bins=np.array(mixture.bounds) - 0.5)[0].tolist()


def test_shares_are_of_rows_or_of_tokens_and_an_epoch_keeps_its_length() -> None:
    bounds, tokens = [0, 60, 90, 100], np.array([10] * 60 + [40] * 30 + [20] * 10)
    by_rows = weighted_mixture([1, 2, 1], bounds, np.ones(100, dtype=np.int64))
    assert by_rows is not None
    assert by_rows.visits == (25, 50, 25)
    by_tokens = weighted_mixture([1, 2, 1], bounds, tokens)
    assert by_tokens is not None
    assert by_tokens.visits == (50, 25, 25)  # 500, 1,000 and 500 of 2,000 tokens
    assert tokens[by_tokens.epoch_order(0, seed=1, shuffle=False)].sum() == tokens.sum()
    assert weighted_mixture([1, 0, 0], bounds, tokens) == Mixture((0, 60, 90, 100), (200, 0, 0))
    assert weighted_mixture([1e-9, 1, 1], bounds, tokens).visits[0] == 1, "a source with a weight is visited"  # type: ignore[union-attr]
    assert weighted_mixture([1, 1, 0], [0, 0, 0, 100], np.ones(100, dtype=np.int64)) is None


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_go_on_where_the_one_before_stopped(shuffle: bool) -> None:
    """Rows of a source are visited equally often: their counts differ by one at most, whatever the epoch."""
    mixture = Mixture((0, 7, 17, 18), (3, 25, 1))
    total: Counter[int] = Counter()
    for epoch in range(9):
        order = mixture.epoch_order(epoch, seed=5, shuffle=shuffle)
        assert visits(mixture, order) == [3, 25, 1]
        assert np.array_equal(order, mixture.epoch_order(epoch, seed=5, shuffle=shuffle))
        total.update(order.tolist())
        for first, stop in ((0, 7), (7, 17), (17, 18)):
            counts = [total[row] for row in range(first, stop)]
            assert max(counts) - min(counts) <= 1
    if shuffle:
        first, second = (mixture.epoch_order(0, seed=seed, shuffle=True) for seed in (5, 6))
        assert not np.array_equal(first, second)
    else:
        visited = mixture.epoch_order(0, seed=5, shuffle=False)
        assert visited[visited < 7].tolist() == [0, 1, 2]
        assert 17 in visited[8:21], "the sources are mixed evenly"


def test_a_sampler_resumes_within_a_mixture() -> None:
    mixture = Mixture((0, 7, 17, 18), (3, 25, 1))

    def sampler() -> ResumableSampler:
        return ResumableSampler(18, seed=3, mixture=mixture)

    whole, first = sampler(), sampler()
    batches = [batch for _ in range(3) for batch in whole.batches(4)]
    assert sum(map(len, batches)) == 3 * 29
    taken = [next(first.batches(4)) for _ in range(5)]
    second = sampler()
    second.load_state_dict(first.state_dict())
    rest = [batch for _ in range(3) for batch in second.batches(4)]
    assert taken + rest == batches


@pytest.fixture
def sources(write: Write, tmp_path: Path) -> list[Source]:
    words = {"a": 4, "b": 30, "c": 12}
    for name, count in words.items():
        write(f"{name}.jsonl", [{"text": f"{name} {n} " + "word " * count} for n in range(40)])
    return [Source(str(tmp_path / f"{name}.jsonl"), weight=weight) for name, weight in (("a", 1), ("b", 2), ("c", 1))]


def test_packs_are_of_one_source_each_and_shares_hold(sources: list[Source], tokenizer: Any) -> None:
    data = prepare(sources, tokenizer, max_length=512, packing=True)
    assert data.packs is not None
    assert data.mixture is not None
    assert data.mixture.bounds[-1] == len(data.packs)
    for number in range(3):
        packs = range(data.mixture.bounds[number], data.mixture.bounds[number + 1])
        rows = {data.training[row].origin.partition(".jsonl")[0][-1] for pack in packs for row in data.packs[pack]}
        assert rows == {"abc"[number]}
    epoch = [source.epoch_rows for source in data.report.sources]
    assert np.array(epoch) / sum(epoch) == pytest.approx([0.25, 0.5, 0.25], abs=0.1)
    alone = prepare([Source(each.path) for each in sources], tokenizer, max_length=512, packing=True)
    assert alone.mixture is None
    assert data.fingerprint != alone.fingerprint


def test_the_weights_are_part_of_what_a_run_is(sources: list[Source], tokenizer: Any) -> None:
    plain = [Source(each.path) for each in sources]
    prints = {prepare(each, tokenizer, max_length=512).fingerprint for each in (sources, plain, sources[::-1])}
    assert len(prints) == 3
    heavier = [*sources[:2], Source(sources[2].path, weight=3)]
    assert prepare(heavier, tokenizer, max_length=512).fingerprint not in prints


def test_a_weight_on_rows_that_are_not_there(sources: list[Source], tokenizer: Any) -> None:
    mixed = [Source(sources[0].path, weight=0), Source(sources[1].path, weight=1, where="r.yaml:4")]
    with pytest.raises(DataError, match="no dataset with a weight above 0 has a row to train on"):
        prepare(mixed, tokenizer, max_length=60, overlength="drop")


# --- eval sets --------------------------------------------------------------------------------------------------------


def test_eval_sets_are_held_out_and_an_overlap_is_counted(write: Write, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": f"row {n}"} for n in range(20)]
    write("a.jsonl", rows)
    write("e.jsonl", [{"text": f"other {n}"} for n in range(5)] + rows[:3])
    write("f.jsonl", [{"text": "third"}])
    named = [("e.jsonl", "code"), ("f.jsonl", "code"), ("f.jsonl", "prose")]
    sources = [Source(str(tmp_path / path), evaluates=name) for path, name in named]
    notes: list[str] = []
    every = [Source(str(tmp_path / "a.jsonl")), *sources]
    data = prepare(every, tokenizer, max_length=99, val_size=4, notify=notes.append)
    assert [(each.name, each.start, each.stop) for each in data.eval_sets] == [
        ("held_out", 0, 4), ("code", 4, 13), ("prose", 13, 14),
    ]  # fmt: skip
    trained = {example.origin for example in data.training}
    assert len(trained) == 16
    assert all("a.jsonl" in origin for origin in trained)
    same = sum(f"{tmp_path}/a.jsonl:{number}" in trained for number in (1, 2, 3))
    assert f"{same} of 9 rows of the eval set 'code' are also in the training data" in notes
    assert data.report.held_out_duplicates == same
    alone = prepare(every, tokenizer, max_length=99, notify=notes.append)
    assert [each.name for each in alone.eval_sets] == ["code", "prose"]
    assert "3 of 9 rows of the eval set 'code' are also in the training data" in notes
    packed = prepare(every, tokenizer, max_length=40, packing=True)
    assert packed.validation_packs is not None
    for each in packed.eval_sets:
        packs = packed.validation_packs.packs_of_rows(each.start, each.stop)
        assert sorted(row for pack in packs for row in packed.validation_packs[pack]) == list(
            range(each.start, each.stop)
        )


def test_an_eval_set_of_which_nothing_is_left(write: Write, tokenizer: Any, tmp_path: Path) -> None:
    write("a.jsonl", [{"text": "short"}])
    write("e.jsonl", [{"text": "long " * 50}])
    short, long = (str(tmp_path / name) for name in ("a.jsonl", "e.jsonl"))
    with pytest.raises(DataError, match="no row of the eval set 'code' is left") as caught:
        prepare([Source(short), Source(long, evaluates="code", where="r.yaml:7")], tokenizer, max_length=20,
                overlength="drop")  # fmt: skip
    assert caught.value.where == "r.yaml:7"
    with pytest.raises(DataError, match="no row is left to train on"):
        prepare([Source(long), Source(short, evaluates="code")], tokenizer, max_length=20, overlength="drop")
