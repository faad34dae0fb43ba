"""A recipe to a run of supervised fine-tuning.

build_sft   recipe -> tokenizer, data, model, engine, step plan; reads everything, writes nothing
run_sft     train, save the model, try it
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamtune import data, models, train
from streamtune.engine import check_packing
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import make_sources, make_tokenizer_together, prepare_data
from streamtune.run.device import blame_recipe
from streamtune.run.engine import plan_and_stream
from streamtune.run.model import make_model
from streamtune.run.start import Doing, Notify, start_run, tell_of_model
from streamtune.run.train import Outcome, Run, train_run
from streamtune.tasks.steps import Batches, Steps, plan_steps

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SftRun", "build_sft", "run_sft"]


@dataclass(kw_only=True)
class SftRun(Run):
    """Everything a run of supervised fine-tuning needs, built and checked."""

    data: data.PreparedData


def build_sft(
    loaded: LoadedRecipe,
    *,
    resume: str = "auto",
    allow_change: Collection[str] = (),
    dry_run: bool = False,
    notify: Notify = lambda message: None,
    doing: Doing = nullcontext,
) -> SftRun:
    """Load or make everything the recipe names. Nothing is written.

    Args:
        loaded: The recipe.
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        allow_change: What may differ from the run that is gone on with, see :func:`start_run`.
        dry_run: Plan a fixed schedule too: what it would hold is what a dry run is for.
        notify: Told what is worth knowing on the way, a sentence at a time.
        doing: Shows what takes a while, for as long as it does.

    Raises:
        UserError: With the line of the recipe that is to blame.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        OutOfMemoryError: Memory ran out before the first step.
    """
    recipe = loaded.recipe
    with blame_recipe(loaded), start_run(loaded, resume, notify, allow_change, dry_run=dry_run, doing=doing) as start:
        sources = make_sources(loaded)
        with doing("reading the tokenizer" if start.checkpoint else "making the tokenizer"):
            tokenizer = make_tokenizer_together(start.world, recipe, sources, start.checkpoint, notify)
        prepared = prepare_data(recipe, sources, tokenizer, notify)
        start.with_data(prepared.fingerprint)
        longest = min(prepared.report.length_percentiles["max"], recipe.max_length)
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, start.checkpoint, start.device, sharing=start.sharing)
        tell_of_model(model, longest, start, notify)
        handle, backend, memory = plan_and_stream(
            recipe,
            model,
            start,
            rows=recipe.per_device_train_batch_size,
            length=recipe.max_length if recipe.packing else longest,
            check=check_packing if recipe.packing else lambda handle: None,
            dry_run=dry_run,
            notify=notify,
            doing=doing,
        )
    return SftRun(
        loaded=loaded,
        start=start,
        data=prepared,
        data_summary=prepared.report.describe(),
        tokenizer=tokenizer,
        model=model,
        parameters=models.count_parameters(model),
        handle=handle,
        backend=backend,
        plan=plan_steps(recipe, Batches(prepared, tokenizer).num_train, start.world),
        unit="packed sequence" if recipe.packing else "row",
        memory=memory,
    )


def run_sft(run: SftRun, console: Console) -> Outcome:
    """Train, and where the run comes to its end save the model and let it answer the sample prompt.

    Args:
        run: From :func:`build_sft`; used once.
        console: Where progress is shown.

    Raises:
        RunError: It failed on the way; the checkpoints saved before are intact.
    """
    recipe, batches = run.recipe, Batches(run.data, run.tokenizer)
    held_out = (lambda: batches.held_out(recipe.per_device_eval_batch_size)) if run.data.validation else None
    return train_run(
        run,
        console,
        objective=train.SupervisedObjective(run.handle),
        steps=Steps(batches, recipe, run.start.world),
        validation=held_out,
    )
