"""The code that a recipe makes a run execute besides StreamTune's own, so that it can be shown before it runs."""

from __future__ import annotations

from .schema import Recipe

__all__ = ["code_of", "own_rewards"]


def own_rewards(recipe: Recipe) -> list[str]:
    """Return the reward functions that are not built in: ``path.py:function``, ``module:function``, without options."""
    return [spec.partition("(")[0].strip() for spec in getattr(recipe, "reward_funcs", ()) if ":" in spec.split("(")[0]]


def code_of(recipe: Recipe) -> list[str]:
    """Describe the code of a run that others have written, one text for each kind; empty for most recipes."""
    found = []
    if recipe.trust_remote_code:
        found.append(f"Python that comes with {recipe.model_name_or_path or 'the tokenizer'} (trust_remote_code)")
    if own := own_rewards(recipe):
        found.append(f"{', '.join(own)} (reward_funcs)")
    if any(spec.partition("(")[0].strip() == "unit_tests" for spec in getattr(recipe, "reward_funcs", ())):
        found.append("what the model writes, in a subprocess with limits (unit_tests)")
    if recipe.allow_pickle:
        found.append("pickles, read as tensors only (allow_pickle)")
    return found
