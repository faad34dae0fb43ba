"""A decoder layer that streams: the forward chunk by chunk, and an autograd node whose backward is the paper's sum.

The node takes the place of ``torch.utils.checkpoint``: it saves the layer's input and nothing else. It takes the
layer's parameters as inputs and returns the gradient of each **once**, so hooks on parameters (DDP, ZeRO, FSDP, an
optimizer in the backward) fire once per layer and step, whatever the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.attention import BiasError
from streamtune.engine.cache import ChunkCache
from streamtune.engine.call import PAST, LayerCall
from streamtune.engine.chain import chained_call
from streamtune.engine.context import CallContext
from streamtune.engine.embeddings import take
from streamtune.engine.fused import FusedParts
from streamtune.engine.hf_names import KEPT_WINDOW, STATE, attention_of, names_attention
from streamtune.engine.kv import Past, refuse_past
from streamtune.engine.last_call import LastLayerCall
from streamtune.engine.leaves import check_leaves
from streamtune.engine.memory.placement import Placement, Tiers
from streamtune.engine.memory.tiers import StoredTensor
from streamtune.engine.observe import RandomState, may_bring_leaves, notify_chunk, refuse_hooks
from streamtune.engine.own_attention import OwnAttention, refuse_another
from streamtune.engine.passes import LayerStream, placeholder
from streamtune.engine.routers import RouterWatch
from streamtune.engine.rows import Branches
from streamtune.engine.scan import mixers_with_a_bare_scan
from streamtune.engine.sharded import Weights
from streamtune.engine.vjp import GradientSum, streamed_vjp
from streamtune.engine.weights.waiting import WaitingWeights
from streamtune.errors import ArgumentError, StreamTuneError, UnsupportedModelError
from streamtune.ops import first_order, graph_is_kept
from streamtune.ops.attention.rules import ForeignAttentionError
from streamtune.schedule import Schedule


class StreamedForward:
    """Replaces ``layer.forward`` on one instance; computes the same function with the activations of one chunk.

    Args:
        layer: A decoder layer of a ``transformers`` model.
        schedule: How to cut the sequence.
        own: The attention implementation of a layer that computes its attention itself. None for one that takes it
            from ``transformers``' interface; if its first call shows that ours is not enough, it keeps its eager one.
        watch: Collects the logits of the layer's router, if it has one.
        context: Per-call state that layers need but are not passed; read at each call.
        place: The placement of the layer's input until the backward.
        tiers: The memory of host and disk, shared by the layers of a model.
        last_call: Remembers the last layer call, so that the next can compute its input again; shared likewise.
        waiting: The weights that wait on the host, if any do; shared likewise.
    """

    def __init__(
        self,
        layer: nn.Module,
        schedule: Schedule,
        own: str | None = None,
        watch: RouterWatch | None = None,
        context: CallContext | None = None,
        place: Placement | None = None,
        tiers: Tiers | None = None,
        last_call: LastLayerCall[LayerStream] | None = None,
        waiting: WaitingWeights | None = None,
    ) -> None:
        self.layer, self.waiting = layer, waiting
        self.place = Placement() if place is None else place
        self.tiers = Tiers(schedule) if tiers is None else tiers
        self.last_call: LastLayerCall[LayerStream] = LastLayerCall() if last_call is None else last_call
        self.context = CallContext() if context is None else context
        self.carries_states = False
        self.watch = watch
        self.bare_scans = mixers_with_a_bare_scan(layer)
        self.fused = FusedParts(layer) if schedule.fuse == "torch" else None
        self.schedule = schedule
        self.leaves_checked = self.attention_known = self.removed = False
        self.narrow_states = False
        """True if its last call passed on a state in a narrower dtype than that of its hidden states."""
        configs: list[Any] = [getattr(module, "config", None) for module in layer.modules()]
        self.configs = list({id(config): config for config in configs if names_attention(config)}.values())
        self.attention = [attention_of(config) for config in self.configs]
        self.own = None if own is None else OwnAttention(own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, with its own signature and result."""
        args, kwargs = tuple(map(take, args)), {key: take(value) for key, value in kwargs.items()}
        if self.context.plain:
            with self.on_device((), then=1):
                return type(self.layer).forward(self.layer, *args, **kwargs)
        if self.own is not None or self.attention_known:
            return self._call(args, kwargs)
        hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        before = RandomState.now(torch.device("cpu") if hidden is None else hidden.device)
        try:
            result = self._call(args, kwargs)
        except ForeignAttentionError as error:
            if self.context.shards is not None:
                raise UnsupportedModelError(error.what, mend="set sequence_parallel_size: 1") from error
            self.own = OwnAttention("eager")
            before.restore()
            return self._call(args, kwargs)
        except Exception as error:
            known = isinstance(error, StreamTuneError | torch.OutOfMemoryError) or _between_ranks(error)
            if self.context.shards is None or known:
                raise
            what = f"{type(self.layer).__name__} does not run on what one rank has ({type(error).__name__}: {error})"
            other = (
                "set sequence_parallel: ring"
                if self.context.shards.form == "ulysses"
                else "set sequence_parallel_size: 1"
            )
            raise UnsupportedModelError(what, mend=other) from error
        self.attention_known = True
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = OwnAttention("eager") if self.own is None and self.context.whole else self.own
        try:
            call = LayerCall.bind(self.layer, args, kwargs, own, self.configs)
        except BiasError as error:
            call = self._biased(error, args, kwargs)
        if self.context.shards is not None:
            call.share(self.context.shards)
        if self.context.rows is not None and (self.context.shards is None or isinstance(self.context.rows, Branches)):
            call.separate(self.context.rows)
        if call.cache is not None:
            if not torch.is_grad_enabled():  # generation: the model's own cache and passes
                return self._generate(call)
            if self._seen_before(call) > 0:
                if self.context.rows is not None:
                    refuse_past("rows are packed or share their beginnings", type(self.layer).__name__)
                call.follow(Past.of(self.layer, call.cache))
        self.check_attention(call.length if self.context.shards is None else self.context.shards.given)
        self.check_hooks()
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        inputs = [*call.tensors(), *parameters]
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            stream = LayerStream(call, self)
            with stream.walk():
                return stream.restore(stream.forward(call.tensors()), call.sharing)
        if (self.context.schedule or self.schedule).order == "chunk":
            return chained_call(self, call, parameters)
        before = self.last_call.maker(call.hidden)
        again = before is not None and before.repeatable and not self.place.begins
        stream = LayerStream(call, self, before if again else None)
        sharing = call.sharing
        if self.place.whole and call.past is None and (whole := stream.whole(call.tensors())) is not None:
            return stream.restore(whole, sharing)
        if self.schedule.stream_grads and call.hidden.requires_grad:
            stream.grad_target = self.last_call.grad_target(call.hidden, self.layer)
        outputs = list(_StreamedLayer.apply(stream, self, *inputs))
        self.last_call.note(outputs[0], stream, self.layer)
        return stream.restore(outputs, sharing)

    def _seen_before(self, call: LayerCall) -> int:
        """Return the number of tokens in the cache that was passed.

        Raises:
            UnsupportedModelError: It holds states, and no keys and values.
        """
        name = type(self.layer).__name__
        if call.cache_name == STATE:
            refuse_past("the layer is handed a state", name)
        try:
            return int(call.cache.get_seq_length())
        except (ValueError, AttributeError) as error:
            raise UnsupportedModelError(
                f"a cache of states was passed while gradients are on ({error})",
                where=name,
                mend="pass the whole sequence without a cache, or call the model under torch.no_grad()",
            ) from error

    def _biased(self, error: BiasError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """Bind a call whose mask ``[B, H, T, T]`` the model's eager attention adds to its scores, chunk by chunk."""

        def added(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() != 4 or value.shape[2] != value.shape[3]:
                return value
            if value.requires_grad:
                raise UnsupportedModelError(
                    f"{error.what} and needs a gradient, which chunks do not give it", where=type(self.layer).__name__
                ) from error
            if value.dtype != torch.bool:
                return value
            lowest = torch.finfo(hidden.dtype).min
            return torch.zeros(value.shape, dtype=hidden.dtype, device=value.device).masked_fill_(~value, lowest)

        hidden: Tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        own = OwnAttention("eager")
        named = {key: added(value) for key, value in kwargs.items()}
        return LayerCall.bind(self.layer, tuple(map(added, args)), named, own, self.configs)

    def _generate(self, call: LayerCall) -> Any:
        """Run the layer on its model's own cache.

        The first call also runs in chunks, before that cache is written to, to find out if our attention is enough.
        """
        if self.own is None and not self.attention_known and call.mask is not None and call.mask.q_offset == 0:
            with RandomState.now(call.hidden.device).replayed():
                try:
                    stream = LayerStream(call, self)
                    with stream.walk():
                        stream.forward(call.tensors())
                except ForeignAttentionError:
                    raise
                except UnsupportedModelError:  # what cannot be streamed may still generate
                    pass
        try:
            with self.on_device((), then=1):
                return call.run_whole()
        except ForeignAttentionError as error:
            raise UnsupportedModelError(error.what, mend="fill the cache after stream(model), not before") from error

    @contextmanager
    def on_device(self, parameters: Sequence[Tensor], then: int | None = None) -> Iterator[list[Tensor]]:
        """Let the layer hold its weights on the device inside; yield those that stand for ``parameters``.

        Args:
            parameters: Parameters of the layer.
            then: The layer that comes next, as in :meth:`WaitingWeights.used`; None is the one before in a backward.
        """
        if self.waiting is None:
            yield list(parameters)
            return
        if then is None:  # before the first layer of a segment, layers of the segment before run forward again
            then = 0 if self.schedule.levels == 2 and self.place.begins else -1
        with self.waiting.used(self.layer, then) as copies:
            yield [copies.get(id(p), p) for p in parameters]

    def to_host(self, parameters: Sequence[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of ``parameters``, on the host where these wait there."""
        return grads if self.waiting is None else self.waiting.to_host(parameters, grads)

    def check_in_place(self, length: int) -> None:
        """Refuse a backward after the stream was removed, or one that would run another attention or a user's hooks."""
        if self.removed:
            raise ArgumentError(
                "the stream was removed between a forward and its backward, which has to run the layers again",
                where=type(self.layer).__name__,
                mend="call loss.backward() before handle.remove(), or inside of the with statement",
            )
        self.check_attention(length)
        self.check_hooks()

    def check_hooks(self) -> None:
        """Refuse hooks of the user's own that would be called with chunks."""
        refuse_hooks(
            self.layer,
            within=True,
            why="and would be called for each chunk, forward and backward",
            mend="register it on the decoder layer, which is called once with the whole sequence; or, if it treats "
            "every token by itself, register streamtune.chunkwise(hook)",
        )

    def check_attention(self, length: int) -> None:
        """Refuse another attention: it does not align a chunk's queries with the last of its keys, and would be wrong.

        Refuse also a choice of keys between equal scores, which a chunk cannot repeat. In the first layer a score of
        the value alone is the same wherever a token is repeated, and which of them ``torch.topk`` keeps depends on the
        number of keys, which is smaller in a chunk.
        """
        for config, name in zip(self.configs, self.attention, strict=True):
            kept = getattr(config, KEPT_WINDOW, None)
            if kept is not None and length > kept:
                raise UnsupportedModelError(
                    f"of {length} tokens the attention keeps {KEPT_WINDOW}={kept} by a score that repeated tokens "
                    "share, so that what it keeps depends on the chunk",
                    where=type(self.layer).__name__,
                    mend=f"train on rows of at most {kept} tokens",
                )
            refuse_another(config, name, type(self.layer).__name__)


BETWEEN_RANKS = ("torch.distributed", "streamtune.ops.messages")
"""Modules in which a rank waits for others."""


def _between_ranks(error: Exception) -> bool:
    """Return True if it was raised by a collective: another rank is gone, and the model is not at fault."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(BETWEEN_RANKS):
            return True
        trace = trace.tb_next
    return False


class _StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: LayerStream, owner: StreamedForward, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = len(stream.call.inputs)
        with stream.walk():
            outputs = stream.forward(inputs[:count], for_backward=True)
        ctx.save_for_backward(*inputs[1:count])  # the first waits where the schedule says
        ctx.set_materialize_grads(False)
        ctx.stream, ctx.owner = stream, owner
        ctx.parameters = inputs[count:]
        ctx.weights = Weights.now(owner.layer)
        stream.call.forget_tensors()
        return tuple(outputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        stream: LayerStream | None = ctx.stream
        if stream is None:
            raise ArgumentError(
                "a streamed layer went backward a second time", mend="pass retain_graph=True to the backward before"
            )
        ctx.owner.check_in_place(stream.length)
        ctx.weights.check()
        saved = ctx.saved_tensors  # read first: the input may be computed again, and keys that are shared with it
        inputs, again = [stream.source(), *saved], graph_is_kept()
        count = len(stream.along)

        notify_chunk(stream.call.layer, slice(0, 0), "prepare")
        owner: StreamedForward = ctx.owner
        with ExitStack() as stack:
            stack.enter_context(ctx.weights.again())
            parameters = stack.enter_context(owner.on_device(ctx.parameters))
            sums = [GradientSum(p, stream.widen) for p in parameters]
            for total, parameter in zip(sums, ctx.parameters, strict=True):
                total.dtype = parameter.dtype  # not that of a narrower copy
            stack.enter_context(stream.walk(sums))

            def run_chunk(chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
                z_i, cache = stream.replay(chunk, x_i)
                if not owner.leaves_checked or may_bring_leaves(stream.call.layer):
                    check_leaves(stream.call.layer, z_i[0], [*x_i, *cache.leaves, *parameters])
                    owner.leaves_checked = True
                return z_i, cache

            stream.prepare(inputs, again)
            for place, index in enumerate(stream.filled.values()):
                stream.kv.add_grads(index, grad_outputs[count + 2 * place : count + 2 * place + 2])
            grad_z = stream.grad_out(grad_outputs[0])
            if isinstance(grad_z, StoredTensor):
                grad_z.expect(stream.chunks[::-1])
            own, grad_target = grad_z is not grad_outputs[0], stream.grad_target
            grad_inputs, grad_parameters = streamed_vjp(
                run_chunk,
                stream.chunks,
                inputs,
                list(stream.call.inputs.values()),
                parameters,
                [grad_z, *grad_outputs[1:count]],
                stream.along,
                needs_grad=ctx.needs_input_grad[2 : 2 + len(inputs)],
                widen=stream.widen,
                into=None if grad_target is None else grad_target.room_for_grad(inputs[0], grad_z if own else None),
                sums=sums,
            )
            for total in sums:
                total.total = None  # freed before the casts of the sums go to the host
            grad_parameters = owner.to_host(ctx.parameters, grad_parameters)
        if grad_target is not None:
            grad_inputs[0] = placeholder(inputs[0])
        for position, name in enumerate(stream.call.inputs):
            if isinstance(name, tuple) and name[0] == PAST:
                grad_inputs[position] = stream.kv.past_grads()[name[2]]
        if isinstance(grad_z, StoredTensor):
            grad_z.free()
        stream.free(again)
        if not again:
            ctx.stream = ctx.parameters = ctx.weights = None
        return (None, None, *grad_inputs, *grad_parameters)
