"""One call of one decoder layer, and its passes over the chunks of its sequence.

forward    first to last chunk, no graph: computes the outputs, and keeps the tensors that the backward needs
recompute  the same with the same random numbers, only for the hidden states: the input of the next layer, where it was
           not stored; in the order of chunks, for one chunk
project    first to last chunk, stops in each as soon as keys and values are made
replay     one chunk with its graph, for the backward, which goes from the last to the first
whole      no pass over chunks: the whole sequence with its graph, as autograd would do it
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.attention import SavedAttention, SavedOutputs
from streamtune.engine.cache import ChunkCache, Pass, ProjectionDone
from streamtune.engine.call import LayerCall
from streamtune.engine.call_parts import LayerOutputs
from streamtune.engine.context import ChunkContext
from streamtune.engine.fused import Linears
from streamtune.engine.inspect_model import keeps_keys
from streamtune.engine.kv import KeysAndValues, States
from streamtune.engine.memory.tiers import Source, StoredTensor, Tier
from streamtune.engine.observe import Autocast, Modes, RandomState, notify_chunk
from streamtune.engine.rows import PackedRows
from streamtune.engine.saved import SavedTensors, keep_kv
from streamtune.engine.scan import carried_scan
from streamtune.engine.sequence.shards import ChunkExchange
from streamtune.engine.sequence.states import MeetsStates, SharedStates
from streamtune.engine.sharded import gathered
from streamtune.engine.streamed_layer import Scope, StreamedLayer
from streamtune.engine.vjp import Along, GradientSum, cut, part
from streamtune.schedule import Schedule
from streamtune.schedule import Tier as TierName


@dataclass(frozen=True)
class CallFacts:
    """The state around a layer call at its forward; at the backward it may be another."""

    schedule: Schedule
    device: torch.device
    batch: int
    rows: PackedRows | None
    autocast: Autocast
    modes: Modes
    counted: Tensor | None
    """``[B, T]``, nonzero for the tokens that its router counts; None for all."""

    @classmethod
    def now(cls, call: LayerCall, owner: StreamedLayer) -> CallFacts:
        """Return the state at this moment."""
        context, routers, device = owner.parts.context, owner.parts.routers, call.hidden.device
        rows = call.shards.rows if call.shards is not None and context.rows is None else context.rows
        counted_BT = routers.mask_BT if routers is not None and routers.active else None
        schedule, batch = context.schedule or owner.schedule, call.hidden.shape[0]
        return cls(schedule, device, batch, rows, Autocast.now(device), Modes.now(call.layer), counted_BT)


class LayerStream:
    """One call of one layer, and the state that its passes over the chunks share.

    ``maker`` is the call that computed this call's hidden states, if it may compute them again.
    """

    def __init__(self, call: LayerCall, owner: StreamedLayer, maker: LayerStream | None = None) -> None:
        self.call, self.owner, self.maker = call, owner, maker
        self.facts, self.saved = CallFacts.now(call, owner), SavedTensors()
        self.widen = self.facts.schedule.grad_dtype == "float32"
        self.chain: weakref.ref[Any] | None = None
        """Chain of this call, in the order of chunks."""
        self.follows = False
        """True if the layer before in the chain computes this call's input in the backward."""
        self.grad_target: LayerStream | None = None
        """Call whose output this call reads, and where it leaves the gradient of that output (``stream_grads``)."""
        self.grad_left = _LeftGradient()
        self.outputs, self.sums = LayerOutputs(owner.name, call.inputs[call.hidden_name]), 0
        routers = owner.parts.routers
        self.routers = routers if routers is not None and routers.active else None
        listening: list[Scope] = [] if self.routers is None else [self.routers.listening]
        self.scopes = [*owner.scopes(self.facts.device), *listening]
        self._begin(owner.carries_states or (self.chained and owner.parts.last_call.ends_with_rows))

    def _begin(self, with_rows: bool) -> None:
        """Choose chunks, which end where packed rows do if ``with_rows``; nothing is kept or sent yet."""
        facts, shards = self.facts, self.call.shards
        self.states = States(facts.rows)
        if shards is not None:
            self.states = SharedStates(shards, facts.rows, with_rows, facts.device)
        if self.owner.parts.context.whole:
            self.chunks = [slice(0, self.call.length)]
        elif facts.rows is None or not with_rows:
            self.chunks = self.call.chunks(facts.schedule)
        elif isinstance(self.states, SharedStates):
            self.chunks = self.states.pieces
        else:
            self.chunks = facts.rows.chunks(facts.schedule)
        if shards is None:
            kept = self.call.keys(slice(0, self.call.length)).stop
        else:
            kept = self.call.length if shards.form == "ring" else shards.total
        self.kv = KeysAndValues(kept, self.widen, self.call.past)
        self.filled: dict[Any, int] = {}
        """Key/value update held by each entry of the shared dictionary that the layer fills."""
        self.random: dict[int, RandomState] = {}

    @property
    def chained(self) -> bool:
        """True in the order of chunks."""
        return self.facts.schedule.order == "chunk"

    @property
    def hidden_along(self) -> int:
        """The dimension along which the hidden states follow the sequence."""
        along = self.outputs.hidden_along
        assert along is not None
        return along

    @property
    def along(self) -> list[Along]:
        """The dimension along which each output follows the sequence; None for the sums of its router."""
        return [*self.outputs.along, *[None] * self.sums]

    @property
    def repeatable(self) -> bool:
        """True if its output can be computed again from its input hidden states alone."""
        return len(self.call.inputs) == 1

    def run(self, chunk: slice, pass_name: Pass, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """Compute ``z(i) = f_W(x(i), prefix)`` by the layer's own forward, inside the scopes of its parts.

        Return the outputs, the first ``[B, T_i, C]``, and the cache that the layer used.
        """
        notify_chunk(self.call.layer, chunk, pass_name)
        ran = self.states.widened(chunk)
        if ran != chunk:
            x_i = [_followed_by_itself(x, along) for x, along in zip(x_i, self.call.inputs.values(), strict=True)]
        shards = self.call.shards
        exchange = None if shards is None else ChunkExchange(shards, chunk)
        keys = self.call.keys(chunk) if exchange is None else exchange.keys
        cache = ChunkCache(self.kv, self.states, keys, self.call.first_key(chunk), pass_name, exchange)
        if exchange is not None:
            exchange.first_key = cache.first_key
        attention = self.saved.attention
        saved = SavedOutputs(attention, chunk.start, last=pass_name == "replay") if attention is not None else None
        of_chunk: list[Scope] = [
            ChunkContext(exchange, saved).entered,
            partial(carried_scan, self.owner.bare_scans, cache),
        ]
        with ExitStack() as stack:
            for scope in (*self.scopes, *of_chunk):
                stack.enter_context(scope())
            out, filled = self.call.run(ran, cache, dict(zip(self.call.inputs, x_i, strict=True)))
            sums = [] if self.routers is None else self.routers.sums(self._counted(chunk, ran))
        cache.close()
        self.filled |= filled
        self.sums = len(sums)
        outputs = self.outputs.take(out, ran, keep=pass_name in ("store", "whole"))
        if ran != chunk:
            outputs = [cut(z, along, slice(0, 1)) for z, along in zip(outputs, self.outputs.along, strict=True)]
        return [*outputs, *sums], cache

    def _counted(self, chunk: slice, ran: slice) -> Tensor | None:
        """Return the mask of the tokens that a router counts among those the layer ran on; None for all."""
        counted_BT = self.facts.counted
        if ran == chunk:
            return None if counted_BT is None else counted_BT[:, chunk]
        counted = torch.zeros(self.facts.batch, ran.stop - ran.start, device=self.facts.device)
        counted[:, : chunk.stop - chunk.start] = 1 if counted_BT is None else counted_BT[:, chunk]
        return counted

    @contextmanager
    def walk(self, sums: Sequence[GradientSum] = ()) -> Iterator[None]:
        """Context for one pass over all chunks: weights are fetched, and linear weights cast, once.

        A backward gives the gradient accumulators of the parameters, ``sums``.
        """
        waiting, scopes = self.owner.parts.waiting, self.scopes
        with nullcontext() if waiting is None else waiting.used(self.call.layer, prefetch=1):
            if len(self.chunks) > 1:
                self.scopes = [*scopes, Linears(self.call.layer, self.facts.autocast, sums).used]
            try:
                yield
            finally:
                self.scopes = scopes

    # The forward.

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], for_backward: bool = False) -> list[Tensor]:
        """Compute ``z = f_W(x)`` chunk by chunk, first to last, without a graph.

        Return the outputs, the first ``[B, T, C]``, and behind them the keys and values shared with other layers.
        """
        z: list[Tensor] = []
        begin = RandomState.now(self.facts.device) if self.facts.rows else None
        if for_backward:
            self._keep_input(inputs[0])
        if for_backward and self.chained and self.facts.schedule.keep_kv == "host" and len(self.chunks) > 1:
            self.states.tier = self._tier("host")
        self.states.begin(backward=False)
        for chunk in self.chunks:
            if for_backward:
                self.random[chunk.start] = RandomState.now(self.facts.device)
            x_i = [cut(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            if isinstance(self.saved.z_in, StoredTensor):
                self.saved.z_in.put(chunk, x_i[0])
            # Known from the first chunk on: a layer with states runs again, in chunks that end where packed rows do.
            try:
                z_i, cache = self.run(chunk, "store", x_i)
                met_states = cache.met_states and not self.owner.carries_states
            except MeetsStates:
                met_states = True
            if begin is not None and met_states:
                begin.restore()
                self._end_with_rows()
                return self.forward(inputs, for_backward)
            if not z:
                z = [_room(out, along, self.call.length) for out, along in zip(z_i, self.along, strict=True)]
            for whole, out, along in zip(z, z_i, self.along, strict=True):
                whole.add_(out) if along is None else cut(whole, along, chunk).copy_(out)
        self.saved.settle()
        self.owner.narrow_states = self.states.narrower_than(inputs[0].dtype)
        self.states.end()
        shared = [buffer for index in self.filled.values() for buffer in self.kv.pairs[index]]
        self._keep_rest(for_backward, recomputed=False, shared=bool(shared))
        return z + shared

    def _end_with_rows(self) -> None:
        """Let this layer's chunks end where packed rows do, from now on."""
        if keeps_keys(self.call.layer):
            self.states.meet_keys()
        self.owner.carries_states = self.owner.parts.last_call.ends_with_rows = True
        self._begin(with_rows=True)

    def whole(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute ``z = f_W(x)`` with autograd's own graph and all activations; shared keys and values come last.

        Return None for a layer whose states must not pass from one packed row to the next, or pass from rank to rank:
        it is streamed all the same.
        """
        begin = RandomState.now(self.facts.device) if self.facts.rows or self.call.shards else None
        met_states = begin is not None and self.owner.carries_states
        if not met_states:
            try:
                z, cache = self.run(slice(0, self.call.length), "whole", list(inputs))
                met_states = begin is not None and cache.met_states
            except MeetsStates:
                met_states = True
        if begin is not None and met_states:
            begin.restore()
            self._end_with_rows()
            return None
        return z + [cache.own[2 * index + place] for index in self.filled.values() for place in (0, 1)]

    def restore(self, outputs: list[Tensor], sharing: Any) -> Any:
        """Return the output in the form the layer gives it; put shared keys and values into ``sharing``."""
        own, count = len(self.outputs.along), len(self.along)
        if self.routers is not None:
            self.routers.add(outputs[own:count])
        for place, key in enumerate(self.filled):
            sharing[key] = tuple(outputs[count + 2 * place : count + 2 * place + 2])
        return self.outputs.restore(outputs[:own])

    # What is kept in between.

    def _tier(self, name: TierName) -> Tier:
        return self.owner.parts.tiers.of(name, self.facts.device)

    def _keep_input(self, hidden: Tensor) -> None:
        place, keep_attention = self.owner.place, self.facts.schedule.keep_attention
        if keep_attention != "no":
            self.saved.attention = SavedAttention(self._tier(keep_attention))
        if self.maker is not None or self.follows:
            self.saved.z_in = None
        elif place.tier == "device":
            self.saved.keep_on_device(hidden)
        else:
            self.saved.z_in = self._store(place.tier, hidden)

    def _store(self, name: TierName, like: Source) -> StoredTensor:
        return StoredTensor(self._tier(name), like, self.hidden_along)

    def _keep_rest(self, for_backward: bool, recomputed: bool, shared: bool = False) -> None:
        """Free keys, values and states that the backward does not need, or that will be computed again for it."""
        if self.chained and for_backward:
            self._cut_kv()
            return
        keep_kv, recompute = self.facts.schedule.keep_kv, not self.owner.place.ends and self.repeatable
        self.saved.must_recompute_kv = for_backward and not recomputed and recompute
        wanted = for_backward and not self.saved.must_recompute_kv
        if not (for_backward and shared) and not (wanted and keep_kv != "no"):
            self.kv.free_kv()
        elif keep_kv == "host" and not shared:
            self.kv.offload(self._tier("host"))
        if not wanted:
            self.states.free()

    def _cut_kv(self) -> None:
        """Keep the keys and values that chunks read of earlier ones until the backward comes to them."""
        keys = [self.call.keys(chunk) for chunk in self.chunks]
        if len(keys) == 1:
            self.kv.free_kv()
            return
        first = {own.start: self.call.first_key(chunk) for own, chunk in zip(keys, self.chunks, strict=True)}
        tier = self._tier("host" if self.facts.schedule.keep_kv == "host" else "device")
        notify_chunk(self.call.layer, self.chunks[-1], "keep")
        self.saved.kv = keep_kv(self.kv, keys, lambda own: first[own.start], tier)

    # The backward.

    def source(self) -> Source:
        """Return the layer's input. If it was not stored, compute it and the inputs of the segment's layers before it.

        Where ranks share the weights, each recomputed layer is gathered once more.
        """
        todo: list[LayerStream] = []
        stream = self
        while stream.saved.z_in is None:
            assert stream.maker is not None
            todo.append(stream)
            stream = stream.maker
        for later in reversed(todo):
            source = stream.stored_input()
            later.saved.z_in = into = later._store(later.owner.place.tier, source)
            with gathered(stream.call.layer, during=self.call.layer, next_backward=later is self), stream.walk():
                stream.recompute(source, into)
            later.maker = None
            stream = later
        return self.stored_input()

    def stored_input(self) -> Source:
        """Return the layer's input; :class:`ArgumentError` if it was changed since the forward."""
        return self.saved.input(self.owner.name)

    def grad_out(self, incoming: Tensor | None) -> Source | None:
        """Return the gradient of the hidden states: autograd's, plus the gradient that the next layer left here."""
        left = self.grad_left.take()
        if left is None or incoming is None:
            return left if incoming is None else incoming
        if is_placeholder(incoming):
            return left
        # Something besides the next layer read them.
        whole = torch.cat([part(left, self.hidden_along, chunk) for chunk in self.chunks], self.hidden_along)
        return whole.add_(incoming)

    def room_for_grad(self, z: Source, grad_after: Source | None) -> Source:
        """Return the memory in which the next layer leaves the gradient of this call's hidden states ``z``.

        A tier if layer inputs are offloaded, else ``grad_after`` if its shape and dtype fit, else a new tensor.
        ``grad_after`` is the gradient of the next layer's output, if it may be overwritten.
        """
        offload, room = self.facts.schedule.offload, grad_after
        if offload != "device":
            room = self._store(offload, z)
        elif not (isinstance(room, Tensor) and room.shape == z.shape and room.dtype == z.dtype):
            room = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        self.grad_left.put(room)
        return room

    def prepare(self, inputs: Sequence[Source], keep_graph: bool = False) -> None:
        """Provide the keys, values and states that the replay of any chunk reads.

        If another backward may follow (``keep_graph``), shared keys and values are copied: this backward would
        overwrite what other layers read in the next one.
        """
        self.kv.grads.clear()  # of a backward that was interrupted
        self.states.grads.clear()
        if self.saved.must_recompute_kv and (self.states.met or self.facts.schedule.keep_kv != "no"):
            self.recompute(inputs[0], None)
        self.states.begin(backward=True)
        self.kv.fetch()
        if keep_graph and self.filled:
            self.kv.copy()
        self.project(inputs)
        self.saved.expect(self.chunks[::-1])

    @torch.no_grad()
    def recompute(self, z_in: Source, into: StoredTensor | None) -> None:
        """Run the forward again with the same input and random numbers; store its hidden states in ``into``."""
        if isinstance(z_in, StoredTensor):
            z_in.expect(self.chunks)
        self.states.begin(backward=False)
        for chunk in self.chunks:
            with self._restored(chunk):
                z_i, _ = self.run(chunk, "store", [part(z_in, self.hidden_along, chunk)])
            if into is not None:
                into.put(chunk, z_i[0])
        if into is not None:
            into.tier.settle()
        self.states.end()
        self._keep_rest(for_backward=True, recomputed=True)

    @torch.no_grad()
    def project(self, inputs: Sequence[Source]) -> None:
        """Fill K and V again, running the layer only until they are made; the last chunk makes its own in replay."""
        if self.kv.pairs or not self.kv.updates:
            return
        if isinstance(inputs[0], StoredTensor):
            inputs[0].expect(self.chunks)
        for chunk in self.chunks if self.filled else self.chunks[:-1]:  # gradients of shared ones come before replay
            x_i = [part(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            with self._restored(chunk):
                try:
                    self.run(chunk, "project", x_i)
                except ProjectionDone:
                    continue

    @torch.no_grad()
    def recompute_chunk(self, chunk: slice, x_i: list[Tensor]) -> Tensor:
        """Return the hidden states of one chunk, computed again without a graph."""
        with self._restored(chunk):
            return self.run(chunk, "recompute", x_i)[0][0]

    def replay(self, chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """Run the layer on one chunk with its graph."""
        with self._restored(chunk):
            return self.run(chunk, "replay", x_i)

    @contextmanager
    def _restored(self, chunk: slice) -> Iterator[None]:
        """Context with the random numbers, autocast and modes of the forward."""
        with self.random[chunk.start].replayed(), self.facts.autocast.restored(), self.facts.modes.restored():
            yield

    def free(self, keep_graph: bool = False) -> None:
        """Free the tensors that the backward used; input and states stay if another backward may follow."""
        self.kv.free_all()
        self.states.end()
        if keep_graph:
            self.saved.attention = None  # the next one computes its attention again
            self.states.grads.clear()
            return
        self.states.free()
        self.saved.free()
        self.maker = self.grad_target = None


class _LeftGradient:
    """Gradient of a call's hidden states that the next layer left, and the backward that did.

    A backward that leaves out this layer leaves a gradient that the next must not use.
    """

    def __init__(self) -> None:
        self._grad: Source | None = None
        self._task = -1

    def put(self, grad: Source) -> None:
        self._grad, self._task = grad, torch._C._current_graph_task_id()

    def take(self) -> Source | None:
        grad, self._grad = self._grad, None
        return grad if self._task == torch._C._current_graph_task_id() else None


def placeholder(like: Source) -> Tensor:
    """Return zeros that take no memory, in place of a gradient that was stored elsewhere."""
    return _zero(like.dtype, like.device).expand(like.shape)


def is_placeholder(grad: Tensor) -> bool:
    """Return True if a gradient is a :func:`placeholder` and nothing was added to it."""
    return grad.untyped_storage()._cdata == _zero(grad.dtype, grad.device).untyped_storage()._cdata


@lru_cache(maxsize=32)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _followed_by_itself(x: Tensor, along: Along) -> Tensor:
    """Return one token followed by a copy of it, whose gradient is dropped."""
    return x if along is None else torch.cat([x, x.detach()], along)


def _room(piece: Tensor, along: Along, length: int) -> Tensor:
    """Return memory for an output of the whole sequence, in the form of one chunk's; zeros for a sum."""
    if along is None:
        return torch.zeros_like(piece)
    return piece.new_empty([length if dim == along else size for dim, size in enumerate(piece.shape)])
