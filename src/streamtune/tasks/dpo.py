"""Preference training: losses on pairs of completions (DPO), or on single labelled completions (KTO).

Memory and time are planned for a micro-batch of ``per_device_train_batch_size`` prompts. A prompt has
``max_prompt_length`` tokens, by default half of the row's length, and each of its completions has the remaining tokens.
A prompt has two completions if the loss is on pairs, else one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from streamtune import data, train
from streamtune.errors import DataError
from streamtune.plan.simulate.scored import Completions, Scored, Trees
from streamtune.recipe.schema import DpoRecipe
from streamtune.tasks import objectives
from streamtune.tasks.preference import (
    PairObjective,
    PreferenceBatch,
    PreferenceBatches,
    UnpairedObjective,
    mismatched_tree,
    pair_options,
    preference_batch,
    unpaired_options,
)
from streamtune.tasks.random_batches import RandomTokens, choose_trees
from streamtune.tasks.task import (
    Notify,
    PreparedRows,
    RandomStep,
    ScoringTask,
    TrialStep,
    delay_messages,
    image_processor,
    larger_images,
    refuse_with_images,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dpo(ScoringTask[DpoRecipe]):
    """Task for ``objective: dpo``: losses on pairs of completions (DPO) or on single labelled completions (KTO)."""

    @classmethod
    def for_run(cls, recipe: DpoRecipe, folder: Path, notify: Notify) -> Self:
        if recipe.is_unpaired:
            objectives.check_unpaired_loss(recipe.loss_type, unpaired_options(recipe))
        else:
            objectives.check_preference_loss(recipe.loss_type, pair_options(recipe))
        return cls(recipe)

    @property
    def unit_noun(self) -> str:
        return "row" if self.recipe.is_unpaired else "pair"

    @property
    def has_baseline(self) -> bool:
        """True if the loss subtracts a KL estimate (kto), computed on prompts with the completions of other prompts."""
        return self.recipe.is_unpaired and objectives.UNPAIRED_LOSSES[self.recipe.loss_type].needs_baseline

    def prepare(
        self,
        sources: Sequence[data.Source],
        tokenizer: PreTrainedTokenizerBase,
        notify: Notify,
        *,
        val_size: float | None = None,
    ) -> data.PreparedCompletions:
        prepare_trees = data.prepare_unpaired if self.recipe.is_unpaired else data.prepare_preferences
        with delay_messages(notify) as notify_later:
            prepared = prepare_trees(sources, tokenizer, self.data_options(val_size), notify_later)
        refuse_with_images(self.recipe, prepared)
        return prepared

    def data_options(self, val_size: float | None = None) -> data.DataOptions:
        recipe = self.recipe
        options = super().data_options(val_size)
        return replace(options, max_prompt_length=recipe.max_prompt_length, identical_pairs=recipe.identical_pairs)

    # --- shapes ------------------------------------------------------------------------------------------------

    @property
    def uses_reference(self) -> bool:
        recipe = self.recipe
        if recipe.is_unpaired:
            return objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_reference
        return objectives.PREFERENCE_LOSSES[recipe.loss_type].needs_reference and not recipe.reference_free

    @property
    def precomputes_reference(self) -> bool:
        return self.uses_reference and self.recipe.precompute_ref_log_probs

    def micro_batch_shape(self, share: bool, length: int, batch_size: int) -> Scored:
        prompt = self.recipe.max_prompt_length or length // 2
        if prompt > length - 2:
            prompt = length // 2
        branches = (length - prompt + 1,) * (1 if self.recipe.is_unpaired else 2)
        return self._make_shape(share, ((prompt - 1, branches),) * batch_size)

    def make_measured_shape_function(self, prepared: PreparedRows, longest_row: int, *, share: bool) -> Completions:
        """Return a function (length, batch size) -> token counts of a micro-batch, based on the longest training row.

        Every prompt of the micro-batch has the token counts of this row, scaled down in proportion to the length.
        Without ``share``, each prompt plus completion has ``longest_row`` tokens before scaling.
        """
        tree = prepared.training[int(prepared.training.lengths().argmax())]  # type: ignore[attr-defined]
        common = tree.num_common_tokens if share else 0
        trunk = len(tree.prompt) - 1 + common
        branches = tuple(len(ids) + 1 - common if share else longest_row - trunk for ids in tree.completions)
        count = self.recipe.per_device_train_batch_size
        scored = partial(self._make_shape, share)
        return make_scaled_shape_function(scored, ((trunk, branches),) * count, longest_row, (common,) * count)

    def _make_shape(self, share: bool, trees: Trees, common: tuple[int, ...] = ()) -> Scored:
        forwards = float(self.uses_reference and not self.precomputes_reference)
        if self.has_baseline:
            forwards += 1 + forwards  # on the mismatched completions: the policy, and the reference
        return Scored(trees, share, forwards=forwards, common=common)

    # --- training ----------------------------------------------------------------------------------------------

    def make_batch_maker(
        self, prepared: data.PreparedCompletions, tokenizer: PreTrainedTokenizerBase, model: Any, *, share: bool
    ) -> PreferenceBatches:
        """Return the object that makes micro-batches of prompts with their completions.

        Raises:
            DataError: The loss needs completions of other prompts (kto), but all rows have the same prompt.
        """
        first = prepared.training[0]
        same = ((tree.prompt, tree.images) == (first.prompt, first.images) for tree in prepared.training)
        if self.has_baseline and all(same):
            raise DataError(
                f"all rows to train on have the same prompt, but {self.recipe.loss_type} estimates the KL with the "
                "reference on completions of other prompts",
                where=prepared.training[0].origin,
                fix="add rows with other prompts, or write loss_type: apo_zero_unpaired, which estimates no KL",
            )
        return PreferenceBatches(
            prepared,
            self.recipe,
            pad_token_id=tokenizer.pad_token_id,
            share=share,
            has_baseline=self.has_baseline,
            images=image_processor(self.recipe, prepared, tokenizer),
        )

    def largest_images(self, batches: PreferenceBatches) -> Mapping[str, torch.Tensor] | None:
        chosen = data.rows_with_most_images(batches.prepared.training, self.recipe.per_device_train_batch_size)
        return larger_images(batches.training_batch(units).images for units in chosen)

    def make_objective(self, scorer: Any, reference: train.Reference | None, device: torch.device) -> train.Objective:
        if self.recipe.is_unpaired:
            assert reference is not None, "losses on single completions need a reference"
            return UnpairedObjective(scorer, self.recipe, reference, device)
        return PairObjective(scorer, self.recipe, reference if self.uses_reference else None)

    # --- trials and comparisons --------------------------------------------------------------------------------

    def make_random_step(self, trial: TrialStep) -> RandomStep:
        draw = RandomTokens(self.recipe, trial.model)
        scored = self.micro_batch_shape(trial.share, trial.length, trial.batch_size)
        batches = [draw.draw_preference_batch(self.recipe, scored) for _ in self._trial_micro_batches()]
        return self.make_objective(trial.scorer, trial.reference, trial.device), lambda: batches

    def verification_trees(
        self, rows: Sequence[data.Tree], length: int, vocabulary: int
    ) -> tuple[list[data.Tree], bool]:
        return choose_trees(rows, length, distinct_prompts=self.has_baseline)

    def verification_batches(
        self,
        trees: Sequence[data.Tree],
        model: nn.Module,
        plain_scorer: Any,
        *,
        pad_token_id: int,
        share: bool,
        images: data.ImageProcessor | None = None,
    ) -> tuple[PreferenceBatch, PreferenceBatch]:
        make = partial(preference_batch, pad_token_id=pad_token_id, images=images)
        return self._verification_batch(trees, partial(make, share=share)), self._verification_batch(
            trees, partial(make, share=False)
        )

    def _verification_batch(
        self, trees: Sequence[data.Tree], make: Callable[[Sequence[data.Tree]], PreferenceBatch]
    ) -> PreferenceBatch:
        others = None
        if self.has_baseline:
            others = make(
                [mismatched_tree(tree, trees, place, self.recipe.max_length) for place, tree in enumerate(trees, 1)]
            )
        return replace(make(trees), mismatched=others)


def make_scaled_shape_function(
    make_shape: Callable[[Trees, tuple[int, ...]], Scored],
    trees: Trees,
    longest_row: int,
    common: tuple[int, ...] = (),
) -> Completions:
    """Return a function (length, batch size) -> token counts of a micro-batch, from which memory and time are
    predicted.

    Each token count is multiplied by ``length / longest_row``, at most 1. The batch size does not change the result.

    Args:
        make_shape: Function that makes the shape from token counts like ``trees`` and ``common``.
        trees: Number of tokens of each prompt without its last token, and of each of its completions plus this token.
        longest_row: Number of tokens of the longest prompt plus completion.
        common: Number of first tokens that a prompt's completions share, per prompt; ``trees`` counts them in the
            prompt.
    """

    def shape_at(length: int, batch_size: int) -> Scored:
        fraction = min(1.0, length / longest_row)
        return make_shape(
            tuple(
                (int(fraction * trunk), tuple(max(2, int(fraction * size)) for size in sizes)) for trunk, sizes in trees
            ),
            tuple(int(fraction * tokens) for tokens in common),
        )

    return shape_at
