"""Token ids to what reward functions are given, and what they say to numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtune import data, rewards
from streamtune.errors import ArgumentError
from streamtune.recipe.code import own_rewards
from streamtune.recipe.schema_grpo import GrpoRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RewardJudge", "load_functions"]


class RewardJudge:
    """Asks the reward functions about completions. They are given text, or messages where the prompt is messages."""

    def __init__(self, functions: rewards.Rewards, tokenizer: PreTrainedTokenizerBase) -> None:
        self.functions, self.tokenizer = functions, tokenizer

    def __call__(self, prompts: Sequence[data.Prompt], completions: Sequence[list[int]]) -> rewards.RewardScores:
        """Score completions, each of the prompt at its place.

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
            ArgumentError: They have not.
        """
        self.functions.check_columns([*data.gather_columns(prompts), "completion_ids"])


def load_functions(
    recipe: GrpoRecipe, folder: Path, notify: Callable[[str], None] = lambda message: None
) -> rewards.Rewards:
    """The reward functions of a recipe that is in ``folder``, where modules of the user's own may lie.

    Args:
        recipe: The recipe.
        folder: Where it is.
        notify: Told which code runs, before it does.

    Raises:
        ArgumentError: One of them does not exist, or would run code and may not.
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
