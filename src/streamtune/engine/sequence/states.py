"""States of recurrent layers and convolutions that go from rank to rank, and their gradients back.

A layer with a state runs a rank's shard of a chunk from the state after the token before it. That token is another
rank's: the previous rank's, or the last rank's in the chunk before. So the state at the end of each shard is sent to
the rank that goes on from there, and the gradient of that state comes back in the backward:

    rank 0 |  0 1 -.             .- 6 7 -.
    rank 1 |        `- 2 3 -.   /         `- 8 9 ...     chunks of 6 tokens, 3 ranks
    rank 2 |                 `- 4 5

A rank waits where the layer reads its state, and sends as soon as the layer has made the next state. So what the layer
does besides (its output projection, MLP, experts) runs while other ranks scan. In the backward it waits where autograd
arrives at the state that it made, and sends a gradient as soon as autograd has it. Received states are kept until the
backward, as a rank's own states are: the replay of a chunk needs no message.

Packed rows, and rows that share their beginning, cut the shards further (``PackedRows``): a piece is a part of a shard
in which no row begins. It begins with the state of the piece before, on this rank or another, or of the trunk's last
piece, or with none. All ranks know all pieces, so each knows what it will be sent, and in which order.

There is no deadlock: every message is made at an earlier token than it is waited for, and ranks go through the pieces
in the order of their tokens, backward in the opposite order.
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
from streamtune.ops.messages import Incoming, Key, Outgoing

KINDS = ("conv", "recurrent")
"""Kinds of states; a message names a kind by its index here."""


class MeetsStates(BaseException):
    """Raised where a layer asks for its first state and its chunks are not the pieces that states need."""


@dataclass(frozen=True)
class ShardPiece:
    """A part of a rank's shard in which no row begins.

    Args:
        own: Places among the rank's own tokens.
        positions: Positions in the sequence.
        after: Position whose state it begins with; None if all its rows begin.
    """

    own: slice
    positions: slice
    after: int | None


class StateRoutes:
    """Pieces of all ranks, and the ranks between which states go."""

    def __init__(self, shards: SequenceShards, rows: PackedRows | None) -> None:
        self.pieces = [
            [
                ShardPiece(own, positions := shards.positions(own, rank), _after(positions.start, rows))
                for chunk in shards.chunks
                for own in _cut(chunk, shards.shard(chunk, rank), rows)
            ]
            for rank in range(shards.size)
        ]
        self.makers = {piece.positions.stop: rank for rank, pieces in enumerate(self.pieces) for piece in pieces}
        """The rank that makes the state after so many tokens, by position."""
        self.takers: dict[int, dict[int, int]] = {}
        """By position, the ranks with a piece that begins with the state, and the place of the first."""
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                if piece.after is not None:
                    self.takers.setdefault(piece.after, {}).setdefault(rank, piece.own.start)

    def sent(self, maker: int, taker: int) -> list[int]:
        """Return the positions whose states one rank sends to another, in the order in which it makes them."""
        return self._sent.get((maker, taker), [])

    @cached_property
    def _sent(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for at in sorted(self.takers):
            for taker in self.takers[at]:
                if taker != self.makers[at]:
                    found.setdefault((self.makers[at], taker), []).append(at)
        return found

    def returned(self, maker: int, taker: int) -> list[int]:
        """Return the positions whose states' gradients come back, in the order in which the taker has them."""
        return sorted(self.sent(maker, taker), key=lambda at: -self.takers[at][taker])


def _after(position: int, rows: PackedRows | None) -> int | None:
    return (position or None) if rows is None or position == 0 else rows.state_before(position)


def _cut(own: slice, positions: slice, rows: PackedRows | None) -> list[slice]:
    """Return the parts of a shard ``own`` at ``positions`` of the sequence, cut where rows begin."""
    starts = [] if rows is None else rows.starts
    inside = starts[bisect_right(starts, positions.start) : bisect_left(starts, positions.stop)]
    places = [own.start, *(own.start + at - positions.start for at in inside), own.stop]
    return [slice(*each) for each in pairwise(places)]


class SharedStates(States):
    """States of one call of a layer whose sequence several ranks share.

    ``after[t]`` holds states after the first t tokens of the sequence: those that this rank's pieces begin with,
    whichever rank made them. ``grads[t]`` sums their gradients from this rank's pieces. ``in_pieces`` is True if the
    layer's chunks are this rank's pieces.
    """

    def __init__(self, shards: SequenceShards, rows: PackedRows | None, in_pieces: bool, device: torch.device) -> None:
        super().__init__(rows)
        self.shards, self.in_pieces, self.device = shards, in_pieces or rows is None, device
        self._backward = False
        self._from: dict[int, Incoming] = {}
        self._to: dict[int, Outgoing] = {}
        self._complete: set[int] = set()
        self._given: set[tuple[int, StateKey]] = set()

    @cached_property
    def routes(self) -> StateRoutes:
        """Pieces of all ranks, found once in a call of the model."""
        if self.shards.routes is None:
            self.shards.routes = StateRoutes(self.shards, self.rows)
        routes: StateRoutes = self.shards.routes
        return routes

    @cached_property
    def _pieces(self) -> dict[int, ShardPiece]:
        return {piece.own.start: piece for piece in self.routes.pieces[self.shards.rank]}

    @property
    def pieces(self) -> list[slice]:
        """The chunks of a layer with states, among this rank's own tokens."""
        return [piece.own for piece in self._pieces.values()]

    def meet(self, whole: bool) -> None:
        """Check that the layer runs on one of this rank's pieces; raise :class:`MeetsStates` if not."""
        if whole or not self.in_pieces:
            raise MeetsStates

    def meet_keys(self) -> None:
        """Refuse packed rows in a layer that keeps keys and values too: ranks would exchange different pieces."""
        if self.rows is not None:
            raise UnsupportedModelError(
                "a layer both attends and carries a state, and meets several rows in a sequence that ranks share",
                fix="set packing: false and share_prefix: never, or sequence_parallel_size: 1",
            )

    def place(self, chunk: slice) -> tuple[int | None, int]:
        """Return (position whose states a piece begins with or None, position of the states that it makes)."""
        piece = self._pieces[chunk.start]
        return piece.after, piece.positions.stop

    def widened(self, chunk: slice) -> slice:
        """Return a piece; for a piece of one token that goes on from a state, return two tokens.

        Layers would take a single token for decoding, where the result may have no gradient and the state is written in
        place. So it runs with a copy of itself behind it, which changes its last state, but nothing else. If that state
        is used (a trunk of one token behind another) the piece stays as it is.
        """
        if chunk.stop - chunk.start > 1 or self.rows is None or not self.in_pieces:
            return chunk
        piece = self._pieces[chunk.start]
        if piece.after is None or piece.positions.stop in self.routes.takers:
            return chunk
        start = min(chunk.start, self.shards.own - 2)
        return slice(start, start + 2)

    def begin(self, backward: bool) -> None:
        """Open the messages of a pass over all pieces: states forward, or gradients backward."""
        self._backward = backward
        for each in (self._from, self._to, self._complete, self._given):
            each.clear()

    def end(self) -> None:
        """Wait until the other ranks have what this one sent."""
        for messages in self._to.values():
            messages.wait()

    # Forward.

    def receive(self, after: int | None, key: StateKey) -> None:
        """Wait for a state that another rank makes, unless it is here."""
        maker = self._other_maker(after)
        if after is None or maker is None or after in self._complete or key in self.after.get(after, {}):
            return
        if (state := self._incoming(maker).get(after, _number(key))) is not None:
            self.after.setdefault(after, {})[key] = state

    def keep(self, position: int, key: StateKey, state: Tensor) -> None:
        """Keep a state for this rank's later pieces, and send it to the other ranks that begin with it."""
        notify_tensors("state", state)
        takers = self.routes.takers.get(position, {})
        state = state.clone() if takers else state
        if self.shards.rank in takers:
            self.after.setdefault(position, {})[key] = state
        for rank in self._other_takers(position):
            self._outgoing(rank).put(_number(key), state)

    def close(self, after: int | None, position: int) -> None:
        """Finish a piece: receive the states that the layer did not read, and end the messages of its own states.

        The sender sent the unread states all the same.
        """
        if after is not None and after not in self._complete and (maker := self._other_maker(after)) is not None:
            self._complete.add(after)
            for number, state in self._incoming(maker).all(after).items():
                self.after.setdefault(after, {}).setdefault(_key(number), state)
        for rank in self._other_takers(position):
            self._outgoing(rank).close()

    # Backward.

    def handed_to_ranks(self, position: int, key: StateKey, state: Tensor) -> Tensor | None:
        """Return an output whose backward is the gradient that a state gets from other ranks, or None."""
        if not state.requires_grad or not self._other_takers(position):
            return None
        out: Tensor = _Awaited.apply(state, partial(self._await, position, key))
        return out

    def _await(self, position: int, key: StateKey) -> Tensor | None:
        """Wait for the gradient of a state of this rank, the sum over the other ranks that used it."""
        parts = [self._incoming(rank).get(position, _number(key)) for rank in self._other_takers(position)]
        known = [part for part in parts if part is not None]
        return sum(known[1:], known[0]) if known else None

    def watch(self, chunk: slice, after: int | None, key: StateKey, leaf: Tensor) -> None:
        """Let the gradient of a state from another rank be sent there as soon as autograd has it."""
        if after is not None and self._returns(chunk, after):
            leaf.register_hook(partial(self._give, after, key))

    def _give(self, after: int, key: StateKey, grad: Tensor | None) -> None:
        """Send the gradient of a state to the rank that made it; zeros if there is none."""
        maker, before = self.routes.makers[after], self.grads.get(after, {}).pop(key, None)
        if grad is None:
            total = torch.zeros_like(self.after[after][key]) if before is None else before
        else:
            total = grad if before is None else before + grad
        self._given.add((after, key))
        self._outgoing(maker).put(_number(key), total)

    def hand_back(self, chunk: slice, after: int | None, position: int, parts: dict[StateKey, Tensor | None]) -> None:
        """Add gradients to the gradient of the state that a piece began with; end the messages of its backward."""
        if after is not None:
            super().hand_back(
                chunk, after, position, {key: part for key, part in parts.items() if (after, key) not in self._given}
            )
        if after is not None and self._returns(chunk, after):
            for key, state in self.after.get(after, {}).items():
                if state.is_floating_point() and (after, key) not in self._given:
                    self._give(after, key, None)
            self._outgoing(self.routes.makers[after]).close()
            self.grads.pop(after, None)
        for rank in self._other_takers(position):
            self._incoming(rank).all(position)

    # Who they come from and go to.

    def _returns(self, chunk: slice, after: int | None) -> bool:
        """Return True if the backward of a piece completes the gradient of another rank's state."""
        if after is None or self._other_maker(after) is None:
            return False
        return self.routes.takers[after][self.shards.rank] == chunk.start

    def _other_maker(self, after: int | None) -> int | None:
        maker = None if after is None else self.routes.makers[after]
        return None if maker == self.shards.rank else maker

    def _other_takers(self, position: int) -> list[int]:
        return [rank for rank in self.routes.takers.get(position, {}) if rank != self.shards.rank]

    def _incoming(self, rank: int) -> Incoming:
        if rank not in self._from:
            own, routes = self.shards.rank, self.routes
            rounds = routes.returned(own, rank) if self._backward else routes.sent(rank, own)
            self._from[rank] = Incoming(self.shards.group, rank, rounds, self.device)
        return self._from[rank]

    def _outgoing(self, rank: int) -> Outgoing:
        if rank not in self._to:
            self._to[rank] = Outgoing(self.shards.group, rank, self.device)
        return self._to[rank]


class _Awaited(torch.autograd.Function):
    """A number made of a state; its backward is the gradient of that state, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, gradient: Callable[[], Tensor | None]) -> Tensor:
        ctx.gradient = gradient
        return state.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.gradient(), None


def _number(key: StateKey) -> Key:
    return KINDS.index(key[0]), *key[1:]


def _key(number: Key) -> StateKey:
    return KINDS[number[0]], number[1], number[2]
