"""``stream(model)``: put the engine into a model in place, and remove it again completely.

Extension points of ``transformers`` are used, and no modeling file is patched: the ``forward`` of decoder layers and of
the embedding (on the instance), the cache that a layer updates, and the attention and the mask function that its config
names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.libraries import blamed, untested
from streamtune.base.model_facts import model_device
from streamtune.engine.context import CallContext
from streamtune.engine.embeddings import StreamedEmbedding, read, token_embedding
from streamtune.engine.head import StreamedHead, has_head
from streamtune.engine.hf_names import check_names
from streamtune.engine.inspect_model import (
    REFUSED_OUTPUTS,
    attention_configs,
    base_model,
    check_streamable,
    decoder_layers,
    own_attention,
    owners,
)
from streamtune.engine.last_call import LastLayerCall
from streamtune.engine.layer import StreamedForward
from streamtune.engine.lazy_logits import LazyLogits, ScoreRequest
from streamtune.engine.losses import LogitsRequest, LossRequest
from streamtune.engine.memory.placement import Tiers, place_layers
from streamtune.engine.model_call import ModelCall, mark_read, refuse_surroundings
from streamtune.engine.norms import StreamedNorm, norms_outside
from streamtune.engine.observe import RandomState
from streamtune.engine.own_attention import CallNames
from streamtune.engine.passes import LayerStream
from streamtune.engine.plain_calls import Generation, has_generate, needs_whole_layers
from streamtune.engine.preflight import check_exact, check_length, check_order, check_shared, lengths_to_check
from streamtune.engine.rotary import LengthRotary, RowLengths
from streamtune.engine.routers import RouterLoss, RouterTerms, RouterWatch, balances_itself, not_balanced, reduced
from streamtune.engine.rows import Branches
from streamtune.engine.scores import TokenScores, lazy_logits_of, token_scores_of
from streamtune.engine.sequence.calls import Sharing, form_for
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.sharded import gather_whole, need_gradient, ungather_whole
from streamtune.engine.weights.waiting import WaitingWeights
from streamtune.errors import ArgumentError, UnsupportedModelError
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
    """Train ``model`` with the exact streaming backward (StreamBP, arXiv 2506.03077). The model is changed in place.

    Afterwards ``model(input_ids=ids, labels=labels).loss.backward()`` computes the ordinary loss and the ordinary
    gradient with the activations of one chunk; trainers, adapters and accelerate work unchanged.

    As under gradient checkpointing, a call that trains (training mode, with ``labels`` or gradients) returns no cache;
    one that is passed is read and not written to. Under ``torch.no_grad()`` ``use_cache=True`` is honoured.
    ``position_ids`` that restart mean packed rows where they do to ``transformers``: without ``attention_mask``, and
    with ``use_cache=False`` of the call or of the configuration, which trainers set. Such rows never see each other, in
    models that make their masks without positions neither (gpt_oss, granitemoehybrid, opt), where plain rows do.

    Args:
        model: A causal language model of ``transformers``, with or without peft adapters.
        chunk_size: Tokens of a chunk; shorthand for ``schedule=Schedule(chunk_size=...)``.
        schedule: How to cut the sequence. Where neither is given, it is ``Schedule()``, and a call of at most 4,096
            tokens is one chunk that keeps its attention outputs: then it costs no more than checkpointing.
        head: Stream the language-model head as well. A call with ``labels`` then returns the loss and no logits; in
            evaluation (``model.eval()`` and ``torch.no_grad()``) it has them, computed when they are read. A model
            without a language-model head (a classifier, a reward model) keeps the one it has.
        router_loss: Losses on the routers of a mixture of experts, added to the loss of a call with ``labels``. None
            adds what the model itself would, its balance loss where ``output_router_logits`` is set. Router logits are
            returned by calls without labels and gradients.
        sequence_parallel: Ranks that share each sequence. All of them make the same calls with the same whole rows; a
            call with labels, or one that is scored, has the loss of the whole rows on every rank, and the gradients of
            the ranks add up to the gradient.

    Returns:
        A handle with ``.schedule`` and ``.remove()``, which restores the model exactly.

    Raises:
        ArgumentError: Both ``chunk_size`` and ``schedule`` are given, or the model is streamed already; ranks are to
            share sequences and the head is not streamed.
        UnsupportedModelError: The model cannot be streamed exactly, or ranks cannot share its sequences; it is left as
            it was.

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


class StreamHandle:
    """The handle of a streamed model, with methods to use and to remove the streaming; also a context manager."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        head: bool,
        router_loss: RouterLoss | None = None,
        sequence_parallel: SequenceParallel | None = None,
        short: Schedule | None = None,
    ) -> None:
        check_names()
        if text := untested():
            warnings.warn(text, stacklevel=3)
        with blamed():
            self._install(model, schedule, head, router_loss, sequence_parallel, short)

    def _install(
        self,
        model: nn.Module,
        schedule: Schedule,
        head: bool,
        router_loss: RouterLoss | None,
        sequence_parallel: SequenceParallel | None,
        short: Schedule | None,
    ) -> None:
        self.model = base_model(model)
        if head:
            _refuse_own_loss(model)
        self.schedule, self._short = schedule, short
        self.layers = decoder_layers(self.model)
        if any(isinstance(layer.__dict__.get("forward"), StreamedForward) for layer in self.layers):
            raise ArgumentError(
                f"this {type(self.model).__name__} is streamed already",
                mend="call StreamHandle.of(model).remove() first",
            )
        check_streamable(self.model, self.layers)
        self.sequence_parallel = None if sequence_parallel is None or sequence_parallel.size == 1 else sequence_parallel
        if self.sequence_parallel is not None and schedule.order == "chunk":
            raise ArgumentError(
                "order='chunk' is for whole sequences, and ranks are to share each of them",
                mend="set order: layer (Schedule(order='layer')), or sequence_parallel_size: 1",
            )
        """The ranks that share each sequence; None where there is only this one."""
        self.form = ""
        """The form of their exchange, ``ulysses`` or ``ring``."""
        if self.sequence_parallel is not None:
            self.form = form_for(self.sequence_parallel, self.model, self.layers, head)
        self._sharing = Sharing(self)
        self.head = StreamedHead(self.model, schedule) if head and has_head(self.model) else None
        self._gathered = gather_whole(self.layers)
        self.context = CallContext()
        self.scored: ScoreRequest | None = None
        self._laid_out: Branches | None = None
        self.routers = RouterWatch(self.model, self.layers, router_loss)
        self._checkpointing: set[Any] = set()
        self._warned = self._warned_of_routers = False
        self._length = 0
        self.own_attention = own_attention(self.model, self.layers)
        """The implementation that layers which compute their attention themselves keep; None where ours is used."""
        self.names = CallNames(attention_configs(self.model, self.layers), self.own_attention)
        self._around: int | None = None
        """The calls around the one that runs; None while none does."""
        self.tiers, self._last_call = Tiers(schedule), LastLayerCall[LayerStream]()
        self.waiting: WaitingWeights | None = None
        """The weights that wait on the host; None where all are on the device."""
        if schedule.weights == "host":  # last of what may be refused: it moves the weights
            dtype = torch.bfloat16 if schedule.fetch_dtype == "bfloat16" else None
            self.waiting = WaitingWeights(self.model, self.layers, self.tiers, dtype)
            if self.head is not None:
                self.head.waiting = self.waiting
        for layer, place in zip(self.layers, place_layers(schedule, len(self.layers)), strict=True):
            layer.forward = StreamedForward(
                layer,
                schedule,
                own=self.own_attention,
                watch=self.routers,
                context=self.context,
                place=place,
                tiers=self.tiers,
                last_call=self._last_call,
                waiting=self.waiting,
            )
        self._norms = norms_outside(owners(self.model, self.layers)[-1], self.layers)
        for norm in self._norms:
            norm.forward = StreamedNorm(norm, schedule, self.tiers, self._last_call)
        self._embedding = token_embedding(self.model)
        if self._embedding is not None:
            self._embedding.forward = StreamedEmbedding(self._embedding)  # type: ignore[method-assign]
        self._rotations = LengthRotary.install(self.model, partial(_lengths_of, self.context))
        self._plain_call = ExitStack()
        """Open while a call runs that is the plain model's."""
        if has_generate(self.model):
            self.model.generate = Generation(self)
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, always_call=True),
            *(layer.register_forward_pre_hook(need_gradient, with_kwargs=True, prepend=True) for layer in self.layers),
        ]
        for inner in owners(self.model, self.layers):
            if inner is not self.model:  # which may be called by itself
                self._hooks += [
                    inner.register_forward_pre_hook(self._before_inner),
                    inner.register_forward_hook(self._after_inner, always_call=True),
                ]

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
        """Return log-probabilities of any target tokens, streamed and differentiable, of which to build objectives.

        Under ``torch.no_grad()`` it streams as well. Its gradient is that of ``log_softmax(logits / temperature)``.

        Args:
            input_ids: ``[B, T]``.
            targets: ``[B, T]``: position t predicts ``targets[:, t]``, or nothing where that is -100.
            branches: The tokens ``[1, T]`` are rows that share their beginnings; positions and mask follow from it.
            entropy: Return the entropy of each target's distribution as well.
            temperature: The divisor of the logits.
            model: The module to call: a wrapper around the model (DeepSpeed's, DDP's); None is the model itself.
            **arguments: Other arguments of the model's call: ``attention_mask``, ``position_ids``.

        Raises:
            ArgumentError: A shape is wrong, or the head is not streamed.
            UnsupportedModelError: The model does not return logits of all tokens, or its rows cannot share beginnings.
        """
        request = ScoreRequest(targets, branches, temperature, entropy)
        return token_scores_of(self, request, self.model if model is None else model, input_ids, arguments)

    def lazy_logits(
        self, input_ids: Tensor, targets: Tensor, *, branches: Branches | None = None, **arguments: Any
    ) -> LazyLogits:
        """Return the logits of all tokens, not computed: of a teacher, for :class:`LossRequest`.

        Only the final hidden states ``[B, T, C]`` are held. Arguments as :meth:`logprobs`; of ``targets`` the shape is
        read. Where ranks share a sequence the logits are those of this rank's tokens.

        Raises:
            ArgumentError: A shape is wrong, or the head is not streamed.
            UnsupportedModelError: The model does not return logits of all tokens.
        """
        return lazy_logits_of(self, LogitsRequest(targets, branches), self.model, input_ids, arguments)

    @property
    def streams_head(self) -> bool:
        """True if the language-model head is streamed too."""
        return self.head is not None

    def layer_on_device(self, layer: nn.Module) -> AbstractContextManager[Any]:
        """Return a context inside of which a layer holds its weights on the device, wherever they wait."""
        return nullcontext() if self.waiting is None else self.waiting.used(layer)

    @contextmanager
    def laid_out(self, branches: Branches) -> Iterator[None]:
        """Take the tokens of calls inside the context for rows that share their beginnings.

        A call has ``labels`` or ``shift_labels`` ``[1, T]`` and the arguments ``branches.arguments(input_ids)``.

        Args:
            branches: The rows.
        """
        self._laid_out = branches
        try:
            yield
        finally:
            self._laid_out = None

    @contextmanager
    def with_loss(self, asked: LossRequest) -> Iterator[None]:
        """Make calls with labels inside the context return the requested loss in place of the cross entropy.

        Args:
            asked: The loss, and weights of the targets of the calls. What is measured beside the loss is put into it.

        Raises:
            ArgumentError: The head is not streamed.
        """
        if self.head is None:
            raise ArgumentError("no language-model head is streamed, whose loss could be another one")
        self.head.asked = asked
        try:
            yield
        finally:
            self.head.asked = None

    @property
    def rotates_by_length(self) -> bool:
        """True if rotary embeddings of the model depend on the longest position (``dynamic``, ``longrope``)."""
        return bool(self._rotations)

    @contextmanager
    def scoring(self, scored: ScoreRequest) -> Iterator[None]:
        """Make a call inside the context return the requested scores in place of its output."""
        self.scored = scored
        try:
            yield
        finally:
            self.scored = None

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Make calls inside the context the plain model's own: nothing is streamed.

        Raises:
            ArgumentError: Gradients are on.
        """
        if torch.is_grad_enabled():
            raise ArgumentError(
                "plain calls of a streamed model compute no gradient", mend="use torch.no_grad(), or remove() first"
            )
        before, self.context.plain = self.context.plain, True
        try:
            yield
        finally:
            self.context.plain = before

    def check(self, length: int | None = None) -> None:
        """Compare this very model streamed and unstreamed on random tokens; costs a few short forwards.

        Loss and gradients are compared on a few tokens; then, forward, one layer of each kind on a row that is longer
        than a chunk: a layer may do something else above a number of tokens. In the order of chunks it is asked whether
        the layers can be taken so. Where ranks share sequences all of them call it together, and their results are
        compared too.

        Args:
            length: Tokens of that row, such as the longest that is trained on; the whole row then goes through one
                plain layer after the other. None is one more than a chunk, for chunks of up to 4,096.

        Raises:
            UnsupportedModelError: They differ; the layer is named. The model is left as it was, still streamed.
        """
        with blamed():
            check_exact(self)
            check_order(self)
            if self.sequence_parallel is not None:
                check_shared(self)
            else:
                for tokens in lengths_to_check(self) if length is None else [length]:
                    check_length(self, tokens)

    @torch.no_grad()
    def count_routes(self, batches: Iterable[dict[str, Any]]) -> Tensor:
        """Count the choices of each expert over several micro-batches, for ``handle.routers.totals`` of a step.

        Costs a forward of the decoder for each batch. Random numbers (router jitter) are those the training calls will
        draw, if these follow in the same order.

        Args:
            batches: The arguments of a call of the model, each; labels are not read. ``branches`` may be among them.

        Returns:
            ``[E + 1]``: the routes by expert and, last, the number of pairs of a token and a layer's router; over all
            ranks where ``torch.distributed`` runs.
        """
        decoder: Any = getattr(self.model, self.model.base_model_prefix)
        counts: Tensor | None = None
        with RandomState.now(model_device(self.model)).replayed():
            for batch in batches:
                unread = ("labels", "shift_labels", "num_items_in_batch", "output_router_logits")
                read = {key: value for key, value in batch.items() if key not in unread}
                branches: Branches | None = read.pop("branches", None)
                if branches is not None:
                    read |= branches.arguments(read["input_ids"])
                else:
                    self._keep_one_row(call := ModelCall(self.model, (), read))
                    read = call.kwargs
                self.context.rows = call.packed_rows() if branches is None else branches
                self._set_lengths()
                try:
                    read = self._sharing.share(read)
                    self._sharing.open_routers(batch.get("attention_mask"))
                    decoder(**{**read, "use_cache": False, **not_balanced(self.model)})
                finally:
                    sums = self.routers.close()
                    self._sharing.end()
                assert sums is not None
                counts = sums.counts if counts is None else counts + sums.counts
        assert counts is not None
        return reduced(counts)

    def reschedule(self, schedule: Schedule) -> None:
        """Stream the model by another schedule from now on: the gradient is the same.

        A loss still to go backward is lost, and so is the state that a failed call left behind.
        """
        self.remove()
        parts = (self.streams_head, self.routers.loss, self.sequence_parallel)
        self.__init__(self.model, schedule, *parts)  # type: ignore[misc]

    @classmethod
    def of(cls, model: nn.Module) -> StreamHandle:
        """Return the handle of a streamed model, or of a copied or loaded one (``copy.deepcopy``, ``torch.load``).

        Raises:
            ArgumentError: The model is not streamed.
        """
        inner = base_model(model)
        for hook in inner._forward_pre_hooks.values():
            if isinstance(handle := getattr(hook, "__self__", None), cls):
                return handle
        raise ArgumentError(f"this {type(inner).__name__} is not streamed", mend="call streamtune.stream(model)")

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but one that a copy makes anew: a copy of a streamed model is streamed by itself."""
        return {key: value for key, value in vars(self).items() if key not in ("_sharing", "_plain_call")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._sharing, self._plain_call = Sharing(self), ExitStack()

    def remove(self) -> None:
        """Restore the model exactly as it was; harmless when called twice. A loss still to go backward is lost.

        Weights that wait on the host (``Schedule(weights="host")``) stay there.
        """
        for hook in self._hooks:
            hook.remove()
        if self.head is not None:
            self.head.close()
        self.routers.remove()
        if self.waiting is not None:
            self.waiting.remove()
        for layer in self.layers:
            if isinstance(forward := layer.__dict__.get("forward"), StreamedForward):
                forward.removed = True
                del layer.forward
        for module in (*self._norms, self._embedding):
            if module is not None:
                del module.forward
        for rotation in self._rotations:
            rotation.remove()
        if isinstance(vars(self.model).get("generate"), Generation):
            del self.model.generate
        self.names.end(0)
        for module in self._checkpointing:
            module.gradient_checkpointing = True
        ungather_whole(self._gathered)
        self.tiers.close()
        self._hooks, self._norms, self._rotations, self._embedding = [], [], [], None
        self.layers, self._checkpointing = [], set()

    def __enter__(self) -> StreamHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        refuse_surroundings(self.model)
        self._end_names()  # an interrupt in a call has left them
        if self.head is not None:
            self.head.close()  # likewise
        if args and not isinstance(args[0], Tensor | None):  # somebody's function stands in forward's place (TRL)
            self._length = 0
            return args, kwargs
        if self._is_plain(ModelCall(self.model, args, kwargs)):
            if not self.context.plain:
                self._plain_call.enter_context(self.plain())
            return args, kwargs
        self._around = self.names.begin(type(self.model).__name__)
        self._refuse_outputs(kwargs)
        for module in self._checkpointed():  # the node stands in checkpointing's place; both would recompute twice
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
                self._checkpointing.add(module)  # once, however often a trainer turns it on again
        scored, call = self.scored, ModelCall(self.model, args, kwargs)
        with_labels = call.get("labels") is not None or scored is not None  # to be scored is to be trained on
        mark_read(call)
        if call.cache is None and (
            torch.is_grad_enabled() or (call.get("use_cache") is None and (with_labels or model.training))
        ):
            if scored is None:
                self._keep_one_row(call)
            call.put("use_cache", False)
        rows, self._length = call.size
        self.context.whole = with_labels and self._sees_everything(call)
        self.context.schedule = self._short if 0 < rows * self._length <= SHORT.chunk_size else None
        branches = self._laid_out if scored is None else scored.branches
        self.context.rows = call.packed_rows() if branches is None else branches
        self._set_lengths()
        padding, takes_positions = call.get("attention_mask"), call.takes("position_ids")
        args, kwargs = call.args, call.kwargs
        asked = kwargs.get("output_router_logits")
        if self.sequence_parallel is not None:
            args, kwargs = (), self._sharing.begin(args, kwargs, with_labels)
        if not takes_positions:
            kwargs = {key: value for key, value in kwargs.items() if key != "position_ids"}  # it was for the rows
        if self.head is not None and with_labels:
            self.head.open()
        if asked is None:
            asked = balances_itself(self.model)
        if self.routers.silent:
            kwargs = {**kwargs, "output_router_logits": False} if asked else kwargs
        elif asked or (self.routers.loss is not None and with_labels):
            self._sharing.open_routers(padding)
            kwargs = {**kwargs, "output_router_logits": False}
        return args, kwargs

    def _end_names(self) -> None:
        """Let the configs name their own attention again, unless another call is around this one."""
        if self._around is not None:
            self.names.end(self._around)
            self._around = None

    def _before_inner(self, inner: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.context.plain:
            self.names.begin(type(inner).__name__)

    def _after_inner(self, inner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.context.plain:
            self.names.end()

    def _is_plain(self, call: ModelCall) -> bool:
        """Return True if a call is the plain model's: it asks for what streaming never builds, without gradients."""
        self._plain_call.close()  # an interrupt in a call has left it open
        if self.context.plain:
            return True
        if torch.is_grad_enabled() or self.scored is not None or self.sequence_parallel is not None:
            return False
        by_config = not self.routers.silent and balances_itself(self.model)
        asked = {"output_router_logits": by_config, **call.kwargs}
        return needs_whole_layers(asked, call.cache, call.get("labels") is not None)

    def _refuse_outputs(self, asked: dict[str, Any]) -> None:
        """Refuse outputs that a streamed call has not, by name; those of routers are left out with a warning.

        Raises:
            UnsupportedModelError: Attention weights are asked for, or a cache of an evaluation with gradients.
        """
        for name, why in REFUSED_OUTPUTS.items():
            if asked.get(name):
                raise UnsupportedModelError(
                    f"{name}=True was asked for, but {why}", mend="call the model under torch.no_grad()"
                )
        if asked.get("use_cache") and torch.is_grad_enabled() and not self.model.training and self.scored is None:
            raise UnsupportedModelError(
                "use_cache=True was asked for in evaluation with gradients on, where streaming returns no cache",
                mend="call the model under torch.no_grad(), or leave use_cache out",
            )
        if asked.get("output_router_logits") and not self.model.training and not self._warned_of_routers:
            self._warned_of_routers = True
            warnings.warn(
                "router_logits are not returned by a streamed evaluation with labels or gradients; aux_loss and loss "
                "are. Without labels, under torch.no_grad(), they are returned",
                stacklevel=3,
            )

    def _set_lengths(self) -> None:
        """Give rotary embeddings the lengths of the rows of the call, where they depend on them."""
        rows = self.context.rows if self._rotations else None
        self.context.lengths = None if rows is None else RowLengths.of(rows)

    def _checkpointed(self) -> Iterator[nn.Module]:
        """Yield modules that may be set to checkpoint and are streamed instead: not an image tower's."""
        yield from owners(self.model, self.layers)
        for layer in self.layers:
            yield from layer.modules()

    def _keep_one_row(self, call: ModelCall) -> None:
        """Keep a call one row that is one without streaming, given the cache that the configuration asks for."""
        decoder: Any = owners(self.model, self.layers)[-1]
        checkpointed = decoder in self._checkpointing and self.model.training
        cached = getattr(decoder.config, "use_cache", False) and not checkpointed
        call.keep_one_row(self.names.before, cached)

    def _sees_everything(self, call: ModelCall) -> bool:
        """Return True if a label follows left padding under eager attention, which then averages over all keys.

        No chunk has them all (docs/decisions/003-queries-that-see-nothing.md). A cross attention between the layers
        (blt) reads outputs of padding for other tokens too.
        """
        if "eager" not in {self.own_attention, *self.names.before}:
            return False
        mixes = call.pads_left() and any("CrossAttention" in type(m).__name__ for m in self.model.modules())
        if not mixes and not call.labels_padding(None if self.scored is None else self.scored.targets):
            return False
        if self.sequence_parallel is not None:
            raise UnsupportedModelError(
                "a label follows left padding, and eager attention lets padding see every token, which no rank that "
                "shares a sequence has",
                mend="give the first token of each row the label -100, or pad on the right",
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a label follows left padding, and eager attention lets padding see every token: such a call is "
                "computed in one chunk, as without streaming. Give the first token of each row the label -100, pad on "
                "the right, or load the model with attn_implementation='sdpa'",
                stacklevel=2,
            )
        return True

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        try:
            if self.context.plain:
                return self._with_plain_states(output)
            if self.scored is not None:
                return self._score_output(self.scored, output)
            self._check_hidden_states(output)
            return self._with_router_loss(self._without_lazy_logits(output))
        finally:
            self._plain_call.close()
            self._end_names()
            self._sharing.end()
            self.context.whole, self.context.schedule = False, None

    @staticmethod
    def _with_plain_states(output: Any) -> Any:
        """Return the output with hidden states that are plain tensors."""
        if isinstance(states := getattr(output, "hidden_states", None), tuple):
            output.hidden_states = tuple(map(read, states))
        return output

    def _check_hidden_states(self, output: Any) -> None:
        """Refuse hidden states recorded inside of a layer, which are those of one chunk; return plain tensors.

        Raises:
            UnsupportedModelError: The model records them of layers within its layers (zamba, zamba2).
        """
        states = getattr(output, "hidden_states", None)
        if isinstance(states, tuple):
            output.hidden_states = states = tuple(map(read, states))
        pieces = [x for x in states or () if isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2] < self._length]
        if pieces:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} records hidden states of layers inside of its decoder layers, which run "
                f"on chunks ({pieces[0].shape[-2]} of {self._length} tokens)",
                mend="leave output_hidden_states out, or call the model without streaming where they are wanted",
            )

    def _score_output(self, scored: ScoreRequest, output: Any) -> Any:
        """Compute the requested scores from the lazy logits, and record the router loss."""
        if self.head is not None:
            self.head.close()
        sums = self.routers.close() if self.routers.active else None
        if sums is not None and output is not None:
            balance, scored.router_loss = self.routers.losses(sums)
            share = self.routers.share * balance.detach()
            self.routers.terms = RouterTerms(torch.zeros_like(share), share)
        return None if output is None else scored.compute(self.model, output)

    def _with_router_loss(self, output: Any) -> Any:
        sums = self.routers.close() if self.routers.active else None
        if sums is None or output is None:
            return output
        balance, added = self.routers.losses(sums)
        if isinstance(output, tuple):  # labels or not, the first item is the loss if there is one
            return (output[0] + added, *output[1:]) if output and output[0].dim() == 0 else output
        if output.loss is not None:
            self.routers.terms = RouterTerms(output.loss.detach(), self.routers.share * balance.detach())
            output.loss = output.loss + added
        if "aux_loss" in {field.name for field in fields(output)}:
            output.aux_loss = balance
        return output

    def _evaluated(self, output: Any) -> Any:
        """Return the output of an evaluation, with logits that are computed when they are read."""
        assert self.head is not None
        compute = self.head.readable if torch.is_grad_enabled() else self.head.evaluated
        if isinstance(output, tuple):
            return tuple(compute(x) if isinstance(x, LazyLogits) else x for x in output)
        if isinstance(lazy := getattr(output, "logits", None), LazyLogits):
            output.logits = compute(lazy)
        return output

    def _without_lazy_logits(self, output: Any) -> Any:
        if self.head is None or not self.head.active:
            return output
        self.head.close()
        if not self.model.training:
            return self._evaluated(output)
        if isinstance(output, tuple):
            return tuple(item for item in output if not isinstance(item, LazyLogits))
        if isinstance(getattr(output, "logits", None), LazyLogits):
            return type(output)(**{key: value for key, value in output.items() if key != "logits"})
        return output


SHORT = Schedule(chunk_size=4096, keep_attention="device")
"""For calls of few tokens, where nobody chose: chunks save nothing there and cost a second forward of the attention."""


def _lengths_of(context: CallContext, position_ids: Tensor) -> RowLengths | None:
    lengths = context.lengths
    return None if lengths is None else lengths.to(position_ids.device)


def _refuse_own_loss(model: nn.Module) -> None:
    """Refuse adapters that compute their loss from logits themselves.

    Raises:
        UnsupportedModelError: Context-aware prompt tuning does.
    """
    configs: Any = getattr(model, "peft_config", None)
    kinds = [getattr(config, "peft_type", None) for config in configs.values()] if isinstance(configs, dict) else []
    if "CPT" in kinds:
        raise UnsupportedModelError(
            "context-aware prompt tuning (CPT) computes its own loss from whole logits, which are not built",
            mend="use stream(model, head=False): layers are streamed, head and loss are the model's own",
        )
