"""The policy-gradient objective of the training loop: micro-batches of completions, and their score.

Shape suffixes: N completions of a micro-batch, K their target tokens, B and T as in ``train.batch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from streamtune import train
from streamtune.engine import StreamHandle
from streamtune.objectives import POLICY_LOSSES, StepTotals, policy_loss
from streamtune.recipe.grpo import GrpoRecipe

__all__ = ["MeasuredBatch", "PolicyBatch", "PolicyObjective"]

Metrics = Mapping[str, tuple[float, float]]
WORLD = train.World()


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(train.TreeBatch):
    """Completions the policy wrote, with everything that their loss reads except their log-probs."""

    advantages_N: Tensor  # noqa: N815
    """fp32 ``[N]``"""
    old_K: Tensor | None = None  # noqa: N815
    """fp32 ``[K]`` log-probs under the policy that wrote them; None: it is the one that is trained now"""
    ref_K: Tensor | None = None  # noqa: N815
    """fp32 ``[K]`` log-probs under the reference"""
    silent_rows: int = 0
    """Completions of the step that have no gradient and so are in none of its micro-batches. They count in what the
    loss is a mean over, which makes leaving them out change nothing."""
    silent_tokens: int = 0
    """Their target tokens."""
    metrics: Metrics = field(default_factory=dict)
    """Of the whole step; carried by its first micro-batch."""

    def to(self, device: torch.device) -> PolicyBatch:
        """Return the same batch on ``device``."""
        moved = super().to(device)
        assert isinstance(moved, PolicyBatch)
        tensors = {name: getattr(self, name) for name in ("advantages_N", "old_K", "ref_K")}
        return replace(moved, **{name: x.to(device) for name, x in tensors.items() if x is not None})


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch(train.MicroBatch):
    """The metrics of held-out prompts that the model has answered: nothing is left to compute."""

    metrics: Metrics

    def to(self, device: torch.device) -> MeasuredBatch:
        """Return the batch itself: it has no tensor that is read."""
        return self


class PolicyObjective:
    """The loss of ``loss_type``; before it, in the steps of ``sft_steps``, supervised fine-tuning.

    Args:
        handle: The handle of the streamed policy.
        recipe: Gives the loss and its settings.
    """

    def __init__(self, handle: StreamHandle, recipe: GrpoRecipe) -> None:
        self.handle, self.recipe = handle, recipe
        self.supervised = train.SupervisedObjective(handle)
        self._loss: dict[str, Any] = {
            "epsilon_low": recipe.epsilon,
            "epsilon_high": recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high,
            "delta": recipe.delta,
            "beta": 0.0 if POLICY_LOSSES[recipe.loss_type].kl_in_reward else recipe.beta,
            "importance_level": recipe.importance_sampling_level,
        }

    def totals(self, micro_batches: Sequence[train.MicroBatch], world: train.World = WORLD) -> StepTotals | float:
        """Return the step's completions and target tokens, also those without gradient; if supervised, its targets."""
        policy = [batch for batch in train.counted(micro_batches) if isinstance(batch, PolicyBatch)]
        if not world.any(bool(policy)):
            return self.supervised.totals(micro_batches, world)
        return StepTotals(
            completions=world.count(sum(batch.num_rows + batch.silent_rows for batch in policy)),
            tokens=world.count(sum(batch.num_targets + batch.silent_tokens for batch in policy)),
            max_completion_length=self.recipe.max_completion_length,
        )

    def score(self, model: nn.Module, batch: train.MicroBatch, totals: StepTotals | float | None) -> train.Score:
        """See :class:`streamtune.train.Objective`."""
        if isinstance(batch, MeasuredBatch):
            return train.Score(torch.zeros(()), metrics=batch.metrics)
        if not isinstance(batch, PolicyBatch):
            assert not isinstance(totals, StepTotals)
            return self.supervised.score(model, batch, totals)
        assert isinstance(totals, StepTotals), "held-out prompts come with what was measured"
        scores = self.handle.logprobs(
            targets=batch.shift_labels,
            temperature=self.recipe.temperature,
            entropy=True,
            model=model,
            **batch.arguments,
        )
        assert scores.entropy is not None
        terms = policy_loss(
            self.recipe.loss_type,
            batch.ragged(scores.logprobs),
            batch.old_K,
            batch.ref_K,
            batch.row_K,
            batch.advantages_N,
            totals,
            entropy_K=batch.ragged(scores.entropy).detach(),
            **self._loss,
        )
        return train.Score(terms.loss, scores.router_loss, metrics={**batch.metrics, **terms.metrics})
