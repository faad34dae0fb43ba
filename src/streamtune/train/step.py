"""Compute the gradients of an optimizer step over its micro-batches, and evaluate.

The loss of a step is a sum over its G micro-batches. For supervised fine-tuning it is

    loss = 1/N  sum_{g=1..G}  sum_{t in targets of micro-batch g}  -log p(target_t)        N = targets in all G

Each micro-batch contributes its sum divided by N, and gradients accumulate. So every token has the same weight, however
a step is split, and also in a shorter step at the end of an epoch. Other objectives have other divisors
(``objective``). With several ranks, N counts the targets of all ranks, and their contributions add up. The router loss
of a mixture of experts (:class:`StepRouters`) is in the gradient, but not in the reported loss.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import nn

from streamtune.base.model_facts import model_device
from streamtune.engine import StreamHandle
from streamtune.errors import NonFiniteError, OutOfMemoryError
from streamtune.train.backend import Backend
from streamtune.train.objective import MicroBatch, Objective, StepScore, SumAndCount, autocast, counted
from streamtune.train.process import StopRequest, preserve_rng
from streamtune.train.world import WORLD, World

GIB = 1 << 30


@dataclass(frozen=True)
class TrainSettings:
    """Settings of the training loop."""

    total_steps: int
    """Number of optimizer steps of the whole run, including steps before a resume."""
    steps_per_epoch: int | None
    """Number of steps of an epoch; None: records have no ``epoch``."""
    max_grad_norm: float
    """Norm to which gradients are clipped; 0: no clipping."""
    eval_steps: int
    """Number of steps between evaluations; 0: only at the end. The end is always evaluated."""
    save_steps: int
    """Number of steps between checkpoints; 0: none. The end and a stop are always saved."""
    save_total_limit: int
    bf16: bool
    """True to run the forward under bfloat16 autocast."""
    seed: int
    out_of_memory_fix: str
    """Fix in the error when memory runs out."""
    supervised_steps: int = 0
    """Number of steps at the start that do not count in epochs."""
    on_nan: Literal["stop", "skip"] = "stop"
    max_skips: int = 0
    """Largest number of steps of the whole run that may be skipped."""
    on_oom: Literal["stop", "replan"] = "stop"
    save_async: bool = True
    metric_for_best_model: str | None = None
    """Name of a metric in ``metrics.jsonl``."""
    greater_is_better: bool = False
    early_stopping_patience: int = 0
    """Number of consecutive evaluations without a better metric after which the run ends; 0: no early stopping."""
    early_stopping_threshold: float = 0.0
    save_best_limit: int = 0
    """Number of checkpoints to keep for their metric, besides the newest."""
    least_moved: float = 0.0
    """Share of the trained weights that a step should change; below it a note is shown."""
    sample_steps: int = 0
    """Number of steps between completions of the sample prompts; 0: never."""
    step_flops: Callable[[Sequence[MicroBatch]], int] | None = None
    """Function that returns the model FLOPs of micro-batches; None: FLOPs are not recorded."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for ``mfu``; None if unknown."""


@dataclass(frozen=True)
class StepContext:
    """The objects that all steps and evaluations of a run use."""

    backend: Backend
    objective: Objective
    settings: TrainSettings
    handle: StreamHandle | None = None
    """Handle of the streamed model. Its router loss is in the gradient, but not in the reported loss."""
    world: World = WORLD
    activity: Callable[[str], None] = lambda doing: None
    """Function called with a description of the current activity."""


HeldOut = Mapping[str, Callable[[], Iterable[MicroBatch]]]
"""Functions that make held-out batches, by name of the set; a single set may have the name ``""``."""


class _Means:
    """Accumulates sums and counts by name over micro-batches."""

    def __init__(self) -> None:
        self._found: dict[str, SumAndCount] = {}

    def add(self, scored: Mapping[str, SumAndCount]) -> None:
        for name, (value, count) in scored.items():
            before, counted = self._found.get(name, (0.0, 0.0))
            self._found[name] = (before + value, counted + count)

    def over(self, world: World) -> _Means:
        joined = _Means()
        for found in world.gather(self._found):
            joined.add(found)
        return joined

    def means(self) -> dict[str, float]:
        """Return the mean by name; names with count 0 are left out."""
        return {name: value / count for name, (value, count) in self._found.items() if count}


def accumulate_gradients(
    context: StepContext, micro_batches: Sequence[MicroBatch], step: int, stop: StopRequest
) -> StepScore | None:
    """Compute the gradients of all micro-batches of a step; return the step's score, without router loss.

    Args:
        context: Backend, objective and ranks of the run.
        micro_batches: This rank's micro-batches of the step; every rank has the same number.
        step: Number of the step, counted from 1, for messages.
        stop: Stop request, checked after each micro-batch. If one rank is stopped, all stop.

    Returns:
        The score, or None if a stop was requested before the last micro-batch; gradients are then incomplete.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    backend, objective, settings, world = context.backend, context.objective, context.settings, context.world
    routers = StepRouters(context.handle, micro_batches, world)
    if world.any(stop.requested):  # a stop may have interrupted the making of micro-batches
        return None
    model = backend.model
    device, fix = device_of(model), settings.out_of_memory_fix
    reset_peak_memory(device)
    with explain_out_of_memory(f"step {step}", micro_batches, fix):
        totals = objective.totals(micro_batches, world)
    total, metrics, wrong = 0.0, _Means(), None
    model.train()
    if routers.need_counting:
        context.activity("counting routes")
        with explain_out_of_memory(f"step {step}", micro_batches, fix), autocast(device, settings.bf16):
            routers.count(device)
    for index, batch in enumerate(micro_batches):
        if world.any(stop.requested):
            return None
        if len(micro_batches) > 1:
            context.activity(f"batch {index + 1}/{len(micro_batches)}")
        with explain_out_of_memory(f"step {step}", [batch], fix):
            batch = batch.to(device)
            last = index == len(micro_batches) - 1
            with routers.micro_batch(batch), backend.micro_step(last=last):
                with autocast(device, settings.bf16):
                    score = objective.score(model, batch, totals)
                minimised = score.minimised * 0.0 if batch.filler else score.minimised
                value = minimised.item()
                wrong = wrong or find_non_finite("loss", value, step, [batch])
                backend.backward(minimised)
        if batch.filler:
            continue
        shown = score.loss if score.reported is None else score.reported
        total += value if shown is minimised else shown.item()
        metrics.add(score.metrics)
    return StepScore(world.sums([total])[0], metrics.over(world).means(), wrong, routers.aux_loss)


def evaluate(context: StepContext, sets: HeldOut, step: int, stop: StopRequest) -> dict[str, float] | None:
    """Score all held-out batches without gradients; return the metrics, or None if ``stop`` was requested.

    Every rank has the same number of batches. No router loss is added, so recipes with different router losses can be
    compared. The random state is restored afterwards.

    Returns:
        ``eval_loss``, a mean over all batches, if the objective has a held-out loss, and ``eval_METRIC`` for each of
        its metrics. For each named set also ``eval_NAME_loss`` and ``eval_NAME_METRIC``.

    Raises:
        NonFiniteError: A held-out loss is not finite.
        OutOfMemoryError: Memory ran out.
    """
    model, objective, settings, world = context.backend.model, context.objective, context.settings, context.world
    device = device_of(model)
    losses, metrics = (_Means(), {name: _Means() for name in sets}), (_Means(), {name: _Means() for name in sets})
    model.eval()
    silenced = nullcontext() if context.handle is None else context.handle.routers.silenced()
    with torch.no_grad(), preserve_rng(), silenced:
        for name, make_batches in sets.items():
            for batch in make_batches():
                if world.any(stop.requested):
                    return None
                with explain_out_of_memory(f"the evaluation at step {step}", [batch], settings.out_of_memory_fix):
                    batch = batch.to(device)
                    with autocast(device, settings.bf16):
                        score = objective.score(model, batch, None)
                if batch.filler:
                    continue
                parts = {str(index): part for index, part in enumerate(score.held_out)}
                for summed, scored in ((losses, parts), (metrics, score.metrics)):
                    summed[0].add(scored)
                    summed[1][name].add(scored)
    found: dict[str, float] = {}
    named = {f"eval_{name}": (losses[1][name], metrics[1][name]) for name in sets if name}
    for prefix, (of_loss, of_metrics) in {"eval": (losses[0], metrics[0]), **named}.items():
        means = of_loss.over(world).means()
        found |= {f"{prefix}_loss": sum(means.values())} if means else {}
        found |= {f"{prefix}_{name}": value for name, value in of_metrics.over(world).means().items()}
        if not math.isfinite(loss := found.get(f"{prefix}_loss", 0.0)):
            raise NonFiniteError(f"the held-out loss {prefix}_loss is {loss} at step {step}",
                                 fix="lower learning_rate")  # fmt: skip
    return found


def device_of(model: nn.Module) -> torch.device:
    return model_device(model)


def find_non_finite(name: str, value: float, step: int, micro_batches: Sequence[MicroBatch]) -> NonFiniteError | None:
    """Return an error if ``value`` is NaN or infinite, because such a step would ruin all weights; else None.

    Args:
        name: Name of the value, such as ``loss``.
        value: Value to check.
        step: Number of the step, counted from 1.
        micro_batches: Micro-batches whose rows the error names.
    """
    if math.isfinite(value):
        return None
    return NonFiniteError(
        f"the {name} of step {step} is {value}; the weights were not changed",
        where=name_rows(micro_batches),
        fix="look at these rows; lower learning_rate or warm up longer; earlier checkpoints are intact",
    )


@contextmanager
def explain_out_of_memory(doing: str, micro_batches: Sequence[MicroBatch], fix: str) -> Iterator[None]:
    """Context manager: when memory runs out, raise an OutOfMemoryError that names the largest batch and its rows.

    Args:
        doing: Activity for the message, such as ``step 3``.
        micro_batches: Micro-batches of the activity.
        fix: Fix for the message.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, length = max((tuple(batch.input_ids.shape) for batch in micro_batches), key=math.prod)
        what = f"out of memory in {doing}, with a batch of {rows} x {length:,} tokens"
        raise OutOfMemoryError(what, where=name_rows(micro_batches), fix=fix) from error


def name_rows(micro_batches: Sequence[MicroBatch], most: int = 4) -> str:
    """Return the sources of the rows as text; of many rows only the first ``most`` are named."""
    origins = [origin for batch in micro_batches for origin in batch.origins]
    rest = f" and {len(origins) - most} more" if len(origins) > most else ""
    return ", ".join(origins[:most]) + rest


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of an accelerator; the CPU peak of a process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of an accelerator since the last reset, or on a CPU of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not available on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` is an out-of-memory error of Python, torch or CUDA."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in message or "out of memory" in message)


class StepRouters:
    """Weights the router loss of each micro-batch of a step, and sums it.

    The router loss of a step (``streamtune.engine.routers``) has two forms; micro-batch g has n_g of the step's n
    tokens:

        micro     sum_g  n_g / n  (coefficient * balance_g + z_coefficient * z_g)      each micro-batch is balanced
        global    coefficient * balance + z_coefficient * z                            the whole step is balanced

    As in the cross-entropy, every token has the same weight in any micro-batch, and padding has none. With one
    micro-batch both forms are equal, and equal to the loss in ``transformers``. With several, ``global`` takes an extra
    forward per micro-batch, without gradient. It counts how often each expert is chosen in the whole step, which must
    be known before the first backward.

    Args:
        handle: Handle of the streamed model; without a router loss this class does nothing.
        batches: Micro-batches of the step.
        world: Ranks that share the step.
    """

    def __init__(
        self,
        handle: StreamHandle | None,
        batches: Sequence[MicroBatch],
        world: World = WORLD,
    ) -> None:
        self._watch = handle.routers if handle is not None and handle.routers.loss is not None else None
        self._handle, self._batches = handle, batches
        self._world = world
        self._tokens = sum(batch.num_tokens for batch in counted(batches))
        if self._watch is not None:
            self._tokens = world.count(self._tokens)
        self._totals: torch.Tensor | None = None
        self.aux_loss: float | None = None if self._watch is None else 0.0
        """Balance loss of the step so far, without its coefficient; None without router loss."""

    @property
    def need_counting(self) -> bool:
        """True if the router loss is ``global`` and the step has several micro-batches or ranks."""
        loss = None if self._watch is None else self._watch.loss
        return loss is not None and loss.scope == "global" and len(self._batches) * self._world.size > 1

    def count(self, device: torch.device) -> None:
        """Count how often each expert is chosen in the whole step. The random state is restored."""
        assert self._handle is not None
        self._totals = self._handle.count_routes(self._calls(device))

    @contextmanager
    def micro_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Context manager for forward and backward of one micro-batch, which sets the routers' totals and weight."""
        if self._watch is None:
            yield
            return
        watch = self._watch
        watch.totals, watch.weight = self._totals, 0.0 if batch.filler else batch.num_tokens / self._tokens
        try:
            with watch.counting(batch.attention_mask):
                yield
        finally:
            watch.totals, watch.weight = None, 1.0
        assert watch.terms is not None, "a call with labels sets the terms of its loss"
        if not batch.filler:
            self.aux_loss = (self.aux_loss or 0.0) + watch.terms.balance.item()

    def _calls(self, device: torch.device) -> Iterator[dict[str, Any]]:
        """Yield the call arguments of each micro-batch; routers ignore its padding until the next is requested."""
        assert self._watch is not None
        for batch in self._batches:
            moved = batch.to(device)
            with self._watch.counting(moved.attention_mask):
                yield moved.arguments
