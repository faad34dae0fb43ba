"""Reinforcement learning from rewards, with advantages within groups of completions; or on-policy distillation.

Memory and time are planned for a micro-batch of ``per_device_train_batch_size`` completions, which belong to as many
prompts as a micro-batch can have. A completion has ``max_completion_length`` tokens, or half of the row's length if no
prompt would fit beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from streamtune import data, models, optim, train
from streamtune.base.model_facts import model_device
from streamtune.engine import StreamHandle
from streamtune.ops import TokenLoss
from streamtune.plan.simulate.scored import Scored
from streamtune.recipe.schema import GrpoRecipe
from streamtune.schedule import Schedule
from streamtune.tasks import rollout
from streamtune.tasks.grpo.groups import (
    BatchLayout,
    DistributedRewards,
    DistributedWriter,
    RewardScorer,
    load_reward_functions,
    single_rank_recipe,
)
from streamtune.tasks.grpo.objective import CompletionLoss, PolicyBatch, completion_loss
from streamtune.tasks.grpo.rollout_rules import RolloutTools, rollout_rules_for
from streamtune.tasks.grpo.stream import CompletionLog, GrpoSteps, SupervisedSteps
from streamtune.tasks.preference import batch_trees
from streamtune.tasks.random_batches import RandomTokens, make_random_trees
from streamtune.tasks.rewards import Rewards
from streamtune.tasks.steps import StepPlan, peak_learning_rate
from streamtune.tasks.task import (
    BuiltRun,
    Notify,
    PreparedRows,
    RandomStep,
    ScoringTask,
    Training,
    TrialStep,
    delay_messages,
    held_out_sets,
)
from streamtune.train.objective import autocast
from streamtune.train.sketch import CompletionGradient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIAL_TOKENS = 4
"""Number of tokens that are generated per completion in a step on random tokens."""

LOG_RATIO_NOISE = 0.1
"""Standard deviation of random log-ratios between policy and old policy, on which gradients are verified."""


@dataclass(frozen=True)
class GrpoData(data.PreparedPrompts):
    supervised: SupervisedSteps | None = None
    """Supervised steps before the first rollout; None without any."""

    @property
    def num_training_units(self) -> int:
        return len(self.training)


class Grpo(ScoringTask[GrpoRecipe]):
    """Task for ``objective: grpo``: policy gradient on sampled completions, or distillation from a teacher.

    ``functions`` are the reward functions of a run; None if nothing is scored.
    """

    def __init__(self, recipe: GrpoRecipe, functions: Rewards | None = None) -> None:
        super().__init__(recipe)
        self.functions = functions

    @classmethod
    def for_run(cls, recipe: GrpoRecipe, folder: Path, notify: Notify) -> Self:
        completion_loss(recipe).check_settings()
        return cls(recipe, load_reward_functions(recipe, folder, notify))

    def check_ranks(self, device: torch.device, world: train.World) -> None:
        single_rank_recipe(self.recipe, world)
        if self.recipe.use_vllm:
            rollout.require_vllm(device)

    def check_model(self, handle: StreamHandle) -> None:
        for rule in rollout_rules_for(self.recipe):
            rule.check_model(handle)

    @property
    def unit_noun(self) -> str:
        return "completion"

    # --- data --------------------------------------------------------------------------------------------------

    def prepare(
        self,
        sources: Sequence[data.Source],
        tokenizer: PreTrainedTokenizerBase,
        notify: Notify,
        *,
        val_size: float | None = None,
    ) -> GrpoData:
        """Return the tokenized prompts.

        If reward functions are loaded, also check the columns that they read, and tokenize supervised rows.
        """
        recipe = self.recipe
        with delay_messages(notify) as notify_later:
            prompts = data.prepare_prompts(sources, tokenizer, self.data_options(val_size), notify_later)
        supervised = None
        if self.functions is not None:
            RewardScorer(self.functions, tokenizer).check_columns(prompts.training[:16])
            supervised = SupervisedSteps(recipe, prompts.training, tokenizer) if recipe.sft_steps else None
        return GrpoData(**vars(prompts), supervised=supervised)

    def data_options(self, val_size: float | None = None) -> data.DataOptions:
        return replace(super().data_options(val_size), max_prompt_length=self.recipe.max_prompt_length)

    @property
    def row_limit(self) -> tuple[str, int]:
        return "max_prompt_length", self.recipe.max_prompt_length

    def longest_row_tokens(self, prepared: PreparedRows) -> int:
        prompt = min(prepared.report.length_percentiles["max"], self.recipe.max_prompt_length)
        return int(prompt) + self.recipe.max_completion_length

    # --- shapes ------------------------------------------------------------------------------------------------

    @property
    def loss(self) -> CompletionLoss:
        return completion_loss(self.recipe)

    @property
    def uses_reference(self) -> bool:
        return self.loss.uses_reference

    @property
    def reference_name(self) -> str | None:
        return self.loss.reference_name

    @property
    def reference_key(self) -> str:
        return self.loss.reference_key

    @property
    def token_loss(self) -> TokenLoss:
        return self.loss.token_loss

    @property
    def temperature(self) -> float:
        return self.recipe.temperature

    @property
    def reward_funcs(self) -> Sequence[str]:
        return self.recipe.reward_funcs

    @property
    def may_share_prompts(self) -> bool:
        return (
            super().may_share_prompts and min(self.recipe.per_device_train_batch_size, self.recipe.num_generations) > 1
        )

    def micro_batch_shape(self, share: bool, length: int, batch_size: int) -> Scored:
        recipe = self.recipe
        completion = recipe.max_completion_length
        if completion > length - 2:
            completion = length // 2
        prompts = self.max_prompts_per_batch(batch_size)
        counts = [batch_size // prompts + (place < batch_size % prompts) for place in range(prompts)]
        trees = tuple((length - completion - 1, (completion + 1,) * count) for count in counts)
        return Scored(trees, share, entropy=self.loss.needs_entropy, forwards=self.loss.num_extra_forwards)

    def max_prompts_per_batch(self, batch_size: int) -> int:
        group = self.recipe.num_generations
        # A micro-batch begins at a multiple of its size, which may be inside of a group.
        prompts = -(-(batch_size + group - math.gcd(batch_size, group)) // group)
        return min(prompts, batch_size)

    # --- training ----------------------------------------------------------------------------------------------

    def make_batch_maker(
        self, prepared: GrpoData, tokenizer: PreTrainedTokenizerBase, model: Any, *, share: bool
    ) -> GrpoData:
        return prepared

    def make_objective(self, scorer: Any, reference: train.Reference | None, device: torch.device) -> train.Objective:
        return self.loss.make_objective(scorer, reference)

    def count_steps(self, batches: GrpoData, micro_batches: int, world: train.World) -> StepPlan:
        """Return the numbers of optimizer steps. An epoch uses each prompt in one rollout, ``num_iterations`` times."""
        recipe = single_rank_recipe(self.recipe, world)
        rollouts = -(-batches.num_training_units // recipe.prompts_per_generation)
        steps_per_epoch = rollouts * recipe.steps_per_rollout * recipe.num_iterations
        steps = recipe.max_steps if recipe.max_steps > 0 else math.ceil(steps_per_epoch * recipe.num_train_epochs)
        warmup = recipe.warmup_steps or math.ceil(steps * recipe.warmup_ratio)
        return StepPlan(recipe.sft_steps + steps, steps_per_epoch, warmup, supervised_steps=recipe.sft_steps)

    def make_training(self, built: BuiltRun) -> Training:
        assert self.functions is not None, "made by for_run"
        world, device = built.world, built.device
        recipe = single_rank_recipe(self.recipe, world)
        log = CompletionLog(built.directory, built.tokenizer, recipe.num_completions_to_print, writes=world.is_main)
        writer = _make_writer(recipe, built)
        temperature = self.temperature
        tools = RolloutTools(
            recipe=recipe,
            prompts=built.prepared,
            writer=writer if world.size == 1 else DistributedWriter(writer, world),
            score=DistributedRewards(RewardScorer(self.functions, built.tokenizer), world),
            policy=train.ModelReference(built.model, built.handle, temperature=temperature, adapters=True),
            reference=built.reference if self.loss.reads_logprobs else None,
            layout=self._layout(built.tokenizer, built.share),
            gradient=CompletionGradient(
                built.model, built.handle, temperature=temperature, device=device, autocast_dtype=recipe.autocast_dtype
            ),
            device=device,
            world=world,
        )
        steps = GrpoSteps(tools, supervised=built.prepared.supervised, log=log)

        def before_first_step(backend: train.Backend, progress: train.Progress, stop: train.StopRequest) -> None:
            if isinstance(writer, rollout.TransformersGenerator):
                writer.should_stop = lambda: stop.requested
            log.delete_records_after_step(built.first_step)
            tools.show_activity = progress.show_activity
            # Moments of the supervised loss would scale the first steps of the loss on completions.
            steps.on_first_rollout = backend.reset_optimizer

        return Training(
            objective=self.make_objective(built.handle, built.reference, device),
            steps=steps,
            held_out=held_out_sets(built.prepared, steps.held_out_batches),
            learning_rate_at=_build_learning_rate(self.recipe, built.plan, world),
            before_first_step=before_first_step,
        )

    def _layout(self, tokenizer: PreTrainedTokenizerBase, share: bool) -> BatchLayout:
        recipe = self.recipe
        return BatchLayout(
            batch_size=recipe.per_device_train_batch_size,
            max_prompts=self.max_prompts_per_batch(recipe.per_device_train_batch_size),
            pad_token_id=tokenizer.pad_token_id,
            share=share,
            leave_out=self.loss.may_leave_out_completions,
            mask_truncated=recipe.mask_truncated_completions,
            zero_advantage_has_gradient=self.loss.zero_advantage_has_gradient,
        )

    # --- trials and comparisons --------------------------------------------------------------------------------

    def make_random_step(self, trial: TrialStep) -> RandomStep:
        """Return the objective and batches of a training step that begins with a short rollout on random prompts.

        The rollout generates as many completions together as a run does, with a few tokens each. Its prompts are so
        long that keys and values reach the length of the step. With ``use_vllm`` nothing is generated.
        """
        recipe, device = self.recipe, trial.device
        teacher = trial.reference.model if isinstance(trial.reference, train.ModelReference) else None
        draw = RandomTokens(recipe, trial.model, teacher)
        scored = self.micro_batch_shape(trial.share, trial.length, trial.batch_size)
        drawn = [draw.draw_policy_batch(recipe, scored) for _ in self._trial_micro_batches()]
        policy = train.ModelReference(trial.model, trial.scorer, temperature=recipe.temperature, adapters=True)
        references = {
            "old_K": policy if recipe.needs_old_logprobs else None,
            "ref_K": trial.reference if self.loss.reads_logprobs else None,
        }
        write_completions = self._random_rollout(trial, draw)

        def make_batches() -> list[PolicyBatch]:
            write_completions()
            batches_with_logprobs = []
            for batch in drawn:
                moved = batch.to(device)
                with autocast(device, recipe.autocast_dtype):
                    logprobs: dict[str, Any] = {
                        name: each.logprobs(moved).cpu() for name, each in references.items() if each is not None
                    }
                batches_with_logprobs.append(replace(batch, **logprobs))
            return batches_with_logprobs

        return self.make_objective(trial.scorer, trial.reference, device), make_batches

    def _random_rollout(self, trial: TrialStep, draw: RandomTokens) -> Callable[[], None]:
        """Return a function that completes random prompts with a few tokens, up to the length of ``trial``."""
        recipe, group = self.recipe, self.recipe.num_generations
        if recipe.use_vllm:
            return lambda: None
        max_rows = recipe.per_device_generation_batch_size or trial.batch_size
        writer = rollout.TransformersGenerator(
            trial.model,
            end_token_ids=[],
            pad_token_id=0,
            prefill_chunk_size=(Schedule() if trial.handle is None else trial.handle.schedule).chunk_size,
            max_rows=max_rows,
            compute_context=lambda: autocast(trial.device, recipe.autocast_dtype),
        )
        num_tokens = min(TRIAL_TOKENS, trial.length - 1)
        prompts = draw.draw_prompts(
            max(1, min(max_rows // group, recipe.prompts_per_generation)), trial.length - num_tokens
        )
        sampling = rollout.Sampling(num_tokens, temperature=recipe.temperature)

        def write_completions() -> None:
            writer.write(prompts, group, sampling)

        return write_completions

    def verification_trees(
        self, rows: Sequence[data.Prompt], length: int, vocabulary: int
    ) -> tuple[list[data.Tree], bool]:
        return make_random_trees(self.recipe, rows, length, vocabulary), False

    def verification_batches(
        self, trees: Sequence[data.Tree], model: nn.Module, plain_scorer: Any, *, pad_token_id: int, share: bool
    ) -> tuple[PolicyBatch, PolicyBatch]:
        """Return two batches of ``trees``: in the run's layout, and with one row for each completion.

        Both batches have the same random advantages and log-probs of an old policy.
        """
        device = model_device(model)
        draw = torch.Generator().manual_seed(self.recipe.seed)
        advantages_N = torch.randn(sum(len(tree.completions) for tree in trees), generator=draw)
        fields = [batch_trees(trees, pad_token_id=pad_token_id, share=each) for each in (share, False)]
        shared, apart = (PolicyBatch(**each, advantages_N=advantages_N).to(device) for each in fields)
        if not self.loss.reads_logprobs:
            return shared, apart
        policy = train.ModelReference(model, plain_scorer, temperature=self.temperature, adapters=True)
        old_K = policy.logprobs(apart)
        old_K = old_K + LOG_RATIO_NOISE * torch.randn(len(old_K), generator=draw).to(device)
        return replace(shared, old_K=old_K), replace(apart, old_K=old_K)

    def with_reference(self, batch: train.TreeBatch, reference: train.Reference) -> train.TreeBatch:
        assert isinstance(batch, PolicyBatch)
        reads = self.uses_reference and self.loss.reads_logprobs
        return replace(batch, ref_K=reference.logprobs(batch)) if reads else batch


def _build_learning_rate(recipe: GrpoRecipe, plan: StepPlan, world: train.World) -> Callable[[int], float]:
    """Return a function step -> learning rate: a cosine over the supervised steps, then the recipe's schedule."""
    supervised_rate = optim.build_schedule(
        "cosine",
        learning_rate=recipe.learning_rate if recipe.sft_learning_rate is None else recipe.sft_learning_rate,
        total_steps=recipe.sft_steps,
        warmup_steps=recipe.sft_steps // 20,
    )
    rollout_rate = optim.build_schedule(
        recipe.lr_scheduler_type,
        learning_rate=peak_learning_rate(recipe, world),
        total_steps=plan.total_steps - recipe.sft_steps,
        warmup_steps=plan.warmup_steps,
        options=recipe.lr_scheduler_kwargs,
    )
    return lambda step: supervised_rate(step) if step < recipe.sft_steps else rollout_rate(step - recipe.sft_steps)


def _make_writer(recipe: GrpoRecipe, built: BuiltRun) -> rollout.Writer:
    end_token_ids = models.all_eos_token_ids(built.model, built.tokenizer)

    @contextmanager
    def compute_context() -> Iterator[None]:
        # Adapters are around the model that writes; so are the hooks of FSDP2 that gather what is outside of layers.
        weights_context = built.backend.allow_direct_calls() if built.weights_are_sharded else nullcontext()
        with weights_context, built.handle.routers.without_losses(), autocast(built.device, recipe.autocast_dtype):
            yield

    if recipe.use_vllm:
        folder = built.directory.path / "vllm"
        models.save_architecture(built.model, built.tokenizer, folder)
        return rollout.VllmGenerator(
            built.model,
            folder,
            end_token_ids=end_token_ids,
            max_length=recipe.max_length,
            memory_fraction=recipe.vllm_gpu_memory_utilization,
        )
    return rollout.TransformersGenerator(
        built.model,
        end_token_ids=end_token_ids,
        pad_token_id=built.tokenizer.pad_token_id,
        prefill_chunk_size=built.handle.schedule.chunk_size,
        max_rows=recipe.per_device_generation_batch_size or recipe.per_device_train_batch_size,
        compute_context=compute_context,
        max_over_ranks=built.world.max_over_ranks if built.weights_are_sharded else None,
    )
