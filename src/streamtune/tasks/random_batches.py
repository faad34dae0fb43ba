"""Random tokens in the shape of a recipe's micro-batches, with all that its objective reads beside them.

What a step holds and takes hangs on the shape alone: no tokenizer and no row of the data is needed.
"""

from __future__ import annotations

from typing import Any

import torch

from streamtune import data, objectives, train
from streamtune.labels import IGNORE_INDEX
from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.recipe.schema import Recipe
from streamtune.simulate.scored import Scored
from streamtune.tasks.grpo.objective import PolicyBatch
from streamtune.tasks.preference import PreferenceBatch, tree_batch

__all__ = ["RandomTokens"]

ORIGIN = "random tokens"


class RandomTokens:
    """Draws micro-batches.

    Args:
        recipe: Whose objective they are for.
        model: Whose vocabulary they are from.
    """

    def __init__(self, recipe: Recipe, model: Any) -> None:
        self.recipe = recipe
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._generator = torch.Generator().manual_seed(recipe.seed)

    def rows(self, rows: int, length: int) -> train.MicroBatch:
        """Rows in which every token is trained on.

        Where the recipe packs, a sequence is two rows of half its length, which takes the way of packed ones.
        """
        positions = None
        if self.recipe.packing and length >= 4:
            halves = [torch.arange(length - length // 2), torch.arange(length // 2)]
            positions = torch.cat(halves).expand(rows, length)
        ids = torch.randint(0, self._vocabulary, (rows, length), generator=self._generator)
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = IGNORE_INDEX
        return train.MicroBatch(ids, torch.ones_like(ids), labels, (ORIGIN,) * rows, positions)

    def preferences(self, recipe: DpoRecipe, scored: Scored) -> PreferenceBatch:
        """Completions that are compared; the first of each prompt is the better one."""
        batch = self._preferences(recipe, scored)
        if recipe.unpaired and objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_baseline:
            return PreferenceBatch(**{**vars(batch), "mismatched": self._preferences(recipe, scored)})
        return batch

    def completions(self, recipe: GrpoRecipe, scored: Scored) -> PolicyBatch:
        """Completions of which every second one was better than the others."""
        signs = [1.0 - 2.0 * (number % 2) for number in range(scored.completions)]
        return PolicyBatch(**self._trees(scored), advantages_N=torch.tensor(signs))

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts of ``length`` tokens."""
        return [self._ids(length) for _ in range(count)]

    def _preferences(self, recipe: DpoRecipe, scored: Scored) -> PreferenceBatch:
        fields = self._trees(scored)
        known = torch.zeros(scored.num_targets) if recipe.precompute_ref_log_probs else None
        labels = torch.arange(scored.completions) % 2 == 0 if recipe.unpaired else None
        return PreferenceBatch(**fields, reference_K=known, desirable_N=labels)

    def _trees(self, scored: Scored) -> dict[str, Any]:
        trees = [
            data.Tree(self._ids(trunk + 1), [self._ids(branch - 1) for branch in branches], origin=ORIGIN)
            for trunk, branches in scored.trees
        ]
        return tree_batch(trees, pad_token_id=0, share=scored.share)

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = torch.randint(0, self._vocabulary, (count,), generator=self._generator).tolist()
        return ids
