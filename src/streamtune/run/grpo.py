"""Build a run of reinforcement learning from rewards, with advantages within groups of completions, and run it.

build_grpo   recipe -> prompts, rewards, model, engine, reference; reads everything, writes nothing
run_grpo     make the writer of completions, train, save the model, let it complete the sample prompt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamtune import data, models, optim, rollout, train
from streamtune.engine import StreamHandle
from streamtune.objectives import POLICY_LOSSES, check_policy, group_advantages
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import make_sources, make_tokenizer_together
from streamtune.run.device import blame_recipe
from streamtune.run.engine import plan_and_stream
from streamtune.run.model import make_model, make_trial_model
from streamtune.run.ranks import shares_weights
from streamtune.run.reference import load_reference, streamed
from streamtune.run.start import Doing, Notify, Start, start_run, tell_of_model
from streamtune.run.train import Outcome, Run, train_run
from streamtune.simulate.memory import held_bytes
from streamtune.tasks.grpo.groups import Layout
from streamtune.tasks.grpo.log import CompletionLog
from streamtune.tasks.grpo.objective import PolicyObjective
from streamtune.tasks.grpo.ranks import SharedJudge, SharedWriter, check_sharded, of_all_ranks
from streamtune.tasks.grpo.rewards import RewardJudge, load_functions
from streamtune.tasks.grpo.stream import GrpoSteps, Scorer
from streamtune.tasks.grpo.warm import WarmSteps
from streamtune.tasks.shapes import completions_of, prompts_of
from streamtune.tasks.sharing import can_share
from streamtune.tasks.steps import StepPlan
from streamtune.train.objective import autocast

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
    allow_change: Collection[str] = (),
    dry_run: bool = False,
    notify: Notify = lambda message: None,
    doing: Doing = nullcontext,
) -> GrpoRun:
    """Load or make everything the recipe names. Nothing is written.

    Args:
        loaded: The recipe, one of grpo.
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        allow_change: Keys that may differ from the resumed run, see :func:`start_run`.
        dry_run: Plan a fixed schedule too: a dry run is there to show what it would hold.
        notify: Called with messages for the user, a sentence at a time.
        doing: Returns a context that shows a message while something takes long.

    Raises:
        UserError: With the line of the recipe that is to blame.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        OutOfMemoryError: Memory ran out before the first step.
    """
    recipe = loaded.recipe
    assert isinstance(recipe, GrpoRecipe), "the command asks for a recipe of grpo"
    with blame_recipe(loaded):
        _check_loss(recipe)
        functions = load_functions(recipe, loaded.path.parent, notify)
    with blame_recipe(loaded), start_run(loaded, resume, notify, allow_change, dry_run=dry_run, doing=doing) as start:
        if recipe.use_vllm:
            rollout.check_vllm(start.device)
        if shares_weights(recipe):
            check_sharded(recipe)
        sources = make_sources(loaded)
        with doing("reading the tokenizer" if start.checkpoint else "making the tokenizer"):
            tokenizer = make_tokenizer_together(start.world, recipe, sources, start.checkpoint, notify)
        judge = RewardJudge(functions, tokenizer)
        prompts = prepare_prompts(recipe, sources, tokenizer, notify)
        judge.check(prompts.train[:16])
        start.with_data(prompts.fingerprint)
        warm = WarmSteps(recipe, prompts.train, tokenizer) if recipe.sft_steps else None
        longest = min(prompts.report.length_percentiles["max"], recipe.max_prompt_length) + recipe.max_completion_length
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, start.checkpoint, start.device, sharing=start.sharing)
        tell_of_model(model, longest, start, notify)
        held = None
        if recipe.beta > 0:
            with doing("loading the reference"):
                held = load_reference(recipe, model, tokenizer, start.device, sharing=start.sharing)
        with doing("checking that prompts can be shared"):
            share = can_share(recipe, make_trial_model(recipe, model, start.device), notify)
        handle, backend, memory = plan_and_stream(
            recipe,
            model,
            start,
            rows=recipe.per_device_train_batch_size,
            length=longest,
            completions=completions_of(recipe, share=share),
            reference_bytes=0 if held is None else held_bytes(held),
            dry_run=dry_run,
            notify=notify,
            doing=doing,
        )
        reference = _reference_scorer(recipe, model, handle, held, start)
    return GrpoRun(
        loaded=loaded,
        start=start,
        tokenizer=tokenizer,
        data_summary=prompts.report.describe(),
        model=model,
        parameters=models.count_parameters(model),
        handle=handle,
        backend=backend,
        plan=_plan_steps(of_all_ranks(recipe, start.world), len(prompts.train)),
        unit="completion",
        memory=memory,
        prompts=prompts,
        judge=judge,
        layout=_layout(recipe, tokenizer, share),
        reference=reference,
        warm=warm,
    )


def prepare_prompts(
    recipe: GrpoRecipe, sources: Sequence[data.Source], tokenizer: PreTrainedTokenizerBase, notify: Notify
) -> data.PreparedPrompts:
    """Return the prompts as token ids. Messages are passed on at the end, and not during the live count."""
    said: list[str] = []
    try:
        return data.prepare_prompts(
            sources,
            tokenizer,
            max_prompt_length=recipe.max_prompt_length,
            overlength=recipe.overlength,
            val_size=recipe.val_size,
            seed=recipe.seed,
            notify=said.append,
        )
    finally:
        for text in said:
            notify(text)


def _check_loss(recipe: GrpoRecipe) -> None:
    """Check that the settings of the loss go together.

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
    some_N = torch.tensor([0.0, 1.0])
    group_advantages(
        recipe.loss_type, some_N, torch.zeros(2), scale_rewards=recipe.scale_rewards, greedy_N=torch.zeros(2)
    )


def _layout(recipe: GrpoRecipe, tokenizer: PreTrainedTokenizerBase, share: bool) -> Layout:
    loss = POLICY_LOSSES[recipe.loss_type]
    return Layout(
        batch_size=recipe.per_device_train_batch_size,
        prompts=prompts_of(recipe, recipe.per_device_train_batch_size),
        pad_token_id=tokenizer.pad_token_id,
        share=share,
        leave_out=recipe.loss_type != "bnpo",
        mask_truncated=recipe.mask_truncated_completions,
        flat_has_gradient=recipe.beta > 0 and not loss.kl_in_reward,
    )


def _plan_steps(recipe: GrpoRecipe, num_prompts: int) -> StepPlan:
    """Count the optimizer steps. In an epoch every prompt is completed once, which makes ``num_iterations`` passes."""
    rollouts = -(-num_prompts // recipe.prompts_per_generation)
    steps_per_epoch = rollouts * recipe.steps_per_rollout * recipe.num_iterations
    steps = recipe.max_steps if recipe.max_steps > 0 else math.ceil(steps_per_epoch * recipe.num_train_epochs)
    warmup = recipe.warmup_steps or math.ceil(steps * recipe.warmup_ratio)
    return StepPlan(recipe.sft_steps + steps, steps_per_epoch, warmup)


def _learning_rate(recipe: GrpoRecipe, plan: StepPlan) -> Callable[[int], float]:
    """Return the learning rate by step: that of the supervised steps, then the recipe's schedule over the others."""
    before = optim.build_schedule(
        "cosine",
        learning_rate=recipe.learning_rate if recipe.sft_learning_rate is None else recipe.sft_learning_rate,
        total_steps=recipe.sft_steps,
        warmup_steps=recipe.sft_steps // 20,
    )
    after = optim.build_schedule(
        recipe.lr_scheduler_type,
        learning_rate=recipe.learning_rate,
        total_steps=plan.total_steps - recipe.sft_steps,
        warmup_steps=plan.warmup_steps,
    )
    return lambda step: before(step) if step < recipe.sft_steps else after(step - recipe.sft_steps)


def _policy_scorer(recipe: GrpoRecipe, model: Any, handle: StreamHandle) -> Scorer:
    """Return a scorer under the current policy: in evaluation mode, as completions are written."""
    policy = train.ModelReference(model, handle, temperature=recipe.temperature, adapters=True)
    return _scorer(policy, recipe, next(model.parameters()).device)


def _reference_scorer(
    recipe: GrpoRecipe, model: Any, handle: StreamHandle, held: Any | None, start: Start
) -> Scorer | None:
    """Return a scorer under the reference, which is ``held`` or the policy without adapters; None without KL."""
    if recipe.beta == 0:
        return None
    if held is None:
        return _scorer(train.ModelReference(model, handle, temperature=recipe.temperature), recipe, start.device)
    share = start.share(recipe)
    beside = streamed(held, handle, temperature=recipe.temperature, share=share)
    return _scorer(beside, recipe, start.device)


def _scorer(reference: train.Reference, recipe: GrpoRecipe, device: torch.device) -> Scorer:
    def logprobs(batch: train.TreeBatch) -> Tensor:
        with autocast(device, recipe.bf16):
            return reference.logprobs(batch.to(device))

    return logprobs


def _make_writer(run: GrpoRun) -> rollout.Writer:
    recipe, device = run.recipe, run.start.device
    ends = _end_tokens(run.model, run.tokenizer)

    @contextmanager
    def computing() -> Iterator[None]:
        with run.handle.routers.silenced(), autocast(device, recipe.bf16):
            yield

    if recipe.use_vllm:
        folder = run.directory.path / "vllm"
        models.save_pretrained(run.model, run.tokenizer, folder)
        return rollout.VllmWriter(
            run.model,
            folder,
            end_token_ids=ends,
            max_length=recipe.max_length,
            memory_fraction=recipe.vllm_gpu_memory_utilization,
        )
    return rollout.TransformersWriter(
        run.model,
        end_token_ids=ends,
        pad_token_id=run.tokenizer.pad_token_id,
        prefill_chunk_size=run.handle.schedule.chunk_size,
        max_rows=recipe.per_device_generation_batch_size or recipe.per_device_train_batch_size,
        computing=computing,
        longest=run.start.world.largest if shares_weights(recipe) else None,
    )


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokenizer's end token, and those at which the model's generation config ends."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    said = getattr(base.generation_config, "eos_token_id", None)
    listed = said if isinstance(said, list) else [said]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})


def run_grpo(run: GrpoRun, console: Console) -> Outcome:
    """Train; if the run comes to its end, save the model and let it complete the sample prompt.

    Args:
        run: From :func:`build_grpo`; used once.
        console: The console that shows progress.

    Raises:
        RunError: Training failed; the checkpoints saved before are intact.
    """
    world = run.start.world
    recipe = of_all_ranks(run.recipe, world)
    log = CompletionLog(run.directory, run.tokenizer, recipe.num_completions_to_print, writes=world.is_main)
    writer = _make_writer(run)
    steps = GrpoSteps(
        recipe,
        run.prompts,
        writer=writer if world.size == 1 else SharedWriter(writer, world),
        judge=SharedJudge(run.judge, world),
        policy=_policy_scorer(recipe, run.model, run.handle),
        reference=run.reference,
        layout=run.layout,
        warm=run.warm,
        log=log,
        world=world,
    )

    def begin(backend: train.Backend, progress: train.Progress, stop: train.StopRequest) -> None:
        if isinstance(writer, rollout.TransformersWriter):
            writer.stop = lambda: stop.requested
        log.cut(run.checkpoint.step if run.checkpoint else 0)
        steps.activity = progress.activity
        # The moments of supervised gradients would scale the first steps of another loss.
        steps.on_first_rollout = backend.reset_optimizer

    return train_run(
        run,
        console,
        objective=PolicyObjective(run.handle, recipe),
        steps=steps,
        validation=steps.held_out if run.prompts.validation else None,
        learning_rate_at=_learning_rate(recipe, run.plan),
        begin=begin,
    )
