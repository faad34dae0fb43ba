"""The recipe of ``streamtune grpo``: what reinforcement learning adds to the keys of fine-tuning. Names are TRL's."""

from __future__ import annotations

from typing import Literal

from streamtune.recipe.keys.policy import NEEDS_WHOLE_WEIGHTS, POLICY_RULES
from streamtune.recipe.keys.rollouts import (
    ALLOCATION_RULES,
    REWARD_RULES,
    ROLLOUT_BATCH_RULES,
    ROLLOUT_LENGTH_RULES,
)
from streamtune.recipe.schema import Recipe
from streamtune.recipe.settings import RolloutSettings
from streamtune.recipe.spec import Steps


class GrpoRecipe(RolloutSettings, Recipe):
    """Everything a run of group-relative policy optimisation depends on."""

    objective: Literal["grpo"] = "grpo"
    """Objective of the training: a loss on completions that the model writes itself, by their rewards or by the
    distribution of a teacher."""

    num_completions_to_print: Steps = 4
    """Completions of each batch to keep, with their rewards, in `completions.jsonl`."""

    rules = (
        *Recipe.rules,
        *REWARD_RULES,
        *ALLOCATION_RULES,
        *ROLLOUT_LENGTH_RULES,
        *ROLLOUT_BATCH_RULES,
        *POLICY_RULES,
    )
    whole_weights = (*Recipe.whole_weights, *NEEDS_WHOLE_WEIGHTS)
