"""The streamed language-model head: only the logits of one chunk of tokens exist at a time when the loss is computed.

    loss = cross_entropy(transform(h W'), targets) = sum_i cross_entropy(transform(h(i) W'), targets(i))

During a call with ``labels`` the head returns :class:`LazyLogits` instead of ``[B, T, V]``. The model may scale them,
squash them (softcap) or cut off a padded end of the vocabulary. These steps are recorded and applied to each chunk. The
model may also drop tokens and flatten the others (``view(-1, V)``); this is applied to the hidden states. The loss is
computed from hidden states and weight when the model calls its ``loss_function``, which is replaced during the call, or
``torch.nn.functional.cross_entropy``.

Shape suffixes: B batch, T tokens, N = B * T or fewer tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine.evaluated import EvaluatedLogits, ReadableLogits
from streamtune.engine.fused import is_linear_unpatched
from streamtune.engine.hf_names import CAUSAL_LOSS, LOSS, LOSSES, hf_internal
from streamtune.engine.lazy_logits import LazyForward, LazyLogits, Step
from streamtune.engine.observe import foreign_hooks, refuse_hooks, restore_forward
from streamtune.engine.offloaded_weights import OffloadedWeights
from streamtune.engine.requests import LossRequest
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.engine.sharded import is_sharded
from streamtune.errors import UnsupportedModelError
from streamtune.ops import (
    MEASURED,
    TeacherHead,
    linear_cross_entropy,
    linear_token_loss,
    project_cross_entropy,
    project_scores,
    project_token_loss,
    token_scores,
)
from streamtune.ops.exchange import sum_over_ranks
from streamtune.ops.head.sweep import autocast_dtype, cast_tensors
from streamtune.schedule import Schedule

_LOSSES = hf_internal(LOSSES)
_causal_loss = hf_internal(CAUSAL_LOSS)


def has_head(model: Any) -> bool:
    """Return True if a model has a language-model head, which a classifier or a bare decoder lacks."""
    return model.get_output_embeddings() is not None


class StreamedHead:
    """Replaces a model's head and loss during a call with labels, so that the loss is computed without full logits.

    Args:
        model: Causal language model, without wrappers.
        schedule: Schedule, of which ``head_chunk_size`` and ``grad_dtype`` are read.
        offloaded: Weights offloaded to the host; None if all weights are on the device.
    """

    def __init__(self, model: Any, schedule: Schedule, offloaded: OffloadedWeights | None = None) -> None:
        self.model, self.schedule, self.offloaded = model, schedule, offloaded
        self.active = self.sharded = False
        self.shards: SequenceShards | None = None
        """Tokens of the current call on each rank, if ranks share the sequence; lazy logits then cover this rank's
        tokens.
        """
        self.loss_request: LossRequest | None = None
        """Loss that a call with labels returns; None for the cross-entropy."""
        if isinstance(heads := model.get_output_embeddings(), nn.ModuleList):
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps a list of heads ({len(heads)}), one for each stream of tokens; only a "
                "head that is a single module can be streamed",
                fix="use stream(model, head=False), which streams the layers and keeps the model's own heads",
            )
        self._refuse_other_loss(model.__dict__.get(LOSS))

    def _refuse_other_loss(self, function: Any) -> None:
        """Raise an error unless ``function`` is None or ``ForCausalLMLoss``, the only loss that streaming replaces."""
        if function is not None and function not in (_causal_loss, self.loss):
            name = getattr(function, "__name__", type(function).__name__)
            raise UnsupportedModelError(
                f"the loss of this {type(self.model).__name__} is {name!r}, a function of full logits; streaming would "
                "replace it with the cross-entropy",
                where="model.loss_function",
                fix="use stream(model, head=False), which streams the layers and keeps the model's own head and loss; "
                "or compute the loss from handle.logprobs(), which is streamed",
            )

    def begin_call(self) -> None:
        """Begin a call with labels: until :meth:`end_call`, the head returns :class:`LazyLogits`."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no language-model head to stream",
                fix="use stream(model, head=False), which streams the layers and keeps the model's own head",
            )
        refuse_hooks(
            head,
            within=False,
            why="which would not run: loss and gradient are computed from the head's weight",
            fix="use stream(model, head=False), which streams the layers and keeps the model's own head",
        )
        self.module, self.original_forward = head, head.__dict__.get("forward")
        self.had_loss = LOSS in self.model.__dict__
        self.loss_before = self.model.__dict__.get(LOSS)
        head.forward = LazyForward(self)
        self.sharded = is_sharded(head)
        if self.sharded:  # lazy logits need no weight: it is gathered only when a loss or scores are computed
            head._call_impl = head.forward  # type: ignore[method-assign]
        setattr(self.model, LOSS, self.loss)
        self.active = True

    def end_call(self) -> None:
        """End a call with labels: restore the model's own head and loss."""
        if not self.active:
            return
        self.active = False
        restore_forward(self.module, self.original_forward)
        self.module.__dict__.pop("_call_impl", None)
        if self.had_loss:
            setattr(self.model, LOSS, self.loss_before)
        else:
            delattr(self.model, LOSS)

    def logits_without_graph(self, logits: LazyLogits) -> Tensor | None:
        """Return logits without a graph, computed when they are read, or now if the head has adapters.

        Return None if ranks share the sequence or the head's weight is sharded.
        """
        return self._make_readable(logits, EvaluatedLogits)

    def logits_with_graph(self, logits: LazyLogits) -> Tensor | None:
        """Return logits with a graph, computed when they are read, or now if the head has adapters.

        Return None if ranks share the sequence or the head's weight is sharded.
        """
        return self._make_readable(logits, ReadableLogits.create)

    def _make_readable(self, logits: LazyLogits, make: Callable[..., Tensor]) -> Tensor | None:
        if self.sharded or self.shards is not None:
            return None
        if any(True for _ in self.module.children()):  # adapters may be enabled or disabled before a later read
            return logits.apply_steps(self.module(logits.hidden))
        return make(self.module, logits.hidden, logits.apply_steps, self.schedule.head_chunk_size)

    def _compute_with_weight(self, logits: LazyLogits, compute: Callable[[LazyLogits], Any]) -> Any:
        """Return ``compute(logits)`` with the head's weight on the device.

        A sharded weight is gathered by hooks around a call of the head, in the forward and in the backward, so
        ``compute`` then runs inside such a call.
        """
        if not self.sharded:
            with nullcontext() if self.offloaded is None else self.offloaded.weights_on_device_with_graph(self.module):
                return compute(logits)
        returns_lazy, head = self.module.__dict__.pop("_call_impl", None), self.module
        before = head.__dict__.get("forward")
        head.forward = lambda hidden: compute(logits.with_hidden(hidden))
        try:
            return head(logits.hidden)
        finally:
            restore_forward(head, before)
            if returns_lazy is not None:
                head._call_impl = returns_lazy  # type: ignore[method-assign]

    def loss(
        self,
        logits: LazyLogits,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss of lazy logits; replaces ``ForCausalLMLoss`` of ``transformers``, with an equal result.

        Args:
            logits: Lazy logits ``[B, T, V]``.
            labels: Labels ``[B, T]``, unshifted; ``ignore_index`` for tokens that are not trained on.
            vocab_size: Unused.
            num_items_in_batch: Number of target tokens in the whole step; None counts the targets of this call.
            ignore_index: Label of tokens that are not trained on.
            shift_labels: Labels ``[B, T]``, already shifted; they take precedence over ``labels``.
            **kwargs: Other arguments of the model, unused.
        """
        default_loss = _LOSSES.get(getattr(self.model, "loss_type", None))
        self._refuse_other_loss(self.loss_before if self.had_loss else default_loss)
        if self.shards is not None:
            return self._loss_over_ranks(self.shards, logits, num_items_in_batch, ignore_index)
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.to(logits.hidden.device)
        return self.cross_entropy(logits, targets, num_items_in_batch, ignore_index)

    def _loss_over_ranks(
        self, shards: SequenceShards, logits: LazyLogits, num_items: Tensor | float | None, ignore_index: int
    ) -> Tensor:
        """Return the loss of sequences that ranks share, equal on every rank; its gradient is this rank's share."""
        all_targets = shards.targets
        assert all_targets is not None
        targets = shards.select_tokens(all_targets.to(logits.hidden.device), 1, ignore_index)
        if logits.hidden.shape[:-1] != targets.shape:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} drops tokens before its loss, which sequence parallelism does not "
                "support",
                fix="set sequence_parallel_size: 1",
            )
        if num_items is None:
            num_items = max(1, int((all_targets != ignore_index).sum()))
        return sum_over_ranks(self.cross_entropy(logits, targets, num_items, ignore_index), shards.group)

    def cross_entropy(
        self, logits: LazyLogits, targets: Tensor, num_items: Tensor | float | None, ignore_index: int
    ) -> Tensor:
        """Return the summed loss of targets ``[...]``, divided by ``num_items`` (None: by the number of targets).

        The loss is the cross-entropy, or the loss that the call requested.
        """
        options: dict[str, Any] = {"num_items": num_items, "ignore_index": ignore_index}
        if self.loss_request is None:
            return self._apply_loss_operator(logits, targets, linear_cross_entropy, project_cross_entropy, options)
        loss_request, weights = self.loss_request, self.loss_request.weights
        if self.shards is not None and weights is not None:
            weights = self.shards.select_tokens(weights.to(targets.device), 1, 1.0)
        options |= {
            "loss": loss_request.loss,
            "weights_BT": loss_request.device_weights(targets, weights, type(self.model).__name__),
        }
        lazy = loss_request.teacher
        top_k = loss_request.rank_top_k(targets.shape, self.shards, type(self.model).__name__)
        with nullcontext(top_k) if lazy is None else lazy.head.teacher_head(lazy, targets) as teacher:
            options["teacher"] = teacher
            loss, measured = self._apply_loss_operator(logits, targets, linear_token_loss, project_token_loss, options)
        if self.shards is not None:
            measured = sum_over_ranks(measured, self.shards.group)
        loss_request.measured = dict(zip(MEASURED, measured.unbind(), strict=True))
        return loss

    @contextmanager
    def teacher_head(self, logits: LazyLogits, targets: Tensor) -> Iterator[TeacherHead]:
        """Yield this model's head (weight on the device) and hidden states in a context, for a student's distillation.

        Raises:
            UnsupportedModelError: The head is sharded, or it gets other tokens than the student's ``targets``.
        """
        if self.sharded or logits.hidden.shape[:-1] != targets.shape:
            what = "its head is sharded" if self.sharded else "it drops tokens before its head"
            raise UnsupportedModelError(f"{type(self.model).__name__} cannot be a teacher: {what}")
        hidden = logits.hidden.detach()
        with nullcontext() if self.offloaded is None else self.offloaded.weights_on_device_with_graph(self.module):
            if not self._is_plain_linear:
                yield TeacherHead(hidden, self._projection_function(logits))
                return
            head: Any = self.module
            dtype = autocast_dtype(hidden)
            weight, bias = cast_tensors(dtype, head.weight.detach(), None if head.bias is None else head.bias.detach())

            def project(h_nC: Tensor) -> Tensor:
                (h_nC,) = cast_tensors(dtype, h_nC)
                return logits.apply_steps(nn.functional.linear(h_nC, weight, bias))

            yield TeacherHead(hidden, project)

    def token_log_probs(self, logits: LazyLogits, targets: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities ``[...]`` of targets ``[...]`` (0 for -100), and entropies ``[...]`` or None."""
        return self._apply_loss_operator(logits, targets, token_scores, project_scores, {"entropy": entropy})

    def _apply_loss_operator(
        self,
        logits: LazyLogits,
        targets: Tensor,
        linear: Callable[..., Any],
        project: Callable[..., Any],
        options: dict[str, Any],
    ) -> Any:
        """Return the result of the function ``linear`` if the head is a plain ``nn.Linear``, else of ``project``."""

        def compute(logits: LazyLogits) -> Any:
            head: Any = self.module
            if not self._is_plain_linear:
                trained = [p for p in head.parameters() if p.requires_grad]
                return project(logits.hidden, self._projection_function(logits), trained, targets, **options)
            wide = self.schedule.grad_dtype == "float32"
            return linear(
                logits.hidden,
                head.weight,
                targets,
                bias_V=head.bias,
                transform=logits.apply_steps if logits.steps else None,
                accumulate_dtype=torch.float32 if wide else head.weight.dtype,
                **options,
            )

        options = {"chunk_size": self.schedule.head_chunk_size, **options}
        return self._compute_with_weight(logits, compute)

    @property
    def _is_plain_linear(self) -> bool:
        head: Any = self.module
        hooked = any(True for _ in foreign_hooks(head)) and not self.sharded
        return (
            is_linear_unpatched()
            and (type(head) is nn.Linear or (self.sharded and isinstance(head, nn.Linear)))
            and self.original_forward is None
            and not hooked
        )

    def _projection_function(self, logits: LazyLogits) -> Step:
        forward = self.original_forward or type(self.module).forward.__get__(self.module)
        return lambda hidden: logits.apply_steps(forward(hidden))
