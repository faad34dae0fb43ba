"""Objectives, which the loop minimises: they score one micro-batch at a time, given the divisors of its step.

The loss of an optimizer step is a mean over something (tokens, pairs, completions) of the whole step, however many
micro-batches it is split over. The loop calls :meth:`Objective.totals` once, for all micro-batches together, and each
micro-batch's :class:`Score` is divided by them: the scores add up, and so do their gradients.

The reference of an objective is the model whose log-probs the trained one's are compared with (:class:`Reference`). It
is always streamed and never differentiated, and computes as in evaluation, so dropout does not blur what is compared
with. The model that is trained is its own reference where its adapters are switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streamtune.engine import LazyLogits, LossRequest, StreamHandle
from streamtune.errors import NonFiniteError
from streamtune.ops import TokenLoss, token_loss_reference
from streamtune.train.batch import MicroBatch, PrefixBatch, TreeBatch, counted
from streamtune.train.world import WORLD, World

SumAndCount = tuple[float, float]
PLAIN = TokenLoss()


@dataclass(frozen=True)
class Score:
    """The result of an objective for one micro-batch."""

    loss: Tensor
    """Scalar with graph: the micro-batch's share of the step's loss."""
    router_loss: Tensor | None = None
    """Scalar with graph, added to what is minimised and not to what is shown."""
    reported: Tensor | None = None
    """Scalar: ``loss`` as it is shown, where ``loss`` has something in it that is not shown. None: ``loss`` itself."""
    metrics: Mapping[str, SumAndCount] = field(default_factory=dict)
    """Name -> (sum, count): the record of a step shows the sums of all micro-batches divided by their counts."""
    held_out: Sequence[SumAndCount] = ()
    """The held-out loss as means that are added: (sum, count) of each, over this batch. Read in evaluation only, where
    one mean is over all batches; empty where nothing is held out by its loss."""

    @property
    def minimised(self) -> Tensor:
        """Scalar with graph, from which the backward starts."""
        return self.loss if self.router_loss is None else self.loss + self.router_loss


@dataclass(frozen=True)
class StepScore:
    """The loss of a whole optimizer step, and the metrics of its objective."""

    loss: float
    metrics: dict[str, float]
    not_finite: NonFiniteError | None = None
    """Set, not raised, where the loss of a micro-batch was NaN or infinite: all ranks decide alike what follows."""
    aux_loss: float | None = None
    """This rank's share of the balance loss of the routers, not multiplied with its coefficient; None without one."""

    @classmethod
    def mean(cls, scores: Sequence[StepScore]) -> StepScore:
        """Return the mean of several scores of the same micro-batches."""
        auxiliary = [score.aux_loss for score in scores if score.aux_loss is not None]
        return cls(
            fmean(score.loss for score in scores),
            {name: fmean(score.metrics[name] for score in scores) for name in scores[0].metrics},
            next((score.not_finite for score in scores if score.not_finite is not None), None),
            fmean(auxiliary) if auxiliary else None,
        )


class Objective(Protocol):
    """A loss that is a mean over a whole optimizer step."""

    def totals(self, micro_batches: Sequence[MicroBatch], world: World = WORLD) -> Any:
        """Return the divisors of the step, counted before its first backward. Never None.

        Args:
            micro_batches: This rank's. Those that are fillers count nothing, and take part in what all ranks compute.
            world: The ranks that share the step: what is counted is counted over all of them.
        """
        ...

    def score(self, model: nn.Module, batch: MicroBatch, totals: Any) -> Score:
        """Score one micro-batch, under the loop's autocast.

        Args:
            model: What is trained.
            batch: On the model's device.
            totals: Of the step it belongs to. None in evaluation, where there are no gradients: nothing is divided,
                ``loss`` is not read, ``held_out`` and ``metrics`` are.
        """
        ...


class SupervisedObjective:
    """The mean over every target of the step of ``-log p(target)``, or of another loss of a target.

    It is weighed where rows have weights: a row of weight 2 counts as if it were there twice. What is held out is
    always compared by ``-log p(target)``, each target once.

    Args:
        handle: The handle of the model, if it is streamed: the loss that its routers add is not shown.
        loss: The loss of a target.
        teacher: The model that its divergence is from, if it has one; streamed as the model is. Without it batches have
            what a teacher said.
    """

    def __init__(
        self, handle: StreamHandle | None = None, loss: TokenLoss = PLAIN, teacher: ModelReference | None = None
    ) -> None:
        self._handle = handle  # whose routers are others once it is scheduled anew
        self.loss, self.teacher = loss, teacher

    def totals(self, micro_batches: Sequence[MicroBatch], world: World = WORLD) -> float:
        """Return the weights of all targets of the step, or their number where none has one."""
        return world.sums([sum(batch.target_weight for batch in counted(micro_batches))])[0]

    def score(self, model: nn.Module, batch: MicroBatch, totals: float | None) -> Score:
        """See :meth:`Objective.score`."""
        if totals is None:
            loss: Tensor = output_of(model, batch, num_targets=1).loss
            return Score(loss, held_out=[(loss.item(), batch.num_targets)])
        metrics: dict[str, SumAndCount] = {}
        if self.loss.is_plain and batch.weights is None:
            loss = output_of(model, batch, num_targets=totals).loss
        elif self._handle is None:
            loss = plain_token_loss(model, batch, self.loss, self.teacher) / totals
        else:
            taught = None if self.teacher is None else self.teacher.lazy_logits(batch)
            asked = LossRequest(self.loss, batch.weights, taught, batch.top_k)
            with self._handle.with_loss(asked):
                loss = output_of(model, batch, num_targets=totals).loss
            assert asked.measured is not None, "a call with labels computes its loss"
            metrics = {
                name: (value.item(), batch.num_targets)
                for name, value in asked.measured.items()
                if name != "kl" or self.loss.divergence is not None
            }
        watch = None if self._handle is None else self._handle.routers
        terms = watch.terms if watch is not None and watch.loss is not None else None
        return Score(loss, reported=None if terms is None else terms.loss, metrics=metrics)


def loss_of(model: nn.Module, batch: MicroBatch, *, num_targets: float, bf16: bool) -> Tensor:
    """Return the sum of ``-log p`` over the targets of ``batch`` divided by ``num_targets``, plus the routers' loss."""
    with autocast(batch.input_ids.device, bf16):
        loss: Tensor = output_of(model, batch, num_targets=num_targets).loss
    return loss


def plain_token_loss(
    model: nn.Module, batch: MicroBatch, loss: TokenLoss, teacher: ModelReference | None = None
) -> Tensor:
    """Return the sum of a loss over the targets of ``batch``, of the logits of models that are not streamed."""
    teacher_logits = None
    if teacher is not None:
        with torch.no_grad(), evaluating(teacher.model):
            teacher_logits = teacher.model(**batch.arguments).logits
    logits = model(**batch.arguments).logits
    return token_loss_reference(
        logits, batch.shift_labels, loss, batch.weights, teacher_BTV=teacher_logits, top_k=batch.top_k
    )


def output_of(model: nn.Module, batch: MicroBatch, *, num_targets: float, **more: Any) -> Any:
    """Call the model on a batch with its labels; ``more`` are arguments that replace or add to the usual ones."""
    branches = batch.branches if isinstance(batch, PrefixBatch) else None
    with nullcontext() if branches is None else StreamHandle.of(model).laid_out(branches):
        return model(
            # Transformers asks for labels to compute a loss at all, and takes the shifted ones where they are given.
            labels=batch.shift_labels,
            shift_labels=batch.shift_labels,
            num_items_in_batch=num_targets,
            **{**batch.arguments, **more},
        )


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """Return a context that computes in bfloat16 if ``bf16``, uncached: a cache would hold all cast weights at once."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False)


class Reference(Protocol):
    """A source of the reference's log-probs."""

    def logprobs(self, batch: TreeBatch) -> Tensor:
        """Return the log-probs of the batch's targets: fp32 ``[K]``, no gradient, in the order of ``batch.row_K``."""
        ...


class ModelReference:
    """A streamed model as reference, without its adapters if it has any.

    Args:
        model: What is called; the trained model itself where adapters are trained, else another one.
        handle: What streams it.
        temperature: What logits are divided by.
        adapters: Leave its adapters on: the model as it is.
    """

    def __init__(self, model: Any, handle: StreamHandle, *, temperature: float = 1.0, adapters: bool = False) -> None:
        self.model, self.handle, self.temperature, self.adapters = model, handle, temperature, adapters

    def logprobs(self, batch: TreeBatch) -> Tensor:
        """See :meth:`Reference.logprobs`; under the caller's autocast."""
        without = nullcontext() if self.adapters else _without_adapters(self.model)
        with torch.no_grad(), evaluating(self.model), without, self.handle.routers.silenced():
            scores = self.handle.logprobs(
                targets=batch.shift_labels, temperature=self.temperature, model=self.model, **batch.arguments
            )
        return batch.ragged(scores.logprobs)

    def lazy_logits(self, batch: MicroBatch) -> LazyLogits:
        """Return the logits of a batch, not computed: its final hidden states; under the caller's autocast."""
        branches = batch.branches if isinstance(batch, PrefixBatch) else None
        with torch.no_grad(), evaluating(self.model), self.handle.routers.silenced():
            return self.handle.lazy_logits(targets=batch.shift_labels, branches=branches, **batch.arguments)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model in evaluation mode within, and back in its mode afterwards; a whole model is in one mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    if not hasattr(model, "disable_adapter"):
        yield
        return
    with model.disable_adapter():
        yield
