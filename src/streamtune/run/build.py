"""Build a run from a recipe, for any objective: load or make everything that the recipe names."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, nullcontext

from streamtune import models, train
from streamtune.data.templates import fix_date
from streamtune.engine import StreamHandle
from streamtune.plan.simulate.memory import device_held_bytes
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import make_tokenizer_together, prepare_together
from streamtune.run.device import check_host_memory
from streamtune.run.engine import place_weights, plan_start, stream_start
from streamtune.run.first_factors import start_from_rows
from streamtune.run.model import make_model, make_trial_model
from streamtune.run.plan import LongestStep
from streamtune.run.recipe_lines import blame_recipe, make_sources
from streamtune.run.reference import kept_logps, load_reference, make_reference
from streamtune.run.samples import end_as_trained
from streamtune.run.start import Doing, start_run, tell_of_model
from streamtune.run.train import Run
from streamtune.tasks.preference import GivenReference, PreferenceBatches
from streamtune.tasks.task import Notify


def build_run(
    loaded: LoadedRecipe,
    *,
    resume: str = "auto",
    allow_change: Collection[str] = (),
    dry_run: bool = False,
    notify: Notify = lambda message: None,
    doing: Doing = nullcontext,
) -> Run:
    """Load or make everything the recipe names. Nothing is written but the reference's log-probs, where asked for.

    Args:
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        dry_run: Plan a fixed schedule too, and compute no log-probs of the reference.

    Raises:
        UserError: The error has the line of the recipe that is to blame.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        OutOfMemoryError: Memory ran out before the first step.
    """
    recipe = loaded.recipe
    with (
        blame_recipe(loaded),
        ExitStack() as closing,
        start_run(loaded, resume, notify, allow_change, dry_run=dry_run, doing=doing) as start,
    ):
        task = start.task
        fix_date(start.identity["date"])
        task.check_ranks(start.device, start.world)
        check_host_memory(recipe.engine)
        sources = make_sources(loaded)
        with doing("reading the tokenizer" if start.checkpoint else "making the tokenizer"):
            tokenizer = make_tokenizer_together(start.world, recipe, sources, start.checkpoint, notify)
        prepared = prepare_together(task, start.world, sources, tokenizer, notify)
        start.with_data(prepared.fingerprint)
        longest = task.longest(prepared)
        with doing("choosing the precision of the weights and where they wait"):
            start = place_weights(start, prepared, longest, notify)
        recipe, task = start.recipe, start.task
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, start.checkpoint, start.device, sharing=start.sharing)
        tell_of_model(model, longest, start, notify)
        added_ends = end_as_trained(task, prepared, tokenizer, model)
        held = None
        if task.compares and not task.precomputes:
            with doing("loading the reference"):
                held = load_reference(task, model, tokenizer, start.device, sharing=start.sharing)
        share = False
        if task.scores:
            with doing("checking that prompts can be shared"):
                whole = held is not None and models.deferred_of(held) is None
                share = task.can_share(
                    make_trial_model(recipe, model, start.device), notify, beside=held if whole else None
                )
        batches = task.batches(prepared, tokenizer, share=share)

        def first(handle: StreamHandle) -> None:
            if recipe.starts_from_gradients and start.checkpoint is None and not dry_run:
                with doing("computing the gradients that adapters start from"):
                    start_from_rows(recipe, task, model, handle, batches, start.world)

        completions = task.own_completions(prepared, longest, share=share)
        longest_step = LongestStep(
            task.planned_length(longest), completions, 0 if held is None else device_held_bytes(held)
        )
        planned = plan_start(start, model, longest_step, dry_run=dry_run, notify=notify, doing=doing)
        streamed = stream_start(start, model, planned, first, notify=notify, doing=doing)
        plan = task.count_steps(batches, start.micro_batches, start.world)
        if (note := plan.unfinished_warmup) is not None:
            notify(note)
        reference: train.Reference | None
        if task.precomputes and not dry_run:
            assert isinstance(batches, PreferenceBatches), "only preferences have log-probs that are kept"
            reference = GivenReference()
            batches.kept = kept_logps(
                start, model, streamed.handle, tokenizer, batches, closing, notify=notify, doing=doing
            )
        else:
            reference = make_reference(start, model, streamed.handle, held, closing)
        return Run(
            start=start,
            device=start.device,
            world=start.world,
            shares_weights=start.shares_weights,
            directory=start.directory,
            first_step=start.checkpoint.step if start.checkpoint else 0,
            tokenizer=tokenizer,
            prepared=prepared,
            batches=batches,
            model=model,
            parameters=models.count_parameters(model),
            streamed=streamed,
            batch_facts=task.batch_facts(prepared, try_packing=False),
            handle=streamed.handle,
            reference=reference,
            share=share,
            plan=plan,
            closing=closing.pop_all(),
            added_ends=added_ends,
        )
