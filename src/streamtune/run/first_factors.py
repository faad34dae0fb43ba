"""Start the adapters of a run from gradients of its rows (``adapter_type: lora_ga``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from streamtune import models, train
from streamtune.base.model_facts import model_device
from streamtune.base.text import parse_size, show_size
from streamtune.engine import StreamHandle
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.errors import ArgumentError
from streamtune.recipe.settings import ModelSettings
from streamtune.tasks import Task
from streamtune.train.step import explain_out_of_memory


def start_from_rows(
    recipe: ModelSettings, task: Task[Any], model: Any, handle: StreamHandle, batches: Any, world: train.World
) -> None:
    """Start the adapters from the gradient of the mean loss of ``lora_ga_rows`` rows, which the seed draws.

    Rank 0 computes it in the order of layers; the others receive the factors. A row is a micro-batch: it needs the
    memory of a step, without adapter gradients and states, and with the gradients of one layer's weights.

    Args:
        model: The model with adapters that change nothing yet, not divided or wrapped by a backend.

    Raises:
        ArgumentError: The host has no room for the sums of the gradients.
        NonFiniteError: A gradient is not finite.
        OutOfMemoryError: A row does not fit.
    """
    world.main(partial(_start, recipe, task, model, handle, batches))
    if world.size > 1:
        with torch.no_grad():
            for values in models.started_values(model):
                sent = values.detach().cpu()
                distributed.broadcast(sent, src=0, group=world.group)
                values.copy_(sent)


def _start(recipe: ModelSettings, task: Task[Any], model: Any, handle: StreamHandle, batches: Any) -> None:
    count = min(recipe.lora_ga_rows, batches.num_train)
    drawn = np.random.default_rng(recipe.seed).choice(batches.num_train, count, replace=False)
    rows = [batches.training([int(unit)]) for unit in np.sort(drawn)]
    if len(rows) > 1:
        _check_room(recipe, model)
    device, alone = model_device(model), train.World()
    objective = task.objective(handle, None, device)
    totals = objective.totals(rows, alone)

    def loss_of(batch: train.MicroBatch) -> Tensor:
        with train.autocast(device, bool(recipe.bf16)):
            return objective.score(model, batch.to(device), totals).minimised

    schedule, training = handle.schedule, model.training
    if schedule.order == "chunk":  # which has the gradients of all layers at its end
        handle.reschedule(replace(schedule, order="layer"))
    model.train()
    mend = "write a smaller max_length, or adapter_type: lora"
    try:
        with (
            explain_out_of_memory("the gradient that adapters start from", rows, mend),
            handle.routers.silenced(),
        ):
            losses: list[Callable[[], Tensor]] = [partial(loss_of, batch) for batch in rows]
            factors = models.first_factors(model, losses, gamma=recipe.lora_ga_gamma, seed=recipe.seed)
    finally:
        model.train(training)
        if handle.schedule != schedule:
            handle.reschedule(schedule)
    models.start_from_factors(model, factors)


def _check_room(recipe: ModelSettings, model: Any) -> None:
    wanted, given = models.summed_bytes(model), recipe.engine.host_memory
    room = usable_host_bytes() if given == "auto" else parse_size(given, where="engine.host_memory")
    if wanted > room:
        raise ArgumentError(
            f"gradients of {recipe.lora_ga_rows:,} rows are summed on the host, {show_size(wanted)} of them, and "
            f"{show_size(room)} are usable",
            where="lora_ga_rows",
            mend="write lora_ga_rows: 1, whose gradients are not summed, or adapter_type: lora",
        )
