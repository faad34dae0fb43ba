"""Rules that decide how many completions each prompt gets, and how rewards become advantages.

    prompts --counts of every rule--> completions --score--> rewards --every rule, in order--> advantages

:data:`ROLLOUT_RULES` has one class for each rule. A recipe creates only the rules that apply to it. All ranks call the
rules in the same way and get the same results.

Shape suffixes: G groups, N completions, n completions of one prompt, K target tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from streamtune import data, train
from streamtune.base.policy_losses import POLICY_LOSS_FACTS
from streamtune.engine import StreamHandle
from streamtune.errors import OutOfMemoryError
from streamtune.recipe.settings import RolloutSettings
from streamtune.tasks import rollout
from streamtune.tasks.grpo.groups import (
    BatchLayout,
    DistributedLogprobs,
    Group,
    ScoreCompletions,
    passing_completion_batch,
    store_logprobs,
)
from streamtune.tasks.objectives import Advantages, group_advantages, reward_with_kl
from streamtune.train.objective import autocast
from streamtune.train.sketch import value_projection_weights

DEFAULT_PASS_RATE = 0.5
"""Assumed pass rate of a prompt without completions. A completion passes if its reward is at least ``pass_reward``."""

T = TypeVar("T")


def groups_of_step(groups: Sequence[T], step_index: int, num_steps: int) -> list[T]:
    """Return the groups of a rollout (or values, one per group) that one of its ``num_steps`` steps trains on."""
    return list(groups[len(groups) * step_index // num_steps : len(groups) * (step_index + 1) // num_steps])


@dataclass(kw_only=True)
class RolloutTools:
    """Objects that generate completions, score them and compute log-probs. All ranks must call each method together."""

    recipe: RolloutSettings
    """Recipe from ``single_rank_recipe``, whose batch settings cover all ranks."""
    prompts: data.PreparedPrompts
    writer: rollout.Writer
    score: ScoreCompletions
    policy: train.Reference
    """The trained model with its current weights."""
    reference: train.Reference | None
    """The reference model; None if the loss does not use its log-probs."""
    layout: BatchLayout
    gradient: Callable[[train.TreeBatch], float]
    """Function that returns the gradient norm of a batch with one completion."""
    device: torch.device
    world: train.World = field(default_factory=train.World)
    show_activity: Callable[[str], None] = lambda text: None
    """Function called with a short description of the current computation."""

    @property
    def sampling_settings(self) -> rollout.Sampling:
        recipe = self.recipe
        return rollout.Sampling(
            max_completion_length=recipe.max_completion_length,
            temperature=recipe.temperature,
            top_p=recipe.top_p,
            top_k=recipe.top_k,
            min_p=recipe.min_p,
            repetition_penalty=recipe.repetition_penalty,
        )

    def groups_by_step(self, groups: Sequence[T]) -> list[list[T]]:
        """Return the groups of a new rollout (or values, one per group) as one list per optimizer step."""
        num_steps = self.recipe.steps_per_rollout
        return [groups_of_step(groups, step_index, num_steps) for step_index in range(num_steps)]

    def write(
        self, prompts: Sequence[data.Prompt], count: int | Sequence[int], sampling: rollout.Sampling
    ) -> list[list[rollout.Completion]]:
        """Return a list of sampled completions for each prompt; ``count`` is one number for all, or one per prompt.

        Raises:
            OutOfMemoryError: The keys and values do not fit into memory.
        """
        images = [list(map(data.ImageFile.parse, prompt.images)) for prompt in prompts]
        try:
            return self.writer.write([prompt.input_ids for prompt in prompts], count, sampling, images)
        except (RuntimeError, MemoryError) as error:
            if not train.is_out_of_memory(error):
                raise
            longest = max(len(prompt.input_ids) for prompt in prompts) + sampling.max_completion_length
            recipe = self.recipe
            at_once = recipe.per_device_generation_batch_size or recipe.per_device_train_batch_size
            raise OutOfMemoryError(
                f"out of memory while generating {at_once} completions at a time, with up to {longest:,} tokens each",
                where="per_device_generation_batch_size",
                fix="lower per_device_generation_batch_size, or max_completion_length",
            ) from error

    def write_greedy(self, prompts: Sequence[data.Prompt]) -> list[rollout.Completion]:
        return [group[0] for group in self.write(prompts, 1, replace(self.sampling_settings, temperature=0.0))]

    def store_logprobs(self, groups: Sequence[Group], *, needs_old: bool) -> None:
        """Compute missing log-probs of the groups: ``ref`` (reference) and, with ``needs_old``, ``old`` (policy)."""
        models = {"old": self.policy if needs_old else None, "ref": self.reference}
        for name, model in models.items():
            if model is None or all(getattr(group, name) is not None for group in groups):
                continue
            self.show_activity(f"{'reference' if name == 'ref' else 'policy'} log-probs")
            for part in self.groups_by_step(groups):
                logprobs = partial(DistributedLogprobs(self.world), partial(self._logprobs, model))
                store_logprobs(name, logprobs, part, self.prompts.training, self.layout)

    def _logprobs(self, model: train.Reference, batch: train.TreeBatch) -> list[float]:
        with autocast(self.device, self.recipe.autocast_dtype):
            found: list[float] = model.logprobs(batch.to(self.device)).tolist()
        return found


@dataclass
class ScoredRollout:
    """Prompts with their completions and rewards. Each :class:`RolloutRule` may change rewards and advantages."""

    prompts: Sequence[data.Prompt]
    groups: Sequence[Group]
    rewards_N: Tensor  # noqa: N815
    """float64 ``[N]``; NaN if no reward function scored the completion"""
    greedy_N: Tensor | None = None  # noqa: N815
    """float64 ``[N]``: reward of the greedy completion of each completion's prompt; None unless a rule computes it"""

    @property
    def group_index_N(self) -> Tensor:  # noqa: N802
        """Index of the group that each completion belongs to, int64 ``[N]``."""
        return self.repeat_by_group(torch.arange(len(self.groups)))

    def repeat_by_group(self, values_G: Tensor) -> Tensor:
        """Return the value of each completion's group: ``[G]`` becomes ``[N]``."""
        return values_G.repeat_interleave(torch.tensor([len(group.completions) for group in self.groups]))

    def split_by_group(self, values_N: Tensor) -> Iterator[Tensor]:
        """Yield the values of each group's n completions, ``[n]``."""
        yield from values_N.split([len(group.completions) for group in self.groups])


class RolloutRule(ABC):
    """Base class of rules that change numbers of completions, rewards or advantages. By default nothing changes."""

    reads_pass_rates: ClassVar[bool] = False

    def __init__(self, tools: RolloutTools) -> None:
        self.tools = tools

    @classmethod
    @abstractmethod
    def applies_to(cls, recipe: RolloutSettings) -> bool:
        """Return True if the rule applies to this recipe."""

    @classmethod  # noqa: B027 (most rules read nothing of it)
    def check_model(cls, handle: StreamHandle) -> None:
        """Raise ``UnsupportedModelError`` if the rule does not support this model."""

    def allocate_counts(
        self, prompt_indices: Sequence[int], counts: list[int], pass_rates: rollout.PassRates
    ) -> list[int]:
        """Return how many completions each prompt of an optimizer step gets. A rule must not change the sum.

        Args:
            prompt_indices: Indices of the prompts among the training prompts.
            counts: Number of completions of each prompt, as set by earlier rules.
        """
        return counts

    @abstractmethod
    def apply(self, scored_rollout: ScoredRollout) -> None:
        """Change the rewards, or set the advantages, of a rollout's completions in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's entries of a checkpoint, as plain JSON values; empty if the rule has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have none)
        """Load the rule's entries from a checkpoint, which may lack them."""


class KlInReward(RolloutRule):
    """Rule that subtracts ``beta`` times the KL with the reference from a completion's reward (for rloo and remax)."""

    @classmethod
    def applies_to(cls, recipe: RolloutSettings) -> bool:
        return recipe.beta > 0 and not recipe.is_distillation and POLICY_LOSS_FACTS[recipe.loss_type].kl_in_reward

    def apply(self, scored_rollout: ScoredRollout) -> None:
        groups = scored_rollout.groups
        for group in groups:
            group.advantages = [1.0] * len(group.completions)  # none is left out: its KL counts
        self.tools.store_logprobs(groups, needs_old=True)
        old_K, ref_K = (
            torch.tensor([value for group in groups for row in rows(group) for value in row])
            for rows in (lambda group: group.old, lambda group: group.ref)
        )
        lengths = torch.tensor([len(row) for group in groups for row in group.old or []])
        row_K = torch.arange(len(lengths)).repeat_interleave(lengths)
        beta = self.tools.recipe.beta
        scored_rollout.rewards_N = reward_with_kl(scored_rollout.rewards_N, old_K, ref_K, row_K, beta=beta)[0]


class GreedyBaseline(RolloutRule):
    """Rule that scores a greedy completion of each prompt: the baseline of the loss ``remax``."""

    @classmethod
    def applies_to(cls, recipe: RolloutSettings) -> bool:
        return recipe.loss_type == "remax"

    def apply(self, scored_rollout: ScoredRollout) -> None:
        written = self.tools.write_greedy(scored_rollout.prompts)
        scores = self.tools.score(scored_rollout.prompts, [completion.token_ids for completion in written])
        scored_rollout.greedy_N = scored_rollout.repeat_by_group(rewards_tensor(scores.total))


class GroupAdvantages(RolloutRule):
    """Rule that computes advantages from rewards, as ``loss_type`` and ``scale_rewards`` define them."""

    @classmethod
    def applies_to(cls, recipe: RolloutSettings) -> bool:
        return not recipe.is_distillation

    def apply(self, scored_rollout: ScoredRollout) -> None:
        recipe = self.tools.recipe
        advantages = group_advantages(
            recipe.loss_type,
            scored_rollout.rewards_N,
            scored_rollout.group_index_N,
            scale_rewards=recipe.scale_rewards,
            greedy_N=scored_rollout.greedy_N,
        )
        _set_statistics(scored_rollout, advantages)
        values_by_group = scored_rollout.split_by_group(advantages.values_N)
        for group, values_n in zip(scored_rollout.groups, values_by_group, strict=True):
            group.advantages = values_n.tolist()


class RewardSpread(RolloutRule):
    """Rule that computes the standard deviation of rewards for metrics. Distillation (``gkd``) needs no advantages."""

    @classmethod
    def applies_to(cls, recipe: RolloutSettings) -> bool:
        return recipe.is_distillation

    def apply(self, scored_rollout: ScoredRollout) -> None:
        advantages = group_advantages("dr_grpo", scored_rollout.rewards_N, scored_rollout.group_index_N)
        _set_statistics(scored_rollout, advantages)
        for group in scored_rollout.groups:
            group.advantages = [0.0] * len(group.completions)


class Allocation(RolloutRule):
    """Rule that divides the completions of a step among its prompts so that the gradient has the least variance.

    The rule also measures gradient norms of passing completions, which determine how later completions are divided.
    """

    reads_pass_rates = True

    def __init__(self, tools: RolloutTools) -> None:
        super().__init__(tools)
        self.norms = rollout.GradientNorms()

    @classmethod
    def applies_to(cls, recipe: RolloutSettings) -> bool:
        return recipe.allocation != "equal"

    @classmethod
    def check_model(cls, handle: StreamHandle) -> None:
        value_projection_weights(handle.layers, "allocation")

    def allocate_counts(
        self, prompt_indices: Sequence[int], counts: list[int], pass_rates: rollout.PassRates
    ) -> list[int]:
        allocation = self.tools.recipe.allocation
        passed = [pass_rates.passed_share(number) for number in prompt_indices]
        scores = [
            rollout.allocation_score(
                DEFAULT_PASS_RATE if rate is None else rate, self.norms.gradient_norm(number), allocation
            )
            for rate, number in zip(passed, prompt_indices, strict=True)
        ]
        return rollout.allocate_completions(scores, sum(counts))

    def apply(self, scored_rollout: ScoredRollout) -> None:
        for group in scored_rollout.groups:  # every prompt counts the same, however many completions it has
            share = self.tools.recipe.num_generations / len(group.completions)
            group.advantages = [advantage * share for advantage in group.advantages]
        self._measure_gradient_norms(scored_rollout.groups)

    def _measure_gradient_norms(self, groups: Sequence[Group]) -> None:
        tools, norm = self.tools, self.tools.gradient
        batches = [
            passing_completion_batch(g, tools.recipe.pass_reward, tools.prompts.training, tools.layout) for g in groups
        ]
        passed = [(group, batch) for group, batch in zip(groups, batches, strict=True) if batch is not None]
        if not passed:
            return
        tools.show_activity("gradient norms")
        measure = DistributedLogprobs(tools.world)
        norms = measure(lambda batch: [norm(batch)], len(passed), lambda number: passed[number][1])
        for (group, _), (value,) in zip(passed, norms, strict=True):
            self.norms.record_norm(group.prompt, value)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms.load_state_dict(state.get("norms", {}))


ROLLOUT_RULES: tuple[type[RolloutRule], ...] = (
    KlInReward,
    GreedyBaseline,
    GroupAdvantages,
    RewardSpread,
    Allocation,
)
"""All rules, in the order in which they run."""


def rollout_rules_for(recipe: RolloutSettings) -> list[type[RolloutRule]]:
    return [rule for rule in ROLLOUT_RULES if rule.applies_to(recipe)]


def rewards_tensor(values: Sequence[float | None]) -> Tensor:
    """Return rewards as float64 ``[N]``, with NaN for None."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)


def _set_statistics(scored_rollout: ScoredRollout, advantages: Advantages) -> None:
    groups, split = scored_rollout.groups, scored_rollout.split_by_group
    for group, flat_n, std_n in zip(groups, split(advantages.no_advantage_N), split(advantages.std_N), strict=True):
        group.flat, group.std = bool(flat_n.all()), float(std_n[0])
