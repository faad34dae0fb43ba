"""The losses that ``verify`` compares where completions are scored: the recipe's own, computed in two ways.

    streamed   the recipe's layout, prompts shared where the model can; log-probabilities by the engine
    plain      a row for each completion behind its own copy of the prompt; log-probabilities by ordinary logits

In both, the reference's log-probabilities are computed in the same way as the model's. Completions of grpo are random
tokens after the prompts of the first rows: nothing is generated and no reward is computed. Losses on routers are left
out on both sides: a prompt that is shared goes through them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from streamtune import data, objectives, train
from streamtune.engine import StreamHandle
from streamtune.errors import DataError
from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.run.reference import streamed
from streamtune.simulate.plain_scores import PlainScores
from streamtune.tasks.grpo.objective import PolicyBatch, PolicyObjective
from streamtune.tasks.preference import PairObjective, PreferenceBatch, UnpairedObjective, mismatched, tree_batch
from streamtune.tasks.shapes import has_reference
from streamtune.train.objective import autocast
from streamtune.verify.restore import cast

__all__ = ["TreeLosses", "choose_trees", "make_losses", "random_completions"]

MOST_TREES = 2
"""Prompts of the batch at most."""

MOST_COMPLETIONS = 4
"""Random completions of a prompt at most."""

NOISE = 0.1
"""Standard deviation of the log-ratios of a policy to the one that wrote the completions."""


@dataclass(frozen=True)
class TreeLosses:
    """The recipe's loss on the same completions in two layouts."""

    recipe: DpoRecipe | GrpoRecipe
    beside: Any | None
    """The reference that is held; None where the model is its own, or there is none."""
    shared: train.TreeBatch
    """As it is trained on."""
    apart: train.TreeBatch
    """A row for each completion."""

    def plain(self, model: nn.Module, bf16: bool) -> Tensor:
        """Compute the loss from ordinary logits, with a row for each completion."""
        scorer: Any = PlainScores(model)
        beside: Any = PlainScores(self.beside) if self.beside is not None else scorer
        return self._loss(scorer, self._reference(model, beside), self.apart, model, bf16)

    def streamed(self, handle: StreamHandle) -> Callable[[nn.Module, bool], Tensor]:
        """Return a function that computes the loss by the engine, in the layout that is trained on."""
        return partial(self._streamed, handle)

    def _streamed(self, handle: StreamHandle, model: nn.Module, bf16: bool) -> Tensor:
        if self.beside is None:
            return self._loss(handle, self._reference(model, handle), self.shared, model, bf16)
        reference = streamed(self.beside, handle, temperature=self._temperature)
        with reference.handle:
            return self._loss(handle, reference, self.shared, model, bf16)

    @property
    def _temperature(self) -> float:
        return self.recipe.temperature if isinstance(self.recipe, GrpoRecipe) else 1.0

    def _reference(self, model: nn.Module, scorer: Any) -> train.ModelReference:
        called = model if self.beside is None else self.beside
        return train.ModelReference(called, scorer, temperature=self._temperature)

    def _loss(
        self, scorer: Any, reference: train.Reference, batch: train.TreeBatch, model: nn.Module, bf16: bool
    ) -> Tensor:
        """Return the loss of a step of this batch alone; without ``bf16`` a held reference is in the model's dtype."""
        recipe = self.recipe.model_copy(update={"bf16": bf16})
        device = batch.input_ids.device
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        wide = dtype if self.beside is not None and not bf16 else None
        with cast(self.beside or model, wide), autocast(device, bf16), scorer.routers.silenced():
            objective: Any
            if isinstance(recipe, GrpoRecipe):
                assert isinstance(batch, PolicyBatch)
                if recipe.beta > 0:
                    batch = replace(batch, ref_K=reference.logprobs(batch))
                objective = PolicyObjective(scorer, recipe)
            elif recipe.unpaired:
                objective = UnpairedObjective(scorer, recipe, reference, device)
            else:
                objective = PairObjective(scorer, recipe, reference if has_reference(recipe) else None)
            loss: Tensor = objective.score(model, batch, objective.totals([batch])).loss
        return loss


def make_losses(
    recipe: DpoRecipe | GrpoRecipe,
    model: Any,
    beside: Any | None,
    trees: Sequence[data.Tree],
    *,
    pad_token_id: int,
    share: bool,
) -> TreeLosses:
    """Return the recipe's loss on some trees, to be computed in both ways.

    Args:
        recipe: The recipe.
        model: What is trained, not streamed yet.
        beside: The reference that is held, if one is.
        trees: From :func:`choose_trees` or :func:`random_completions`.
        pad_token_id: For rows apart.
        share: Whether prompts are shared where they are streamed.
    """
    device = next(model.parameters()).device
    if isinstance(recipe, DpoRecipe):
        pairs = [_preferences(recipe, trees, pad_token_id, each).to(device) for each in (share, False)]
        return TreeLosses(recipe, beside, pairs[0], pairs[1])
    draw = torch.Generator().manual_seed(recipe.seed)
    count = sum(len(tree.completions) for tree in trees)
    advantages_N = torch.randn(count, generator=draw)
    fields = [tree_batch(trees, pad_token_id=pad_token_id, share=each) for each in (share, False)]
    policies = [PolicyBatch(**each, advantages_N=advantages_N).to(device) for each in fields]
    plain: Any = PlainScores(model)
    policy = train.ModelReference(model, plain, temperature=recipe.temperature, adapters=True)
    old_K = policy.logprobs(policies[1])
    old_K = old_K + NOISE * torch.randn(len(old_K), generator=draw).to(device)
    shared, apart = (replace(batch, old_K=old_K) for batch in policies)
    return TreeLosses(recipe, beside, shared, apart)


def _preferences(recipe: DpoRecipe, trees: Sequence[data.Tree], pad_token_id: int, share: bool) -> PreferenceBatch:
    """Make a batch as ``PreferenceBatches`` does, but without log-probs of the reference computed in advance."""
    margins = [tree.margin for tree in trees if tree.margin is not None]
    labels = [label for tree in trees for label in tree.labels or []]
    others = None
    if recipe.unpaired and objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_baseline:
        turned = [mismatched(tree, trees, number + 1, recipe.max_length) for number, tree in enumerate(trees)]
        others = PreferenceBatch(**tree_batch(turned, pad_token_id=pad_token_id, share=share))
    return PreferenceBatch(
        **tree_batch(trees, pad_token_id=pad_token_id, share=share),
        margin_P=torch.tensor(margins, dtype=torch.float64) if len(margins) == len(trees) else None,
        desirable_N=torch.tensor(labels) if labels else None,
        mismatched=others,
    )


# --- rows -------------------------------------------------------------------------------------------------------------


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
