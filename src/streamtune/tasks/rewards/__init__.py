"""Rewards: functions that score completions, built in or the user's own."""

from __future__ import annotations

from streamtune.tasks.rewards.builtin import BUILTINS
from streamtune.tasks.rewards.scoring import Rewards, RewardScores, load_rewards
from streamtune.tasks.rewards.spec import RewardFunction, load_reward, reward_sources

__all__ = ["BUILTINS", "RewardFunction", "RewardScores", "Rewards", "load_reward", "load_rewards", "reward_sources"]
