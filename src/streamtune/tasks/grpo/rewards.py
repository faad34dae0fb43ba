"""Load the reward functions of a recipe, and score completions, given as token ids, with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtune import data, rewards
from streamtune.errors import ArgumentError
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.recipe.loader import own_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RewardScorer", "ScoreCompletions", "load_functions"]

ScoreCompletions = Callable[[Sequence[data.Prompt], Sequence[list[int]]], rewards.RewardScores]
"""Scores completions, each for the prompt of the same index."""


class RewardScorer:
    """Calls the reward functions on completions, as text, or as messages where the prompt is messages."""

    def __init__(self, functions: rewards.Rewards, tokenizer: PreTrainedTokenizerBase) -> None:
        self.functions, self.tokenizer = functions, tokenizer

    def __call__(self, prompts: Sequence[data.Prompt], completions: Sequence[list[int]]) -> rewards.RewardScores:
        """Score completions, each for the prompt of the same index.

        Raises:
            RunError: A function raised, or did not return one finite number or None for each.
        """
        texts = self.tokenizer.batch_decode(list(completions), skip_special_tokens=True)
        said: list[Any] = [
            text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {**data.gather_columns(prompts), "completion_ids": list(completions)}
        origins = [prompt.origin for prompt in prompts]
        return self.functions([prompt.prompt for prompt in prompts], said, columns, origins=origins)

    def check(self, prompts: Sequence[data.Prompt]) -> None:
        """Check that the rows have the columns the functions read.

        Raises:
            ArgumentError: A column is missing.
        """
        self.functions.check_columns([*data.gather_columns(prompts), "completion_ids"])


def load_functions(
    recipe: GrpoRecipe, folder: Path, notify: Callable[[str], None] = lambda message: None
) -> rewards.Rewards:
    """Load the reward functions of a recipe; modules of the user's own are looked for in ``folder``.

    Args:
        recipe: The recipe.
        folder: The directory of the recipe.
        notify: Called before the recipe's own code runs, with the names of it.

    Raises:
        ArgumentError: One of them does not exist, or is code that is not allowed to run.
    """
    own = own_rewards(recipe)
    if own and not recipe.allow_code:
        raise ArgumentError(
            f"the reward '{own[0]}' is Python code that the recipe names, and it would run here",
            where="reward_funcs",
            mend="read it; if it is yours, or you trust it, run with --allow-code or set allow_code: true",
        )
    if own:
        notify(f"running the code of {', '.join(own)}")
    return rewards.load_rewards(
        recipe.reward_funcs, weights=recipe.reward_weights, allow_code=recipe.allow_code, directory=folder
    )
