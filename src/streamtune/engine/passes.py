"""One call of one decoder layer, and its passes over the chunks of its sequence.

forward   first to last chunk, no graph: computes the outputs, and keeps the tensors that the backward needs
again     the same with the same random numbers, only for the hidden states: the input of the next layer, where that
          was not stored; in the order of chunks, for one chunk
project   first to last chunk, stops in each as soon as keys and values are made
replay    one chunk with its graph, for the backward, which goes from the last to the first
whole     no pass over chunks: the whole sequence with its graph, as autograd would do it
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streamtune.engine.attention import KeptAttention, SavedOutputs
from streamtune.engine.cache import ChunkCache, Pass, ProjectionDone
from streamtune.engine.call import LayerCall
from streamtune.engine.call_parts import LayerOutputs
from streamtune.engine.context import CallContext, ChunkContext
from streamtune.engine.fused import FusedParts, Linears
from streamtune.engine.inspect_model import keeps_keys
from streamtune.engine.kept_keys import KeptKeys, kept_keys
from streamtune.engine.kv import KeysAndValues, States
from streamtune.engine.last_call import LastLayerCall
from streamtune.engine.memory.placement import Placement, Tiers
from streamtune.engine.memory.tiers import Source, StoredTensor, Tier
from streamtune.engine.observe import Autocast, Modes, RandomState, notify_chunk
from streamtune.engine.routers import RouterWatch
from streamtune.engine.scan import carried_scan
from streamtune.engine.sequence.shards import ChunkExchange
from streamtune.engine.sequence.states import MeetsStates, SharedStates
from streamtune.engine.sharded import gathered
from streamtune.engine.vjp import Along, GradientSum, cut, part
from streamtune.engine.weights.waiting import WaitingWeights
from streamtune.errors import ArgumentError
from streamtune.schedule import Schedule
from streamtune.schedule import Tier as TierName


class LayerOwner(Protocol):
    """The streamed forward of a layer, and what its calls have in common."""

    schedule: Schedule
    context: CallContext
    place: Placement
    """The placement of the layer's input until the backward."""
    tiers: Tiers
    last_call: LastLayerCall[LayerStream]
    watch: RouterWatch | None
    bare_scans: list[nn.Module]
    fused: FusedParts | None
    carries_states: bool
    """True if its chunks end where packed rows do: states must not pass from one to the next."""
    narrow_states: bool
    """True if its last call passed on a state in a narrower dtype than that of its hidden states."""
    waiting: WaitingWeights | None
    """The weights that wait on the host; None where all are on the device."""


class LayerStream:
    """One call of one layer, and the state that its passes over the chunks share.

    Args:
        call: The call.
        owner: The layer's streamed forward.
        maker: The call that computed this one's hidden states, if it may compute them again.
    """

    def __init__(self, call: LayerCall, owner: LayerOwner, maker: LayerStream | None = None) -> None:
        schedule = owner.context.schedule or owner.schedule
        self.call, self.length, self.owner, self.shards = call, call.length, owner, call.shards
        self.batch = call.hidden.shape[0]
        self.rows = owner.context.rows
        if self.shards is not None and self.rows is None:
            self.rows = self.shards.rows
        self.chained, self.follows = schedule.order == "chunk", False
        """In the order of chunks; the layer before then computes this one's input in the backward."""
        self.chain: weakref.ref[Any] | None = None
        """The chain it belongs to."""
        self.schedule, self.device = schedule, call.hidden.device
        with_rows = owner.carries_states or (self.chained and owner.last_call.ends_with_rows)
        self.states = self._new_states(with_rows)
        self.chunks = self._chunks_with_rows() if self.rows and with_rows else call.chunks(schedule)
        if owner.context.whole:
            self.chunks = [slice(0, self.length)]
        self.widen = schedule.grad_dtype == "float32"
        self.kv = KeysAndValues(self._keys_length, self.widen, call.past)
        self.pieces: KeptKeys | None = None
        """Keys and values until the backward, in the order of chunks; None where ``kv`` keeps them."""
        self.kept: KeptAttention | None = None
        self.linears: Linears | None = None
        self.maker = maker
        self.z_in: Tensor | StoredTensor | None = None
        """The layer's input, wherever it waits; None as long as it is to be computed again."""
        self.version = 0
        self.grad_target: LayerStream | None = None
        """The call whose output this one reads and whose gradient it leaves there, where gradients are streamed."""
        self.grad_z: Source | None = None
        """The gradient of this call's hidden states, where they left it."""
        self.grad_task = -1
        """The backward that stored it. One that leaves out this layer stores a gradient that the next must not use."""
        self.must_recompute_kv = False
        """True while states, keys or values freed after the forward are still to be computed again for the backward."""
        self.filled: dict[Any, int] = {}
        self.autocast, self.modes = Autocast.now(self.device), Modes.now(call.layer)
        self.random: dict[int, RandomState] = {}
        self.outputs = LayerOutputs(type(call.layer).__name__, call.inputs[call.hidden_name])
        self.bare_scans, self.sums = owner.bare_scans, 0
        self.watch = owner.watch if owner.watch is not None and owner.watch.active else None
        self.tokens = self.watch.mask_BT if self.watch else None  # at the time of its backward there may be others

    def _new_states(self, with_rows: bool) -> States:
        if self.shards is None:
            return States(self.rows)
        return SharedStates(self.shards, self.rows, with_rows, self.device)

    def _chunks_with_rows(self) -> list[slice]:
        """Return chunks that end where rows do."""
        assert self.rows is not None
        return self.states.pieces if isinstance(self.states, SharedStates) else self.rows.chunks(self.schedule)

    @property
    def along(self) -> list[Along]:
        """The dimension along which each output follows the sequence; None for the sums of its router."""
        return [*self.outputs.along, *[None] * self.sums]

    @property
    def _keys_length(self) -> int:
        """Number of tokens whose keys and values this rank keeps, with those before the call."""
        shards = self.shards
        if shards is None:
            return self.call.keys(slice(0, self.length)).stop
        return self.length if shards.form == "ring" else shards.total

    @property
    def repeatable(self) -> bool:
        """True if its output can be computed again from its input hidden states alone."""
        return len(self.call.inputs) == 1

    def run(self, chunk: slice, pass_name: Pass, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """Run the layer on one chunk; return its outputs ``z(i)``, the first ``[B, T_i, C]``, and the cache it used."""
        notify_chunk(self.call.layer, chunk, pass_name)
        ran = self.states.widened(chunk)
        if ran != chunk:
            x_i = [_followed_by_itself(x, along) for x, along in zip(x_i, self.call.inputs.values(), strict=True)]
        exchange = None if self.shards is None else ChunkExchange(self.shards, chunk)
        seen = self.call.keys(chunk) if exchange is None else exchange.keys
        cache = ChunkCache(self.kv, self.states, seen, self.call.first_key(chunk), pass_name, exchange)
        if exchange is not None:
            exchange.first_key = cache.first_key
        given = dict(zip(self.call.inputs, x_i, strict=True))
        listening: AbstractContextManager[list[Tensor]] = self.watch.listening() if self.watch else nullcontext([])
        saved = SavedOutputs(self.kept, chunk.start, last=pass_name == "replay") if self.kept else None
        linears = nullcontext() if self.linears is None else self.linears.used()
        fused = nullcontext() if self.owner.fused is None else self.owner.fused.used(self.device)
        with (
            linears,
            fused,
            carried_scan(self.bare_scans, cache),
            ChunkContext(exchange, saved).entered(),
            listening as heard,
        ):
            out, filled = self.call.run(ran, cache, given)
        cache.close()
        self.filled |= filled
        sums = self.watch.sums(heard, self._counted(chunk, ran)) if self.watch else []
        self.sums = len(sums)
        outputs = self.outputs.take(out, ran, keep=pass_name in ("store", "whole"))
        if ran != chunk:
            outputs = [cut(z, along, slice(0, 1)) for z, along in zip(outputs, self.outputs.along, strict=True)]
        return [*outputs, *sums], cache

    def _counted(self, chunk: slice, ran: slice) -> Tensor | None:
        """Return the mask of the tokens that a router counts, of those that the layer ran on; None for all of them."""
        if ran == chunk:
            return None if self.tokens is None else self.tokens[:, chunk]
        counted = torch.zeros(self.batch, ran.stop - ran.start, device=self.device)
        counted[:, : chunk.stop - chunk.start] = 1 if self.tokens is None else self.tokens[:, chunk]
        return counted

    @contextmanager
    def walk(self, sums: Sequence[GradientSum] = ()) -> Iterator[None]:
        """Do once, for the passes over several chunks inside, what does not depend on the chunk.

        Args:
            sums: The sums of the parameters' gradients, in a backward.
        """
        waiting, outer = self.owner.waiting, self.linears
        with nullcontext() if waiting is None else waiting.used(self.call.layer, then=1):
            if outer is None and len(self.chunks) > 1:
                self.linears = Linears(self.call.layer, self.autocast, sums)
            try:
                yield
            finally:
                self.linears = outer

    # The forward.

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], for_backward: bool = False) -> list[Tensor]:
        """Compute the outputs ``z``, the first ``[B, T, C]``, chunk by chunk, first to last.

        Behind them come the keys and values that the layer shares with others.
        """
        z: list[Tensor] = []
        begin = RandomState.now(self.device) if self.rows else None
        if for_backward:
            self._keep_input(inputs[0])
        if for_backward and self.chained and self.schedule.keep_kv == "host" and len(self.chunks) > 1:
            self.states.tier = self._tier("host")
        self.states.begin(backward=False)
        for chunk in self.chunks:
            if for_backward:
                self.random[chunk.start] = RandomState.now(self.device)
            x_i = [cut(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            if isinstance(self.z_in, StoredTensor):
                self.z_in.put(chunk, x_i[0])
            # Known from the first chunk on: a layer with states runs again, in chunks that end where packed rows do.
            try:
                z_i, cache = self.run(chunk, "store", x_i)
                again = cache.met_states and not self.owner.carries_states
            except MeetsStates:
                again = True
            if begin is not None and again:
                begin.restore()
                self._end_with_rows()
                return self.forward(inputs, for_backward)
            if not z:
                z = [_room(piece, along, self.length) for piece, along in zip(z_i, self.along, strict=True)]
            for whole, piece, along in zip(z, z_i, self.along, strict=True):
                whole.add_(piece) if along is None else cut(whole, along, chunk).copy_(piece)
        for waiting in (self.z_in, self.kept):
            if isinstance(waiting, StoredTensor | KeptAttention):
                waiting.tier.settle()
        self.owner.narrow_states = self.states.narrower_than(inputs[0].dtype)
        self.states.end()
        shared = [buffer for index in self.filled.values() for buffer in self.kv.pairs[index]]
        self._keep_rest(for_backward, again=False, shared=bool(shared))
        return z + shared

    def _end_with_rows(self) -> None:
        """Let this layer's chunks end where packed rows do, from now on; nothing was kept or sent yet."""
        if keeps_keys(self.call.layer):
            self.states.meet_keys()
        self.owner.carries_states = self.owner.last_call.ends_with_rows = True
        self.states, self.random = self._new_states(with_rows=True), {}
        if self.rows is not None:
            self.chunks = self._chunks_with_rows()
        self.kv = KeysAndValues(self._keys_length, self.widen, self.call.past)
        self.filled = {}

    def whole(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute the outputs with autograd's own graph and all activations, and the keys and values that are shared.

        Return None for a layer whose states must not pass from one packed row to the next, or which pass from rank to
        rank: it is streamed all the same.
        """
        begin = RandomState.now(self.device) if self.rows or self.shards else None
        again = begin is not None and self.owner.carries_states
        if not again:
            try:
                z, cache = self.run(slice(0, self.length), "whole", list(inputs))
                again = begin is not None and cache.met_states
            except MeetsStates:
                again = True
        if begin is not None and again:
            begin.restore()
            self._end_with_rows()
            return None
        return z + [cache.own[2 * index + place] for index in self.filled.values() for place in (0, 1)]

    def restore(self, outputs: list[Tensor], sharing: Any) -> Any:
        """Return the output in the form the layer gives it; put shared keys and values into ``sharing``."""
        own, count = len(self.outputs.along), len(self.along)
        if self.watch:
            self.watch.add(outputs[own:count])
        for place, key in enumerate(self.filled):
            sharing[key] = tuple(outputs[count + 2 * place : count + 2 * place + 2])
        return self.outputs.restore(outputs[:own])

    # What is kept in between.

    def _tier(self, name: TierName) -> Tier:
        return self.owner.tiers.of(name, self.device)

    def _keep_input(self, hidden: Tensor) -> None:
        """Choose where the input is kept for the backward; the forward stores each chunk there as it runs."""
        place, kept = self.owner.place, self.schedule.keep_attention
        if kept != "no":
            self.kept = KeptAttention(self._tier(kept))
        if self.maker is not None or self.follows:
            self.z_in = None
        elif place.tier == "device":
            self.z_in, self.version = hidden.detach(), hidden._version
        else:
            self.z_in = self._store(place.tier, hidden)

    def _store(self, name: TierName, like: Source) -> StoredTensor:
        along = self.call.inputs[self.call.hidden_name]
        assert along is not None, "hidden states follow the sequence"
        return StoredTensor(self._tier(name), like, along)

    def _keep_rest(self, for_backward: bool, again: bool, shared: bool = False) -> None:
        """Free keys, values and states that the backward does not need, or that will be computed again for it."""
        if self.chained and for_backward:
            self._keep_pieces()
            return
        self.must_recompute_kv = for_backward and not again and not self.owner.place.ends and self.repeatable
        wanted = for_backward and not self.must_recompute_kv
        if not (for_backward and shared) and not (wanted and self.schedule.keep_kv != "no"):
            self.kv.free_kv()
        elif self.schedule.keep_kv == "host" and not shared:
            self.kv.offload(self._tier("host"))
        if not wanted:
            self.states.free()

    def _keep_pieces(self) -> None:
        """Keep what chunks read of earlier ones until the backward comes to them."""
        keys = [self.call.keys(chunk) for chunk in self.chunks]
        if len(keys) == 1:
            self.kv.free_kv()
            return
        first = {own.start: self.call.first_key(chunk) for own, chunk in zip(keys, self.chunks, strict=True)}
        tier = self._tier("host" if self.schedule.keep_kv == "host" else "device")
        notify_chunk(self.call.layer, self.chunks[-1], "keep")
        self.pieces = kept_keys(self.kv, keys, lambda own: first[own.start], tier)

    # The backward.

    def source(self) -> Source:
        """Return the layer's input. If it was not stored, compute it and the inputs of the segment's layers before it.

        Where ranks share the weights, each layer that runs again is gathered once more.

        Raises:
            ArgumentError: The stored input was changed since the forward.
        """
        todo: list[LayerStream] = []
        stream = self
        while stream.z_in is None:
            assert stream.maker is not None
            todo.append(stream)
            stream = stream.maker
        for later in reversed(todo):
            source = stream.stored_input()
            later.z_in = later._store(later.owner.place.tier, source)
            with gathered(stream.call.layer, during=self.call.layer, next_backward=later is self), stream.walk():
                stream.again(source, later.z_in)
            later.maker = None
            stream = later
        return self.stored_input()

    def stored_input(self) -> Source:
        """Return the layer's input as it was stored.

        Raises:
            ArgumentError: It was changed since the forward.
        """
        assert self.z_in is not None
        if isinstance(self.z_in, Tensor) and self.z_in._version != self.version:
            raise ArgumentError(
                f"the input of {type(self.call.layer).__name__} was changed in place after it had been read",
                mend="change a copy of the hidden states",
            )
        return self.z_in

    def grad_out(self, incoming: Tensor | None) -> Source | None:
        """Return the gradient of the hidden states: autograd's, plus the one that the next layer stored here."""
        left, self.grad_z = self.grad_z if self.grad_task == torch._C._current_graph_task_id() else None, None
        if left is None or incoming is None:
            return left if incoming is None else incoming
        if is_placeholder(incoming):
            return left
        along = self.outputs.hidden_along  # something besides the next layer read them
        assert along is not None
        whole = torch.cat([part(left, along, chunk) for chunk in self.chunks], along)
        return whole.add_(incoming)

    def room_for_grad(self, z: Source, grad_after: Source | None) -> Source:
        """Return the memory in which the next layer stores the gradient of this call's hidden states ``z``.

        That is a tier if layer inputs are offloaded, else ``grad_after`` if its shape and dtype fit, else a new tensor.

        Args:
            z: The hidden states.
            grad_after: The gradient of the next layer's output, if it may be overwritten.
        """
        along, self.grad_task = self.outputs.hidden_along, torch._C._current_graph_task_id()
        assert along is not None
        if self.schedule.offload != "device":
            self.grad_z = StoredTensor(self._tier(self.schedule.offload), z, along)
        elif isinstance(grad_after, Tensor) and grad_after.shape == z.shape and grad_after.dtype == z.dtype:
            self.grad_z = grad_after
        else:
            self.grad_z = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        return self.grad_z

    def prepare(self, inputs: Sequence[Source], again: bool = False) -> None:
        """Provide the keys, values and states that the replay of any chunk reads of those before it.

        Args:
            inputs: The layer's inputs.
            again: Another backward may follow. Shared keys and values are then copied, so that this backward does not
                overwrite those that other layers read in the next one.
        """
        self.kv.grads.clear()  # of a backward that was interrupted
        self.states.grads.clear()
        if self.must_recompute_kv and (self.states.met or self.schedule.keep_kv != "no"):
            self.again(inputs[0], None)
        self.states.begin(backward=True)
        self.kv.fetch()
        if again and self.filled:
            self.kv.copy()
        self.project(inputs)
        for kept in (inputs[0], self.kept):
            if isinstance(kept, StoredTensor | KeptAttention):
                kept.expect(self.chunks[::-1])

    @torch.no_grad()
    def again(self, z_in: Source, into: StoredTensor | None) -> None:
        """Run the forward again with the same input and random numbers; store its hidden states in ``into``."""
        if isinstance(z_in, StoredTensor):
            z_in.expect(self.chunks)
        along = self.call.inputs[self.call.hidden_name]
        self.states.begin(backward=False)
        for chunk in self.chunks:
            with self._as_before(chunk):
                z_i, _ = self.run(chunk, "store", [part(z_in, along, chunk)])
            if into is not None:
                into.put(chunk, z_i[0])
        if into is not None:
            into.tier.settle()
        self.states.end()
        self._keep_rest(for_backward=True, again=True)

    @torch.no_grad()
    def project(self, inputs: Sequence[Source]) -> None:
        """Fill K and V again, running the layer only until they are made. The last chunk makes its own in replay."""
        if self.kv.pairs or not self.kv.updates:
            return
        if isinstance(inputs[0], StoredTensor):
            inputs[0].expect(self.chunks)
        for chunk in self.chunks if self.filled else self.chunks[:-1]:  # gradients of shared ones come before replay
            x_i = [part(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            with self._as_before(chunk):
                try:
                    self.run(chunk, "project", x_i)
                except ProjectionDone:
                    continue

    @torch.no_grad()
    def again_on(self, chunk: slice, x_i: list[Tensor]) -> Tensor:
        """Return the hidden states of one chunk, computed again with the forward's random numbers."""
        with self._as_before(chunk):
            return self.run(chunk, "again", x_i)[0][0]

    def replay(self, chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """Run the layer on one chunk with its graph, drawing the forward's random numbers again."""
        with self._as_before(chunk):
            return self.run(chunk, "replay", x_i)

    @contextmanager
    def _as_before(self, chunk: slice) -> Iterator[None]:
        """Set the random numbers, autocast and modes of the forward inside the context."""
        with self.random[chunk.start].replayed(), self.autocast.again(), self.modes.again():
            yield

    def free(self, again: bool = False) -> None:
        """Free the tensors that the backward used.

        Args:
            again: Another backward may follow: keep the input and the states, which it cannot compute again.
        """
        self.kv.free_all()
        self.states.end()
        if again:
            self.kept = None  # the next one computes its attention again
            self.states.grads.clear()
            return
        self.states.free()
        if isinstance(self.z_in, StoredTensor):
            self.z_in.free()
        self.z_in = self.maker = self.grad_target = self.kept = None


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
    """Return memory for an output of the whole sequence, given one chunk's; zeros for a sum."""
    if along is None:
        return torch.zeros_like(piece)
    return piece.new_empty([length if dim == along else size for dim, size in enumerate(piece.shape)])
