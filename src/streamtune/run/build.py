"""Build a training run from a recipe, or only prepare and measure its dataset rows, without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed

from streamtune import models, train
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.base.text import parse_size, show_size
from streamtune.data import BatchStatistics
from streamtune.data.fit import Prepared
from streamtune.data.image_files import count_images, have_images
from streamtune.data.inspect_rows import RowInspector
from streamtune.data.length_measures import LengthBin, MaxLengthEffect, compare_max_lengths, length_histogram
from streamtune.data.templates import fix_template_date
from streamtune.engine import StreamHandle
from streamtune.engine.image_tower import with_tower_gradients
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.errors import ArgumentError
from streamtune.plan.simulate.memory import device_model_bytes
from streamtune.recipe.keys.adapters import TOWER_KEYS
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.settings import ModelSettings
from streamtune.run.data import (
    locate_errors,
    make_shared_tokenizer,
    make_sources,
    make_tokenizer,
    prepare_on_all_ranks,
    unread_chat_keys_note,
)
from streamtune.run.device import check_host_memory, prepare_libraries
from streamtune.run.engine import plan_schedule, stream_and_make_backend, with_chosen_placement
from streamtune.run.model import make_model, make_trial_model
from streamtune.run.plan import LongestStep
from streamtune.run.reference import load_or_compute_logps, load_reference, make_reference
from streamtune.run.samples import add_stop_tokens
from streamtune.run.start import Doing, Start, notify_model_warnings, start_run
from streamtune.run.train import Run
from streamtune.tasks import Task, task_of
from streamtune.tasks.grpo.task import GrpoData
from streamtune.tasks.preference import PrecomputedReference, PreferenceBatches
from streamtune.tasks.task import Notify
from streamtune.train.step import explain_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_run(
    loaded: LoadedRecipe,
    *,
    resume: str = "auto",
    allow_change: Collection[str] = (),
    dry_run: bool = False,
    notify: Notify = lambda message: None,
    doing: Doing = nullcontext,
) -> Run:
    """Return a run with data, model, reference model and training steps, ready to train.

    Only reference log-probs are written to disk, if the recipe sets ``precompute_ref_log_probs``.

    Args:
        loaded: Recipe with the lines of its keys.
        resume: ``auto`` (resume the run in ``output_dir``), ``never``, or the path of a checkpoint.
        allow_change: Recipe keys that may differ from the resumed run.
        dry_run: True to plan memory and time even with a fixed schedule, and to compute no reference log-probs.
        notify: Function called with messages for the user.
        doing: Function that returns a context manager, which shows a message during a slow activity.

    Raises:
        UserError: The recipe or an input is wrong; ``where`` is the line of the recipe.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        OutOfMemoryError: Memory ran out before the first step.
    """
    recipe = loaded.recipe
    with (
        locate_errors(loaded),
        ExitStack() as closing,
        start_run(loaded, resume, notify, allow_change, dry_run=dry_run, doing=doing) as start,
    ):
        task = start.task
        fix_template_date(start.identity["date"])
        task.check_ranks(start.device, start.world)
        check_host_memory(recipe.engine)
        sources = make_sources(loaded)
        with doing("reading the tokenizer" if start.checkpoint else "making the tokenizer"):
            tokenizer = make_shared_tokenizer(start.world, recipe, sources, start.checkpoint, notify)
        prepared = prepare_on_all_ranks(task, start.world, sources, tokenizer, notify)
        if start.weights_are_sharded and not recipe.fsdp and prepared.has_images:
            raise ArgumentError(
                "the rows have images, and ZeRO-3 gathers the vision tower's weights only if all ranks have images",
                where="deepspeed",
                fix="write fsdp: true, or deepspeed: zero2",
            )
        if (note := unread_chat_keys_note(recipe, sources)) is not None:
            notify(note)
        start.record_data(prepared.fingerprint)
        longest_row = task.longest_row_tokens(prepared)
        with doing("choosing the precision and placement of the weights"):
            start = with_chosen_placement(start, prepared, longest_row, notify)
        recipe, task = start.recipe, start.task
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, start.checkpoint, start.device, shard_world=start.shard_world)
        if parts := models.trained_image_modules(model):
            _check_trained_tower(start, model, parts, prepared.training, notify)
        notify_model_warnings(model, longest_row, start, notify)
        added_stop_tokens = add_stop_tokens(task, prepared, tokenizer, model)
        second_model = None
        if task.uses_reference and not task.precomputes_reference:
            with doing("loading the reference"):
                second_model = load_reference(
                    task,
                    model,
                    tokenizer,
                    start.device,
                    shard_world=start.shard_world,
                    has_images=prepared.has_images,
                )
        share = False
        if task.scores_completions and not prepared.has_images:  # an image is in one sequence
            with doing("checking that prompts can be shared"):
                has_loaded_weights = second_model is not None and models.find_deferred_weights(second_model) is None
                share = task.can_share_prompts(
                    make_trial_model(recipe, model, start.device),
                    notify,
                    second_model=second_model if has_loaded_weights else None,
                )
        batches = task.make_batch_maker(prepared, tokenizer, model, share=share)

        def check_and_start_adapters(handle: StreamHandle) -> None:
            task.check_batches(handle, batches, notify)
            if recipe.starts_from_gradients and start.checkpoint is None and not dry_run:
                with doing("computing gradients to initialise the adapters"):
                    init_adapters_from_gradient(recipe, task, model, handle, batches, start.world)

        completions = task.make_measured_shape_function(prepared, longest_row, share=share)
        longest_step = LongestStep(
            task.planned_length(longest_row),
            completions,
            0 if second_model is None else device_model_bytes(second_model),
            task.largest_images(batches),
        )
        planned = plan_schedule(start, model, longest_step, dry_run=dry_run, notify=notify, doing=doing)
        streamed = stream_and_make_backend(start, model, planned, check_and_start_adapters, notify=notify, doing=doing)
        plan = task.count_steps(batches, start.micro_batches, start.world)
        if (note := plan.unfinished_warmup_warning) is not None:
            notify(note)
        reference: train.Reference | None
        if task.precomputes_reference and not dry_run:
            assert isinstance(batches, PreferenceBatches), "only preferences precompute log-probs"
            reference = PrecomputedReference()
            batches.reference_logps = load_or_compute_logps(
                start, model, streamed.handle, tokenizer, batches, closing, doing
            )
        else:
            reference = make_reference(start, model, streamed.handle, second_model, closing)
        return Run(
            start=start,
            device=start.device,
            world=start.world,
            weights_are_sharded=start.weights_are_sharded,
            directory=start.directory,
            first_step=start.checkpoint.step if start.checkpoint else 0,
            tokenizer=tokenizer,
            prepared=prepared,
            batches=batches,
            model=model,
            parameters=models.count_parameters(model),
            streamed=streamed,
            batch_facts=task.first_epoch_statistics(prepared, try_packing=False),
            handle=streamed.handle,
            reference=reference,
            share=share,
            plan=plan,
            closing=closing.pop_all(),
            added_stop_tokens=added_stop_tokens,
        )


def init_adapters_from_gradient(
    recipe: ModelSettings, task: Task[Any], model: Any, handle: StreamHandle, batches: Any, world: train.World
) -> None:
    """Initialise the adapters from the gradient of the mean loss of ``lora_ga_rows`` random rows (LoRA-GA).

    Rank 0 computes the gradient, and sends the resulting adapter weights to the other ranks. The gradients of one layer
    at a time are in memory.

    Args:
        recipe: Settings of the adapters; the seed chooses the rows.
        task: Task of the run.
        model: Model with new adapters, not sharded or wrapped by a backend.
        handle: Handle of the model, returned by ``streamtune.stream``.
        batches: Batches of the training rows.
        world: Ranks of the run.

    Raises:
        ArgumentError: The sum of the gradients of several rows does not fit in host memory.
        NonFiniteError: A gradient is not finite.
        OutOfMemoryError: A row does not fit in device memory.
    """
    world.run_on_rank_0(partial(_init_adapters, recipe, task, model, handle, batches))
    if world.size > 1:
        with torch.no_grad():
            for values in models.initial_value_tensors(model):
                sent = values.detach().cpu()
                distributed.broadcast(sent, src=0, group=world.group)
                values.copy_(sent)


def _init_adapters(recipe: ModelSettings, task: Task[Any], model: Any, handle: StreamHandle, batches: Any) -> None:
    count = min(recipe.lora_ga_rows, batches.num_training_units)
    units = np.random.default_rng(recipe.seed).choice(batches.num_training_units, count, replace=False)
    rows = [batches.training_batch([int(unit)]) for unit in np.sort(units)]
    if len(rows) > 1:
        _check_host_memory(recipe, model)
    device, world = model_device(model), train.WORLD
    objective = task.make_objective(handle, None, device)
    totals = objective.step_totals(rows, world)

    def row_loss(batch: train.MicroBatch) -> Tensor:
        with train.autocast(device, recipe.autocast_dtype):
            return with_tower_gradients(objective.score(model, batch.to(device), totals).total_loss, model)

    schedule, training = handle.schedule, model.training
    if schedule.order == "chunk":  # chunk order yields all gradients only at its end
        handle.reschedule(replace(schedule, order="layer"))
    model.train()
    fix = "lower max_length, or write adapter_type: lora"
    try:
        with (
            explain_out_of_memory("the gradient that initialises the adapters", rows, fix),
            handle.routers.without_losses(),
        ):
            losses: list[Callable[[], Tensor]] = [partial(row_loss, batch) for batch in rows]
            factors = models.factors_from_gradients(model, losses, gamma=recipe.lora_ga_gamma, seed=recipe.seed)
    finally:
        model.train(training)
        if handle.schedule != schedule:
            handle.reschedule(schedule)
    models.initialize_from_factors(model, factors)


def _check_trained_tower(start: Start, model: Any, parts: Sequence[str], rows: Any, notify: Notify) -> None:
    """Check that a run can train the parts of a model for images. Loaded adapters in them are frozen without images.

    Args:
        start: Start of the run.
        model: Model of the run.
        parts: Names of the trained modules.
        rows: Training rows, without held-out rows.
        notify: Function called with a note if loaded adapters are not trained.

    Raises:
        ArgumentError: No row has images, or DeepSpeed trains on several ranks.
    """
    recipe, names = start.recipe, ", ".join(parts)
    has_images = recipe.streaming or (have_images(rows) and bool(count_images(rows).any()))
    if not has_images and recipe.adapter_name_or_path is not None:
        notify(f"no row has images, so the adapters in {names} do not change")
        for part in parts:
            for parameter in models.parameters_at(base_of(model), part).values():
                parameter.requires_grad_(False)
        return
    if not has_images:
        key = next((key for key in TOWER_KEYS if not getattr(recipe, key)), "lora_target")
        raise ArgumentError(
            f"no row has images, so {names} cannot be trained",
            where=key,
            fix="add rows with images, or name layers of the language model"
            if key == "lora_target"
            else "add rows with images, or delete the line",
        )
    if recipe.deepspeed is not None and start.world.size > 1:
        raise ArgumentError(
            f"{names} is trained, and DeepSpeed reduces gradients in the order in which they are computed, which "
            "differs between ranks with and without images",
            where="deepspeed",
            fix="delete the line (DDP), or write fsdp: true",
        )


def _check_host_memory(recipe: ModelSettings, model: Any) -> None:
    needed_bytes, host_memory = models.gradient_sum_bytes(model), recipe.engine.host_memory
    usable_bytes = usable_host_bytes() if host_memory == "auto" else parse_size(host_memory, where="engine.host_memory")
    if needed_bytes > usable_bytes:
        raise ArgumentError(
            f"summing the gradients of {recipe.lora_ga_rows:,} rows needs {show_size(needed_bytes)} of host memory, "
            f"but only {show_size(usable_bytes)} are usable",
            where="lora_ga_rows",
            fix="write lora_ga_rows: 1, which needs no sum, or adapter_type: lora",
        )


@dataclass(frozen=True)
class Inspection:
    """Prepared dataset rows of a recipe, with statistics of lengths and batches, for ``streamtune data``."""

    loaded: LoadedRecipe
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared[Any, Any]
    rows: RowInspector
    limit: int
    """Length limit in tokens: the recipe's ``max_length``, or ``max_prompt_length`` for prompts."""
    limit_name: str
    histogram: list[LengthBin]
    choices: list[MaxLengthEffect]
    batches: BatchStatistics | None
    """Statistics of the batches; None for preference data and prompts, whose batches depend on the model."""

    def to_json(self) -> dict[str, Any]:
        recipe = self.loaded.recipe
        return {
            **self.prepared.report.to_json(),
            "recipe": str(self.loaded.path),
            "objective": recipe.objective,
            "overlength": recipe.overlength,
            self.limit_name: self.limit,
            "vocabulary": len(self.tokenizer),
            "histogram": [asdict(each) for each in self.histogram],
            "lengths": [asdict(each) for each in self.choices],
            "batches": None if self.batches is None else asdict(self.batches),
        }


def inspect_recipe(
    loaded: LoadedRecipe, notify: Notify = lambda message: None, doing: Doing = nullcontext
) -> Inspection:
    """Read, tokenize and measure the dataset rows of a recipe; no model is loaded."""
    recipe, task = loaded.recipe, task_of(loaded.recipe)
    with locate_errors(loaded):
        prepare_libraries(torch.device("cpu"))
        sources = make_sources(loaded)
        with doing("making the tokenizer"):
            tokenizer = make_tokenizer(recipe, sources, None, notify)
        prepared: Prepared[Any, Any] = task.prepare(sources, tokenizer, notify)  # type: ignore[assignment]
        if (note := unread_chat_keys_note(recipe, sources)) is not None:
            notify(note)
    trees = task.scores_completions and not isinstance(prepared, GrpoData)
    options = task.data_options()
    if prepared.has_images and options.overlength == "truncate":
        options = replace(options, overlength="drop")  # such rows are never cut
    limit_name, limit = task.row_limit
    kinds = tuple(prepared.report.completion_lengths) if trees else ()
    unpaired = "desirable" in kinds or "undesirable" in kinds
    with doing("measuring the rows"):
        return Inspection(
            loaded=loaded,
            tokenizer=tokenizer,
            prepared=prepared,
            rows=RowInspector(
                prepared, tokenizer, ("desirable", "undesirable") if unpaired else ("chosen", "rejected")
            ),
            limit=limit,
            limit_name=limit_name,
            histogram=length_histogram(prepared.measured.lengths, limit),
            choices=compare_max_lengths(
                prepared.measured,
                limit,
                options,
                batch_size=None if task.scores_completions else recipe.per_device_train_batch_size,
                shuffle=recipe.shuffle,
                cuts_rows=not (trees or prepared.has_images),
            ),
            batches=task.first_epoch_statistics(prepared),
        )
