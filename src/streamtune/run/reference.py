"""Make the reference of a recipe: the trained model without its adapters, a second model, or log-probs on disk.

    adapters, and no name       the trained model, adapters switched off        nothing is held
    full, and no name           the model as it is when training starts         a second copy of the weights
    ref_model_name_or_path      that model                                      its weights
    teacher                     that model, of sft                              its weights
    precompute_ref_log_probs    any of these, run once before training          nothing, once it has been run

Log-probs that were computed once are kept below the user's cache directory under a hash of all they depend on: the
reference's weights and resolved configuration, device, precision and versions, and every token of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from streamtune import models, train
from streamtune.engine import StreamHandle, stream
from streamtune.errors import ArgumentError, StreamTuneError, UserError
from streamtune.plan.simulate.scored import PlainScores
from streamtune.run.model import make_reference_model
from streamtune.run.ranks import share_reference, whole_weights
from streamtune.run.start import Doing, Start
from streamtune.schedule import Schedule
from streamtune.tasks import Task
from streamtune.tasks.preference import PreferenceBatches
from streamtune.tasks.reference import KeptLogps, computation, compute_logps, configuration, read_logps, row_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_reference(
    task: Task[Any],
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    *,
    sharing: train.World | None = None,
) -> Any | None:
    """Load the reference as a second model; return None if the trained model without its adapters is the reference.

    Args:
        model: The trained model; None where it is not at hand, and a reference is named.
        sharing: The ranks that will share its weights: it is on ``meta``, and they come later.

    Raises:
        ArgumentError: There is no such model, or its vocabulary is another.
    """
    recipe, name = task.recipe, task.reference_name
    if name is None:
        if recipe.finetuning_type != "full":
            return None
        return _frozen(make_reference_model(recipe, tokenizer, device, sharing=sharing))
    try:
        reference = make_reference_model(recipe, tokenizer, device, name=name, sharing=sharing)
    except UserError as error:
        error.where = task.reference_key
        raise
    _check_vocabulary(task, name, reference, model, tokenizer)
    return _frozen(reference)


def make_reference(
    start: Start, model: Any, handle: StreamHandle, held: Any | None, closing: ExitStack
) -> train.Reference | None:
    """Return the reference as objectives call it: ``held``, or the trained model without its adapters; None without.

    Args:
        held: The second model, from :func:`load_reference`.
        closing: Gets a callback for the engine that gathers the reference's weights, where ranks share them.
    """
    if not start.task.compares:
        return None
    return reference_model(start.task, model, handle, held, _share(start, closing) if held is not None else None)


def reference_model(
    task: Task[Any],
    model: Any,
    handle: StreamHandle | None,
    held: Any | None,
    share: Callable[[Any, Any], None] | None = None,
) -> train.ModelReference:
    """Return the reference that runs: ``held``, or the model without its adapters; streamed if the model is."""
    if handle is not None and held is not None:
        return streamed(held, handle, temperature=task.temperature, share=share)
    called = model if held is None else held
    scorer: Any = PlainScores(called) if handle is None else handle
    return train.ModelReference(called, scorer, temperature=task.temperature)


def kept_logps(
    start: Start,
    model: Any,
    handle: StreamHandle,
    tokenizer: PreTrainedTokenizerBase,
    batches: PreferenceBatches,
    closing: ExitStack,
    doing: Doing,
) -> KeptLogps:
    """Return the reference's log-probs of every tree: kept from an earlier run, or computed now."""
    recipe, world, notify = start.recipe, start.world, start.notify
    # A run that is resumed says under which key they are kept; its model is no longer the one it started with.
    # A reference that was allowed to change is asked anew.
    same = start.checkpoint is not None and not start.changed_files() & {"base", "adapter", "reference"}
    known = start.checkpoint.state["identity"].get("reference") if start.checkpoint is not None and same else None
    how = computation(start.device, bf16=bool(recipe.bf16), temperature=start.task.temperature)
    own = start.task.reference_name is None
    if known is not None:
        parts = [how, *([configuration(model, adapters=False)] if own else [])]
        kept = read_logps(known, notify) if str(known).split("-")[: len(parts)] == parts else None
        if not world.any(kept is None):
            assert kept is not None
            start.identity["reference"] = known
            return kept
        notify("the reference is asked again: its log-probs are damaged or gone, or it would give others now")
    asked: Any = model
    if not own or (recipe.finetuning_type == "full" and start.checkpoint is not None):
        with doing("loading the reference"):
            asked = load_reference(start.task, model, tokenizer, start.device, sharing=start.sharing)
    reference = make_reference(start, model, handle, None if asked is model else asked, closing)
    assert reference is not None, "log-probs are kept of a reference"
    with doing("reading the reference's weights"):
        weights = whole_weights(recipe, asked) if start.shares_weights else asked.named_parameters()
        adapters = asked is not model
        rows = world.collect(row_key(weights, batches.asked(), adapters=adapters))[0]
        key = f"{how}-{configuration(asked, adapters=adapters)}-{rows}"
    start.identity["reference"] = key
    kept = None if key == known else read_logps(key, notify)  # which was read above, and cannot be used
    if not world.any(kept is None):
        assert kept is not None
        notify("the reference's log-probs are known from an earlier run")
        return kept
    with doing("asking the reference"):
        trees = map(batches.alone, batches.asked())
        return compute_logps(key, reference, trees, start.device, bf16=bool(recipe.bf16), notify=notify)


def _share(start: Start, closing: ExitStack) -> Callable[[Any, Any], None]:
    """Return a function that gives each rank its part of the reference's weights, if they come later."""

    def share(model: Any, layers: Any) -> None:
        engine = share_reference(start.recipe, model, layers, start.world, start.device)
        if engine is not None:
            closing.callback(engine.destroy)

    return share


def streamed(
    model: Any, like: StreamHandle, *, temperature: float = 1.0, share: Callable[[Any, Any], None] | None = None
) -> train.ModelReference:
    """Stream a second model by its own engine, which cuts and shares sequences as the trained model's engine does.

    Args:
        like: The trained model's engine.
        share: Called with the reference and its decoder layers; gives it its weights if they come later.
    """
    own = like.schedule
    chunks = Schedule(chunk_size=own.chunk_size, head_chunk_size=own.head_chunk_size, weights=own.weights)
    handle = stream(model, schedule=chunks, sequence_parallel=like.sequence_parallel)
    if share is not None:
        share(model, handle.layers)
    return train.ModelReference(model, handle, temperature=temperature)


def _frozen(model: Any) -> Any:
    model.requires_grad_(False)
    return model.eval()


def _check_vocabulary(
    task: Task[Any], name: str, reference: Any, model: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a reference with other token ids: every number would be finite and worth nothing.

    Without a tokenizer of the reference only the sizes can be compared. With one, embeddings may differ in size:
    families pad them differently.
    """
    key = task.reference_key
    noun = "teacher" if key == "teacher" else "reference"
    fix = f"use a {noun} with the tokenizer of the model, such as the model it was made from"
    theirs = reference.get_input_embeddings().weight.shape[0]
    ours = len(tokenizer) if model is None else model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > theirs:
        what = f"the {noun} '{name}' has an embedding of {theirs:,} rows, and the tokenizer {len(tokenizer):,} tokens"
        raise ArgumentError(what, where=key, fix=fix)
    try:
        vocabulary = models.load_tokenizer(name, trust_remote_code=task.recipe.trust_remote_code).get_vocab()
    except StreamTuneError:
        if ours != theirs:
            what = f"the {noun} '{name}' has a vocabulary of {theirs:,} tokens, and the model one of {ours:,}"
            raise ArgumentError(what, where=key, fix=fix) from None
        return
    known = tokenizer.get_vocab()
    differing = sum(vocabulary.get(token) != index for token, index in known.items())
    if differing:
        what = f"the {noun} '{name}' has another vocabulary: {differing:,} of {len(known):,} tokens differ"
        raise ArgumentError(what, where=key, fix=fix)
