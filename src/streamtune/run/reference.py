"""Create the reference model of a recipe, or compute and cache its log-probs.

    recipe                      reference                                       extra memory
    adapters                    the trained model with adapters disabled        none
    full fine-tuning            the model as it is when training starts         a second copy of the weights
    ref_model_name_or_path      the named model                                 its weights
    teacher (sft)               the named model                                 its weights
    precompute_ref_log_probs    any of these, run once before training          none while training

Precomputed log-probs are cached on disk. Their key is a hash of the reference's weights and configuration, the device,
precision, versions, and all tokens of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from streamtune import models, train
from streamtune.base.adapters import base_of
from streamtune.engine import StreamHandle, stream
from streamtune.errors import ArgumentError, StreamTuneError, UserError
from streamtune.plan.simulate.scored import PlainScores
from streamtune.run.model import make_reference_model
from streamtune.run.ranks import gather_weights, shard_reference
from streamtune.run.start import Doing, Start
from streamtune.schedule import Schedule
from streamtune.tasks import Task
from streamtune.tasks.preference import PreferenceBatches
from streamtune.tasks.reference import (
    CachedLogps,
    computation_hash,
    compute_logps,
    configuration_hash,
    read_logps,
    rows_hash,
    weights_hash,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_reference(
    task: Task[Any],
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    *,
    shard_world: train.World | None = None,
    has_images: bool = False,
) -> Any | None:
    """Return the reference as a second model; None if it is the trained model without its adapters.

    Args:
        task: Task of the run.
        model: Trained model; None if it is not loaded and the recipe names a reference.
        tokenizer: Tokenizer of the data.
        device: Device of this rank.
        shard_world: Ranks that will shard its weights; it is then on ``meta``, and its weights are loaded later.
        has_images: True if the reference gets images, which the processor of the trained model prepares.

    Raises:
        ArgumentError: The model does not exist, its vocabulary differs, or it cannot get the images.
    """
    recipe, name = task.recipe, task.reference_name
    if name is None:
        if recipe.finetuning_type != "full":
            return None
        return _freeze(make_reference_model(recipe, tokenizer, device, shard_world=shard_world))
    try:
        reference = make_reference_model(recipe, tokenizer, device, name=name, shard_world=shard_world)
    except UserError as error:
        error.where = task.reference_key
        raise
    kinds = [base_of(each).config.model_type for each in (reference, model)] if has_images else []
    if len(set(kinds)) > 1:
        raise ArgumentError(
            f"the rows have images prepared for a model of type {kinds[1]}, and '{name}' is of type {kinds[0]}",
            where=task.reference_key,
            fix=f"use a model of type {kinds[1]}",
        )
    _check_vocabulary(task, name, reference, model, tokenizer)
    return _freeze(reference)


def make_reference(
    start: Start, model: Any, handle: StreamHandle, second_model: Any | None, closing: ExitStack
) -> train.Reference | None:
    """Return the reference for the objective; None if the objective needs none.

    Args:
        start: Start of the run.
        model: Trained model.
        handle: Handle of the trained model, returned by ``streamtune.stream``.
        second_model: Second model from :func:`load_reference`; None for the trained model without its adapters.
        closing: Exit stack; when it closes, the DeepSpeed engine of a sharded reference is destroyed.
    """
    if not start.task.uses_reference:
        return None
    return wrap_reference(
        start.task, model, handle, second_model, _shard_loader(start, closing) if second_model is not None else None
    )


def wrap_reference(
    task: Task[Any],
    model: Any,
    handle: StreamHandle | None,
    second_model: Any | None,
    load_shards: Callable[[Any, Any], None] | None = None,
) -> train.ModelReference:
    """Return ``second_model``, or the model without its adapters, as a reference; streamed if ``handle`` is given."""
    if handle is not None and second_model is not None:
        return stream_reference(second_model, handle, temperature=task.temperature, load_shards=load_shards)
    called = model if second_model is None else second_model
    scorer: Any = PlainScores(called) if handle is None else handle
    return train.ModelReference(called, scorer, temperature=task.temperature)


def load_or_compute_logps(
    start: Start,
    model: Any,
    handle: StreamHandle,
    tokenizer: PreTrainedTokenizerBase,
    batches: PreferenceBatches,
    closing: ExitStack,
    doing: Doing,
) -> CachedLogps:
    """Return the reference's log-probs of all completions: cached, or computed now."""
    recipe, world, notify = start.recipe, start.world, start.notify
    # A resumed run has the cache key in its checkpoint, because its model has changed since the start.
    # If the reference was allowed to change, its log-probs are computed again.
    unchanged = start.checkpoint is not None and not start.changed_file_keys() & {"base", "adapter", "reference"}
    saved_key = (
        start.checkpoint.state["identity"].get("reference") if start.checkpoint is not None and unchanged else None
    )
    computation_key = computation_hash(
        start.device, autocast_dtype=recipe.autocast_dtype, temperature=start.task.temperature
    )
    key_parts = [computation_key, rows_hash(batches.reference_trees())]
    is_own_model = start.task.reference_name is None
    if saved_key is not None:
        parts = [*key_parts, *([configuration_hash(model, adapters=False)] if is_own_model else [])]
        cached = read_logps(saved_key, notify) if str(saved_key).split("-")[: len(parts)] == parts else None
        if not world.any_rank(cached is None):
            assert cached is not None
            start.identity["reference"] = saved_key
            return cached
        notify(
            "log-probs of the reference are computed again: the cached ones are damaged, missing, outdated or "
            "of other rows"
        )
    scored_model: Any = model
    if not is_own_model or (recipe.finetuning_type == "full" and start.checkpoint is not None):
        with doing("loading the reference"):
            scored_model = load_reference(
                start.task,
                model,
                tokenizer,
                start.device,
                shard_world=start.shard_world,
                has_images=batches.images is not None,
            )
    reference = make_reference(start, model, handle, None if scored_model is model else scored_model, closing)
    assert reference is not None, "unreachable: a recipe with reference log-probs has a reference"
    with doing("reading the reference's weights"):
        weights = gather_weights(recipe, scored_model) if start.weights_are_sharded else scored_model.named_parameters()
        adapters = scored_model is not model
        weights_key = world.gather_all_ranks(weights_hash(weights, adapters=adapters))[0]
        key = "-".join([*key_parts, configuration_hash(scored_model, adapters=adapters), weights_key])
    start.identity["reference"] = key
    cached = None if key == saved_key else read_logps(key, notify)  # read above, and unusable
    if not world.any_rank(cached is None):
        assert cached is not None
        notify("log-probs of the reference were read from the cache")
        return cached
    with doing("computing log-probs of the reference"):
        trees = map(batches.make_single_batch, batches.reference_trees())
        return compute_logps(key, reference, trees, start.device, autocast_dtype=recipe.autocast_dtype, notify=notify)


def _shard_loader(start: Start, closing: ExitStack) -> Callable[[Any, Any], None]:
    def load_shards(model: Any, layers: Any) -> None:
        engine = shard_reference(start.recipe, model, layers, start.world, start.device)
        if engine is not None:
            closing.callback(engine.destroy)

    return load_shards


def stream_reference(
    model: Any,
    trained_handle: StreamHandle,
    *,
    temperature: float = 1.0,
    load_shards: Callable[[Any, Any], None] | None = None,
) -> train.ModelReference:
    """Return a second model as a reference, streamed with the chunk sizes and sequence ranks of the trained model.

    Args:
        model: Reference model.
        trained_handle: Handle of the trained model, returned by ``streamtune.stream``.
        temperature: Divisor of the logits.
        load_shards: Function called with the model and its decoder layers; loads weights that are on ``meta``.
    """
    schedule = trained_handle.schedule
    chunks = Schedule(
        chunk_size=schedule.chunk_size, head_chunk_size=schedule.head_chunk_size, weights=schedule.weights
    )
    handle = stream(model, schedule=chunks, sequence_parallel=trained_handle.sequence_parallel)
    if load_shards is not None:
        load_shards(model, handle.layers)
    return train.ModelReference(model, handle, temperature=temperature)


def _freeze(model: Any) -> Any:
    model.requires_grad_(False)
    return model.eval()


def _check_vocabulary(
    task: Task[Any], name: str, reference: Any, model: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that the reference has the same token ids as the model.

    Embedding sizes are compared only if the reference has no tokenizer, because models pad their embeddings
    differently.

    Raises:
        ArgumentError: The vocabularies differ.
    """
    key = task.reference_key
    noun = "teacher" if key == "teacher" else "reference"
    fix = f"use a {noun} with the tokenizer of the model, such as its base model"
    reference_rows = reference.get_input_embeddings().weight.shape[0]
    model_rows = len(tokenizer) if model is None else model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > reference_rows:
        what = f"the {noun} '{name}' has an embedding of {reference_rows:,} rows, but the tokenizer "
        what += f"{len(tokenizer):,} tokens"
        raise ArgumentError(what, where=key, fix=fix)
    try:
        vocabulary = models.load_tokenizer(name, trust_remote_code=task.recipe.trust_remote_code).get_vocab()
    except StreamTuneError:
        if model_rows != reference_rows:
            what = f"the {noun} '{name}' has a vocabulary of {reference_rows:,} tokens, but the model of {model_rows:,}"
            raise ArgumentError(what, where=key, fix=fix) from None
        return
    vocabulary_ids = tokenizer.get_vocab()
    differing = sum(vocabulary.get(token) != index for token, index in vocabulary_ids.items())
    if differing:
        what = f"the {noun} '{name}' has another vocabulary: {differing:,} of {len(vocabulary_ids):,} tokens differ"
        raise ArgumentError(what, where=key, fix=fix)
