"""Which prompts come next, and that a picker goes on where another one stood."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from streamtune.errors import CheckpointError
from streamtune.tasks.rollout import PassRates, PromptPicker


def picker(choice: str, num_prompts: int = 10, seed: int = 3) -> PromptPicker:
    return PromptPicker(num_prompts, choice=choice, seed=seed)


def test_uniform_takes_every_prompt_once_an_epoch_in_a_new_order_each_time() -> None:
    uniform = picker("uniform")
    drawn = [prompt for _ in range(10) for prompt in uniform.next(3)]
    epochs = [drawn[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert picker("uniform", seed=4).next(10) != epochs[0]


def test_more_prompts_than_there_are() -> None:
    assert Counter(picker("uniform", num_prompts=2).next(6)) == {0: 3, 1: 3}
    assert Counter(picker("pass_rate", num_prompts=2).next(6)) == {0: 3, 1: 3}


def test_pass_rate_prefers_what_is_solved_now_and_then_and_leaves_nothing_out() -> None:
    by_rate = picker("pass_rate", num_prompts=3)
    for _ in range(5):
        by_rate.observe(0, passed=8, tried=8)
        by_rate.observe(1, passed=4, tried=8)
        by_rate.observe(2, passed=0, tried=8)
    counts = Counter(by_rate.next(1)[0] for _ in range(3000))
    assert counts[1] > 2 * counts[0]
    assert counts[1] > 2 * counts[2]
    assert min(counts.values()) > 200


def test_middle_prefers_all_of_medium_difficulty_alike_and_leaves_nothing_out() -> None:
    middle = picker("middle", num_prompts=4)
    for _ in range(5):
        for prompt, passed in enumerate((8, 3, 5, 0)):
            middle.observe(prompt, passed=passed, tried=8)
    counts = Counter(middle.next(1)[0] for _ in range(3000))
    assert counts[1] == pytest.approx(counts[2], rel=0.15)
    assert min(counts[1], counts[2]) > 5 * max(counts[0], counts[3])
    assert min(counts.values()) > 50


def test_rates_follow_what_the_policy_can_do_now() -> None:
    rates = PassRates()
    assert rates.rate(0) == 0.5
    for _ in range(4):
        rates.observe(0, passed=0, tried=8)
    hopeless = rates.rate(0)
    for _ in range(3):
        rates.observe(0, passed=8, tried=8)
    assert hopeless < 0.1
    assert rates.rate(0) > 0.8


@pytest.mark.parametrize("choice", ["uniform", "pass_rate", "middle"])
def test_it_goes_on_where_another_one_stood(choice: str) -> None:
    first = picker(choice)
    first.next(7)
    first.observe(2, passed=1, tried=4)
    state = json.loads(json.dumps(first.state_dict()))
    second = picker(choice)
    second.load_state_dict(state)
    assert [second.next(4) for _ in range(5)] == [first.next(4) for _ in range(5)]


def test_it_does_not_go_on_over_other_prompts() -> None:
    with pytest.raises(CheckpointError, match="num_prompts = 10, this run with 9"):
        picker("uniform", num_prompts=9).load_state_dict(picker("uniform").state_dict())
