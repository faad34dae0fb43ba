"""Rewards: functions that score completions, those of the user and those that are built in.

spec        "module:function", "path.py:function" or a name, with options -> a function
sources     the files that functions are written in
scoring     functions with weights -> checked scores
builtin     exact_match, numeric_answer, regex_match, format_tags, json_schema, unit_tests
unit_tests  runs a completion's code in a subprocess with limits
"""

from __future__ import annotations

from streamtune.tasks.rewards.builtin import BUILTINS
from streamtune.tasks.rewards.scoring import Rewards, RewardScores, load_rewards
from streamtune.tasks.rewards.spec import RewardFunction, load_reward, reward_sources

__all__ = ["BUILTINS", "RewardFunction", "RewardScores", "Rewards", "load_reward", "load_rewards", "reward_sources"]
