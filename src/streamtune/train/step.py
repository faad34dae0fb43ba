"""Gradients of all micro-batches of an optimizer step, and evaluation.

The gradient of a step is the gradient of one number, a sum over any number of micro-batches G. For supervised
fine-tuning it is

    loss = 1/N  sum_{g=1..G}  sum_{t in targets of micro-batch g}  -log p(target_t)        N = targets of all G together

Each micro-batch contributes its sum, divided once by N, and gradients accumulate. So a step split differently, or
shorter at the end of an epoch, still weighs every token the same. Other objectives have other divisors (``objective``).
Several ranks split a step further: N counts the targets of all ranks, and the shares of all add up. The loss of a
mixture's routers (:class:`StepRouters`) is in the gradient, and not in the loss that is shown and recorded.
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
    """Settings of the loop."""

    total_steps: int
    """Optimizer steps of the whole run, those before a resume included."""
    steps_per_epoch: int | None
    """None writes no epochs."""
    max_grad_norm: float
    """0 does not clip."""
    eval_steps: int
    """Evaluate every so many steps, and at the end; 0 only at the end."""
    save_steps: int
    """Save every so many steps, at the end and when stopped; 0 only at the end and when stopped."""
    save_total_limit: int
    bf16: bool
    """Run the forward under bfloat16 autocast."""
    seed: int
    out_of_memory_fix: str
    """Advice for the message where memory runs out."""
    supervised_steps: int = 0
    """Steps before those that epochs are counted in."""
    on_nan: Literal["stop", "skip"] = "stop"
    max_skips: int = 0
    """Steps of the whole run that may be skipped."""
    on_oom: Literal["stop", "replan"] = "stop"
    save_async: bool = True
    metric_for_best_model: str | None = None
    """A name of ``metrics.jsonl``."""
    greater_is_better: bool = False
    early_stopping_patience: int = 0
    """Evaluations in a row without a better metric that end the run; 0 never does."""
    early_stopping_threshold: float = 0.0
    save_best_limit: int = 0
    """Checkpoints to keep for their metric, besides the newest."""
    least_moved: float = 0.0
    """Share of the trained weights that a step should change: a note says where it changes fewer."""
    sample_steps: int = 0
    """Steps between two completions of the sample prompts; 0 is never."""
    step_flops: Callable[[Sequence[MicroBatch]], int] | None = None
    """Counts the FLOPs of micro-batches; None counts none."""
    peak_flops: float | None = None
    """Peak FLOP/s of a device, to which ``mfu`` is relative; None where it is not known."""


@dataclass(frozen=True)
class StepContext:
    """Everything that the steps and evaluations of a run share."""

    backend: Backend
    objective: Objective
    settings: TrainSettings
    handle: StreamHandle | None = None
    """Handle of the streamed model; the loss of its routers is in the gradient and not in the loss that is shown."""
    world: World = WORLD
    activity: Callable[[str], None] = lambda doing: None
    """Called with a few words on the current activity."""


HeldOut = Mapping[str, Callable[[], Iterable[MicroBatch]]]
"""Makers of held-out batches by the name of their set; a single set may have no name, ``""``."""


class _Means:
    """Sums and counts by name, added up over micro-batches."""

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
        """Return the mean of each name; names with count 0 are left out."""
        return {name: value / count for name, (value, count) in self._found.items() if count}


def accumulate_gradients(
    context: StepContext, micro_batches: Sequence[MicroBatch], step: int, stop: StopRequest
) -> StepScore | None:
    """Add the gradients of all micro-batches to the backend's and return the step's loss, without the routers'.

    Args:
        context: The model, the objective and the ranks that share the step.
        micro_batches: This rank's micro-batches of the step: as many on every rank.
        step: Number of the step, from 1: for messages.
        stop: Checked after each micro-batch; a stop of one rank is one of all.

    Returns:
        None where ``stop`` was requested before the last micro-batch: the gradients are then incomplete.
    """
    backend, objective, settings, world = context.backend, context.objective, context.settings, context.world
    routers = StepRouters(context.handle, micro_batches, world)
    if world.any(stop.requested):  # while the micro-batches were made, which may have been broken off
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
    """Score every batch of every set without gradients; None where ``stop`` was requested.

    With several ranks each has its own batches, as many as the others. No router loss is added, so recipes that balance
    routers differently can be compared. The random state is put back afterwards.

    Returns:
        ``eval_loss``, a mean over all batches together, if the objective has one, and ``eval_`` each of its metrics;
        the same of each named set, ``eval_NAME_loss`` and so on.
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
            raise NonFiniteError(f"{prefix}_loss, the held-out loss, is {loss} at step {step}",
                                 fix="lower learning_rate")  # fmt: skip
    return found


def device_of(model: nn.Module) -> torch.device:
    return model_device(model)


def find_non_finite(name: str, value: float, step: int, micro_batches: Sequence[MicroBatch]) -> NonFiniteError | None:
    """Return an error if ``value`` is NaN or infinite: one such step would ruin every weight."""
    if math.isfinite(value):
        return None
    return NonFiniteError(
        f"the {name} of step {step} is {value}; the weights were not changed by it",
        where=name_rows(micro_batches),
        fix="look at these rows; lower learning_rate or warm up longer; checkpoints saved before are intact",
    )


@contextmanager
def explain_out_of_memory(doing: str, micro_batches: Sequence[MicroBatch], fix: str) -> Iterator[None]:
    """Turn an out-of-memory error into a message that names the batch and what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, length = max((tuple(batch.input_ids.shape) for batch in micro_batches), key=math.prod)
        what = f"out of memory in {doing}, on a batch of {rows} x {length:,} tokens"
        raise OutOfMemoryError(what, where=name_rows(micro_batches), fix=fix) from error


def name_rows(micro_batches: Sequence[MicroBatch], most: int = 4) -> str:
    """Return the sources of the rows as text, of many rows the first ``most``."""
    origins = [origin for batch in micro_batches for origin in batch.origins]
    rest = f" and {len(origins) - most} more" if len(origins) > most else ""
    return ", ".join(origins[:most]) + rest


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement. On the CPU the peak is the process's own and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return peak bytes: of the device's allocator since its last reset, or on a CPU the process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Not on Windows.

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` is how Python, torch or CUDA reports that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in message or "out of memory" in message)


class StepRouters:
    """Sets the totals and weight of a streamed model's routers for each micro-batch of a step, and adds up their loss.

    The routers' loss of a step (``streamtune.engine.routers``) is one number however the step is split, n_g tokens of n
    in micro-batch g:

        micro     sum_g  n_g / n  (coefficient * balance_g + z_coefficient * z_g)      each balanced by itself
        global    coefficient * balance + z_coefficient * z                            of all n tokens together

    As in the cross entropy, a token weighs the same in every micro-batch, and padding nothing. With one micro-batch the
    two are equal, and are what ``transformers`` adds. With several, ``global`` costs one more forward of each, without
    gradient: how often each expert is chosen in the whole step must be known before the first backward.

    Args:
        handle: Handle of the streamed model; without a loss on its routers nothing is done here.
        batches: The micro-batches of the step.
        world: The ranks that share the step.
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
        """The step's balance loss so far, not multiplied with its coefficient."""

    @property
    def need_counting(self) -> bool:
        """True if the step is balanced as a whole and has several parts."""
        loss = None if self._watch is None else self._watch.loss
        return loss is not None and loss.scope == "global" and len(self._batches) * self._world.size > 1

    def count(self, device: torch.device) -> None:
        """Count how often each expert is chosen in the whole step. The random state is restored."""
        assert self._handle is not None
        self._totals = self._handle.count_routes(self._calls(device))

    @contextmanager
    def micro_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Set up the routers around the call and the backward of one micro-batch on its device."""
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
        assert watch.terms is not None, "a call with labels has said what its loss was made of"
        if not batch.filler:
            self.aux_loss = (self.aux_loss or 0.0) + watch.terms.balance.item()

    def _calls(self, device: torch.device) -> Iterator[dict[str, Any]]:
        """Yield the arguments of each micro-batch's call; while they are used, its padding does not count."""
        assert self._watch is not None
        for batch in self._batches:
            moved = batch.to(device)
            with self._watch.counting(moved.attention_mask):
                yield moved.arguments
