"""Rows and losses that ``streamtune verify`` compares, and the longest row that plain autograd has memory for.

For an objective that scores completions (DPO, GRPO), the recipe's own loss is computed in two ways:

    streamed   batches as in training, with shared prompts if possible; log-probabilities from the engine
    plain      a row for each completion after its own copy of the prompt; log-probabilities from full logits

The reference model's log-probabilities are computed in the same way as the trained model's. For GRPO, completions are
random tokens after the prompts of the first rows: nothing is generated and no reward is computed. Router losses are
left out in both ways, because a shared prompt passes the routers only once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamtune import data, train
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import IGNORE_INDEX, model_device
from streamtune.engine import (
    LossRequest,
    RouterLoss,
    StreamHandle,
    adds_balance_loss,
    balance_coefficient,
    decoder_layers,
)
from streamtune.engine.memory.host import free_host_bytes
from streamtune.engine.rotary import rotate_rows_as_if_alone
from streamtune.errors import DataError
from streamtune.ops import TokenLoss, token_loss_reference
from streamtune.plan.simulate.memory import LiveBytes
from streamtune.plan.simulate.scored import PlainScores
from streamtune.programs.verify.restore import widening_weights
from streamtune.run.reference import stream_reference, wrap_reference
from streamtune.tasks.task import ScoringTask
from streamtune.train.objective import autocast, call_model, supervised_loss


@dataclass(frozen=True)
class RowLosses:
    """Next-token loss of the compared rows: by plain autograd on unpacked rows, and streamed on the training batch.

    In both cases the model adds the load-balancing loss of its experts, if it has one. A router z-loss is left out.
    """

    batch: train.MicroBatch
    alone: train.MicroBatch
    """The same rows unpacked; equal to ``batch`` if the batch is not packed."""
    router_loss: RouterLoss | None
    token_loss: TokenLoss
    teacher: Any | None
    """Teacher model of a distillation loss; None without distillation."""

    def plain_loss(self, model: nn.Module, bf16: bool) -> Tensor:
        """Return the loss of the unpacked rows by plain autograd, with each row's own rotary embeddings."""
        packed = self.batch is not self.alone
        with rotate_rows_as_if_alone(model, self.alone.attention_mask) if packed else nullcontext():
            return self._loss(self.alone, None, model, bf16)

    def streamed_loss(self, handle: StreamHandle) -> Callable[[nn.Module, bool], Tensor]:
        """Return a function that computes the loss of ``batch`` with the streamed model."""
        return partial(self._loss, self.batch, handle)

    def _loss(self, batch: train.MicroBatch, handle: StreamHandle | None, model: nn.Module, bf16: bool) -> Tensor:
        """Return the loss of ``batch``, streamed if ``handle`` is given; ``bf16`` turns on bf16 autocast."""
        router_loss, token_loss, teacher = self.router_loss, self.token_loss, self.teacher
        if token_loss.is_plain and batch.weights is None:
            return model_cross_entropy(batch, router_loss, model, bf16)
        device = batch.input_ids.device
        with widening_weights(teacher or model, _parameter_dtype(model) if teacher is not None and not bf16 else None):
            if handle is not None:
                teacher_logits = None
                if teacher is not None:
                    with (reference := stream_reference(teacher, handle)).handle, autocast(device, bf16):
                        teacher_logits = reference.lazy_logits(batch)
                with handle.with_loss(LossRequest(token_loss, batch.weights, teacher_logits, batch.top_k)):
                    return model_cross_entropy(batch, router_loss, model, bf16)
            arguments, balance = _balance_loss_arguments(batch, router_loss, model)
            with autocast(device, bf16):
                output = model(**{**batch.inputs, **arguments})
                with torch.no_grad():
                    teacher_BTV = None if teacher is None else teacher(**batch.inputs).logits
            loss = token_loss_reference(
                output.logits, batch.shift_labels, token_loss, batch.weights, teacher_BTV=teacher_BTV, top_k=batch.top_k
            )
            loss = loss / batch.target_weight
            return loss + balance * output.aux_loss if balance else loss


def model_cross_entropy(
    batch: train.MicroBatch, router_loss: RouterLoss | None, model: nn.Module, bf16: bool
) -> Tensor:
    """Return the cross-entropy that the model computes from labels, with its load-balancing loss if there is one."""
    arguments, balance = _balance_loss_arguments(batch, router_loss, model)
    if not arguments:
        return supervised_loss(model, batch, num_targets=batch.target_weight, bf16=bf16)
    with autocast(batch.input_ids.device, bf16), warnings.catch_warnings():
        # The argument asks for the balance loss; nobody reads the router logits.
        warnings.filterwarnings("ignore", message="a streamed evaluation with labels or gradients returns")
        output = call_model(model, batch, num_targets=batch.target_weight, **arguments)
    loss: Tensor = output.loss + (balance - balance_coefficient(base_of(model))) * output.aux_loss
    return loss


def _balance_loss_arguments(
    batch: train.MicroBatch, router_loss: RouterLoss | None, model: nn.Module
) -> tuple[dict[str, Any], float]:
    """Return arguments that make a model return its load-balancing loss, and the loss's factor; or ``({}, 0)``."""
    if router_loss is None or not (router_loss.balance or adds_balance_loss(base_of(model))):
        return {}, 0.0
    # The balance loss counts the tokens of the mask: padded rows need it, and packed rows must do without.
    padded = batch.position_ids is None and batch.num_tokens < batch.attention_mask.numel()
    mask = batch.attention_mask if padded else None
    return {"attention_mask": mask, "output_router_logits": True}, router_loss.balance


def _parameter_dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


@dataclass(frozen=True)
class TreeLosses:
    """Loss of a recipe that scores completions, such as DPO.

    Plain autograd computes the loss on one row per completion. The streamed model computes the loss on completions that
    share a prompt.
    """

    task: ScoringTask[Any]
    own_reference: Any | None
    """Separate reference model; None if there is no reference, or if it is the model without its adapters."""
    shared: train.TreeBatch
    """Completions as batched in training."""
    apart: train.TreeBatch
    """Completions as one row each."""

    def plain_loss(self, model: nn.Module, bf16: bool) -> Tensor:
        """Return the loss by plain autograd from full logits, with a row for each completion."""
        return self._loss(
            PlainScores(model), wrap_reference(self.task, model, None, self.own_reference), self.apart, model, bf16
        )

    def streamed_loss(self, handle: StreamHandle) -> Callable[[nn.Module, bool], Tensor]:
        """Return a function that computes the loss of ``shared`` with the streamed model."""
        return partial(self._loss_with_handle, handle)

    def _loss_with_handle(self, handle: StreamHandle, model: nn.Module, bf16: bool) -> Tensor:
        reference = wrap_reference(self.task, model, handle, self.own_reference)
        with nullcontext() if self.own_reference is None else reference.handle:
            return self._loss(handle, reference, self.shared, model, bf16)

    def _loss(
        self, scorer: Any, reference: train.Reference, batch: train.TreeBatch, model: nn.Module, bf16: bool
    ) -> Tensor:
        """Return the loss of ``batch``; without ``bf16``, policy and reference compute in the policy's dtype."""
        task = type(self.task)(self.task.recipe.model_copy(update={"bf16": bf16}))
        device = batch.input_ids.device
        dtype = _parameter_dtype(model) if self.own_reference is not None and not bf16 else None
        with (
            widening_weights(self.own_reference or model, dtype),
            autocast(device, bf16),
            scorer.routers.without_losses(),
        ):
            batch = task.with_reference(batch, reference)
            objective: Any = task.make_objective(scorer, reference, device)
            loss: Tensor = objective.score(model, batch, objective.step_totals([batch])).loss
        return loss


MAX_ROWS = 4
"""Maximum number of rows in the batch."""


@dataclass(frozen=True)
class Window:
    """The part of a row that is compared.

    Attributes:
        example: Row cut to this part.
        start: Position of the part's first token in the whole row.
        row_length: Number of tokens in the whole row.
    """

    example: data.Example
    start: int
    row_length: int

    @property
    def length(self) -> int:
        return len(self.example.input_ids)


def choose_windows(examples: Sequence[data.Example], length: int, min_rows: int = 1) -> list[Window]:
    """Return the first row with a trained token, cut to ``length`` tokens; if it is short, further rows too.

    The padded batch has at most ``length`` tokens and at most :data:`MAX_ROWS` rows. Each row is cut to ``length //
    min_rows`` tokens, so that ``min_rows`` rows fit.

    Raises:
        DataError: No row has a trained token after its first token.
    """
    windows: list[Window] = []
    for example in examples:
        window = _cut_window(example, max(2, length // min_rows))
        if window is None:
            continue
        longest = max(window.length, *(other.length for other in windows), 0)
        if windows and (len(windows) == MAX_ROWS or longest * (len(windows) + 1) > length):
            break
        windows.append(window)
    if not windows:
        raise DataError(
            "no row has a trained token after its first token, so there is no gradient to compare",
            where=examples[0].origin,
            fix="use longer rows, or check train_on",
        )
    return windows


def _cut_window(example: data.Example, length: int) -> Window | None:
    """Return at most ``length`` tokens of a row, including the first trained token; None without trained tokens."""
    ids, labels = np.asarray(example.input_ids), np.asarray(example.labels)
    trained = np.flatnonzero(labels[1:] != IGNORE_INDEX) + 1
    if not len(trained):
        return None
    start = 0
    if len(ids) > length and trained[0] >= length // 2:
        start = int(min(trained[0] - length // 2, len(ids) - length))
    kept = labels[start : start + length].copy()
    kept[0] = IGNORE_INDEX  # nothing precedes it
    images = example.images if len(ids) <= length else ()  # a part of a row may lack tokens of an image
    part = replace(example, input_ids=ids[start : start + length], labels=kept, images=images)
    return Window(part, start, len(ids))


MARGIN = 0.8
"""Fraction of free memory that may be used."""

GIB = 1 << 30


@dataclass(frozen=True)
class FreeMemory:
    """Free memory, and the memory of a forward over T tokens: ``per_token T + per_square T^2`` bytes.

    Attributes:
        measured: Dtype in which the coefficients were measured.
        free: Free bytes on the model's device.
        host_free: Free bytes of host memory, where ``verify`` stores the gradients of the wider dtype.
        per_token, per_square: Coefficients in bytes; ``per_square`` is above 0 if attention weights are stored.
    """

    model: nn.Module
    measured: torch.dtype
    free: int
    host_free: int
    per_token: float
    per_square: float

    def max_tokens(self, dtype: torch.dtype) -> int:
        """Return the number of tokens that plain autograd in ``dtype`` has memory for; 0 if the weights do not fit."""
        wider = dtype.itemsize / self.measured.itemsize
        spare = MARGIN * self.free - self._needed_bytes(0, dtype)
        if spare <= 0 or self._truth_gradient_bytes(dtype) > MARGIN * self.host_free:
            return 0
        a, b = wider * self.per_square, wider * self.per_token
        return int(spare / b) if a <= 0 else int((math.sqrt(b * b + 4 * a * spare) - b) / (2 * a))

    def why_too_large(self, tokens: int, dtype: torch.dtype) -> str:
        """Return a message about the memory that plain autograd in ``dtype`` lacks for ``tokens``; empty if it fits."""
        needs = [
            ("memory", self._needed_bytes(tokens, dtype), self.free),
            ("host memory", self._truth_gradient_bytes(dtype), self.host_free),
        ]
        for which, needed, free in needs:
            if needed > MARGIN * free:
                return f"needs {needed / GIB:.1f} GiB more {which}, {free / GIB:.1f} GiB are free"
        return ""

    def _needed_bytes(self, tokens: int, dtype: torch.dtype) -> float:
        parameters = list(self.model.parameters())
        weights = sum(p.numel() * max(dtype.itemsize - p.dtype.itemsize, 0) for p in parameters)
        on_host = parameters[0].device.type == "cpu"
        largest = max((p.numel() for p in parameters if p.requires_grad), default=0) * dtype.itemsize
        wider = dtype.itemsize / self.measured.itemsize
        activations = wider * (self.per_token * tokens + self.per_square * tokens**2)
        return weights + (self._truth_gradient_bytes(dtype) if on_host else largest) + activations

    def _truth_gradient_bytes(self, dtype: torch.dtype) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad) * dtype.itemsize


def measure_memory(
    model: nn.Module, measured: torch.dtype, forward: Callable[[int], Tensor], tokens: int
) -> FreeMemory:
    """Measure the memory of two short forwards with autograd graphs, and fit the coefficients of :class:`FreeMemory`.

    Args:
        measured: Dtype in which ``forward`` computes.
        forward: Function that returns the loss on a given number of tokens.
        tokens: Number of tokens in the longer of the two forwards.
    """
    half, whole = tokens // 2, tokens
    held = []
    for size in (half, whole):
        with LiveBytes(model, decoder_layers(model)) as live:
            loss = forward(size)
        held.append(live.peak)
        del loss
    # per_token T + per_square T^2 through both points
    square = max(0.0, (held[1] / whole - held[0] / half) / (whole - half))
    per_token = max(1.0, held[1] / whole - square * whole)
    host_free = free_host_bytes()
    device = model_device(model)
    free = host_free
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(model, measured, free, host_free, per_token, square)
