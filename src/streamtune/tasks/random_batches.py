"""Random tokens to measure memory and time of a training step, and short rows to verify gradients.

Memory and time depend only on shapes, so their measurement needs neither a tokenizer nor data.
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
        model: Model whose vocabulary the tokens are drawn from.
        second_model: Second model that gets the same tokens, such as a teacher. All tokens are in its vocabulary too.
    """

    def __init__(self, recipe: RowSettings, model: Any, second_model: Any = None) -> None:
        self.recipe = recipe
        vocabulary_sizes = [
            each.get_input_embeddings().weight.shape[0] for each in (model, second_model) if each is not None
        ]
        self._vocabulary = min(vocabulary_sizes)
        self._generator = torch.Generator().manual_seed(recipe.seed)

    def draw_row_batch(self, rows: int, length: int) -> train.MicroBatch:
        """Return a batch of ``rows`` random rows, in which all tokens but the first of each row are targets.

        With packing, a sequence is a single row with position ids. No other packing has more attention cost.
        """
        positions = torch.arange(length).expand(rows, length) if self.recipe.packing else None
        ids = torch.randint(0, self._vocabulary, (rows, length), generator=self._generator)
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = IGNORE_INDEX
        return train.MicroBatch(ids, torch.ones_like(ids), labels, (ORIGIN,) * rows, positions)

    def draw_top_k(self, batch: train.MicroBatch, k: int) -> TopKTeacher:
        """Return random teacher predictions at the targets of a batch: ``k`` tokens with their log-probs."""
        logits = torch.randn(batch.num_targets, self._vocabulary, generator=self._generator)
        ids, logprobs = top_k_classes(logits, k)
        return TopKTeacher.of_targets(batch.shift_labels, ids.int(), logprobs)

    def draw_preference_batch(self, recipe: PreferenceKeys, scored: Scored) -> PreferenceBatch:
        """Return a preference batch of random tokens with the token counts of ``scored``.

        The first completion of a pair is the chosen completion. Unpaired completions are alternately desirable and
        undesirable.
        """
        batch = self._draw_preferences(recipe, scored)
        if recipe.is_unpaired and objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_baseline:
            return PreferenceBatch(**{**vars(batch), "mismatched": self._draw_preferences(recipe, scored)})
        return batch

    def draw_policy_batch(self, recipe: RolloutSettings, scored: Scored) -> PolicyBatch:
        """Return random completions with the token counts of ``scored`` and alternating advantages 1 and -1."""
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
"""Maximum number of prompts in a batch that verifies gradients."""

MAX_COMPLETIONS = 4
"""Maximum number of random completions per prompt."""


def choose_trees(trees: Sequence[data.Tree], length: int, *, distinct_prompts: bool) -> tuple[list[data.Tree], bool]:
    """Return at most two trees (prompts with completions), and True if any of them was shortened.

    Args:
        trees: Trees to choose from. The first one is always chosen.
        length: Approximate number of tokens in total. Each completion counts with its own copy of the prompt.
        distinct_prompts: True to choose two trees with different prompts.

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
    """Return the tree shortened to about ``length`` tokens: the end of its prompt, and a part of each completion.

    A prompt that is cut has no images.

    The part includes the first token at which the first two completions differ.
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
    images = tree.images if len(prompt) == len(tree.prompt) else ()
    return replace(tree, prompt=prompt, completions=completions, masks=masks, images=images)


def make_random_trees(
    recipe: RolloutSettings, prompts: Sequence[data.Prompt], length: int, vocabulary: int
) -> list[data.Tree]:
    """Return one or two prompts with random completions of different lengths, about ``length`` tokens in total.

    A prompt that is cut has no images.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    chosen_prompts = prompts[:MAX_TREES] if len(prompts) > 1 else [prompts[0]]
    count = max(2, min(recipe.num_generations, MAX_COMPLETIONS))
    row_tokens = max(4, length // (len(chosen_prompts) * count))
    with_images = {token for prompt in chosen_prompts if prompt.images for token in prompt.input_ids}
    drawn = [token for token in range(vocabulary) if token not in with_images]  # an image's token would have no image
    trees = []
    for prompt in chosen_prompts:
        prompt_ids = prompt.input_ids[-max(1, row_tokens - min(recipe.max_completion_length, row_tokens // 2)) :]
        longest = max(1, min(recipe.max_completion_length, row_tokens - len(prompt_ids)))
        sizes = [max(1, longest - number * (longest // (2 * count))) for number in range(count)]
        ids = [[drawn[i] for i in torch.randint(0, len(drawn), (n,), generator=generator).tolist()] for n in sizes]
        images = prompt.images if len(prompt_ids) == len(prompt.input_ids) else ()
        trees.append(data.Tree(prompt_ids, ids, origin=prompt.origin, images=images))
    return trees
