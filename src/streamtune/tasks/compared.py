"""The completions that ``verify`` compares: a few trees of the data, cut; or random ones, where rollouts write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from streamtune import data
from streamtune.errors import DataError
from streamtune.recipe.grpo import GrpoRecipe

__all__ = ["choose_trees", "random_completions"]

MOST_TREES = 2
"""Prompts of the batch at most."""

MOST_COMPLETIONS = 4
"""Random completions of a prompt at most."""


def choose_trees(trees: Sequence[data.Tree], length: int, *, differing: bool) -> tuple[list[data.Tree], bool]:
    """Return the first trees, cut so that all their rows together have about ``length`` tokens.

    Args:
        trees: At least one.
        length: Tokens of all completions, each with its own copy of the prompt.
        differing: At least two prompts that differ are needed.

    Returns:
        The trees, and True if something of them was left out.

    Raises:
        DataError: Prompts have to differ, and all are the same.
    """
    chosen = [trees[0]]
    for tree in trees[1:] if len(trees) > 1 else []:
        enough = sum(each.num_tokens_separate for each in chosen) + tree.num_tokens_separate > length
        if len(chosen) == MOST_TREES or (enough and not differing):
            break
        if not differing or tree.prompt != chosen[0].prompt:
            chosen.append(tree)
    if differing and len(chosen) < MOST_TREES:
        raise DataError(
            "the first rows have one prompt, and this loss compares with those of others", where=trees[0].origin
        )
    cut = [_cut(tree, length // len(chosen)) for tree in chosen]
    return cut, cut != chosen


def _cut(tree: data.Tree, length: int) -> data.Tree:
    """Cut a tree to ``length`` tokens: the end of its prompt, and its completions from shortly before they differ."""
    row = max(4, length // len(tree.completions))
    longest = max(len(completion) for completion in tree.completions)
    if len(tree.prompt) + longest <= row:
        return tree
    prompt = tree.prompt[-max(1, row - min(longest, row // 2)) :]
    room = row - len(prompt)
    start = 0
    if len(tree.completions) > 1:
        first, second = tree.completions[:2]
        alike = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        start = alike - room // 2 if alike >= room else 0
    completions = [(completion[start : start + room] or completion[-room:]) for completion in tree.completions]
    masks = tree.masks and [(mask[start : start + room] or mask[-room:]) for mask in tree.masks]
    if masks is not None and not all(any(mask) for mask in masks):
        masks = None
    return replace(tree, prompt=prompt, completions=completions, masks=masks)


def random_completions(
    recipe: GrpoRecipe, prompts: Sequence[data.Prompt], length: int, vocabulary: int
) -> list[data.Tree]:
    """Return the first prompts with random completions of different lengths, about ``length`` tokens in all rows."""
    draw = torch.Generator().manual_seed(recipe.seed)
    few = prompts[:MOST_TREES] if len(prompts) > 1 else [prompts[0]]
    count = max(2, min(recipe.num_generations, MOST_COMPLETIONS))
    row = max(4, length // (len(few) * count))
    trees = []
    for prompt in few:
        kept = prompt.input_ids[-max(1, row - min(recipe.max_completion_length, row // 2)) :]
        longest = max(1, min(recipe.max_completion_length, row - len(kept)))
        sizes = [max(1, longest - number * (longest // (2 * count))) for number in range(count)]
        ids = [torch.randint(0, vocabulary, (size,), generator=draw).tolist() for size in sizes]
        trees.append(data.Tree(kept, ids, origin=prompt.origin))
    return trees
