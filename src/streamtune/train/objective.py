"""Micro-batches, and the objectives that compute their loss.

The loss of an optimizer step is a mean over the whole step (over tokens, pairs or completions), however many
micro-batches the step has. Therefore :meth:`Objective.step_totals` is called once with all micro-batches, and the loss
of each micro-batch (:class:`Score`) is a sum divided by these totals.
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
from streamtune.engine.image_tower import stays_on_host
from streamtune.errors import NonFiniteError
from streamtune.ops import TokenLoss, token_loss_reference
from streamtune.ops.devices import to_float64
from streamtune.train.world import WORLD, World

if TYPE_CHECKING:
    from streamtune.engine import Branches
    from streamtune.ops import TopKTeacher


SumAndCount = tuple[float, float]
PLAIN = TokenLoss()


@dataclass(frozen=True)
class Score:
    """Loss and metrics of one micro-batch."""

    loss: Tensor
    """Scalar that requires a gradient: the micro-batch's share of the step's loss."""
    router_loss: Tensor | None = None
    """Scalar that requires a gradient, added to the minimised loss but not to the reported loss."""
    reported: Tensor | None = None
    """Scalar to report in place of ``loss``; None: ``loss`` is reported."""
    metrics: Mapping[str, SumAndCount] = field(default_factory=dict)
    """Name -> (sum, count). The record of a step has the sums of all micro-batches divided by their counts."""
    held_out: Sequence[SumAndCount] = ()
    """Terms of the evaluation loss, as (sum, count) over this micro-batch. Each term is averaged over all
    micro-batches, and the means are added. Empty without an evaluation loss."""

    @property
    def total_loss(self) -> Tensor:
        """``loss`` plus ``router_loss``: a scalar that requires a gradient."""
        return self.loss if self.router_loss is None else self.loss + self.router_loss


@dataclass(frozen=True)
class StepScore:
    """Loss and metrics of an optimizer step."""

    loss: float
    metrics: dict[str, float]
    not_finite: NonFiniteError | None = None
    """Error if the loss of a micro-batch was NaN or infinite, which all ranks handle together later."""
    aux_loss: float | None = None
    """This rank's share of the balance loss of routers, without its coefficient; None without router loss."""

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
    """Computes the loss of one micro-batch at a time, as a share of a mean over the optimizer step."""

    def step_totals(self, micro_batches: Sequence[MicroBatch], world: World = WORLD) -> Any:
        """Return the divisors of the step's loss, summed over all ranks of ``world``; never None.

        Called before the first backward pass of the step. Dummy micro-batches (``MicroBatch.filler``) do not count.
        """
        ...

    def score(self, model: nn.Module, batch: MicroBatch, totals: Any) -> Score:
        """Return loss and metrics of one micro-batch; called under autocast.

        Args:
            model: Model to call.
            batch: Micro-batch.
            totals: Result of :meth:`step_totals`; None in evaluation, which reads only ``held_out`` and ``metrics``.
        """
        ...


class SupervisedObjective:
    """Objective of supervised fine-tuning: the mean of a per-token loss over all targets of a step.

    With row weights the mean is weighted: a row of weight 2 counts like two rows. The evaluation loss is always ``-log
    p(target)``, unweighted.

    Args:
        handle: Handle returned by ``streamtune.stream``; None for a model that is not streamed.
        loss: Per-token loss; by default the cross-entropy.
        teacher: Teacher model for distillation; None: no distillation, or batches have the teacher's top-k
            probabilities.
    """

    def __init__(
        self, handle: StreamHandle | None = None, loss: TokenLoss = PLAIN, teacher: ModelReference | None = None
    ) -> None:
        self._handle = handle  # not its routers: a new schedule replaces them
        self.loss, self.teacher = loss, teacher

    def step_totals(self, micro_batches: Sequence[MicroBatch], world: World = WORLD) -> float:
        """Return the sum of the weights of all targets of the step; without weights, the number of targets."""
        return world.sum_over_ranks([sum(batch.target_weight for batch in counted_batches(micro_batches))])[0]

    def score(self, model: nn.Module, batch: MicroBatch, totals: float | None) -> Score:
        if totals is None:
            loss: Tensor = call_model(model, batch, num_targets=1).loss
            return Score(loss, held_out=[(loss.item(), batch.num_targets)])
        metrics: dict[str, SumAndCount] = {}
        if self.loss.is_plain and batch.weights is None:
            loss = call_model(model, batch, num_targets=totals).loss
        elif self._handle is None:
            loss = unstreamed_token_loss(model, batch, self.loss, self.teacher) / totals
        else:
            taught = None if self.teacher is None else self.teacher.lazy_logits(batch)
            request = LossRequest(self.loss, batch.weights, taught, batch.top_k)
            with self._handle.with_loss(request):
                loss = call_model(model, batch, num_targets=totals).loss
            assert request.measured is not None, "unreachable: a model call with labels computes the loss"
            metrics = {
                name: (value.item(), batch.num_targets)
                for name, value in request.measured.items()
                if name != "kl" or self.loss.divergence is not None
            }
        watch = None if self._handle is None else self._handle.routers
        terms = watch.terms if watch is not None and watch.loss is not None else None
        return Score(loss, reported=None if terms is None else terms.loss, metrics=metrics)


def supervised_loss(
    model: nn.Module, batch: MicroBatch, *, num_targets: float, autocast_dtype: str | None = None
) -> Tensor:
    """Return the sum of ``-log p`` over the targets of ``batch``, divided by ``num_targets``, plus the router loss."""
    with autocast(batch.input_ids.device, autocast_dtype):
        loss: Tensor = call_model(model, batch, num_targets=num_targets).loss
    return loss


def unstreamed_token_loss(
    model: nn.Module, batch: MicroBatch, loss: TokenLoss, teacher: ModelReference | None = None
) -> Tensor:
    """Return the sum of a per-token loss over the targets of ``batch``, computed from all logits at once."""
    teacher_logits = None
    if teacher is not None:
        with torch.no_grad(), evaluation_mode(teacher.model):
            teacher_logits = teacher.model(**batch.inputs).logits
    logits = model(**batch.inputs).logits
    return token_loss_reference(
        logits, batch.shift_labels, loss, batch.weights, teacher_BTV=teacher_logits, top_k=batch.top_k
    )


def call_model(model: nn.Module, batch: MicroBatch, *, num_targets: float, **extra_arguments: Any) -> Any:
    """Return the model's output for a batch with labels; ``extra_arguments`` adds or replaces arguments of the call."""
    branches = batch.branches if isinstance(batch, PrefixBatch) else None
    with nullcontext() if branches is None else StreamHandle.of(model).laid_out(branches):
        return model(
            # Transformers computes a loss only with labels, and uses shift_labels if given.
            labels=batch.shift_labels,
            shift_labels=batch.shift_labels,
            num_items_in_batch=num_targets,
            **{**batch.inputs, **extra_arguments},
        )


def autocast(device: torch.device, dtype: str | None) -> torch.autocast:
    """Return an autocast context in ``bfloat16`` or ``float16`` (None: off), without a cache of cast weights."""
    computed = torch.float16 if dtype == "float16" else torch.bfloat16
    return torch.autocast(device.type, dtype=computed, enabled=dtype is not None, cache_enabled=False)


class Reference(Protocol):
    """Source of the reference model's log-probabilities."""

    def logprobs(self, batch: TreeBatch) -> Tensor:
        """Return the log-probabilities of the batch's targets: fp32 ``[K]``, no gradient, ordered as
        ``batch.row_K``."""
        ...


class ModelReference:
    """A model as reference, in evaluation mode; its adapters are disabled unless ``adapters`` is True.

    Args:
        model: Model to call: the trained model if it has adapters, else another model.
        handle: Handle of the model, returned by ``streamtune.stream``.
        temperature: Divisor of the logits.
        adapters: True to keep adapters enabled.
    """

    def __init__(self, model: Any, handle: StreamHandle, *, temperature: float = 1.0, adapters: bool = False) -> None:
        self.model, self.handle, self.temperature, self.adapters = model, handle, temperature, adapters

    def logprobs(self, batch: TreeBatch) -> Tensor:
        """Return the log-probabilities of the batch's targets: fp32 ``[K]``, computed under the caller's autocast."""
        without = nullcontext() if self.adapters else _disabled_adapters(self.model)
        with torch.no_grad(), evaluation_mode(self.model), without, self.handle.routers.without_losses():
            scores = self.handle.logprobs(
                targets=batch.shift_labels, temperature=self.temperature, model=self.model, **batch.inputs
            )
        return batch.gather_targets(scores.logprobs)

    def lazy_logits(self, batch: MicroBatch) -> LazyLogits:
        """Return the reference's logits, which are computed from its final hidden states when they are read; no
        gradient."""
        branches = batch.branches if isinstance(batch, PrefixBatch) else None
        with torch.no_grad(), evaluation_mode(self.model), self.handle.routers.without_losses():
            return self.handle.lazy_logits(targets=batch.shift_labels, branches=branches, **batch.inputs)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Context manager in which the model is in evaluation mode; its previous mode is restored on exit."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _disabled_adapters(model: Any) -> Iterator[None]:
    if not hasattr(model, "disable_adapter"):
        yield
        return
    with model.disable_adapter():
        yield


Batch = TypeVar("Batch", bound="MicroBatch")


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass, padded to the same length: B rows, T positions.

    Labels are already shifted: ``shift_labels[b, t]`` is the token that position t predicts, or :data:`IGNORE_INDEX`.
    """

    input_ids: Tensor
    """[B, T] int64"""
    attention_mask: Tensor
    """[B, T] int64, 0 on padding"""
    shift_labels: Tensor
    """[B, T] int64"""
    origins: tuple[str, ...]
    """Source of each row as ``file:row``, for messages."""
    position_ids: Tensor | None = None
    """[B, T] int64, starting at 0 for each packed row; None if rows are not packed"""
    weights: Tensor | None = None
    """[B, T] floating point, loss weight of the target of position t; None if all are 1"""
    top_k: TopKTeacher | None = None
    """Top-k probabilities of a teacher at the positions with a target, in host memory"""
    images: Mapping[str, Tensor] | None = None
    """inputs of the model for the images of the rows, such as ``pixel_values``; None without images. Of packed rows,
    also ``position_ids`` ``[4, B, T]`` if the model numbers tokens of images in time, height and width"""
    filler: bool = False
    """True for a dummy micro-batch, which only gives all ranks the same number of forward passes; its loss does not
    count."""

    _tensor_fields: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "attention_mask",
        "shift_labels",
        "position_ids",
        "weights",
    )

    @property
    def num_targets(self) -> int:
        """Number of positions with a target."""
        return int((self.shift_labels != IGNORE_INDEX).sum())

    @property
    def target_weight(self) -> float:
        """Sum of the weights of all targets; without weights, their number."""
        if self.weights is None:
            return self.num_targets
        return float(to_float64(self.weights[self.shift_labels != IGNORE_INDEX]).sum())

    @property
    def num_tokens(self) -> int:
        """Number of input tokens, without padding."""
        return int(self.attention_mask.sum())

    @property
    def is_padded_left(self) -> bool:
        """True if a row has padding before a token. Padding after all tokens needs no mask in causal attention."""
        return bool((self.attention_mask[:, 1:] > self.attention_mask[:, :-1]).any())

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's call, without labels."""
        # Transformers separates packed rows by their positions, but only if no mask is given.
        packed = {} if self.position_ids is None else {"position_ids": self.position_ids}
        # Tokens do not see padding after them, and an unneeded mask would prevent faster kernels.
        mask = self.attention_mask if self.is_padded_left else None
        images = self.images or {}
        return {"input_ids": self.input_ids, **packed, "attention_mask": mask, "use_cache": False, **images}

    def to(self, device: torch.device) -> Self:
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self._tensor_fields}
        moved = {name: x.to(device) for name, x in tensors.items() if x is not None}
        if self.images is not None:
            moved["images"] = {name: x if stays_on_host(name, x) else x.to(device) for name, x in self.images.items()}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class PrefixBatch(MicroBatch):
    """Rows packed into one sequence ``[1, T]``, in which common prefixes occur once. Loss and gradient do not
    change."""

    branches: Branches

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, **self.branches.arguments(self.input_ids), "use_cache": False}


@dataclass(frozen=True, kw_only=True)
class TreeBatch(MicroBatch):
    """N completions of prompts, with K targets in total, in one of two layouts.

        shared      one sequence ``[1, T]`` in which prompts and other common prefixes occur once (``branches``)
        separate    one row per completion ``[N, L]`` with its prompt, padded on the right or on the left

    In both layouts values ``[K]`` are ordered by completion, then by position. A target in a common prefix occurs once
    per completion, and its gradients add up.
    """

    flat_index_K: Tensor  # noqa: N815
    """int64 ``[K]``: index of each target in the flattened ``[B, T]``"""
    row_K: Tensor  # noqa: N815
    """int64 ``[K]``, sorted: index of each target's completion"""
    num_rows: int
    """Number of completions, N"""
    branches: Branches | None = None
    """Tokens that each token attends to, if prefixes are shared"""

    _tensor_fields: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "attention_mask",
        "shift_labels",
        "flat_index_K",
        "row_K",
        "position_ids",
    )

    @property
    def num_targets(self) -> int:
        """Number of targets of all completions, K."""
        return len(self.row_K)

    def gather_targets(self, x_BT: Tensor) -> Tensor:
        """Return the values of ``x_BT`` at the targets, ``[K]``, ordered by completion; differentiable."""
        return x_BT.flatten()[self.flat_index_K]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of ``StreamHandle.logprobs``, without targets."""
        arguments = super().inputs
        return arguments if self.branches is None else {**arguments, "branches": self.branches}


def counted_batches(batches: Sequence[Batch]) -> list[Batch]:
    return [batch for batch in batches if not batch.filler]


class StepStream(Protocol):
    """Endless iterator over optimizer steps, whose position can be saved."""

    def next_step(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of the next optimizer step; at the end of an epoch there may be fewer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position saved by ``state_dict``."""
        ...
