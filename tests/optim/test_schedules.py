"""Schedules of the learning rate beside those of transformers, and what a recipe is told about them."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler

from streamtune.errors import ArgumentError
from streamtune.optim import SCHEDULES, build_schedule
from streamtune.recipe.keys.learning_rate import OPTIONS, ScheduleName

TOTAL, WARMUP = 40, 4
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("cosine", {"num_cycles": 1.5}, {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {}),
    ("cosine_with_min_lr", {"min_lr": 0.2}, {}),
    ("cosine_with_restarts", {"num_cycles": 3}, {}),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}, {}),
    ("inverse_sqrt", {}, {}),
    ("inverse_sqrt", {"timescale": 100}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 10}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}, {}),
    ("warmup_stable_decay", {"decay_ratio": 0.25, "decay_type": "linear"}, {"num_decay_steps": 10}),
]


@pytest.mark.parametrize(("name", "options", "more"), CASES, ids=str)
def test_matches_transformers_behind_the_warm_up(name: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    peak = 0.5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    theirs_options = {key: value for key, value in {**options, **more}.items() if key != "decay_ratio"}
    theirs = get_scheduler(name, optimizer, WARMUP, TOTAL, scheduler_specific_kwargs=theirs_options)
    ours = build_schedule(name, learning_rate=peak, total_steps=TOTAL, warmup_steps=WARMUP, options=options)
    for step in range(TOTAL):
        if step >= WARMUP:
            assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_power_of_whole_numbers_is_one_of_floats() -> None:
    """Whole numbers of millions of digits took for ever."""
    options = {"batch_size": 1, "tokens_per_step": 10**15, "a": 1, "b": 10}
    assert build_schedule("power", learning_rate=1.0, total_steps=10**12, options=options)(10**11) == 1.0


def test_power_depends_on_tokens_and_not_on_how_they_are_cut_into_steps() -> None:
    """``min(peak, batch a tokens^b)``: a batch twice as large has twice the rate at the same number of tokens."""
    options = {"batch_size": 64, "tokens_per_step": 1e6, "decay_ratio": 0.2}
    rate = build_schedule("power", learning_rate=1.0, total_steps=100, options=options)
    double = build_schedule("power", learning_rate=1.0, total_steps=50, options={
        **options, "batch_size": 128, "tokens_per_step": 2e6})  # fmt: skip
    assert rate(39) == pytest.approx(64 * 4 * (40e6) ** -0.51)
    assert double(19) == pytest.approx(2 * rate(39))
    assert build_schedule("power", learning_rate=1e-3, total_steps=100, options=options)(0) == 1e-3
    before, last = rate(79), rate(99)
    assert last == pytest.approx(rate(80) / 20)
    assert before > rate(81) > last


def test_names_and_options_are_those_of_the_recipe() -> None:
    assert set(get_args(ScheduleName)) == set(SCHEDULES) == set(OPTIONS)
    for name, factor in SCHEDULES.items():
        assert list(inspect.signature(factor).parameters)[1:] == sorted(
            OPTIONS[name], key=list(inspect.signature(factor).parameters).index
        )
    with pytest.raises(ArgumentError, match="no option 'min_lr_ratio'") as caught:
        build_schedule("cosine_with_min_lr", learning_rate=1.0, total_steps=9, options={"min_lr_ratio": 0.1})
    assert "min_lr_rate" in caught.value.fix


def test_a_peak_of_zero_stays_zero() -> None:
    needed = {"power": {"batch_size": 1, "tokens_per_step": 1}}
    for name in SCHEDULES:
        assert build_schedule(name, learning_rate=0.0, total_steps=4, options=needed.get(name))(2) == 0.0


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_warm_up_rises_in_equal_steps_to_the_peak(name: str) -> None:
    needed = {"batch_size": 1000, "tokens_per_step": 10} if name == "power" else {}
    rate = build_schedule(name, learning_rate=0.8, total_steps=20, warmup_steps=3, options=needed)
    assert [rate(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_decays() -> None:
    names = ("constant", "cosine", "linear")
    rates = {name: build_schedule(name, learning_rate=1.0, total_steps=10) for name in names}
    assert [rates["constant"](step) for step in (0, 5, 9)] == [1.0, 1.0, 1.0]
    assert [rates["linear"](step) for step in (0, 5, 9)] == pytest.approx([1.0, 0.5, 0.1])
    assert [rates["cosine"](step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_matches_torch_after_the_warm_up(name: str) -> None:
    """The decay is that of transformers' schedules, which are LambdaLR with the same step count."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kind = "constant_with_warmup" if name == "constant" else name
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=4, num_training_steps=20)
    ours = build_schedule(name, learning_rate=1.0, total_steps=20, warmup_steps=4)
    for step in range(20):
        if step >= 4:
            assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_a_warm_up_longer_than_the_run_never_divides_by_zero() -> None:
    rate = build_schedule("cosine", learning_rate=1.0, total_steps=2, warmup_steps=5)
    assert [rate(step) for step in range(6)] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="cosin") as caught:
        build_schedule("cosin", learning_rate=1.0, total_steps=1)
    assert "'cosine'" in caught.value.fix
