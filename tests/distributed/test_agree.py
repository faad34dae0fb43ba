"""Ranks that differ, are missing or cannot reach each other: all ranks raise the same error before training."""

from __future__ import annotations

import json

import pytest

from streamtune.distributed.agree import describe_ranks, find_differing_values
from streamtune.distributed.failure import RankEnd
from tests.distributed.ranks_kit import start, wait

ALIKE = {"data": "d1", "recipe seed": "42"}


def agreed(*facts: dict[str, str] | None, seconds: str = "60") -> list[RankEnd]:
    ranks = start("agree", count=len(facts), WATCHED_FACTS=json.dumps(facts), WATCHED_SECONDS=seconds)
    return wait(ranks, 120)


def test_ranks_that_are_alike_go_on() -> None:
    ends = agreed(ALIKE, ALIKE, ALIKE)
    assert [(end.code, end.failure) for end in ends] == [(0, None)] * 3


def test_a_difference_is_the_same_error_on_every_rank() -> None:
    ends = agreed(ALIKE, ALIKE, {**ALIKE, "data": "d2"})
    assert [end.code for end in ends] == [1, 1, 1]
    whats = {end.failure.what for end in ends if end.failure is not None}
    assert whats == {"the ranks differ\n- data: d1 on ranks 0-1 (here); d2 on rank 2 (here)"}


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named_on_the_others() -> None:
    ends = agreed(ALIKE, ALIKE, None, seconds="5")
    assert [end.code for end in ends] == [1, 1, 0]
    for end in ends[:2]:
        assert end.failure is not None
        assert end.failure.what == "rank 2 of 3 has not connected to rank 0 on here within 5 s"


def test_who_has_what() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "c"}
    assert find_differing_values(dict.fromkeys(hosts, ALIKE), hosts) is None
    lacking = find_differing_values({0: {"x": "1"}, 1: {"x": "1"}, 2: {}, 3: {"x": "2"}}, hosts)
    assert lacking is not None
    assert lacking.what.splitlines()[1] == "- x: 1 on ranks 0-1 (a); unknown on rank 2 (b); 2 on rank 3 (c)"
    assert describe_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
