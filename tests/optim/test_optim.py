"""Schedules as functions, the optimizer's groups."""

from __future__ import annotations

import pytest
import torch

from streamtune.errors import ArgumentError
from streamtune.optim import SCHEDULES, OptimChoice, build_optimizer, build_schedule


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
    from transformers import get_scheduler

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


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="cosin") as caught:
        build_schedule("cosin", learning_rate=1.0, total_steps=1)
    assert "'cosine'" in caught.value.mend
    with pytest.raises(ArgumentError) as caught:
        build_optimizer(OptimChoice("adam", 1.0), torch.nn.Linear(2, 2).named_parameters())
    assert "'adamw'" in caught.value.mend


def test_only_matrices_decay_and_only_trainable_parameters_are_held() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(OptimChoice("adamw", 0.1, weight_decay=0.5), model.named_parameters())
    decayed, kept = optimizer.param_groups
    assert decayed["params"] == [model[0].weight]
    assert decayed["weight_decay"] == 0.5
    assert {id(p) for p in kept["params"]} == {id(p) for p in (model[0].bias, *model[1].parameters(), model[2].bias)}
    assert kept["weight_decay"] == 0.0


def test_nothing_to_train_is_refused() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ArgumentError, match="nothing to train"):
        build_optimizer(OptimChoice("adamw", 0.1), model.named_parameters())
