"""Micro-batches, and the objectives that score them: the losses that the loop minimises.

The loss of an optimizer step is a mean over something (tokens, pairs, completions) of the whole step, however many
micro-batches it is split over. The loop calls :meth:`Objective.totals` once, for all micro-batches together, and each
micro-batch's :class:`Score` is divided by the totals: the scores add up, and so do their gradients.

A :class:`Reference` is the model whose log-probs are compared with the trained model's. It is always streamed, never
differentiated, and in evaluation mode, so without dropout. A model with adapters is its own reference when the adapters
are switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine import LazyLogits, LossRequest, StreamHandle
from streamtune.errors import NonFiniteError
from streamtune.ops import TokenLoss, token_loss_reference
from streamtune.train.world import WORLD, World

if TYPE_CHECKING:
    from streamtune.engine import Branches
    from streamtune.ops import TopKTeacher


SumAndCount = tuple[float, float]
PLAIN = TokenLoss()


@dataclass(frozen=True)
class Score:
    """The result of an objective for one micro-batch."""

    loss: Tensor
    """Scalar with graph: the micro-batch's share of the step's loss."""
    router_loss: Tensor | None = None
    """Scalar with graph, added to the minimised loss and not to the shown loss."""
    reported: Tensor | None = None
    """Scalar: ``loss`` as it is shown, if part of ``loss`` is not shown. None: ``loss`` itself."""
    metrics: Mapping[str, SumAndCount] = field(default_factory=dict)
    """Name -> (sum, count): the record of a step shows the sums of all micro-batches divided by their counts."""
    held_out: Sequence[SumAndCount] = ()
    """The held-out loss as means that are added: (sum, count) of each, over this batch. Read in evaluation alone, where
    one mean is over all batches; empty for an objective without a held-out loss.
    """

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
    """Set, not raised, if the loss of a micro-batch was NaN or infinite: all ranks decide alike what follows."""
    aux_loss: float | None = None
    """This rank's share of the routers' balance loss, not multiplied with its coefficient; None without routers."""

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
        """Return the divisors of the step, counted over all ranks of ``world`` before its first backward. Never None.

        Fillers count nothing, and take part in what all ranks compute.
        """
        ...

    def score(self, model: nn.Module, batch: MicroBatch, totals: Any) -> Score:
        """Score one micro-batch, under the loop's autocast.

        ``totals`` are the divisors of its step. In evaluation, without gradients, they are None: nothing is divided,
        ``loss`` is not read, ``held_out`` and ``metrics`` are.
        """
        ...


class SupervisedObjective:
    """The mean over every target of the step of ``-log p(target)``, or of another loss of a target.

    The mean is weighted if rows have weights: a row of weight 2 counts like two rows. The held-out loss is always
    ``-log p(target)``, each target once.

    Args:
        handle: Handle of the model, if it is streamed: the loss that its routers add is not shown.
        loss: Loss of a target.
        teacher: Model that the divergence is from, if there is one; streamed as the model is. Without it batches hold
            the teacher's top-k probabilities.
    """

    def __init__(
        self, handle: StreamHandle | None = None, loss: TokenLoss = PLAIN, teacher: ModelReference | None = None
    ) -> None:
        self._handle = handle  # whose routers are others once it is scheduled anew
        self.loss, self.teacher = loss, teacher

    def totals(self, micro_batches: Sequence[MicroBatch], world: World = WORLD) -> float:
        """Return the summed weights of all targets of the step: their number without weights."""
        return world.sums([sum(batch.target_weight for batch in counted(micro_batches))])[0]

    def score(self, model: nn.Module, batch: MicroBatch, totals: float | None) -> Score:
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
    """Return the sum of a loss over the targets of ``batch``, from the logits of models that are not streamed."""
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
        model: The model that is called: with adapters the trained model itself, else another one.
        handle: Handle of the model.
        temperature: Divisor of the logits.
        adapters: Leave its adapters on.
    """

    def __init__(self, model: Any, handle: StreamHandle, *, temperature: float = 1.0, adapters: bool = False) -> None:
        self.model, self.handle, self.temperature, self.adapters = model, handle, temperature, adapters

    def logprobs(self, batch: TreeBatch) -> Tensor:
        """Return the log-probs, under the caller's autocast."""
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
    """Put the model in evaluation mode inside, and all of it back in its mode afterwards."""
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


Batch = TypeVar("Batch", bound="MicroBatch")


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward, padded to one length; B rows, T positions.

    ``shift_labels[b, t]`` is the token that position t is to predict, or :data:`IGNORE_INDEX`: shifted already.
    """

    input_ids: Tensor
    """[B, T] int64"""
    attention_mask: Tensor
    """[B, T] int64, 0 on padding"""
    shift_labels: Tensor
    """[B, T] int64"""
    origins: tuple[str, ...]
    """Source of each row, ``file:row``: for messages."""
    position_ids: Tensor | None = None
    """[B, T] int64 from 0 in each row packed into a sequence; None if every sequence is one row"""
    weights: Tensor | None = None
    """[B, T] floats, factor of the loss of the target of position t; None if all are 1"""
    top_k: TopKTeacher | None = None
    """Top-k probabilities of a teacher at the trained positions, from a file; they stay on the host"""
    filler: bool = False
    """True for a batch that counts nothing: it is computed because other ranks compute one."""

    _moved: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "shift_labels", "position_ids", "weights")

    @property
    def num_targets(self) -> int:
        """Number of trained positions: the loss is a mean over them."""
        return int((self.shift_labels != IGNORE_INDEX).sum())

    @property
    def target_weight(self) -> float:
        """Sum of the weights of all trained positions: their number without weights."""
        if self.weights is None:
            return self.num_targets
        return float(self.weights[self.shift_labels != IGNORE_INDEX].double().sum())

    @property
    def num_tokens(self) -> int:
        """Number of input tokens, without padding."""
        return int(self.attention_mask.sum())

    @property
    def padded_left(self) -> bool:
        """True if padding stands before a token of its row. Padding after it is hidden by causality alone."""
        return bool((self.attention_mask[:, 1:] > self.attention_mask[:, :-1]).any())

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the model's call, without labels."""
        # Transformers separates packed rows by their positions, and looks at them only where no mask is given.
        packed = {} if self.position_ids is None else {"position_ids": self.position_ids}
        # No token sees padding behind it, and a mask it does not need would cost it the faster kernels.
        mask = self.attention_mask if self.padded_left else None
        return {"input_ids": self.input_ids, **packed, "attention_mask": mask, "use_cache": False}

    def to(self, device: torch.device) -> Self:
        tensors = {name: getattr(self, name) for name in self._moved}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})


@dataclass(frozen=True, kw_only=True)
class PrefixBatch(MicroBatch):
    """Rows that share their beginnings, in one sequence ``[1, T]``, trained on as each of them alone."""

    branches: Branches

    @property
    def arguments(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, **self.branches.arguments(self.input_ids), "use_cache": False}


@dataclass(frozen=True, kw_only=True)
class TreeBatch(MicroBatch):
    """Completions of prompts: N of them, with K targets together, in one of two layouts.

    shared      one sequence ``[1, T]``: common beginnings once, a prompt and perhaps more (``branches``)
    separate    a row for each completion ``[N, L]``, its prompt before it; padded on the right or on the left

    An objective gets the same from both: 1-D over K, ordered by completion and then by position. A target that several
    completions begin with is there once for each, and its gradient is the sum of theirs.
    """

    place_K: Tensor  # noqa: N815
    """int64 ``[K]``: position of each target in ``[B, T]``, flattened"""
    row_K: Tensor  # noqa: N815
    """int64 ``[K]``, sorted: the completion of each target"""
    num_rows: int
    """N"""
    branches: Branches | None = None
    """Tokens that each token sees, if beginnings are shared"""

    _moved: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "attention_mask",
        "shift_labels",
        "place_K",
        "row_K",
        "position_ids",
    )

    @property
    def num_targets(self) -> int:
        """Targets of all completions, K."""
        return len(self.row_K)

    def ragged(self, x_BT: Tensor) -> Tensor:
        """Return the values at targets, ``[K]``, completion by completion. Differentiable."""
        return x_BT.flatten()[self.place_K]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``StreamHandle.logprobs``, without targets."""
        given = super().arguments
        return given if self.branches is None else {**given, "branches": self.branches}


def counted(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches that count: all but fillers."""
    return [batch for batch in batches if not batch.filler]


class StepStream(Protocol):
    """An endless source of optimizer steps, epoch after epoch, whose position can be saved."""

    def next_step(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of the next optimizer step; fewer than usual at the end of an epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, as plain JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position saved by ``state_dict``."""
        ...
