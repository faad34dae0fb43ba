"""Gradients of an optimizer step over its micro-batches, and evaluation.

The loss of a step is a sum over its G micro-batches. For supervised fine-tuning it is

    loss = 1/N  sum_{g=1..G}  sum_{t in targets of micro-batch g}  -log p(target_t)        N = targets in all G

Each micro-batch contributes its sum divided by N, and gradients accumulate. So every token has the same weight, however
a step is split. Other objectives have other divisors. With several ranks, N counts the targets of all ranks, and their
contributions add up. The router loss of a mixture of experts is in the gradient, but not in the reported loss.
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

from streamtune.base.model_facts import model_device
from streamtune.engine import StreamHandle
from streamtune.engine.image_tower import with_tower_gradients
from streamtune.errors import NonFiniteError, OutOfMemoryError
from streamtune.ops import devices
from streamtune.train.backend import Backend
from streamtune.train.objective import MicroBatch, Objective, StepScore, SumAndCount, autocast, counted_batches
from streamtune.train.process import StopRequest, preserve_rng
from streamtune.train.world import WORLD, World

GIB = 1 << 30


@dataclass(frozen=True)
class TrainSettings:
    total_steps: int
    """Number of optimizer steps of the whole run, including steps before it was resumed."""
    steps_per_epoch: int | None
    """Number of steps of an epoch; None: ``epoch`` is not recorded."""
    max_grad_norm: float
    """Norm to which gradients are clipped; 0: no clipping."""
    eval_steps: int
    """Number of steps between evaluations; 0: only at the end, which is always evaluated."""
    save_steps: int
    """Number of steps between checkpoints; 0: only at the end or a stop, which are always saved."""
    save_total_limit: int
    autocast_dtype: str | None
    """Dtype in which autocast computes the forward pass, ``bfloat16`` or ``float16``; None: no autocast."""
    seed: int
    out_of_memory_fix: str
    """Advice in the error when memory runs out."""
    supervised_steps: int = 0
    """Number of supervised steps at the start, which do not count in epochs."""
    on_nan: Literal["stop", "skip"] = "stop"
    max_skips: int = 0
    """Largest number of steps of the run that may be skipped."""
    on_oom: Literal["stop", "replan"] = "stop"
    save_async: bool = True
    metric_for_best_model: str | None = None
    """Name of a metric in ``metrics.jsonl``."""
    greater_is_better: bool = False
    early_stopping_patience: int = 0
    """Number of consecutive evaluations without improvement after which the run ends; 0: no early stopping."""
    early_stopping_threshold: float = 0.0
    save_best_limit: int = 0
    """Number of checkpoints with the best metric to keep, in addition to the newest."""
    min_changed_fraction: float = 0.0
    """Smallest fraction of trained weights that a step should change; a note is shown below it."""
    sample_steps: int = 0
    """Number of steps between completions of the sample prompts; 0: never."""
    step_flops: Callable[[Sequence[MicroBatch]], int] | None = None
    """Function that returns the model FLOPs of micro-batches; None: FLOPs are not recorded."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for ``mfu``; None if unknown."""

    @property
    def ranked_by(self) -> str:
        """Name of the metric by which evaluations are ranked."""
        return self.metric_for_best_model or "eval_loss"


@dataclass(frozen=True)
class StepContext:
    """Objects that the steps and evaluations of a run share."""

    backend: Backend
    objective: Objective
    settings: TrainSettings
    handle: StreamHandle | None = None
    """Handle returned by ``streamtune.stream``. Its router loss is in the gradient, but not in the reported
    loss."""
    world: World = WORLD
    show_activity: Callable[[str], None] = lambda doing: None
    """Function called with a description of the current activity."""


HeldOut = Mapping[str, Callable[[], Iterable[MicroBatch]]]
"""Functions that make held-out batches, by name of the set; a single set may have the name ``""``."""


class _MeanAccumulator:
    """Accumulates sums and counts of metrics over micro-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, SumAndCount] = {}

    def add(self, sums_by_name: Mapping[str, SumAndCount]) -> None:
        for name, (value, count) in sums_by_name.items():
            earlier_value, earlier_count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (earlier_value + value, earlier_count + count)

    def sum_counts_over_ranks(self, world: World) -> _MeanAccumulator:
        total = _MeanAccumulator()
        for sums in world.gather_data_ranks(self._sums):
            total.add(sums)
        return total

    def means(self) -> dict[str, float]:
        """Return name -> sum / count; names with count 0 are left out."""
        return {name: value / count for name, (value, count) in self._sums.items() if count}


def accumulate_gradients(
    context: StepContext, micro_batches: Sequence[MicroBatch], step: int, stop: StopRequest
) -> StepScore | None:
    """Compute the gradients of all micro-batches of a step; return loss and metrics, without router loss.

    Args:
        context: Backend, objective and ranks of the run.
        micro_batches: This rank's micro-batches of the step; every rank has the same number.
        step: Number of the step, counted from 1, for messages.
        stop: Stop request, checked before each micro-batch; all ranks stop together.

    Returns:
        The score; None if a stop was requested before the last micro-batch, so that gradients are incomplete.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    backend, objective, settings, world = context.backend, context.objective, context.settings, context.world
    routers = StepRouterLoss(context.handle, micro_batches, world)
    if world.any_rank(stop.requested):  # a stop may have interrupted the making of micro-batches
        return None
    model = backend.model
    device, fix = model_device(model), settings.out_of_memory_fix
    reset_peak_memory(device)
    with explain_out_of_memory(f"step {step}", micro_batches, fix):
        totals = objective.step_totals(micro_batches, world)
    total_loss, metrics, not_finite = 0.0, _MeanAccumulator(), None
    model.train()
    if routers.needs_expert_counts:
        context.show_activity("counting expert choices")
        with explain_out_of_memory(f"step {step}", micro_batches, fix), autocast(device, settings.autocast_dtype):
            routers.count_expert_choices(device)
    for index, batch in enumerate(micro_batches):
        if world.any_rank(stop.requested):
            return None
        if len(micro_batches) > 1:
            context.show_activity(f"batch {index + 1}/{len(micro_batches)}")
        with explain_out_of_memory(f"step {step}", [batch], fix):
            batch = batch.to(device)
            last = index == len(micro_batches) - 1
            with routers.weight_micro_batch(batch), backend.micro_batch_context(last=last):
                with autocast(device, settings.autocast_dtype):
                    score = objective.score(model, batch, totals)
                minimised = score.total_loss * 0.0 if batch.filler else score.total_loss
                value = minimised.item()
                not_finite = not_finite or non_finite_error("loss", value, step, [batch])
                backend.backward(with_tower_gradients(minimised, backend.module))
        if batch.filler:
            continue
        reported = score.loss if score.reported is None else score.reported
        total_loss += value if reported is minimised else reported.item()
        metrics.add(score.metrics)
    return StepScore(
        world.sum_over_ranks([total_loss])[0],
        metrics.sum_counts_over_ranks(world).means(),
        not_finite,
        routers.aux_loss,
    )


def evaluate(context: StepContext, held_out: HeldOut, step: int, stop: StopRequest) -> dict[str, float] | None:
    """Evaluate all evaluation sets; return the metrics, or None if ``stop`` was requested.

    Every rank has the same number of batches. The router loss is not included. The random state is restored afterwards.

    Returns:
        ``eval_loss``, a mean over all batches, if the objective has an evaluation loss, and ``eval_METRIC`` for each
            metric of the objective. For each named set also ``eval_NAME_loss`` and ``eval_NAME_METRIC``.

    Raises:
        NonFiniteError: An evaluation loss is not finite.
        OutOfMemoryError: Memory ran out.
    """
    model, objective, settings, world = context.backend.model, context.objective, context.settings, context.world
    device = model_device(model)
    prefixes = ["eval", *(f"eval_{name}" for name in held_out if name)]
    losses, metrics = ({prefix: _MeanAccumulator() for prefix in prefixes} for _ in range(2))
    model.eval()
    silenced = nullcontext() if context.handle is None else context.handle.routers.without_losses()
    with torch.no_grad(), preserve_rng(), silenced:
        for name, make_batches in held_out.items():
            for batch in make_batches():
                if world.any_rank(stop.requested):
                    return None
                with explain_out_of_memory(f"the evaluation at step {step}", [batch], settings.out_of_memory_fix):
                    batch = batch.to(device)
                    with autocast(device, settings.autocast_dtype):
                        score = objective.score(model, batch, None)
                if batch.filler:
                    continue
                parts = {str(index): part for index, part in enumerate(score.held_out)}
                for prefix in ("eval", f"eval_{name}") if name else ("eval",):
                    losses[prefix].add(parts)
                    metrics[prefix].add(score.metrics)
    values: dict[str, float] = {}
    for prefix in prefixes:
        terms = losses[prefix].sum_counts_over_ranks(world).means()
        values |= {f"{prefix}_loss": sum(terms.values())} if terms else {}
        means = metrics[prefix].sum_counts_over_ranks(world).means()
        values |= {f"{prefix}_{name}": value for name, value in means.items()}
        if not math.isfinite(loss := values.get(f"{prefix}_loss", 0.0)):
            raise NonFiniteError(f"the held-out loss {prefix}_loss is {loss} at step {step}",
                                 fix="lower learning_rate")  # fmt: skip
    return values


def non_finite_error(name: str, value: float, step: int, micro_batches: Sequence[MicroBatch]) -> NonFiniteError | None:
    """Return an error if ``value`` is NaN or infinite; else None.

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
        where=describe_rows(micro_batches),
        fix="look at these rows; lower learning_rate or warm up longer; earlier checkpoints are intact",
    )


@contextmanager
def explain_out_of_memory(activity: str, micro_batches: Sequence[MicroBatch], fix: str) -> Iterator[None]:
    """Context manager that turns out-of-memory errors into an OutOfMemoryError with the largest batch and its rows.

    Args:
        activity: Activity for the message, such as ``step 3``.
        micro_batches: Micro-batches of the activity.
        fix: Advice for the message.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, length = max((tuple(batch.input_ids.shape) for batch in micro_batches), key=math.prod)
        message = f"out of memory in {activity}, with a batch of {rows} x {length:,} tokens"
        raise OutOfMemoryError(message, where=describe_rows(micro_batches), fix=fix) from error


def describe_rows(micro_batches: Sequence[MicroBatch], max_rows: int = 4) -> str:
    """Return the sources of the rows as text; only the first ``max_rows`` are named."""
    origins = [origin for batch in micro_batches for origin in batch.origins]
    remainder = f" and {len(origins) - max_rows} more" if len(origins) > max_rows else ""
    return ", ".join(origins[:max_rows]) + remainder


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of an accelerator; on a CPU nothing happens."""
    devices.reset_peak_bytes(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of an accelerator since the last reset, of a CPU process since its start."""
    if (counted := devices.peak_bytes(device)) is not None:
        return counted
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


class StepRouterLoss:
    """Router loss of a mixture-of-experts model over the micro-batches of a step.

    The router loss of a step has two forms; micro-batch g has n_g of the step's n tokens:

        micro     sum_g  n_g / n  (coefficient * balance_g + z_coefficient * z_g)      each micro-batch is balanced
        global    coefficient * balance + z_coefficient * z                            the whole step is balanced

    Padding does not count. With one micro-batch both forms are equal; without the z-loss they equal the auxiliary loss
    of ``transformers``. With several, ``global`` needs an additional forward pass per micro-batch without gradient, to
    count how often each expert is chosen in the step.

    Args:
        handle: Handle returned by ``streamtune.stream``; nothing happens if it has no router loss.
        batches: Micro-batches of the step.
        world: Ranks of the run.
    """

    def __init__(
        self,
        handle: StreamHandle | None,
        batches: Sequence[MicroBatch],
        world: World = WORLD,
    ) -> None:
        self._routers = handle.routers if handle is not None and handle.routers.loss is not None else None
        self._handle, self._batches = handle, batches
        self._world = world
        self._tokens = sum(batch.num_tokens for batch in counted_batches(batches))
        if self._routers is not None:
            self._tokens = world.sum_count_over_ranks(self._tokens)
        self._totals: torch.Tensor | None = None
        self.aux_loss: float | None = None if self._routers is None else 0.0
        """Balance loss of the step so far, without its coefficient; None without router loss."""

    @property
    def needs_expert_counts(self) -> bool:
        """True if :meth:`count_expert_choices` must be called: ``global``, with several micro-batches or ranks."""
        loss = None if self._routers is None else self._routers.loss
        return loss is not None and loss.scope == "global" and len(self._batches) * self._world.size > 1

    def count_expert_choices(self, device: torch.device) -> None:
        """Count how often each expert is chosen in the whole step. The random state is restored."""
        assert self._handle is not None
        self._totals = self._handle.count_routes(self._yield_call_arguments(device))

    @contextmanager
    def weight_micro_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Context manager for the forward and backward pass of a micro-batch: multiplies its router loss by its share
        of tokens."""
        if self._routers is None:
            yield
            return
        routers = self._routers
        routers.totals, routers.weight = self._totals, 0.0 if batch.filler else batch.num_tokens / self._tokens
        try:
            with routers.counting_tokens(batch.attention_mask):
                yield
        finally:
            routers.totals, routers.weight = None, 1.0
        assert routers.terms is not None, "unreachable: a model call with labels sets the terms of its router loss"
        if not batch.filler:
            self.aux_loss = (self.aux_loss or 0.0) + routers.terms.balance.item()

    def _yield_call_arguments(self, device: torch.device) -> Iterator[dict[str, Any]]:
        assert self._routers is not None
        for batch in self._batches:
            moved = batch.to(device)
            with self._routers.counting_tokens(moved.attention_mask):
                yield moved.inputs
