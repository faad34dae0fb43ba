"""The choice of the next prompts, and the division of completions among them with the least variance."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import product
from random import Random

import pytest

from streamtune.errors import CheckpointError
from streamtune.tasks.rollout import (
    MIN_COMPLETIONS,
    GradientNorms,
    PassRates,
    PromptPicker,
    allocate_completions,
    allocation_score,
)

ALPHA, BETA = 1e-3, 2.0


def picker(choice: str, num_prompts: int = 10, seed: int = 3) -> PromptPicker:
    return PromptPicker(num_prompts, choice=choice, seed=seed)


def test_uniform_takes_every_prompt_once_an_epoch_in_a_new_order_each_time() -> None:
    uniform = picker("uniform")
    drawn = [prompt for _ in range(10) for prompt in uniform.next_prompts(3)]
    epochs = [drawn[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert picker("uniform", seed=4).next_prompts(10) != epochs[0]


def test_uniform_without_shuffle_keeps_the_order_of_the_prompts_in_every_epoch() -> None:
    ordered = PromptPicker(5, choice="uniform", seed=3, shuffle=False)
    assert [ordered.next_prompts(3) for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    before_the_key = {key: value for key, value in ordered.state_dict().items() if key != "shuffle"}
    with pytest.raises(CheckpointError, match="shuffle = True, this run with False"):
        ordered.load_state_dict(before_the_key)


def test_more_prompts_than_there_are() -> None:
    assert Counter(picker("uniform", num_prompts=2).next_prompts(6)) == {0: 3, 1: 3}
    assert Counter(picker("pass_rate", num_prompts=2).next_prompts(6)) == {0: 3, 1: 3}


def test_pass_rate_prefers_what_is_solved_now_and_then_and_leaves_nothing_out() -> None:
    by_rate = picker("pass_rate", num_prompts=3)
    for _ in range(5):
        by_rate.record_completions(0, passed=8, tried=8)
        by_rate.record_completions(1, passed=4, tried=8)
        by_rate.record_completions(2, passed=0, tried=8)
    counts = Counter(by_rate.next_prompts(1)[0] for _ in range(3000))
    assert counts[1] > 2 * counts[0]
    assert counts[1] > 2 * counts[2]
    assert min(counts.values()) > 200


def test_middle_prefers_all_of_medium_difficulty_alike_and_leaves_nothing_out() -> None:
    middle = picker("middle", num_prompts=4)
    for _ in range(5):
        for prompt, passed in enumerate((8, 3, 5, 0)):
            middle.record_completions(prompt, passed=passed, tried=8)
    counts = Counter(middle.next_prompts(1)[0] for _ in range(3000))
    assert counts[1] == pytest.approx(counts[2], rel=0.15)
    assert min(counts[1], counts[2]) > 5 * max(counts[0], counts[3])
    assert min(counts.values()) > 50


def test_rates_follow_what_the_policy_can_do_now() -> None:
    rates = PassRates()
    assert rates.pass_rate(0) == 0.5
    for _ in range(4):
        rates.record_completions(0, passed=0, tried=8)
    hopeless = rates.pass_rate(0)
    for _ in range(3):
        rates.record_completions(0, passed=8, tried=8)
    assert hopeless < 0.1
    assert rates.pass_rate(0) > 0.8


@pytest.mark.parametrize("choice", ["uniform", "pass_rate", "middle"])
def test_it_goes_on_where_another_one_stood(choice: str) -> None:
    first = picker(choice)
    first.next_prompts(7)
    first.record_completions(2, passed=1, tried=4)
    state = json.loads(json.dumps(first.state_dict()))
    second = picker(choice)
    second.load_state_dict(state)
    assert [second.next_prompts(4) for _ in range(5)] == [first.next_prompts(4) for _ in range(5)]


def test_it_does_not_go_on_over_other_prompts() -> None:
    with pytest.raises(CheckpointError, match="num_prompts = 10, this run with 9"):
        picker("uniform", num_prompts=9).load_state_dict(picker("uniform").state_dict())


def variance(counts: tuple[int, ...] | list[int], rates: list[float], norms: list[float]) -> float:
    """Return the sum of the variances of the prompts' mean gradients; prompts that are hardly solved count less."""
    parts = zip(counts, rates, norms, strict=True)
    return sum(norm**2 / (count * rate) / (1 + ALPHA / rate**BETA) for count, rate, norm in parts)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_division_has_less_variance(seed: int) -> None:
    """Rounding to whole numbers may move one completion to another prompt."""
    draw = Random(seed)
    rates, norms = [draw.uniform(0.02, 1.0) for _ in range(4)], [draw.uniform(0.2, 3.0) for _ in range(4)]
    total = 24
    found = allocate_completions([allocation_score(rate, norm) for rate, norm in zip(rates, norms, strict=True)], total)
    assert sum(found) == total
    assert min(found) >= MIN_COMPLETIONS
    others = (c for c in product(range(MIN_COMPLETIONS, total), repeat=4) if sum(c) == total)
    best = min(others, key=lambda counts: variance(counts, rates, norms))
    assert variance(found, rates, norms) <= 1.02 * variance(best, rates, norms)
    assert sum(abs(ours - theirs) for ours, theirs in zip(found, best, strict=True)) <= 2


@pytest.mark.parametrize("seed", range(8))
def test_no_other_division_of_advantages_has_less_variance(seed: int) -> None:
    draw = Random(seed)
    rates, norms = [draw.uniform(0.02, 0.98) for _ in range(4)], [draw.uniform(0.2, 3.0) for _ in range(4)]

    def of_advantages(counts: tuple[int, ...] | list[int]) -> float:
        return sum(g * g * p * (1 - p) / n for n, p, g in zip(counts, rates, norms, strict=True))

    found = allocate_completions(
        [allocation_score(rate, norm, "neyman") for rate, norm in zip(rates, norms, strict=True)], 24
    )
    best = min((c for c in product(range(MIN_COMPLETIONS, 24), repeat=4) if sum(c) == 24), key=of_advantages)
    assert of_advantages(found) <= 1.02 * of_advantages(best)
    assert allocation_score(0.5, 1.0, "neyman") == 0.5
    assert allocation_score(1.0, 1.0, "neyman") == allocation_score(0.0, 1.0, "neyman") == 0.0


def test_hard_prompts_get_more_until_they_are_hopeless() -> None:
    scores = [allocation_score(rate, 1.0) for rate in (1.0, 0.5, 0.1, 0.03, 0.005, 0.0)]
    assert scores[:4] == sorted(scores[:4])
    assert scores[4] < scores[3]
    assert scores[5] == 0
    assert allocation_score(0.5, 2.0) == pytest.approx(2 / math.sqrt(0.5 + 1e-3 / 0.5))
    assert allocate_completions([1.0, 0.0, 1.0], 12) == [5, 2, 5]


def test_equal_scores_are_divided_equally_and_the_remainder_from_the_first() -> None:
    assert allocate_completions([3.0] * 4, 32) == [8] * 4
    assert allocate_completions([0.0] * 3, 9) == [3] * 3
    assert allocate_completions([1.0] * 3, 11) == [4, 4, 3]
    assert allocate_completions([100.0, 1.0, 1.0], 6) == [2, 2, 2]
    assert allocate_completions([1e-30, 1.0], 100) == [2, 98]
    assert allocate_completions([5.0], 7) == [7]


@pytest.mark.parametrize("seed", range(20))
def test_all_are_given_and_none_has_too_few(seed: int) -> None:
    draw = Random(seed)
    scores = [draw.choice([0.0, draw.random(), 100 * draw.random()]) for _ in range(draw.randint(1, 12))]
    total = MIN_COMPLETIONS * len(scores) + draw.randint(0, 40)
    found = allocate_completions(scores, total)
    assert sum(found) == total
    assert min(found) >= MIN_COMPLETIONS
    for one, other in product(range(len(scores)), repeat=2):
        assert scores[one] <= scores[other] or found[one] >= found[other] - 1


def test_norms_follow_the_policy_and_go_on_where_others_stood() -> None:
    norms = GradientNorms()
    assert norms.gradient_norm(3) == 1.0
    norms.record_norm(3, 4.0)
    norms.record_norm(3, 2.0)
    norms.record_norm(5, 1.0)
    norms.record_norm(5, math.nan)
    assert (norms.gradient_norm(3), norms.gradient_norm(5), norms.gradient_norm(9)) == (3.0, 1.0, 2.0)
    other = GradientNorms()
    other.load_state_dict(json.loads(json.dumps(norms.state_dict())))
    assert [other.gradient_norm(prompt) for prompt in (3, 5, 9)] == [3.0, 1.0, 2.0]
