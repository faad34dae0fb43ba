"""Sums, means and counts of rows, compared with padded tensors; advantages, compared with their formulas."""

from __future__ import annotations

import pytest
import torch
from ragged_kit import make_rows

from streamtune.base.policy_losses import POLICY_LOSS_FACTS
from streamtune.errors import ArgumentError
from streamtune.tasks.grpo.rollout_rules import rewards_tensor
from streamtune.tasks.objectives import (
    ADVANTAGES,
    POLICY_LOSSES,
    group_advantages,
    mean_by_row,
    reward_with_kl,
    sum_by_row,
    tokens_per_row,
)

REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.2], [2.0, 2.0, 2.0, 2.0], [-1.0, 3.0, 0.1, 0.1]]).double()
GROUPS = torch.arange(3).repeat_interleave(4)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo"])
def test_less_the_mean_of_the_group(name: str, scale: str) -> None:
    found = group_advantages(name, REWARDS.flatten(), GROUPS, scale_rewards=scale)
    std = {"group": REWARDS.std(1, keepdim=True) + 1e-4, "batch": REWARDS.std() + 1e-4, "none": 1.0}[scale]
    expected = (REWARDS - REWARDS.mean(1, keepdim=True)) / std
    torch.testing.assert_close(found.values_N.view(3, 4), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(found.std_N.view(3, 4), REWARDS.std(1, keepdim=True).expand(3, 4), atol=1e-10, rtol=0)
    assert found.no_advantage_N.view(3, 4).any(1).tolist() == [False, True, False]


def test_what_each_loss_divides_by_unless_told() -> None:
    for name in ("grpo", "dapo", "bnpo", "gspo"):
        ours, scaled = (group_advantages(name, REWARDS.flatten(), GROUPS, scale_rewards=s) for s in (None, "group"))
        assert ours.values_N.equal(scaled.values_N)
    ours, plain = (group_advantages("dr_grpo", REWARDS.flatten(), GROUPS, scale_rewards=s) for s in (None, "none"))
    assert ours.values_N.equal(plain.values_N)


def test_leave_one_out() -> None:
    found = group_advantages("rloo", REWARDS.flatten(), GROUPS)
    expected = torch.stack(
        [row[i] - torch.cat([row[:i], row[i + 1 :]]).mean() for row in REWARDS for i in range(len(row))]
    )
    torch.testing.assert_close(found.values_N, expected, atol=1e-10, rtol=0)


def test_less_the_greedy_completion() -> None:
    greedy_G = torch.tensor([0.3, 2.0, 1.0]).double()
    found = group_advantages("remax", REWARDS.flatten(), GROUPS, greedy_N=greedy_G[GROUPS])
    torch.testing.assert_close(found.values_N.view(3, 4), REWARDS - greedy_G[:, None], atol=1e-12, rtol=0)
    assert found.no_advantage_N.view(3, 4).any(1).tolist() == [False, True, False]
    alike = group_advantages("remax", REWARDS.flatten(), GROUPS, greedy_N=torch.zeros(12))
    assert not alike.no_advantage_N.any(), "equal rewards still differ from the greedy one's"


def test_groups_of_any_order_and_size() -> None:
    rewards_N = torch.tensor([1.0, 5.0, 3.0, 0.0, 7.0])
    group_N = torch.tensor([7, -2, 7, 7, 40])
    found = group_advantages("dr_grpo", rewards_N, group_N)
    assert found.values_N.dtype == torch.float32
    assert found.values_N.tolist() == pytest.approx([1 - 4 / 3, 0.0, 3 - 4 / 3, -4 / 3, 0.0])
    assert found.no_advantage_N.tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_are_flat_to_the_last_bit(name: str) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3: the mean of equal numbers may differ from them by rounding."""
    found = group_advantages(name, torch.full((7,), 0.1), torch.zeros(7).long())
    assert found.values_N.tolist() == [0.0] * 7
    assert found.no_advantage_N.all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_completions_without_a_reward_take_no_part(name: str) -> None:
    nan = torch.nan
    rewards_N = torch.tensor([1.0, nan, 0.0, 4.0, nan, nan, nan, 2.0]).double()
    group_N = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    found = group_advantages(name, rewards_N, group_N)
    alone = group_advantages(name, torch.tensor([1.0, 0.0, 4.0]).double(), torch.zeros(3).long())
    torch.testing.assert_close(found.values_N[[0, 2, 3]], alone.values_N, atol=1e-12, rtol=0)
    assert found.values_N[[1, 4, 5, 6, 7]].tolist() == [0.0] * 5
    assert found.no_advantage_N.tolist() == [False] * 4 + [True] * 4
    assert found.mean_N.isnan().tolist() == [False] * 4 + [True, True, False, False]


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_one_completion_teaches_nothing(scale: str) -> None:
    found = group_advantages("grpo", torch.tensor([3.0]), torch.tensor([0]), scale_rewards=scale)
    assert (found.values_N.tolist(), found.no_advantage_N.tolist(), found.std_N.tolist()) == ([0.0], [True], [0.0])


def test_kl_is_taken_off_the_reward() -> None:
    rows = make_rows((3, 1, 2))
    ref_NL = rows.other(seed=1)
    rewards_N = torch.tensor([1.0, 2.0, 3.0])
    found_N, kl_N = reward_with_kl(rewards_N, rows.logp_K, rows.ragged(ref_NL), rows.row_K, beta=0.5)
    expected_N = ((rows.logp_NL - ref_NL) * rows.mask_NL).sum(1).detach()
    torch.testing.assert_close(kl_N, expected_N, atol=1e-12, rtol=0)
    torch.testing.assert_close(found_N, (rewards_N - 0.5 * expected_N).float())
    assert not found_N.requires_grad


def test_every_policy_loss_has_its_advantages() -> None:
    assert list(ADVANTAGES) == list(POLICY_LOSSES) == list(POLICY_LOSS_FACTS)


@pytest.mark.parametrize(
    ("name", "scale", "says"),
    [
        ("rlo", None, "did you mean 'rloo'"),
        ("grpo", "groups", "did you mean 'group'"),
        ("rloo", "group", "does not divide advantages by a standard deviation"),
        ("remax", None, "reward of the greedy completion"),
    ],
)
def test_wrong_arguments(name: str, scale: str | None, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        group_advantages(name, REWARDS.flatten(), GROUPS, scale_rewards=scale)


@pytest.mark.parametrize("left", [False, True])
def test_sums_and_means_are_those_of_padded_rows(left: bool) -> None:
    rows = make_rows(left=left)
    tokens_N = rows.mask_NL.sum(1)
    sums_N = sum_by_row(rows.logp_K, rows.row_K, rows.num_rows)
    means_N = mean_by_row(rows.logp_K, rows.row_K, rows.num_rows)
    torch.testing.assert_close(sums_N, (rows.logp_NL * rows.mask_NL).sum(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(means_N, (rows.logp_NL * rows.mask_NL).sum(1) / tokens_N, atol=1e-12, rtol=0)
    assert tokens_per_row(rows.row_K, rows.num_rows).tolist() == tokens_N.tolist()


def test_gradients_come_back_in_the_dtype_of_the_tokens() -> None:
    logp_K = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    row_K = torch.tensor([0, 0, 2])
    (mean_by_row(logp_K, row_K, 3) * torch.tensor([1.0, 5.0, 3.0])).sum().backward()
    assert logp_K.grad is not None
    assert logp_K.grad.dtype == torch.float32
    assert logp_K.grad.tolist() == [0.5, 0.5, 3.0]


def test_a_row_without_tokens_is_zero() -> None:
    row_K = torch.tensor([0, 2])
    assert mean_by_row(torch.tensor([1.0, 3.0]), row_K, 4).tolist() == [1.0, 0.0, 3.0, 0.0]
    assert tokens_per_row(row_K, 4).tolist() == [1, 0, 1, 0]


def test_long_rows_keep_what_float32_sums_lose() -> None:
    """Two log-probs near -100,000 differ by 0.001, which float32 would lose to rounding."""
    logp_K = torch.full((200_000,), -1.0)
    logp_K[0] = -1.001
    row_K = torch.arange(2).repeat_interleave(100_000)
    sums_N = sum_by_row(logp_K, row_K, 2)
    assert (sums_N[1] - sums_N[0]).item() == pytest.approx(0.001, rel=1e-4)


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "rloo", "remax"])
def test_sums_of_scores_that_differ_by_their_rounding_have_no_advantage(name: str) -> None:
    rewards_N = torch.tensor([0.1 + 0.2, 0.3, 1e9 + 0.1 + 0.2, 1e9 + 0.3], dtype=torch.float64)
    greedy_N = torch.tensor([0.3, 0.1 + 0.2, 1e9 + 0.3, 1e9 + 0.3], dtype=torch.float64)
    found = group_advantages(name, rewards_N, torch.tensor([0, 0, 1, 1]), greedy_N=greedy_N)
    assert found.values_N.tolist() == [0.0] * 4
    assert found.no_advantage_N.all()


@pytest.mark.parametrize("rewards", [[16777217.0, 16777216.0], [-20000001.0, -20000002.0], [1e39, 0.0]])
def test_rewards_beyond_float32_keep_their_differences(rewards: list[float]) -> None:
    found = group_advantages("dapo", rewards_tensor([*rewards, None]), torch.tensor([0, 0, 0]))
    assert found.values_N.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0], abs=1e-3)
    minus_kl_N, _ = reward_with_kl(rewards_tensor(rewards), torch.ones(2), torch.ones(2), torch.arange(2), beta=0.1)
    assert minus_kl_N.tolist() == rewards
