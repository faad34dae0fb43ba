"""``stream(model)`` and the handle it returns."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.libraries import name_untested_as_cause, untested_versions_note
from streamtune.base.model_facts import decoder_of, model_device
from streamtune.engine.call_hooks import SHORT, StreamedCalls
from streamtune.engine.hf_names import check_internal_names
from streamtune.engine.inspect_model import base_model
from streamtune.engine.lazy_logits import LazyLogits
from streamtune.engine.model_call import ModelCall
from streamtune.engine.observe import temporary_attribute
from streamtune.engine.preflight import (
    check_chunk_order,
    check_exact,
    check_length,
    check_sequence_parallel,
    lengths_to_check,
)
from streamtune.engine.requests import LogitsRequest, LossRequest, ScoreRequest, TokenScores
from streamtune.engine.routers import RouterLoss, sum_counts_over_ranks, without_router_loss
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.errors import ArgumentError
from streamtune.ops.forward_state import RandomState
from streamtune.schedule import Schedule


def stream(
    model: nn.Module,
    chunk_size: int | None = None,
    *,
    schedule: Schedule | None = None,
    head: bool = True,
    router_loss: RouterLoss | None = None,
    sequence_parallel: SequenceParallel | None = None,
) -> StreamHandle:
    """Change ``model`` in place so that it trains with the exact streaming backward (StreamBP, arXiv 2506.03077).

    Afterwards ``model(input_ids=ids, labels=labels).loss.backward()`` computes the same loss and gradient as before,
    with the activations of one chunk at a time. Trainers, adapters and accelerate work unchanged.

    As under gradient checkpointing, a call that trains (training mode, with ``labels`` or gradients) returns no cache.
    A cache that is passed is read but not written to. Under ``torch.no_grad()`` ``use_cache=True`` is honoured.

    ``position_ids`` that restart mean packed rows under the same conditions as in ``transformers``. There must be no
    ``attention_mask``, and the call or the configuration must have ``use_cache=False``, which trainers set. Packed rows
    never see each other, not even in models that ignore positions in their masks (gpt_oss, granitemoehybrid, opt).

    Args:
        model: Causal language model of ``transformers``, with or without peft adapters.
        chunk_size: Number of tokens per chunk; shorthand for ``schedule=Schedule(chunk_size=...)``.
        schedule: Chunk sizes, and where tensors are stored until the backward. If neither ``chunk_size`` nor
            ``schedule`` is given, it is ``Schedule()``. A call of at most 4,096 tokens is then one chunk that keeps its
            attention outputs, which costs no more than gradient checkpointing.
        head: True streams the language-model head as well. A call with ``labels`` then returns the loss and no logits.
            In evaluation (``model.eval()`` and ``torch.no_grad()``) logits are computed when they are read. A model
            without a language-model head (a classifier, a reward model) keeps its own head.
        router_loss: Losses on the routers of a mixture of experts, added to the loss of a call with ``labels``. None
            adds the model's own balance loss if ``output_router_logits`` is set. Calls without labels and gradients
            return router logits.
        sequence_parallel: Ranks that share each sequence. All ranks make the same calls with the same whole rows. A
            call with labels, or of ``StreamHandle.logprobs``, returns the result for the whole rows on every rank. The
            gradient is the sum of the ranks' gradients.

    Returns:
        Handle with ``.schedule`` and ``.remove()``; the latter restores the model exactly.

    Raises:
        ArgumentError: Both ``chunk_size`` and ``schedule`` are given, the model is streamed already, or
            ``sequence_parallel`` is given without a streamed head.
        UnsupportedModelError: The model cannot be streamed exactly, or ranks cannot share its sequences. The model is
            left as it was.

    Example:
        >>> handle = streamtune.stream(model, chunk_size=2048)
        >>> model(input_ids=ids, labels=labels).loss.backward()
        >>> handle.remove()
    """
    if chunk_size is not None and schedule is not None:
        raise ArgumentError("give chunk_size or schedule, not both")
    short = SHORT if schedule is None and chunk_size is None and sequence_parallel is None else None
    if schedule is None:
        schedule = Schedule() if chunk_size is None else Schedule(chunk_size=chunk_size)
    return StreamHandle(model, schedule, head, router_loss, sequence_parallel, short=short)


class StreamHandle(StreamedCalls):
    """Handle of a streamed model, to score tokens, check the model or stop streaming; also a context manager.

    Example:
        >>> with streamtune.stream(model, chunk_size=16) as handle:
        ...     model(input_ids=ids, labels=labels).loss.backward()
        >>> handle.schedule.chunk_size
        16
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        head: bool,
        router_loss: RouterLoss | None = None,
        sequence_parallel: SequenceParallel | None = None,
        short: Schedule | None = None,
    ) -> None:
        check_internal_names()
        if text := untested_versions_note():
            warnings.warn(text, stacklevel=3)
        with name_untested_as_cause():
            super().__init__(model, schedule, head, router_loss, sequence_parallel, short)

    def logprobs(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        branches: Branches | None = None,
        entropy: bool = False,
        temperature: float = 1.0,
        model: nn.Module | None = None,
        **arguments: Any,
    ) -> TokenScores:
        """Return log-probabilities of any target tokens, computed in chunks and differentiable, to build objectives on.

        Equal to ``(model(input_ids).logits / temperature).log_softmax(-1)`` at the targets. The call runs in chunks
        also under ``torch.no_grad()``.

        Args:
            input_ids: Token ids ``[B, T]``.
            targets: Target ids ``[B, T]``: position t predicts ``targets[:, t]``, or nothing if that is -100.
            branches: Layout of rows that share a prefix, for tokens ``[1, T]``; it sets position ids and attention
                mask.
            entropy: True also returns the entropy of the predicted distribution at each target.
            temperature: Divisor of the logits.
            model: Wrapper of the model to call (DeepSpeed's, DDP's); None calls the model itself.
            **arguments: Other arguments of the model call: ``attention_mask``, ``position_ids``.

        Raises:
            ArgumentError: A shape is wrong, or the head is not streamed.
            UnsupportedModelError: The model does not return logits of all tokens, or does not support rows that share a
                prefix.

        Example:
            >>> with streamtune.stream(model, chunk_size=16) as handle:
            ...     scores = handle.logprobs(ids, labels)
            >>> scores.logprobs.shape == labels.shape
            True
        """
        request = ScoreRequest(targets, branches, temperature, entropy)
        scores = self._scored_call(request, self.model if model is None else model, input_ids, arguments)
        return TokenScores(scores["logprobs"], scores.get("entropy"), scores.get("router_loss"))

    def lazy_logits(
        self, input_ids: Tensor, targets: Tensor, *, branches: Branches | None = None, **arguments: Any
    ) -> LazyLogits:
        """Return the logits of all tokens, not computed yet, for a model that is the teacher of a :class:`LossRequest`.

        The result holds the final hidden states ``[B, T, C]``. Arguments and errors are the same as for
        :meth:`logprobs`, but only the shape of ``targets`` is read. If ranks share a sequence, the result has only this
        rank's tokens.
        """
        logits: LazyLogits = self._scored_call(LogitsRequest(targets, branches), self.model, input_ids, arguments)[
            "logits"
        ]
        return logits

    def _scored_call(
        self, request: ScoreRequest, model_or_wrapper: Any, input_ids: Tensor, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        self._check_score_request(request, input_ids)
        if request.branches is not None:
            arguments = {**arguments, **request.branches.arguments(input_ids)}
        with self.returning_scores(request):
            answer: dict[str, Any] = model_or_wrapper(input_ids=input_ids, **arguments)
        return answer

    def _check_score_request(self, request: ScoreRequest, input_ids: Tensor) -> None:
        targets, branches, temperature = request.targets, request.branches, request.temperature
        if not self.layers:
            raise ArgumentError("the model is no longer streamed", fix="compute log-probabilities before .remove()")
        if not self.streams_head:
            raise ArgumentError(
                "log-probabilities need a streamed head; this model's head is not streamed",
                fix="use stream(model, head=True) on a causal language model",
            )
        if input_ids.shape != targets.shape or input_ids.dim() != 2:
            raise ArgumentError(
                f"input_ids {tuple(input_ids.shape)} and targets {tuple(targets.shape)} must both be [B, T]",
                fix="shift the targets: position t predicts targets[:, t], -100 where it predicts nothing",
            )
        if not temperature > 0:
            raise ArgumentError(f"temperature must be above 0, found {temperature!r}")
        if branches is not None and tuple(input_ids.shape) != (1, branches.length):
            raise ArgumentError(
                f"input_ids must be (1, {branches.length}) to match branches, found {tuple(input_ids.shape)}",
                fix="lay all trees end to end in one row of input_ids",
            )

    def with_loss(self, request: LossRequest) -> AbstractContextManager[None]:
        """Return a context in which calls with labels return the requested loss instead of the cross-entropy.

        Args:
            request: Loss, and weights of the targets. After a call, ``request.measured`` has sums for metrics.

        Raises:
            ArgumentError: The head is not streamed.
        """
        if self.head is None:
            raise ArgumentError(
                "a loss other than cross-entropy needs a streamed head; this model's head is not streamed"
            )
        return temporary_attribute(self.head, "loss_request", request)

    def check(self, length: int | None = None) -> None:
        """Raise an error if streaming changes the model's results on random tokens; this costs a few short forwards.

        Loss and gradients are compared on a few tokens. Then one layer of each kind runs forward on a row longer than a
        chunk, because a layer may compute differently above some length. The layers must also support the schedule's
        ``order``. If ranks share sequences, all of them must call this together; the results of the ranks are compared
        too.

        Args:
            length: Number of tokens of the long row, such as the longest row to train on. The layers run on the whole
                row without streaming, one after the other. None is one token more than a chunk, for chunks of up to
                4,096 tokens.

        Raises:
            UnsupportedModelError: The results differ; the message names the layer. The model stays streamed.

        Example:
            >>> with streamtune.stream(model, chunk_size=16) as handle:
            ...     handle.check()
        """
        with name_untested_as_cause():
            check_exact(self)
            check_chunk_order(self)
            if self.sequence_parallel is not None:
                check_sequence_parallel(self)
            else:
                for tokens in lengths_to_check(self) if length is None else [length]:
                    check_length(self, tokens)

    @torch.no_grad()
    def count_routes(self, batches: Iterable[dict[str, Any]]) -> Tensor:
        """Return how many tokens of a step's micro-batches are routed to each expert, for ``handle.routers.totals``.

        The cost is one forward of the decoder per micro-batch. If the training calls follow in the same order, they
        draw the same random numbers (router jitter).

        Args:
            batches: Arguments of each model call; labels are not read. The key ``branches`` may hold a
                :class:`Branches`.

        Returns:
            Counts ``[E + 1]``: tokens per expert and, last, the number of (token, router) pairs. They are summed over
                all ranks if ``torch.distributed`` is initialised.
        """
        decoder: Any = decoder_of(self.model)
        counts: Tensor | None = None
        with RandomState.capture(model_device(self.model)).replayed():
            for batch in batches:
                unread = ("labels", "shift_labels", "num_items_in_batch", "output_router_logits")
                read = {key: value for key, value in batch.items() if key not in unread}
                branches: Branches | None = read.pop("branches", None)
                if branches is not None:
                    read |= branches.arguments(read["input_ids"])
                else:
                    self._add_mask_for_one_row(call := ModelCall(self.model, (), read))
                    read = call.kwargs
                self.context.rows = call.packed_rows() if branches is None else branches
                self._set_rope_lengths()
                try:
                    read = self._sharing.shard_arguments(read)
                    self._sharing.open_routers(batch.get("attention_mask"))
                    decoder(**{**read, "use_cache": False, **without_router_loss(self.model)})
                finally:
                    sums = self.routers.end_call()
                    self._sharing.end_call()
                assert sums is not None
                counts = sums.counts if counts is None else counts + sums.counts
        assert counts is not None
        return sum_counts_over_ranks(counts)

    def reschedule(self, schedule: Schedule) -> None:
        """Stream the model with another schedule from now on; the gradient stays the same up to rounding.

        The backward of an earlier call can no longer run.
        """
        self.remove()
        parts = (self.streams_head, self.routers.loss, self.sequence_parallel)
        self.__init__(self.model, schedule, *parts)  # type: ignore[misc]

    @classmethod
    def of(cls, model: nn.Module) -> StreamHandle:
        """Return the handle of a streamed model, also of a copy (``copy.deepcopy``) or a loaded model (``torch.load``).

        Raises:
            ArgumentError: The model is not streamed.
        """
        inner = base_model(model)
        for hook in inner._forward_pre_hooks.values():
            if isinstance(handle := getattr(hook, "__self__", None), cls):
                return handle
        raise ArgumentError(f"this {type(inner).__name__} is not streamed", fix="call streamtune.stream(model)")

    def __enter__(self) -> StreamHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()
