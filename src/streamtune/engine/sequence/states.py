"""States of recurrent layers and convolutions that ranks send to each other, and the gradients they send back.

A layer with a state runs on a rank's shard of a chunk from the state after the token before the shard. That token is on
another rank: the previous rank, or the last rank in the preceding chunk. So the state at the end of each shard is sent
to the rank with the next shard, and its gradient comes back in the backward:

    rank 0 |  0 1 -.             .- 6 7 -.
    rank 1 |        `- 2 3 -.   /         `- 8 9 ...     chunks of 6 tokens, 3 ranks
    rank 2 |                 `- 4 5

A rank waits when the layer reads its state, and sends the next state as soon as the layer has computed it. So the rest
of the layer (output projection, MLP, experts) runs while other ranks scan. In the backward, a rank waits when autograd
reaches the state that it sent, and sends a gradient as soon as autograd has it. Received states are saved until the
backward.

Packed rows, and rows that share a prefix, cut the shards further (``PackedRows``). A fragment is a part of a shard in
which no row begins. It starts from the state of the fragment before it, from the state of the trunk's last fragment, or
from no state. All ranks know all fragments, so each rank knows which states it will receive, and in which order.

There is no deadlock. Every message is sent at an earlier token than it is waited for. Ranks process the fragments in
the order of their tokens, and in reverse order in the backward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.kv import StateKey, States
from streamtune.engine.observe import notify_tensors
from streamtune.engine.rows import PackedRows
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.errors import UnsupportedModelError
from streamtune.ops import first_order
from streamtune.ops.messages import Key, RoundReceiver, RoundSender

STATE_KINDS = ("conv", "recurrent")
"""Kinds of states; a message between ranks names a kind by its index in this tuple."""


class NeedsFragments(BaseException):
    """Raised if a layer turns out to have a state, and its chunks are not yet cut where rows begin."""


@dataclass(frozen=True)
class ShardFragment:
    """A part of a rank's shard (its tokens in one chunk) in which no row begins.

    Args:
        own_slice: Slice of the rank's tokens.
        positions: Slice of the sequence.
        read_position: Position of the state that the fragment starts from; None if it starts without a state.
    """

    own_slice: slice
    positions: slice
    read_position: int | None


class StateRoutes:
    """The parts of all ranks' shards in which no row begins (fragments), and the ranks that exchange each state."""

    def __init__(self, shards: SequenceShards, rows: PackedRows | None) -> None:
        self.fragments = [
            [
                ShardFragment(
                    own_slice,
                    positions := shards.sequence_slice(own_slice, rank),
                    _state_position(positions.start, rows),
                )
                for chunk in shards.chunks
                for own_slice in _fragment_slices(chunk, shards.shard_positions(chunk, rank), rows)
            ]
            for rank in range(shards.size)
        ]
        self.producers = {
            fragment.positions.stop: rank for rank, fragments in enumerate(self.fragments) for fragment in fragments
        }
        """Rank that computes the state at a position, by position."""
        self.readers: dict[int, dict[int, int]] = {}
        """Ranks that read the state at a position, by position; each with the start of its first fragment that reads
        it.
        """
        for rank, fragments in enumerate(self.fragments):
            for fragment in fragments:
                if fragment.read_position is not None:
                    self.readers.setdefault(fragment.read_position, {}).setdefault(rank, fragment.own_slice.start)

    def sent_positions(self, producer: int, reader: int) -> list[int]:
        """Return the positions of the states that rank ``producer`` sends to rank ``reader``, in sending order."""
        return self._sent_by_ranks.get((producer, reader), [])

    @cached_property
    def _sent_by_ranks(self) -> dict[tuple[int, int], list[int]]:
        positions: dict[tuple[int, int], list[int]] = {}
        for at in sorted(self.readers):
            for reader in self.readers[at]:
                if reader != self.producers[at]:
                    positions.setdefault((self.producers[at], reader), []).append(at)
        return positions

    def returned_positions(self, producer: int, reader: int) -> list[int]:
        """Return the positions of the states whose gradients ``reader`` sends to ``producer``, in sending order."""
        return sorted(self.sent_positions(producer, reader), key=lambda at: -self.readers[at][reader])


def _state_position(position: int, rows: PackedRows | None) -> int | None:
    return (position or None) if rows is None or position == 0 else rows.start_state_position(position)


def _fragment_slices(own_slice: slice, positions: slice, rows: PackedRows | None) -> list[slice]:
    """Return the parts of a shard in which no row begins, as slices of the rank's tokens.

    ``own_slice`` is the shard as a slice of the rank's tokens, ``positions`` the same shard as a slice of the sequence.
    """
    starts = [] if rows is None else rows.row_starts
    inside = starts[bisect_right(starts, positions.start) : bisect_left(starts, positions.stop)]
    places = [own_slice.start, *(own_slice.start + at - positions.start for at in inside), own_slice.stop]
    return [slice(*each) for each in pairwise(places)]


class SharedStates(States):
    """Recurrent states of one layer call on a sequence that several ranks share.

    ``states_after[t]`` has the states after the first t tokens of the sequence, if a chunk of this rank starts from
    them. This rank or another computed them. ``grads[t]`` sums their gradients over this rank's chunks.
    ``in_fragments`` is True if the layer's chunks are already cut where rows begin.
    """

    def __init__(
        self, shards: SequenceShards, rows: PackedRows | None, in_fragments: bool, device: torch.device
    ) -> None:
        super().__init__(rows)
        self.shards, self.in_fragments, self.device = shards, in_fragments or rows is None, device
        self._backward = False
        self._receivers: dict[int, RoundReceiver] = {}
        self._senders: dict[int, RoundSender] = {}
        self._complete: set[int] = set()
        self._sent_grads: set[tuple[int, StateKey]] = set()

    @cached_property
    def routes(self) -> StateRoutes:
        """Ranks that exchange each state, computed once per model call."""
        if self.shards.routes is None:
            self.shards.routes = StateRoutes(self.shards, self.rows)
        routes: StateRoutes = self.shards.routes
        return routes

    @cached_property
    def _fragments(self) -> dict[int, ShardFragment]:
        return {fragment.own_slice.start: fragment for fragment in self.routes.fragments[self.shards.rank]}

    @property
    def fragments(self) -> list[slice]:
        """Chunks for a layer with states, cut where rows begin, as slices of this rank's tokens."""
        return [fragment.own_slice for fragment in self._fragments.values()]

    def on_state_used(self, unchunked: bool) -> None:
        """Raise :class:`NeedsFragments` if the layer's chunks are not cut where rows begin."""
        if unchunked or not self.in_fragments:
            raise NeedsFragments

    def on_keys_used(self) -> None:
        """Raise an error if a layer has both attention and a state, and the sequence has several rows.

        Attention needs equal chunks on all ranks, and rows cut the chunks of each rank differently.
        """
        if self.rows is not None:
            raise UnsupportedModelError(
                "a layer has both attention and a recurrent state, so sequence parallelism supports only one row per "
                "sequence",
                fix="set packing: false and share_prefix: never, or sequence_parallel_size: 1",
            )

    def state_positions(self, chunk: slice) -> tuple[int | None, int]:
        """Return the position of the state from which ``chunk`` starts (or None), and of the state after ``chunk``."""
        fragment = self._fragments[chunk.start]
        return fragment.read_position, fragment.positions.stop

    def tokens_to_run(self, chunk: slice) -> slice:
        """Return the slice on which a layer runs for ``chunk``: the chunk itself, or two tokens if it has one token.

        Layers treat a single token with a state as a decoding step, which may give no gradient and writes the state in
        place. So the token runs followed by a copy of itself. The copy changes only the last state. If another rank or
        chunk reads that state, the single token runs alone.
        """
        if chunk.stop - chunk.start > 1 or self.rows is None or not self.in_fragments:
            return chunk
        fragment = self._fragments[chunk.start]
        if fragment.read_position is None or fragment.positions.stop in self.routes.readers:
            return chunk
        start = min(chunk.start, self.shards.own_length - 2)
        return slice(start, start + 2)

    def begin_pass(self, backward: bool) -> None:
        """Begin a forward, in which ranks send states, or a backward, in which they send gradients of states."""
        self._backward = backward
        for messages in (self._receivers, self._senders, self._complete, self._sent_grads):
            messages.clear()

    def end_pass(self) -> None:
        """Wait until the other ranks have received what this rank sent."""
        for messages in self._senders.values():
            messages.wait_until_sent()

    # Forward.

    def receive_state(self, read_position: int | None, key: StateKey) -> None:
        """Wait for the state ``key`` at ``read_position`` if another rank computes it; save it for the backward."""
        producer = self._other_producer(read_position)
        if (
            read_position is None
            or producer is None
            or read_position in self._complete
            or key in self.states_after.get(read_position, {})
        ):
            return
        if (state := self._receiver_from(producer).receive(read_position, _message_key(key))) is not None:
            self.states_after.setdefault(read_position, {})[key] = state

    def save_state(self, position: int, key: StateKey, state: Tensor) -> None:
        """Save a state for this rank's later chunks, and send it to the other ranks that start from it."""
        notify_tensors("state", state)
        readers = self.routes.readers.get(position, {})
        state = state.clone() if readers else state
        if self.shards.rank in readers:
            self.states_after.setdefault(position, {})[key] = state
        for rank in self._other_readers(position):
            self._sender_to(rank).send(_message_key(key), state)

    def end_chunk(self, read_position: int | None, position: int) -> None:
        """End a chunk: receive the states that the layer did not read, and tell other ranks that no more states follow.

        The rank that computes the states sends all of them, whether another rank's layer reads them or not.
        """
        if (
            read_position is not None
            and read_position not in self._complete
            and (producer := self._other_producer(read_position)) is not None
        ):
            self._complete.add(read_position)
            for number, state in self._receiver_from(producer).receive_round(read_position).items():
                self.states_after.setdefault(read_position, {}).setdefault(_state_key(number), state)
        for rank in self._other_readers(position):
            self._sender_to(rank).end_round()

    # Backward.

    def remote_gradient_tensor(self, position: int, key: StateKey, state: Tensor) -> Tensor | None:
        """Return a tensor whose backward waits for other ranks' gradient of ``state``; None if no rank reads it."""
        if not state.requires_grad or not self._other_readers(position):
            return None
        out: Tensor = _GradFromRanks.apply(state, partial(self._await_grad, position, key))
        return out

    def _await_grad(self, position: int, key: StateKey) -> Tensor | None:
        received = [
            self._receiver_from(rank).receive(position, _message_key(key)) for rank in self._other_readers(position)
        ]
        parts = [part for part in received if part is not None]
        return sum(parts[1:], parts[0]) if parts else None

    def on_state_leaf(self, chunk: slice, read_position: int | None, key: StateKey, leaf: Tensor) -> None:
        """Register a hook on ``leaf``, a received state, that sends its gradient to the rank that computed it."""
        if read_position is not None and self._adds_last_grad_term(chunk, read_position):
            leaf.register_hook(partial(self._send_grad, read_position, key))

    def _send_grad(self, read_position: int, key: StateKey, grad: Tensor | None) -> None:
        producer, before = self.routes.producers[read_position], self.grads.get(read_position, {}).pop(key, None)
        if grad is None:
            total = torch.zeros_like(self.states_after[read_position][key]) if before is None else before
        else:
            total = grad if before is None else before + grad
        self._sent_grads.add((read_position, key))
        self._sender_to(producer).send(_message_key(key), total)

    def add_state_grads(
        self, chunk: slice, read_position: int | None, position: int, parts: dict[StateKey, Tensor | None]
    ) -> None:
        """Add the gradients of the states from which ``chunk`` started; send the sums if they are complete."""
        if read_position is not None:
            unsent = {key: part for key, part in parts.items() if (read_position, key) not in self._sent_grads}
            super().add_state_grads(chunk, read_position, position, unsent)
        if read_position is not None and self._adds_last_grad_term(chunk, read_position):
            for key, state in self.states_after.get(read_position, {}).items():
                if state.is_floating_point() and (read_position, key) not in self._sent_grads:
                    self._send_grad(read_position, key, None)
            self._sender_to(self.routes.producers[read_position]).end_round()
            self.grads.pop(read_position, None)
        for rank in self._other_readers(position):
            self._receiver_from(rank).receive_round(position)

    # Senders and receivers.

    def _adds_last_grad_term(self, chunk: slice, read_position: int | None) -> bool:
        if read_position is None or self._other_producer(read_position) is None:
            return False
        return self.routes.readers[read_position][self.shards.rank] == chunk.start

    def _other_producer(self, read_position: int | None) -> int | None:
        producer = None if read_position is None else self.routes.producers[read_position]
        return None if producer == self.shards.rank else producer

    def _other_readers(self, position: int) -> list[int]:
        return [rank for rank in self.routes.readers.get(position, {}) if rank != self.shards.rank]

    def _receiver_from(self, rank: int) -> RoundReceiver:
        if rank not in self._receivers:
            this_rank, routes = self.shards.rank, self.routes
            rounds = (
                routes.returned_positions(this_rank, rank) if self._backward else routes.sent_positions(rank, this_rank)
            )
            self._receivers[rank] = RoundReceiver(self.shards.group, rank, rounds, self.device)
        return self._receivers[rank]

    def _sender_to(self, rank: int) -> RoundSender:
        if rank not in self._senders:
            self._senders[rank] = RoundSender(self.shards.group, rank, self.device)
        return self._senders[rank]


class _GradFromRanks(torch.autograd.Function):
    """A zero that depends on a state; its backward waits for other ranks' gradient of the state and returns it."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, gradient: Callable[[], Tensor | None]) -> Tensor:
        ctx.gradient = gradient
        return state.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.gradient(), None


def _message_key(key: StateKey) -> Key:
    return STATE_KINDS.index(key[0]), *key[1:]


def _state_key(number: Key) -> StateKey:
    return STATE_KINDS[number[0]], number[1], number[2]
