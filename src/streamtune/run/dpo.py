"""Build a run of preference training from a recipe, and run it.

build_dpo   recipe -> tokenizer, trees, reference, model, engine, step plan; writes at most the reference's log-probs
run_dpo     train, save the model, let it complete the sample prompt
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamtune import data, models, objectives, train
from streamtune.engine import StreamHandle
from streamtune.errors import DataError
from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import make_sources, make_tokenizer_together
from streamtune.run.device import blame_recipe
from streamtune.run.engine import plan_and_stream
from streamtune.run.model import make_model, make_trial_model
from streamtune.run.ranks import whole_weights
from streamtune.run.reference import asked_for, load_reference, streamed
from streamtune.run.start import Doing, Notify, Start, start_run, tell_of_model
from streamtune.run.train import Outcome, Run, train_run
from streamtune.simulate.memory import held_bytes
from streamtune.simulate.scored import Trees
from streamtune.tasks.preference import (
    GivenReference,
    PairObjective,
    PreferenceBatches,
    UnpairedObjective,
    pair_knobs,
    unpaired_knobs,
)
from streamtune.tasks.reference import KeptLogps, compute_logps, read_logps, reference_key
from streamtune.tasks.shapes import completions_like
from streamtune.tasks.sharing import can_share
from streamtune.tasks.steps import Steps, plan_steps

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

__all__ = ["DpoRun", "build_dpo", "run_dpo"]


@dataclass(kw_only=True)
class DpoRun(Run):
    """Everything a run of preference training needs, built and checked."""

    batches: PreferenceBatches
    reference: train.Reference | None
    """None where the loss has none."""

    @property
    def objective(self) -> train.Objective:
        """The objective that is minimised."""
        recipe = _preferences(self.recipe)
        if recipe.unpaired:
            assert self.reference is not None, "losses of single completions compare with a reference"
            return UnpairedObjective(self.handle, recipe, self.reference, self.start.device)
        return PairObjective(self.handle, recipe, self.reference)


def build_dpo(
    loaded: LoadedRecipe,
    *,
    resume: str = "auto",
    allow_change: Collection[str] = (),
    dry_run: bool = False,
    notify: Notify = lambda message: None,
    doing: Doing = nullcontext,
) -> DpoRun:
    """Load or make everything the recipe names. Nothing is written but the reference's log-probs, where asked for.

    Args:
        loaded: The recipe, with ``objective: dpo``.
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        allow_change: Keys that may differ from the resumed run, see :func:`start_run`.
        dry_run: Plan a fixed schedule too, and compute no log-probs of the reference.
        notify: Called with messages for the user, a sentence at a time.
        doing: Returns a context that shows a message while something takes long.

    Raises:
        UserError: With the line of the recipe that is to blame.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        OutOfMemoryError: Memory ran out before the first step.
    """
    recipe = _preferences(loaded.recipe)
    with blame_recipe(loaded):
        compares = _check_loss(recipe)
    with blame_recipe(loaded), start_run(loaded, resume, notify, allow_change, dry_run=dry_run, doing=doing) as start:
        sources = make_sources(loaded)
        with doing("reading the tokenizer" if start.checkpoint else "making the tokenizer"):
            tokenizer = make_tokenizer_together(start.world, recipe, sources, start.checkpoint, notify)
        prepared = prepare_trees(recipe, sources, tokenizer, notify)
        start.with_data(prepared.fingerprint)
        longest = min(prepared.report.length_percentiles["max"], recipe.max_length)
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, start.checkpoint, start.device, sharing=start.sharing)
        tell_of_model(model, longest, start, notify)
        held = None
        if compares and not recipe.precompute_ref_log_probs:
            with doing("loading the reference"):
                held = load_reference(recipe, model, tokenizer, start.device, sharing=start.sharing)
        with doing("checking that prompts can be shared"):
            share = can_share(recipe, make_trial_model(recipe, model, start.device), notify)
        largest = _largest(prepared, recipe, longest, share)
        handle, backend, memory = plan_and_stream(
            recipe,
            model,
            start,
            rows=recipe.per_device_train_batch_size,
            length=longest,
            completions=completions_like(recipe, largest, longest, share=share),
            reference_bytes=0 if held is None else held_bytes(held),
            dry_run=dry_run,
            notify=notify,
            doing=doing,
        )
        measures = recipe.unpaired and objectives.UNPAIRED_LOSSES[recipe.loss_type].needs_baseline
        if measures:
            _check_prompts(prepared, recipe)
        batches = PreferenceBatches(
            prepared, recipe, pad_token_id=tokenizer.pad_token_id, share=share, measures=measures
        )
        reference: train.Reference | None = None
        if compares and recipe.precompute_ref_log_probs and not dry_run:
            reference = GivenReference()
            batches.kept = _logps_of_reference(recipe, model, handle, tokenizer, start, batches, notify, doing)
        elif compares:
            own = train.ModelReference(model, handle)
            reference = own if held is None else streamed(held, handle, share=start.share(recipe))
    return DpoRun(
        loaded=loaded,
        start=start,
        data_summary=prepared.report.describe(),
        tokenizer=tokenizer,
        model=model,
        parameters=models.count_parameters(model),
        handle=handle,
        backend=backend,
        plan=plan_steps(recipe, batches.num_train, start.world),
        unit="row" if recipe.unpaired else "pair",
        memory=memory,
        batches=batches,
        reference=reference,
    )


def run_dpo(run: DpoRun, console: Console) -> Outcome:
    """Train; if the run comes to its end, save the model and let it complete the sample prompt.

    Args:
        run: From :func:`build_dpo`; used once.
        console: The console that shows progress.

    Raises:
        RunError: Training failed; the checkpoints saved before are intact.
    """
    recipe, batches = run.recipe, run.batches
    held_out = (lambda: batches.held_out(recipe.per_device_eval_batch_size)) if batches.prepared.validation else None
    return train_run(
        run, console, objective=run.objective, steps=Steps(batches, recipe, run.start.world), validation=held_out
    )


def prepare_trees(
    recipe: DpoRecipe,
    sources: Sequence[data.Source],
    tokenizer: PreTrainedTokenizerBase,
    notify: Notify,
) -> data.PreparedTrees:
    """Return the rows as trees of token ids. Messages are passed on at the end, and not during the live count."""
    said: list[str] = []
    prepare = data.prepare_unpaired if recipe.unpaired else data.prepare_preferences
    try:
        return prepare(
            sources,
            tokenizer,
            max_length=recipe.max_length,
            max_prompt_length=recipe.max_prompt_length,
            overlength=recipe.overlength,
            identical_pairs=recipe.identical_pairs,
            val_size=recipe.val_size,
            seed=recipe.seed,
            notify=said.append,
        )
    finally:
        for text in said:
            notify(text)


def _check_loss(recipe: DpoRecipe) -> bool:
    """Return True if the loss compares with a reference.

    Raises:
        ArgumentError: A setting that the loss does not read, or a value that it does not accept.
    """
    if recipe.unpaired:
        return objectives.check_unpaired(recipe.loss_type, **unpaired_knobs(recipe)).needs_reference
    loss = objectives.check_preference(recipe.loss_type, **pair_knobs(recipe))
    return loss.needs_reference and not recipe.reference_free


def _largest(prepared: data.PreparedTrees, recipe: DpoRecipe, longest: int, share: bool) -> Trees:
    """Return the largest micro-batch that is possible, as trunks and branches.

    Args:
        prepared: The trees.
        recipe: The recipe.
        longest: Tokens of the longest completion with its prompt.
        share: Prompts are shared: it is the tree of most tokens that counts, not the longest row.
    """
    tree = prepared.train[int(prepared.train.lengths().argmax())]
    trunk = len(tree.prompt) - 1
    branches = tuple(len(completion) + 1 if share else longest - trunk for completion in tree.completions)
    return ((trunk, branches),) * recipe.per_device_train_batch_size


def _check_prompts(prepared: data.PreparedTrees, recipe: DpoRecipe) -> None:
    """Refuse data in which no completion belongs to another prompt.

    Raises:
        DataError: All rows have one prompt.
    """
    first = prepared.train[0].prompt
    if all(tree.prompt == first for tree in prepared.train):
        raise DataError(
            f"all rows to train on have the same prompt, and {recipe.loss_type} measures its distance from the "
            "reference on completions of other prompts",
            where=prepared.train[0].origin,
            mend="add rows with other prompts, or write loss_type: apo_zero_unpaired, which does not measure it",
        )


def _logps_of_reference(
    recipe: DpoRecipe,
    model: Any,
    handle: StreamHandle,
    tokenizer: PreTrainedTokenizerBase,
    start: Start,
    batches: PreferenceBatches,
    notify: Notify,
    doing: Doing,
) -> KeptLogps:
    """Return the reference's log-probs of every tree: those that are kept from an earlier run, or computed now."""
    # A run that is gone on with says under which key they are kept; its model is no longer the one it started with.
    # A reference that was allowed to change is asked anew.
    same = start.checkpoint is not None and not start.changed_files() & {"base", "adapter", "reference"}
    known = start.checkpoint.state["identity"].get("reference") if start.checkpoint is not None and same else None
    if known is not None and not start.world.any((kept := read_logps(known)) is None) and kept is not None:
        start.identity["reference"] = known
        return kept
    asked: Any = model
    if asked_for(recipe) is not None or (recipe.finetuning_type == "full" and start.checkpoint is not None):
        with doing("loading the reference"):
            asked = load_reference(recipe, model, tokenizer, start.device, sharing=start.sharing)
    own = train.ModelReference(model, handle)
    reference = own if asked is model else streamed(asked, handle, share=start.share(recipe))
    with doing("reading the reference's weights"):
        weights = whole_weights(recipe, asked) if start.shares_weights else asked.named_parameters()
        key = start.world.collect(reference_key(weights, batches.asked(), bf16=recipe.bf16))[0]
    start.identity["reference"] = key
    kept = read_logps(key)
    if not start.world.any(kept is None):
        assert kept is not None
        notify("the reference's log-probs are known from an earlier run")
        return kept
    with doing("asking the reference"):
        trees = map(batches.alone, batches.asked())
        return compute_logps(key, reference, trees, start.device, bf16=recipe.bf16, notify=notify)


def _preferences(recipe: Any) -> DpoRecipe:
    assert isinstance(recipe, DpoRecipe)
    return recipe
