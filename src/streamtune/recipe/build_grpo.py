"""A recipe to a run of reinforcement learning from rewards, with advantages within groups of completions.

build_grpo   recipe -> prompts, rewards, model, engine, what writes, what judges; reads everything, writes nothing
run_grpo     train, save the model, try it
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamtune import data, models, optim, rollout, train
from streamtune.engine import StreamHandle, check_branches
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.objectives import POLICY_LOSSES, check_policy
from streamtune.recipe.build import blame_recipe, make_sources, make_tokenizer
from streamtune.recipe.build_grpo_groups import Layout
from streamtune.recipe.build_grpo_log import CompletionLog
from streamtune.recipe.build_grpo_objective import PolicyObjective, logprobs_of
from streamtune.recipe.build_grpo_rewards import RewardJudge, make_judge
from streamtune.recipe.build_grpo_stream import GrpoSteps, Scorer
from streamtune.recipe.build_grpo_warm import WarmSteps, row_texts
from streamtune.recipe.build_model import make_model
from streamtune.recipe.build_run import (
    Doing,
    Notify,
    Outcome,
    Run,
    plan_and_stream,
    start_run,
    tell_of_model,
    train_run,
)
from streamtune.recipe.build_settings import StepPlan
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema_grpo import GrpoRecipe

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

__all__ = ["GrpoRun", "build_grpo", "run_grpo"]


@dataclass(kw_only=True)
class GrpoRun(Run):
    """Everything a run of reinforcement learning needs, built and checked."""

    prompts: data.PreparedPrompts
    judge: RewardJudge
    layout: Layout
    reference: Scorer | None
    warm: WarmSteps | None

    @property
    def recipe(self) -> GrpoRecipe:
        """The recipe."""
        assert isinstance(self.loaded.recipe, GrpoRecipe)
        return self.loaded.recipe


def build_grpo(
    loaded: LoadedRecipe,
    *,
    resume: str = "auto",
    dry_run: bool = False,
    notify: Notify = lambda message: None,
    doing: Doing = nullcontext,
) -> GrpoRun:
    """Load or make everything the recipe names. Nothing is written.

    Args:
        loaded: The recipe, one of grpo.
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        dry_run: Plan a fixed schedule too: what it would hold is what a dry run is for.
        notify: Told what is worth knowing on the way, a sentence at a time.
        doing: Shows what takes a while, for as long as it does.

    Raises:
        UserError: With the line of the recipe that is to blame.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        OutOfMemoryError: The weights alone do not fit.
    """
    recipe = loaded.recipe
    assert isinstance(recipe, GrpoRecipe), "the command asks for a recipe of grpo"
    with blame_recipe(loaded):
        start = start_run(recipe, resume, notify)
        _check_loss(recipe)
        if recipe.use_vllm:
            rollout.check_vllm(start.device)
        sources = make_sources(loaded)
        with doing("reading the tokenizer" if start.checkpoint else "making the tokenizer"):
            tokenizer = make_tokenizer(recipe, sources, start.checkpoint, notify, row_texts)
        judge = make_judge(recipe, loaded.path.parent, tokenizer)
        prompts = data.prepare_prompts(
            sources,
            tokenizer,
            max_prompt_length=recipe.max_prompt_length,
            overlength=recipe.overlength,
            val_size=recipe.val_size,
            seed=recipe.seed,
            notify=notify,
        )
        start.with_data(prompts.fingerprint)
        warm = WarmSteps(recipe, prompts.train, tokenizer) if recipe.sft_steps else None
        longest = min(prompts.report.length_percentiles["max"], recipe.max_prompt_length) + recipe.max_completion_length
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, start.checkpoint, start.device)
        tell_of_model(model, longest, start, notify)
        handle, memory = plan_and_stream(
            recipe,
            model,
            start,
            rows=recipe.per_device_train_batch_size,
            length=longest,
            dry_run=dry_run,
            notify=notify,
            doing=doing,
        )
        share = _shares_prefix(recipe, handle, doing, notify)
        reference = _make_reference(recipe, model, handle, start.device) if recipe.beta > 0 else None
    return GrpoRun(
        loaded=loaded,
        start=start,
        tokenizer=tokenizer,
        data_summary=prompts.report.describe(),
        model=model,
        parameters=models.count_parameters(model),
        handle=handle,
        plan=_plan_steps(recipe, len(prompts.train)),
        unit="completion",
        memory=memory,
        prompts=prompts,
        judge=judge,
        layout=_layout(recipe, tokenizer, share),
        reference=reference,
        warm=warm,
    )


def _check_loss(recipe: GrpoRecipe) -> None:
    """Ask the objective's room whether the recipe's numbers go together.

    Raises:
        ArgumentError: They do not; it names the key.
    """
    loss = POLICY_LOSSES[recipe.loss_type]
    check_policy(
        recipe.loss_type,
        epsilon_low=recipe.epsilon,
        epsilon_high=recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high,
        delta=recipe.delta,
        beta=0.0 if loss.kl_in_reward else recipe.beta,
        importance_level=recipe.importance_sampling_level,
        max_completion_length=recipe.max_completion_length,
    )


def _layout(recipe: GrpoRecipe, tokenizer: PreTrainedTokenizerBase, share: bool) -> Layout:
    loss = POLICY_LOSSES[recipe.loss_type]
    return Layout(
        batch_size=recipe.per_device_train_batch_size,
        pad_token_id=tokenizer.pad_token_id,
        share=share,
        leave_out=recipe.loss_type != "bnpo",
        mask_truncated=recipe.mask_truncated_completions,
        flat_has_gradient=recipe.beta > 0 and not loss.kl_in_reward,
    )


def _shares_prefix(recipe: GrpoRecipe, handle: StreamHandle, doing: Doing, notify: Notify) -> bool:
    """Whether completions share their prompt.

    Raises:
        UnsupportedModelError: They are to, and the model cannot.
    """
    if recipe.share_prefix == "never" or min(recipe.per_device_train_batch_size, recipe.num_generations) == 1:
        return False
    try:
        with doing("checking that this model shares prompts exactly"):
            check_branches(handle)
    except UnsupportedModelError as error:
        if recipe.share_prefix == "always":
            error.where = error.where or "share_prefix"
            raise
        notify(f"each completion gets its own copy of the prompt: {error.what}")
        return False
    return True


def _plan_steps(recipe: GrpoRecipe, num_prompts: int) -> StepPlan:
    """Count the optimizer steps. An epoch goes through every prompt once, ``num_iterations`` times through its rollout."""
    rollouts = -(-num_prompts // recipe.prompts_per_generation)
    steps_per_epoch = rollouts * recipe.steps_per_rollout * recipe.num_iterations
    steps = recipe.max_steps if recipe.max_steps > 0 else math.ceil(steps_per_epoch * recipe.num_train_epochs)
    return StepPlan(
        recipe.sft_steps + steps, steps_per_epoch, recipe.warmup_steps or math.ceil(steps * recipe.warmup_ratio)
    )
