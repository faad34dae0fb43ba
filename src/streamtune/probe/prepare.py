"""Make whole training steps of a recipe on random tokens: a trial of the probe runs them, in its own process.

They are the training loop's own functions with the recipe's own objective and reference, on batches shaped like the
recipe's. Gradients are accumulated over two micro-batches where the recipe does so over several: those of the first are
there during the second, and that is all that more of them would add.

A step of grpo begins with a rollout that is as large as any and short: as many completions as are written together, a
few tokens each, of prompts so long that their keys and values come to the length that is tried. With ``use_vllm``
nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from streamtune import rollout, train
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError
from streamtune.probe.steps import BudgetExceededError, Shape, StepBudget, TrainingStep
from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.recipe.schema import Recipe
from streamtune.run.device import quiet_libraries
from streamtune.run.model import make_model_alone, make_optimizer, make_reference_alone
from streamtune.run.plan import plan_model
from streamtune.run.reference import streamed
from streamtune.run.streaming import stream_model
from streamtune.schedule import Schedule
from streamtune.simulate.checkpointing import use_checkpointing
from streamtune.simulate.memory import held_bytes
from streamtune.simulate.plain_scores import PlainScores
from streamtune.simulate.scored import Scored
from streamtune.tasks.grpo.objective import PolicyBatch, PolicyObjective
from streamtune.tasks.preference import GivenReference, PairObjective, UnpairedObjective
from streamtune.tasks.random_batches import RandomTokens
from streamtune.tasks.shapes import completions_of, has_reference, holds_reference
from streamtune.tasks.sharing import can_share
from streamtune.train.objective import autocast
from streamtune.train.routers import StepRouters
from streamtune.train.step import accumulate_gradients, explain_out_of_memory

__all__ = ["OBJECTIVES", "make_reference", "prepare_step"]

WRITTEN = 4
"""Tokens of a completion that a trial writes."""


def prepare_step(recipe: Recipe, device_name: str, budget: StepBudget, shape: Shape) -> TrainingStep:
    """Make the model, the optimizer and the step of a trial, in its process.

    Raises:
        BudgetExceededError: The planner finds no schedule for this shape.
    """
    device = torch.device(device_name)
    quiet_libraries(device)
    model = make_model_alone(recipe, device)
    beside = make_reference_alone(recipe, device) if holds_reference(recipe) else None
    share = shape.mode == "stream" and can_share(recipe, model)
    handle: StreamHandle | None = None
    if shape.mode == "stream":
        schedule = _planned(recipe, model, shape, budget, share, 0 if beside is None else held_bytes(beside))
        handle = stream_model(recipe, model, schedule)
    elif shape.mode == "checkpoint":
        use_checkpointing(model)
    optimizer = make_optimizer(recipe, model)
    job = Trained(recipe, model, handle, beside, shape, share)
    return TrainingStep(
        model, optimizer, partial(_step, job, optimizer, OBJECTIVES[recipe.objective](job)), handle, beside
    )


@dataclass(frozen=True)
class Trained:
    """The model, the reference and the shape of the step that a trial runs."""

    recipe: Recipe
    model: Any
    handle: StreamHandle | None
    """None where it is a baseline."""
    beside: Any | None
    """The reference that is held."""
    shape: Shape
    share: bool
    """True if prompts are shared."""

    @property
    def scorer(self) -> Any:
        """The object that computes log-probabilities for objectives."""
        return PlainScores(self.model) if self.handle is None else self.handle

    @property
    def scored(self) -> Scored:
        """The completions of a micro-batch."""
        completions = completions_of(self.recipe)
        assert completions is not None
        return replace(completions(self.shape.length, self.shape.batch_size), share=self.share)

    @property
    def batches(self) -> range:
        """The micro-batches of a step."""
        return range(min(self.recipe.gradient_accumulation_steps, 2))


def _planned(
    recipe: Recipe, model: Any, shape: Shape, budget: StepBudget, share: bool, beside_bytes: int
) -> Schedule | None:
    """Return the planner's schedule for a run of batches like these; None if the recipe fixes the schedule."""
    if recipe.engine.schedule == "fixed":
        return None
    sizes = {"device_memory": budget.device_bytes, "host_memory": budget.host_bytes, "disk_memory": budget.disk_bytes}
    given = {name: f"{size}B" for name, size in sizes.items() if size is not None}
    engine = recipe.engine.model_copy(update={**given, "margin": budget.margin})
    like = recipe.model_copy(update={"engine": engine, "per_device_train_batch_size": shape.batch_size})
    device = next(model.parameters()).device
    completions = completions_of(recipe, share=share)
    try:
        return plan_model(
            like, model, shape.length, device, completions=completions, reference_bytes=beside_bytes
        ).schedule
    except ArgumentError as error:
        raise BudgetExceededError("device", f"device memory: {error.what}") from error


def _step(job: Trained, optimizer: torch.optim.Optimizer, prepared: Prepared) -> None:
    """Run one optimizer step, as ``train.loop`` does."""
    recipe, model = job.recipe, job.model
    settings = train.TrainSettings(
        total_steps=1,
        steps_per_epoch=1,
        max_grad_norm=recipe.max_grad_norm,
        eval_steps=0,
        save_steps=0,
        save_total_limit=1,
        bf16=recipe.bf16,
        seed=recipe.seed,
        out_of_memory_mend="",
    )
    objective, make_batches = prepared
    batches = make_batches()
    backend = train.LocalBackend(model, optimizer)
    accumulate_gradients(
        backend,
        objective,
        batches,
        StepRouters(job.handle, batches),
        settings=settings,
        step=1,
        progress=lambda activity: None,
        stop=train.StopRequest(),
    )
    backend.clip_gradients(settings.max_grad_norm)
    # Nothing is to be learnt from random tokens: the update runs whole and leaves the weights as they are.
    with explain_out_of_memory("the optimizer at step 1", batches, settings.out_of_memory_mend):
        backend.step(0.0)


# --- objectives -------------------------------------------------------------------------------------------------------

Prepared = tuple[train.Objective, Callable[[], Sequence[train.MicroBatch]]]
"""An objective, and what makes the micro-batches of a step."""


def _sft(job: Trained) -> Prepared:
    draw = RandomTokens(job.recipe, job.model)
    batches = [draw.rows(job.shape.batch_size, job.shape.length).to(_device(job)) for _ in job.batches]
    return train.SupervisedObjective(job.handle), lambda: batches


def _dpo(job: Trained) -> Prepared:
    recipe = job.recipe
    assert isinstance(recipe, DpoRecipe)
    draw = RandomTokens(recipe, job.model)
    batches = [draw.preferences(recipe, job.scored) for _ in job.batches]
    reference = make_reference(job)
    if recipe.unpaired:
        assert reference is not None
        return UnpairedObjective(job.scorer, recipe, reference, _device(job)), lambda: batches
    return PairObjective(job.scorer, recipe, reference), lambda: batches


def make_reference(job: Trained) -> train.Reference | None:
    """Make the reference: the model without its adapters, the second model, or given log-probs; None without one."""
    recipe = job.recipe
    if not has_reference(recipe):
        return None
    if getattr(recipe, "precompute_ref_log_probs", False):
        return GivenReference()
    temperature = recipe.temperature if isinstance(recipe, GrpoRecipe) else 1.0
    if job.beside is None:
        return train.ModelReference(job.model, job.scorer, temperature=temperature)
    if job.handle is None:
        plain: Any = PlainScores(job.beside)
        return train.ModelReference(job.beside, plain, temperature=temperature)
    return streamed(job.beside, job.handle, temperature=temperature)


def _grpo(job: Trained) -> Prepared:
    recipe, device = job.recipe, _device(job)
    assert isinstance(recipe, GrpoRecipe)
    draw = RandomTokens(recipe, job.model)
    drawn = [draw.completions(recipe, job.scored) for _ in job.batches]
    policy = train.ModelReference(job.model, job.scorer, temperature=recipe.temperature, adapters=True)
    asked = {"old_K": policy if recipe.needs_old_logprobs else None, "ref_K": make_reference(job)}
    write = _rollout(job, recipe, draw)

    def batches() -> list[PolicyBatch]:
        write()
        found = []
        for batch in drawn:
            moved = batch.to(device)
            with autocast(device, recipe.bf16):
                known: dict[str, Any] = {
                    name: each.logprobs(moved).cpu() for name, each in asked.items() if each is not None
                }
            found.append(replace(batch, **known))
        return found

    return PolicyObjective(job.scorer, recipe), batches


def _rollout(job: Trained, recipe: GrpoRecipe, draw: RandomTokens) -> Callable[[], None]:
    """Return a function that writes the last tokens of completions that come to the length of the trial."""
    if recipe.use_vllm:
        return lambda: None
    group = recipe.num_generations
    at_once = recipe.per_device_generation_batch_size or job.shape.batch_size
    writer = rollout.TransformersWriter(
        job.model,
        end_token_ids=[],
        pad_token_id=0,
        prefill_chunk_size=(Schedule() if job.handle is None else job.handle.schedule).chunk_size,
        max_rows=at_once,
        computing=lambda: autocast(_device(job), recipe.bf16),
    )
    written = min(WRITTEN, job.shape.length - 1)
    prompts = draw.prompts(max(1, min(at_once // group, recipe.prompts_per_generation)), job.shape.length - written)
    sampling = rollout.Sampling(written, temperature=recipe.temperature)

    def write() -> None:
        writer.write(prompts, group, sampling)

    return write


def _device(job: Trained) -> torch.device:
    device: torch.device = next(job.model.parameters()).device
    return device


OBJECTIVES: dict[str, Callable[[Trained], Prepared]] = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}
"""Objective -> what makes its loss and the micro-batches of its steps."""
