"""The objectives of the training loop on completions: a policy gradient, or the divergence from a teacher.

Shape suffixes: N completions of a micro-batch, K their target tokens, B and T as in ``train.objective``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from streamtune import train
from streamtune.engine import StreamHandle
from streamtune.ops import Divergence, TokenLoss
from streamtune.recipe.settings import PolicySettings
from streamtune.tasks.objectives import (
    POLICY_LOSSES,
    PolicyKnobs,
    StepTotals,
    TokenLogps,
    check_policy,
    group_advantages,
    policy_loss,
)
from streamtune.tasks.objectives.advantages import counts

Metrics = Mapping[str, tuple[float, float]]


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
        moved = super().to(device)
        assert isinstance(moved, PolicyBatch)
        tensors = {name: getattr(self, name) for name in ("advantages_N", "old_K", "ref_K")}
        return replace(moved, **{name: x.to(device) for name, x in tensors.items() if x is not None})

    def rows(self, weight: float) -> train.MicroBatch:
        """Return the same sequences as rows of next tokens; the targets of each completion weigh ``weight`` together.

        A target that several completions begin with has the sum of their weights.
        """
        share_K = weight / counts(self.row_K, self.num_rows)[self.row_K].double()
        flat = torch.zeros(self.input_ids.numel(), dtype=share_K.dtype, device=share_K.device)
        weights = flat.index_add(0, self.place_K, share_K).view(self.input_ids.shape)
        fields: dict[str, Any] = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "shift_labels": self.shift_labels,
            "origins": self.origins,
            "weights": weights,
            "filler": self.filler,
        }
        if self.branches is not None:
            return train.PrefixBatch(**fields, position_ids=self.branches.position_ids, branches=self.branches)
        return train.MicroBatch(**fields, position_ids=self.position_ids)


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch(train.MicroBatch):
    """Metrics of held-out prompts that the model has answered: nothing is left to compute."""

    metrics: Metrics

    def to(self, device: torch.device) -> MeasuredBatch:
        return self


class RolloutObjective(ABC):
    """A loss on completions; before it, in the steps of ``sft_steps``, supervised fine-tuning.

    Args:
        handle: The handle of the streamed policy; None where it is not streamed.
    """

    def __init__(self, handle: StreamHandle | None, recipe: PolicySettings) -> None:
        self.recipe = recipe
        self.supervised = train.SupervisedObjective(handle)

    def totals(self, micro_batches: Sequence[train.MicroBatch], world: train.World = train.WORLD) -> StepTotals | float:
        """Return how many completions and target tokens the step has, with those without gradient; if supervised, its
        targets.
        """
        policy = [batch for batch in train.counted(micro_batches) if isinstance(batch, PolicyBatch)]
        if not world.any(bool(policy)):
            return self.supervised.totals(micro_batches, world)
        return StepTotals(
            completions=world.count(sum(batch.num_rows + batch.silent_rows for batch in policy)),
            tokens=world.count(sum(batch.num_targets + batch.silent_tokens for batch in policy)),
            max_completion_length=self.recipe.max_completion_length,
        )

    def score(self, model: nn.Module, batch: train.MicroBatch, totals: StepTotals | float | None) -> train.Score:
        if isinstance(batch, MeasuredBatch):
            return train.Score(torch.zeros(()), metrics=batch.metrics)
        if not isinstance(batch, PolicyBatch):
            assert not isinstance(totals, StepTotals)
            return self.supervised.score(model, batch, totals)
        assert totals is None or isinstance(totals, StepTotals)
        return self._score(model, batch, totals)

    @abstractmethod
    def _score(self, model: nn.Module, batch: PolicyBatch, totals: StepTotals | None) -> train.Score: ...


class PolicyObjective(RolloutObjective):
    """The policy-gradient loss of ``loss_type``."""

    def __init__(self, handle: StreamHandle, recipe: PolicySettings) -> None:
        super().__init__(handle, recipe)
        self.handle = handle
        self.knobs = policy_knobs(recipe)

    def _score(self, model: nn.Module, batch: PolicyBatch, totals: StepTotals | None) -> train.Score:
        assert totals is not None, "held-out prompts come with what was measured"
        scores = self.handle.logprobs(
            targets=batch.shift_labels,
            temperature=self.recipe.temperature,
            entropy=True,
            model=model,
            **batch.arguments,
        )
        assert scores.entropy is not None
        logps = TokenLogps(
            batch.ragged(scores.logprobs),
            batch.row_K,
            old_K=batch.old_K,
            ref_K=batch.ref_K,
            entropy_K=batch.ragged(scores.entropy).detach(),
        )
        terms = policy_loss(self.recipe.loss_type, logps, batch.advantages_N, totals, self.knobs)
        return train.Score(terms.loss, scores.router_loss, metrics={**batch.metrics, **terms.metrics})


class DistillationObjective(RolloutObjective):
    """On-policy distillation: GKD with the model's own completions alone (arXiv 2306.13649, algorithm 1, lambda = 1).

        loss = 1 / N  sum_n  1 / |o_n|  sum_t  D(teacher, model)(. | prompt, o_n,<t)

    with D a divergence of the distributions of the next token. No gradient goes through the drawing of completions. The
    logits of both models exist for a chunk of the head at a time (``ops.head.token_losses``).

    Args:
        handle: The handle of the streamed policy; None computes it from ordinary logits.
        loss: The divergence, as the loss of a token.
        teacher: The teacher, streamed as the policy is.
    """

    def __init__(
        self, handle: StreamHandle | None, recipe: PolicySettings, loss: TokenLoss, teacher: train.ModelReference
    ) -> None:
        super().__init__(handle, recipe)
        self.of_tokens = train.SupervisedObjective(handle, loss, teacher)

    def _score(self, model: nn.Module, batch: PolicyBatch, totals: StepTotals | None) -> train.Score:
        """Score completions; held-out completions by their mean divergence."""
        completions = 1 if totals is None else totals.completions
        score = self.of_tokens.score(model, batch.rows(1 / completions), 1.0)
        if totals is not None:
            return replace(score, metrics={**batch.metrics, **score.metrics})
        return train.Score(score.loss, metrics=batch.metrics, held_out=[(score.loss.item(), batch.num_rows)])


class CompletionLoss(ABC):
    """A kind of loss on completions, and everything that a run, a plan and a verification ask of it."""

    reference_key: ClassVar[str]
    """Key that names the reference."""
    reads_logprobs: ClassVar[bool]
    """True if the loss reads the reference's log-probs from its batches; else it calls the reference."""
    entropy: ClassVar[bool]
    """True if entropies are computed at the targets."""
    scores_held_out: ClassVar[bool]
    """True if the loss is computed on held-out completions as well."""
    nothing_learnt: ClassVar[tuple[str, str]]
    """Why a rollout may have no gradient, and the fix where several in a row have none."""

    def __init__(self, recipe: PolicySettings) -> None:
        self.recipe = recipe

    @abstractmethod
    def check(self) -> None:
        """Check that the settings of the loss go together.

        Raises:
            ArgumentError: They do not; it names the key.
        """

    @property
    @abstractmethod
    def compares(self) -> bool:
        """True if the loss has a reference."""

    @property
    @abstractmethod
    def reference_name(self) -> str | None:
        """The model that the recipe names as reference, if it names one."""

    @property
    def token_loss(self) -> TokenLoss:
        return TokenLoss()

    @property
    @abstractmethod
    def forwards(self) -> float:
        """Forwards without gradient of the same tokens before each optimizer step."""

    @property
    @abstractmethod
    def leaves_out(self) -> bool:
        """True if completions without a gradient may be left out of micro-batches."""

    @property
    @abstractmethod
    def flat_has_gradient(self) -> bool:
        """True if a completion whose advantage is 0 has a gradient."""

    @abstractmethod
    def objective(self, scorer: Any, reference: train.Reference | None) -> RolloutObjective:
        """Return the objective of the training loop.

        Args:
            scorer: The handle of the streamed policy, or another object that computes log-probs.
            reference: None where the loss has none.
        """


class RewardLoss(CompletionLoss):
    """A policy-gradient loss of advantages, with a KL to the reference where ``beta`` says so."""

    reference_key = "ref_model_name_or_path"
    reads_logprobs = True
    entropy = True
    scores_held_out = False
    nothing_learnt = (
        "all completions of a prompt have the same reward",
        "look at completions.jsonl: is the task far too hard or too easy, or does a reward say the same of "
        "everything? More num_generations, another temperature, easier prompts or sft_steps help; skip_limit says "
        "how long to try",
    )

    def check(self) -> None:
        recipe = self.recipe
        check_policy(recipe.loss_type, policy_knobs(recipe), max_completion_length=recipe.max_completion_length)
        some_N = torch.tensor([0.0, 1.0])
        group_advantages(
            recipe.loss_type, some_N, torch.zeros(2), scale_rewards=recipe.scale_rewards, greedy_N=torch.zeros(2)
        )

    @property
    def compares(self) -> bool:
        return self.recipe.beta > 0

    @property
    def reference_name(self) -> str | None:
        return self.recipe.ref_model_name_or_path

    @property
    def forwards(self) -> float:
        """Forwards of the reference, and of the old policy where needed; the iterations of a rollout share them."""
        return (self.compares + self.recipe.needs_old_logprobs) / self.recipe.num_iterations

    @property
    def leaves_out(self) -> bool:
        return not POLICY_LOSSES[self.recipe.loss_type].by_micro_batch

    @property
    def flat_has_gradient(self) -> bool:
        return self.compares and not POLICY_LOSSES[self.recipe.loss_type].kl_in_reward

    def objective(self, scorer: Any, reference: train.Reference | None) -> RolloutObjective:
        return PolicyObjective(scorer, self.recipe)


class TeacherLoss(CompletionLoss):
    """The divergence from a teacher: ``gkd``."""

    reference_key = "teacher"
    reads_logprobs = False
    entropy = False
    scores_held_out = True
    nothing_learnt = (
        "all completions were cut off, and mask_truncated_completions leaves them out",
        "raise max_completion_length, or delete mask_truncated_completions",
    )
    compares = True
    leaves_out = True
    flat_has_gradient = True
    forwards = 0.0  # the teacher's is one of each step

    def check(self) -> None:
        """Check nothing: the keys are checked where the recipe is read."""

    @property
    def reference_name(self) -> str | None:
        return self.recipe.teacher

    @property
    def token_loss(self) -> TokenLoss:
        recipe = self.recipe
        return TokenLoss(divergence=Divergence(recipe.kd_divergence, recipe.kd_beta, recipe.kd_temperature))

    def objective(self, scorer: Any, reference: train.Reference | None) -> RolloutObjective:
        assert isinstance(reference, train.ModelReference), "a teacher is a model"
        handle = scorer if isinstance(scorer, StreamHandle) else None
        return DistillationObjective(handle, self.recipe, self.token_loss, reference)


def completion_loss(recipe: PolicySettings) -> CompletionLoss:
    return (TeacherLoss if recipe.distils else RewardLoss)(recipe)


def policy_knobs(recipe: PolicySettings) -> PolicyKnobs:
    """Return the parameters of the policy-gradient loss that a recipe sets."""
    return PolicyKnobs(
        epsilon_low=recipe.epsilon,
        epsilon_high=recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high,
        delta=recipe.delta,
        beta=0.0 if POLICY_LOSSES[recipe.loss_type].kl_in_reward else recipe.beta,
        kl_by_ratio=recipe.use_bias_correction_kl,
        importance_level=recipe.importance_sampling_level,
    )
