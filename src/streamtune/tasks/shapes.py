"""The shape of a recipe's micro-batch at a given length: rows of so many tokens, or completions of prompts.

A length is what ``max_length`` limits: a row, or a prompt with its longest completion. ``plan``, ``probe-max-len`` and
``bench`` do not read the data, so a shape follows from the recipe's keys:

    sft     per_device_train_batch_size rows
    dpo     so many prompts of max_prompt_length tokens, or of half the length, each with two completions of the rest;
            with one where the loss takes completions one by one
    grpo    so many completions of max_completion_length tokens, or of half the length where that leaves no prompt,
            over as few prompts as num_generations says

The largest micro-batch of a run's own data is made of its largest prompt (:func:`completions_like`).
"""

from __future__ import annotations

import math
from functools import partial

from streamtune import objectives
from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.recipe.schema import Recipe
from streamtune.simulate.scored import Completions, Scored, Trees

__all__ = [
    "LEAST",
    "completions_like",
    "completions_of",
    "has_reference",
    "holds_reference",
    "may_share",
    "prompts_of",
    "unit_of",
]

LEAST = {"sft": 2, "dpo": 4, "grpo": 4}
"""Tokens of the shortest length: a prompt and completions of two each, where there are any."""


def completions_of(recipe: Recipe, *, share: bool = True) -> Completions | None:
    """Return the completions of a micro-batch, by length and batch size; None if the recipe's loss is on next tokens.

    Args:
        recipe: The recipe.
        share: True if its model can share prompts; the recipe may still say never.
    """
    if isinstance(recipe, DpoRecipe | GrpoRecipe):
        return partial(_scored, recipe, share and may_share(recipe))
    return None


def may_share(recipe: Recipe) -> bool:
    """Return True if there are completions with a prompt in common, and the recipe does not keep them apart."""
    if isinstance(recipe, GrpoRecipe) and min(recipe.per_device_train_batch_size, recipe.num_generations) == 1:
        return False
    return getattr(recipe, "share_prefix", "never") != "never"


def completions_like(recipe: Recipe, trees: Trees, longest: int, *, share: bool) -> Completions:
    """Return the micro-batch of ``trees`` as a function of the length: with a smaller one every part is in proportion.

    Args:
        recipe: The recipe.
        trees: At ``longest``.
        longest: Tokens of the longest completion with its prompt.
        share: True if prompts are shared.
    """
    return partial(_in_proportion, recipe, trees, longest, share)


def _in_proportion(recipe: Recipe, trees: Trees, longest: int, share: bool, length: int, batch_size: int) -> Scored:
    part = min(1.0, length / longest)
    cut = tuple((int(part * trunk), tuple(max(2, int(part * size)) for size in sizes)) for trunk, sizes in trees)
    return _asked(recipe, cut, share)


def _scored(recipe: DpoRecipe | GrpoRecipe, share: bool, length: int, batch_size: int) -> Scored:
    if isinstance(recipe, DpoRecipe):
        prompt = recipe.max_prompt_length or length // 2
        if prompt > length - 2:
            prompt = length // 2
        branches = (length - prompt + 1,) * (1 if recipe.unpaired else 2)
        return _asked(recipe, ((prompt - 1, branches),) * batch_size, share)
    completion = recipe.max_completion_length
    if completion > length - 2:
        completion = length // 2
    prompts = prompts_of(recipe, batch_size)
    counts = [batch_size // prompts + (place < batch_size % prompts) for place in range(prompts)]
    trees = tuple((length - completion - 1, (completion + 1,) * count) for count in counts)
    return _asked(recipe, trees, share)


def unit_of(recipe: Recipe) -> str:
    """Return the name of the unit that ``per_device_train_batch_size`` counts."""
    if isinstance(recipe, GrpoRecipe):
        return "completion"
    return "pair" if isinstance(recipe, DpoRecipe) and not recipe.unpaired else "row"


def prompts_of(recipe: GrpoRecipe, batch_size: int) -> int:
    """Return the most prompts whose completions can be together in a micro-batch of ``batch_size`` completions."""
    group = recipe.num_generations
    # A micro-batch begins at a multiple of its size, so somewhere in a group.
    met = -(-(batch_size + group - math.gcd(batch_size, group)) // group)
    return min(met, batch_size)


def _asked(recipe: Recipe, trees: Trees, share: bool) -> Scored:
    """Return the micro-batch with what the objective computes of completions besides their gradient."""
    if isinstance(recipe, GrpoRecipe):
        # Once a rollout: of the reference, and of the policy that wrote it where it changes before the last step.
        forwards = ((recipe.beta > 0) + recipe.needs_old_logprobs) / recipe.num_iterations
        return Scored(trees, share, entropy=True, forwards=forwards)
    assert isinstance(recipe, DpoRecipe)
    asked = float(has_reference(recipe) and not recipe.precompute_ref_log_probs)
    if recipe.unpaired and objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_baseline:
        asked += 1 + asked  # of the mismatched completions: the policy, and the reference
    return Scored(trees, share, forwards=asked)


def has_reference(recipe: Recipe) -> bool:
    """Return True if the objective compares with a reference."""
    if isinstance(recipe, GrpoRecipe):
        return recipe.beta > 0
    if not isinstance(recipe, DpoRecipe):
        return False
    if recipe.unpaired:
        return objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_reference
    return objectives.PREFERENCE_LOSSES[recipe.loss_type].needs_reference and not recipe.reference_free


def holds_reference(recipe: Recipe) -> bool:
    """Return True if a second model is held: a named reference, or a copy where all weights are trained."""
    if not has_reference(recipe) or getattr(recipe, "precompute_ref_log_probs", False):
        return False
    return recipe.finetuning_type == "full" or getattr(recipe, "ref_model_name_or_path", None) is not None
