"""Micro-batches of random tokens in a recipe's shape, with all else that its objective reads.

Memory and time of a step depend on shapes only, so neither a tokenizer nor data is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from streamtune import data, train
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.errors import DataError
from streamtune.ops import TopKTeacher, top_k_classes
from streamtune.plan.simulate.scored import Scored
from streamtune.recipe.keys.preferences import PreferenceKeys
from streamtune.recipe.settings import RolloutSettings, RowSettings
from streamtune.tasks import objectives
from streamtune.tasks.grpo.objective import PolicyBatch
from streamtune.tasks.preference import PreferenceBatch, batch_trees

ORIGIN = "random tokens"


class RandomTokens:
    """Draws micro-batches of random tokens.

    Args:
        recipe: Settings: the seed, and whether rows are packed.
        model: Model that gets the tokens, which are in its vocabulary.
        second_model: Second model that gets the same tokens, such as a teacher; they are in its vocabulary too.
    """

    def __init__(self, recipe: RowSettings, model: Any, second_model: Any = None) -> None:
        self.recipe = recipe
        vocabulary_sizes = [
            each.get_input_embeddings().weight.shape[0] for each in (model, second_model) if each is not None
        ]
        self._vocabulary = min(vocabulary_sizes)
        self._generator = torch.Generator().manual_seed(recipe.seed)

    def draw_row_batch(self, rows: int, length: int) -> train.MicroBatch:
        """Return a batch of ``rows`` rows of ``length`` random tokens; the loss includes every token.

        With packing, each sequence is a single row with position ids: of all packings of that length, it has the most
        attention work.
        """
        positions = torch.arange(length).expand(rows, length) if self.recipe.packing else None
        ids = torch.randint(0, self._vocabulary, (rows, length), generator=self._generator)
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = IGNORE_INDEX
        return train.MicroBatch(ids, torch.ones_like(ids), labels, (ORIGIN,) * rows, positions)

    def draw_top_k(self, batch: train.MicroBatch, k: int) -> TopKTeacher:
        """Return random top-k tokens with log-probs, as if from a teacher, at the targets of a batch."""
        logits = torch.randn(batch.num_targets, self._vocabulary, generator=self._generator)
        ids, logprobs = top_k_classes(logits, k)
        return TopKTeacher.of_targets(batch.shift_labels, ids.int(), logprobs)

    def draw_preference_batch(self, recipe: PreferenceKeys, scored: Scored) -> PreferenceBatch:
        """Return random completions to compare, with the token counts of ``scored``.

        The first completion of a pair is the chosen one. Of unpaired completions every second one is desirable.
        """
        batch = self._draw_preferences(recipe, scored)
        if recipe.is_unpaired and objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_baseline:
            return PreferenceBatch(**{**vars(batch), "mismatched": self._draw_preferences(recipe, scored)})
        return batch

    def draw_policy_batch(self, recipe: RolloutSettings, scored: Scored) -> PolicyBatch:
        """Return random completions with the token counts of ``scored`` and advantages 1, -1, 1, -1, ..."""
        signs = [1.0 - 2.0 * (number % 2) for number in range(scored.num_completions)]
        return PolicyBatch(**self._draw_trees(scored), advantages_N=torch.tensor(signs))

    def draw_prompts(self, count: int, length: int) -> list[list[int]]:
        return [self._draw_ids(length) for _ in range(count)]

    def _draw_preferences(self, recipe: PreferenceKeys, scored: Scored) -> PreferenceBatch:
        fields = self._draw_trees(scored)
        reference_K = torch.zeros(len(fields["row_K"])) if recipe.precompute_ref_log_probs else None
        labels = torch.arange(scored.num_completions) % 2 == 0 if recipe.is_unpaired else None
        return PreferenceBatch(**fields, reference_K=reference_K, desirable_N=labels)

    def _draw_trees(self, scored: Scored) -> dict[str, Any]:
        trees = [
            data.Tree(self._draw_ids(trunk + 1), [self._draw_ids(branch - 1) for branch in branches], origin=ORIGIN)
            for trunk, branches in scored.trees
        ]
        return batch_trees(trees, pad_token_id=0, share=scored.share)

    def _draw_ids(self, count: int) -> list[int]:
        ids: list[int] = torch.randint(0, self._vocabulary, (count,), generator=self._generator).tolist()
        return ids


MAX_TREES = 2
"""Most prompts in a batch."""

MAX_COMPLETIONS = 4
"""Most random completions of a prompt."""


def choose_trees(trees: Sequence[data.Tree], length: int, *, distinct_prompts: bool) -> tuple[list[data.Tree], bool]:
    """Return the first one or two trees, cut to about ``length`` tokens in total, and True if any was cut.

    Args:
        trees: Prompts with completions.
        length: Number of tokens, in which each completion counts with its own copy of the prompt.
        distinct_prompts: True if two different prompts are needed.

    Raises:
        DataError: Two different prompts are needed, and all trees have the same prompt.
    """
    chosen = [trees[0]]
    for tree in trees[1:] if len(trees) > 1 else []:
        is_full = sum(each.num_tokens_separate for each in chosen) + tree.num_tokens_separate > length
        if len(chosen) == MAX_TREES or (is_full and not distinct_prompts):
            break
        if not distinct_prompts or tree.prompt != chosen[0].prompt:
            chosen.append(tree)
    if distinct_prompts and len(chosen) < MAX_TREES:
        raise DataError(
            "the first rows have the same prompt, but this loss needs two different prompts", where=trees[0].origin
        )
    cut_trees = [_cut_tree(tree, length // len(chosen)) for tree in chosen]
    return cut_trees, cut_trees != chosen


def _cut_tree(tree: data.Tree, length: int) -> data.Tree:
    """Return a tree cut to about ``length`` tokens: the end of its prompt, and a stretch of each completion.

    The stretch contains the first token at which the first two completions differ.
    """
    row_tokens = max(4, length // len(tree.completions))
    longest_completion = max(len(completion) for completion in tree.completions)
    if len(tree.prompt) + longest_completion <= row_tokens:
        return tree
    prompt = tree.prompt[-max(1, row_tokens - min(longest_completion, row_tokens // 2)) :]
    room = row_tokens - len(prompt)
    start = 0
    if len(tree.completions) > 1:
        first, second = tree.completions[:2]
        differs_at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        start = differs_at - room // 2 if differs_at >= room else 0
    completions = [(completion[start : start + room] or completion[-room:]) for completion in tree.completions]
    masks = tree.masks and [(mask[start : start + room] or mask[-room:]) for mask in tree.masks]
    if masks is not None and not all(any(mask) for mask in masks):
        masks = None
    return replace(tree, prompt=prompt, completions=completions, masks=masks)


def make_random_trees(
    recipe: RolloutSettings, prompts: Sequence[data.Prompt], length: int, vocabulary: int
) -> list[data.Tree]:
    """Return the first prompts, each with random completions of different lengths: about ``length`` tokens in total."""
    generator = torch.Generator().manual_seed(recipe.seed)
    chosen_prompts = prompts[:MAX_TREES] if len(prompts) > 1 else [prompts[0]]
    count = max(2, min(recipe.num_generations, MAX_COMPLETIONS))
    row_tokens = max(4, length // (len(chosen_prompts) * count))
    trees = []
    for prompt in chosen_prompts:
        prompt_ids = prompt.input_ids[-max(1, row_tokens - min(recipe.max_completion_length, row_tokens // 2)) :]
        longest = max(1, min(recipe.max_completion_length, row_tokens - len(prompt_ids)))
        sizes = [max(1, longest - number * (longest // (2 * count))) for number in range(count)]
        ids = [torch.randint(0, vocabulary, (size,), generator=generator).tolist() for size in sizes]
        trees.append(data.Tree(prompt_ids, ids, origin=prompt.origin))
    return trees
