"""Losses on sampled completions for the training loop: a policy gradient, or the divergence from a teacher.

Shape suffixes: B rows, T positions, N completions of a micro-batch, K their target tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from streamtune import train
from streamtune.base.policy_losses import POLICY_LOSS_FACTS
from streamtune.engine import StreamHandle
from streamtune.ops import Divergence, TokenLoss
from streamtune.recipe.settings import PolicySettings
from streamtune.tasks.objectives import (
    POLICY_LOSSES,
    PolicyOptions,
    StepTotals,
    TokenLogps,
    check_policy_loss,
    group_advantages,
    policy_loss,
)
from streamtune.tasks.objectives.advantages import tokens_per_row

Metrics = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(train.TreeBatch):
    """A micro-batch of completions from the policy, with advantages and log-probs of old policy and reference."""

    advantages_N: Tensor  # noqa: N815
    """fp32 ``[N]``: advantage of each completion"""
    old_K: Tensor | None = None  # noqa: N815
    """fp32 ``[K]``: log-probs under the policy that sampled the completions; None if it is the current policy"""
    ref_K: Tensor | None = None  # noqa: N815
    """fp32 ``[K]``: log-probs under the reference; None without a reference"""
    left_out_rows: int = 0
    """Number of completions of the step that are in no micro-batch because their gradient is 0. The loss is divided by
    their number too."""
    left_out_tokens: int = 0
    """Number of target tokens of the completions that are in no micro-batch."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the whole step, name -> (sum, count); empty except in the step's first micro-batch."""

    def to(self, device: torch.device) -> PolicyBatch:
        moved = super().to(device)
        assert isinstance(moved, PolicyBatch)
        tensors = {name: getattr(self, name) for name in ("advantages_N", "old_K", "ref_K")}
        return replace(moved, **{name: x.to(device) for name, x in tensors.items() if x is not None})

    def as_supervised(self, completion_weight: float) -> train.MicroBatch:
        """Return a batch for a next-token loss, in which each completion has the weight ``completion_weight``.

        The weight is divided evenly among the targets of a completion. A target that several completions share has the
        sum of their weights.
        """
        share_K = completion_weight / tokens_per_row(self.row_K, self.num_rows)[self.row_K].double()
        flat = torch.zeros(self.input_ids.numel(), dtype=share_K.dtype, device=share_K.device)
        weights = flat.index_add(0, self.flat_index_K, share_K).view(self.input_ids.shape)
        fields: dict[str, Any] = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "shift_labels": self.shift_labels,
            "origins": self.origins,
            "weights": weights,
            "images": self.images,
            "filler": self.filler,
        }
        if self.branches is not None:
            return train.PrefixBatch(**fields, position_ids=self.branches.position_ids, branches=self.branches)
        return train.MicroBatch(**fields, position_ids=self.position_ids)


@dataclass(frozen=True, kw_only=True)
class MetricsBatch(train.MicroBatch):
    """A batch of held-out completions whose metrics are already computed; its tensors are unused."""

    metrics: Metrics

    def to(self, device: torch.device) -> MetricsBatch:
        return self


class RolloutObjective(ABC):
    """Base class of losses on sampled completions. Supervised batches (``sft_steps``) have the next-token loss.

    ``handle`` belongs to the streamed policy; None if the model is not streamed.
    """

    def __init__(self, handle: StreamHandle | None, recipe: PolicySettings) -> None:
        self.recipe = recipe
        self.supervised = train.SupervisedObjective(handle)

    def step_totals(
        self, micro_batches: Sequence[train.MicroBatch], world: train.World = train.WORLD
    ) -> StepTotals | float:
        """Return how many completions and target tokens the step has, including completions without a gradient.

        For a supervised step, return its number of targets.
        """
        policy = [batch for batch in train.counted_batches(micro_batches) if isinstance(batch, PolicyBatch)]
        if not world.any_rank(bool(policy)):
            return self.supervised.step_totals(micro_batches, world)
        return StepTotals(
            completions=world.sum_count_over_ranks(sum(batch.num_rows + batch.left_out_rows for batch in policy)),
            tokens=world.sum_count_over_ranks(sum(batch.num_targets + batch.left_out_tokens for batch in policy)),
            max_completion_length=self.recipe.max_completion_length,
        )

    def score(self, model: nn.Module, batch: train.MicroBatch, totals: StepTotals | float | None) -> train.Score:
        if isinstance(batch, MetricsBatch):
            return train.Score(torch.zeros(()), metrics=batch.metrics)
        if not isinstance(batch, PolicyBatch):
            assert not isinstance(totals, StepTotals)
            return self.supervised.score(model, batch, totals)
        assert totals is None or isinstance(totals, StepTotals)
        return self._score(model, batch, totals)

    @abstractmethod
    def _score(self, model: nn.Module, batch: PolicyBatch, totals: StepTotals | None) -> train.Score: ...


class PolicyObjective(RolloutObjective):
    """The policy-gradient loss that the recipe key ``loss_type`` names."""

    def __init__(self, handle: StreamHandle, recipe: PolicySettings) -> None:
        super().__init__(handle, recipe)
        self.handle = handle
        self.options = policy_options(recipe)

    def _score(self, model: nn.Module, batch: PolicyBatch, totals: StepTotals | None) -> train.Score:
        assert totals is not None, "a policy-gradient loss is not computed on held-out prompts"
        scores = self.handle.logprobs(
            targets=batch.shift_labels,
            temperature=self.recipe.temperature,
            entropy=True,
            model=model,
            **batch.inputs,
        )
        assert scores.entropy is not None
        logps = TokenLogps(
            batch.gather_targets(scores.logprobs),
            batch.row_K,
            old_K=batch.old_K,
            ref_K=batch.ref_K,
            entropy_K=batch.gather_targets(scores.entropy).detach(),
        )
        terms = policy_loss(self.recipe.loss_type, logps, batch.advantages_N, totals, self.options)
        return train.Score(terms.loss, scores.router_loss, metrics={**batch.metrics, **terms.metrics})


class DistillationObjective(RolloutObjective):
    """On-policy distillation: GKD on the model's own completions only (arXiv 2306.13649, algorithm 1, lambda = 1).

        loss = 1 / N  sum_n  1 / |o_n|  sum_t  D(teacher, model)(. | prompt, o_n,<t)

    D is a divergence between next-token distributions, and o_n is one of N completions. Sampling has no gradient.
    Logits of both models are computed for one chunk of tokens at a time.

    Args:
        handle: Handle of the streamed policy; None computes the divergence from full logits.
        loss: Loss of one token, whose ``divergence`` is set.
        teacher: Teacher model, which is streamed if the policy is.
    """

    def __init__(
        self, handle: StreamHandle | None, recipe: PolicySettings, loss: TokenLoss, teacher: train.ModelReference
    ) -> None:
        super().__init__(handle, recipe)
        self.token_objective = train.SupervisedObjective(handle, loss, teacher)

    def _score(self, model: nn.Module, batch: PolicyBatch, totals: StepTotals | None) -> train.Score:
        """Return the mean divergence of completions; in evaluation (no ``totals``), the sum of their divergences."""
        completions = 1 if totals is None else totals.completions
        score = self.token_objective.score(model, batch.as_supervised(1 / completions), 1.0)
        if totals is not None:
            return replace(score, metrics={**batch.metrics, **score.metrics})
        return train.Score(score.loss, metrics=batch.metrics, held_out=[(score.loss.item(), batch.num_rows)])


class CompletionLoss(ABC):
    """Base class that describes a loss on sampled completions: models, log-probs and forward passes that it needs."""

    reference_key: ClassVar[str]
    """Recipe key that names the reference or the teacher."""
    reads_logprobs: ClassVar[bool]
    """True if batches must have log-probs of the reference; False if the loss runs a teacher model."""
    needs_entropy: ClassVar[bool]
    """True if the entropy of the next-token distribution is computed at each target."""
    scores_held_out: ClassVar[bool]
    """True if the loss is computed on held-out completions too."""
    no_gradient: ClassVar[tuple[str, str]]
    """Message after several rollouts in a row without a gradient: the reason, and a fix."""

    def __init__(self, recipe: PolicySettings) -> None:
        self.recipe = recipe

    @abstractmethod
    def check_settings(self) -> None:
        """Raise ``ArgumentError`` if settings of the loss are invalid or contradict each other."""

    @property
    @abstractmethod
    def uses_reference(self) -> bool:
        """True if the loss compares the policy with a reference model or a teacher."""

    @property
    @abstractmethod
    def reference_name(self) -> str | None:
        """Name or path of the reference model or teacher in the recipe; None if the recipe names none."""

    @property
    def token_loss(self) -> TokenLoss:
        return TokenLoss()

    @property
    @abstractmethod
    def num_extra_forwards(self) -> float:
        """Number of forward passes without gradient per optimizer step; a fraction if several steps share one pass."""

    @property
    @abstractmethod
    def may_leave_out_completions(self) -> bool:
        """True if completions without a gradient may be left out of micro-batches."""

    @property
    @abstractmethod
    def zero_advantage_has_gradient(self) -> bool:
        """True if a completion whose advantage is 0 has a gradient, from a KL in the loss or from a teacher."""

    @abstractmethod
    def make_objective(self, scorer: Any, reference: train.Reference | None) -> RolloutObjective:
        """Return the objective, which computes the loss of each micro-batch.

        Args:
            scorer: Handle of the streamed policy, or another object that computes log-probs.
            reference: Reference or teacher model; None if the loss needs neither.
        """


class RewardLoss(CompletionLoss):
    """Policy-gradient loss on advantages, plus the KL with a reference model if ``beta`` is above 0."""

    reference_key = "ref_model_name_or_path"
    reads_logprobs = True
    needs_entropy = True
    scores_held_out = False
    no_gradient = (
        "the completions of each prompt have equal rewards",
        "check in completions.jsonl whether the task is too hard or too easy, or a reward is constant. Raise "
        "num_generations, change temperature, use easier prompts or sft_steps, or raise skip_limit",
    )

    def check_settings(self) -> None:
        recipe = self.recipe
        check_policy_loss(recipe.loss_type, policy_options(recipe), max_completion_length=recipe.max_completion_length)
        some_N = torch.tensor([0.0, 1.0])
        group_advantages(
            recipe.loss_type, some_N, torch.zeros(2), scale_rewards=recipe.scale_rewards, greedy_N=torch.zeros(2)
        )

    @property
    def uses_reference(self) -> bool:
        return self.recipe.beta > 0

    @property
    def reference_name(self) -> str | None:
        return self.recipe.ref_model_name_or_path

    @property
    def num_extra_forwards(self) -> float:
        return (self.uses_reference + self.recipe.needs_old_logprobs) / self.recipe.num_iterations

    @property
    def may_leave_out_completions(self) -> bool:
        return not POLICY_LOSSES[self.recipe.loss_type].averages_over_micro_batch

    @property
    def zero_advantage_has_gradient(self) -> bool:
        return self.uses_reference and not POLICY_LOSS_FACTS[self.recipe.loss_type].kl_in_reward

    def make_objective(self, scorer: Any, reference: train.Reference | None) -> RolloutObjective:
        return PolicyObjective(scorer, self.recipe)


class TeacherLoss(CompletionLoss):
    """Distillation loss: the divergence from a teacher model on the trained model's own completions (``gkd``)."""

    reference_key = "teacher"
    reads_logprobs = False
    needs_entropy = False
    scores_held_out = True
    no_gradient = (
        "all completions were truncated, and mask_truncated_completions excludes them",
        "raise max_completion_length, or delete mask_truncated_completions",
    )
    uses_reference = True
    may_leave_out_completions = True
    zero_advantage_has_gradient = True
    num_extra_forwards = 0.0  # the teacher's forward is part of the step

    def check_settings(self) -> None:
        """Do nothing: the recipe's schema has already checked the keys of this loss."""

    @property
    def reference_name(self) -> str | None:
        return self.recipe.teacher

    @property
    def token_loss(self) -> TokenLoss:
        recipe = self.recipe
        return TokenLoss(divergence=Divergence(recipe.kd_divergence, recipe.kd_beta, recipe.kd_temperature))

    def make_objective(self, scorer: Any, reference: train.Reference | None) -> RolloutObjective:
        assert isinstance(reference, train.ModelReference), "the reference must be a teacher model"
        handle = scorer if isinstance(scorer, StreamHandle) else None
        return DistillationObjective(handle, self.recipe, self.token_loss, reference)


def completion_loss(recipe: PolicySettings) -> CompletionLoss:
    return (TeacherLoss if recipe.is_distillation else RewardLoss)(recipe)


def policy_options(recipe: PolicySettings) -> PolicyOptions:
    return PolicyOptions(
        epsilon_low=recipe.epsilon,
        epsilon_high=recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high,
        delta=recipe.delta,
        beta=0.0 if POLICY_LOSS_FACTS[recipe.loss_type].kl_in_reward else recipe.beta,
        kl_by_ratio=recipe.use_bias_correction_kl,
        importance_level=recipe.importance_sampling_level,
    )
