"""The tokens of each rank, where several ranks share the sequence of a call, and what their layers exchange.

The schedule cuts a rank's own tokens into chunks. The i-th chunks of all ranks together are the i-th chunk of the
sequence. Each rank's part of it is called a shard; the shards lie in the order of the ranks:

    rank 0 | 0 1 . . . . 6 7  . . . .      tokens of the sequence, 2 to a shard, 3 ranks
    rank 1 | . . 2 3 . . . .  8 9 . .
    rank 2 | . . . . 4 5 . .  . . A B
             first chunk      second

So all tokens before a chunk of the sequence are in earlier chunks, and every rank computes a part of the causal
attention of each chunk.

Shape suffixes: B batch, T tokens of the sequence, L of this rank, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamtune.engine.rows import PackedRows
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops import LazyMask
from streamtune.ops.attention.ring import Ring
from streamtune.ops.attention.runs import run_starts
from streamtune.ops.exchange import collected, to_heads, to_shards
from streamtune.schedule import Schedule


@dataclass(eq=False)
class SequenceShards:
    """Division of a call's tokens into chunks, and of each chunk into one shard for every rank.

    Args:
        group: Ranks that share the tokens.
        form: ``ring`` or ``ulysses``: how the ranks exchange keys and values.
        schedule: Gives the chunks of each rank's own tokens.
        batch: Rows B.
        given: Tokens T of the rows, before they are padded.
        rows: Packed rows; their mask is made here, because no rank's model sees the starts of all rows.
        targets: Target ``[B, T]`` of each token, -100 for none; None if no loss is computed.
        least: Fewest tokens of a rank: 2 for layers with states, which take a single token for decoding.
    """

    group: Any
    form: str
    schedule: Schedule
    batch: int
    given: int
    rows: PackedRows | None = None
    targets: Tensor | None = None
    least: int = 1
    trees: PackedRows | None = None
    """Rows that share their beginnings; their mask is not made here."""
    padding: Tensor | None = None
    """Padding mask ``[B, L S]`` that the model is handed, 0 for padding."""
    routes: Any = None
    """Ways of states between the ranks (``StateRoutes``); made by the first layer that has states."""
    _masks: dict[int, tuple[LazyMask, LazyMask]] = field(default_factory=dict)
    _paddings: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    _places: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        """Number of ranks S."""
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return dist.get_rank(self.group)

    @cached_property
    def own(self) -> int:
        """Number of tokens L of each rank."""
        return self.chunks[-1].stop

    @property
    def total(self) -> int:
        """Number of tokens of the padded sequence, L S."""
        return self.own * self.size

    @cached_property
    def chunks(self) -> list[slice]:
        """The chunks of a rank's own tokens."""
        own, rows = max(self.least, -(-self.given // self.size)), self.trees or self.rows
        if rows is None or self.least < 2:
            return self.schedule.chunks(own)
        return chunks_between_rows(self.schedule, own, self.size, rows)

    @property
    def whole(self) -> slice:
        """The slice of all of a rank's own tokens."""
        return slice(0, self.own)

    def everywhere(self, chunk: slice) -> slice:
        """Return the chunk of the sequence, all ranks' shards of it, that corresponds to a chunk of own tokens."""
        return slice(chunk.start * self.size, chunk.stop * self.size)

    def shard(self, chunk: slice, rank: int | None = None) -> slice:
        """Return the positions in the sequence of a rank's shard of a chunk; by default this rank's."""
        length = chunk.stop - chunk.start
        start = chunk.start * self.size + (self.rank if rank is None else rank) * length
        return slice(start, start + length)

    def positions(self, part: slice, rank: int | None = None) -> slice:
        """Return the positions in the sequence of tokens in one shard, given their places among a rank's own tokens."""
        chunk = next(chunk for chunk in reversed(self.chunks) if chunk.start <= part.start)
        start = self.shard(chunk, rank).start + part.start - chunk.start
        return slice(start, start + part.stop - part.start)

    def within(self, part: slice) -> list[slice]:
        """Return the chunks in a part of a rank's tokens; the part is one chunk, several, or all of them."""
        return [chunk for chunk in self.chunks if part.start <= chunk.start and chunk.stop <= part.stop]

    def local_chunk_start(self, position: int) -> int:
        """Return the start, among a rank's own tokens, of the chunk that contains a ``position`` of the sequence."""
        return next(chunk.start for chunk in reversed(self.chunks) if chunk.start * self.size <= position)

    def places(self, rank: int, device: torch.device) -> Tensor:
        """Return the positions ``[L]`` of a rank's tokens in the sequence."""
        if rank not in self._places:
            shards = [self.shard(chunk, rank) for chunk in self.chunks]
            self._places[rank] = torch.cat([torch.arange(s.start, s.stop, device=device) for s in shards])
        return self._places[rank].to(device)

    def cut(self, x: Tensor, dim: int, fill: float | bool | None = None) -> Tensor:
        """Return this rank's tokens of a tensor of the rows, padded with ``fill`` or the value of the last token."""
        missing = self.total - x.shape[dim]
        if missing:
            last = x.narrow(dim, x.shape[dim] - 1, 1)
            last = last if fill is None else torch.full_like(last, fill)
            x = torch.cat([x, last.repeat_interleave(missing, dim)], dim)
        return x.index_select(dim, self.places(self.rank, x.device))

    def own_padding(self, mask: Tensor) -> Tensor | None:
        """Return the padding mask ``[B, L]`` of this rank's tokens for a layer with a state, or None.

        The model makes such a mask of the padding mask of the whole sequence: all of it, or as many of its last columns
        as the rank has tokens. None if ``mask`` is another mask.
        """
        known = self._paddings.get(id(mask))
        if known is None or known[0] is not mask:
            known = self._paddings[id(mask)] = (mask, self._cut_padding(mask))
        return known[1]

    def _cut_padding(self, mask: Tensor) -> Tensor | None:
        whole = self.padding
        if whole is None or mask.dim() != 2 or mask.shape[1] not in (self.own, self.total):
            return None
        whole = whole.to(mask.dtype)
        return self.cut(whole, 1) if torch.equal(mask, whole[:, -mask.shape[1] :]) else None

    def collect(self, x_BL: Tensor) -> Tensor:
        """Gather ``[B, T]`` from the tokens ``[B, L]`` of all ranks."""
        places = [self.places(rank, x_BL.device) for rank in range(self.size)]
        return collected(x_BL, self.group, places, self.given)

    def mask(self, mask: LazyMask) -> LazyMask:
        """Return the mask of the whole sequence, given the model's mask for this rank's queries.

        The other fields of the mask describe the whole sequence already, since the model's attention mask does.
        """
        known = self._masks.get(id(mask))
        if known is None or known[0] is not mask:
            known = self._masks[id(mask)] = (mask, self._of_sequence(mask))
        return known[1]

    def _of_sequence(self, mask: LazyMask) -> LazyMask:
        if not mask.causal or not _alone(mask.block_start):
            raise UnsupportedModelError(
                "the attention mask lets a token see later tokens, which may be another rank's",
                fix="set sequence_parallel_size: 1",
            )
        row_start = None
        if self.rows is not None:
            if mask.function is not None or mask.span_start is not None:
                raise UnsupportedModelError(
                    "packed rows meet an attention mask that counts from the start of each; ranks that share a "
                    "sequence cannot tell it",
                    fix="set packing: false, or sequence_parallel_size: 1",
                )
            begins = torch.nn.functional.pad(self.rows.begins, (0, self.total - self.given))
            begins[:, self.given :] = True
            row_start = run_starts(begins.cumsum(1)).to(mask.device)
        return replace(mask, q_length=self.total, row_start=row_start, block_start=None)


class ChunkExchange:
    """Exchange with the other ranks in one run of a layer on ``part`` of this rank's tokens.

    ``first_key`` is set later: the first key that the attention of the chunk is given, counted as in the cache.
    """

    def __init__(self, shards: SequenceShards, part: slice) -> None:
        self.shards, self.part = shards, part
        self.lengths = [chunk.stop - chunk.start for chunk in shards.within(part)]
        self.first_key = 0
        self.one_head = False
        """True if all ranks keep the same head, from which the layer may make all heads of keys and values."""
        self.returned: tuple[Tensor, Tensor] | None = None
        """Keys and values that the cache returned to the layer last."""

    @property
    def in_ring(self) -> bool:
        """True if each rank keeps the keys and values of its own tokens, as ring attention does."""
        return self.shards.form == "ring"

    @property
    def keys(self) -> slice:
        """Positions in the cache of the part's keys and values."""
        return self.part if self.in_ring else self.shards.everywhere(self.part)

    @property
    def position(self) -> int:
        """Position of the part's first token in the sequence."""
        if len(self.lengths) > 1:
            raise UnsupportedModelError(
                "a layer counts its positions from the length of its cache, which several strips at once do not have",
                fix="set keep_layers: 0",
            )
        return self.start

    @property
    def start(self) -> int:
        """Position of the part's first token in the sequence, whatever the part is."""
        return self.shards.positions(self.part).start

    def keys_and_values(self, k_BGLD: Tensor, v_BGLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the cache keeps: in a ring those given, which are of this rank's shards.

        Otherwise they are exchanged: of all shards the heads that this rank's query heads attend to. If there are fewer
        heads than ranks, several ranks keep the same head.
        """
        if self.in_ring:
            return k_BGLD, v_BGLD
        heads = k_BGLD.shape[1]
        self.one_head = heads == 1
        copies = math.lcm(heads, self.shards.size) // heads
        both = torch.cat([k_BGLD, v_BGLD], -1).repeat_interleave(copies, 1)
        k, v = to_heads(both, self.shards.group, self.lengths).split([k_BGLD.shape[-1], v_BGLD.shape[-1]], -1)
        return k.contiguous(), v.contiguous()

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads of all shards: of the queries, which are exchanged, and of keys and values.

        Keys and values are those that the layer attends to, with the heads that the cache kept on this rank.
        """
        heads, size = q.shape[1], self.shards.size
        if heads % size:
            what = f"{heads} query heads cannot be shared out to {size} ranks"
            raise UnsupportedModelError(what, where=layer, fix="set sequence_parallel: ring")
        of_cache = self.returned is None or self.one_head or self.part.start > 0  # one chunk tells for all
        if not of_cache and not all(_same(x, kept) for x, kept in zip((k, v), self.returned or (), strict=True)):
            raise UnsupportedModelError(
                "keys or values are not those that the cache handed the layer; of others no rank knows the heads",
                where=layer,
                fix="set sequence_parallel: ring",
            )
        if self.one_head and k.shape[1] > 1:  # made of a latent, on every rank all of them
            copies = math.lcm(k.shape[1], size) // k.shape[1]
            k, v = (x.repeat_interleave(copies, 1).chunk(size, 1)[self.shards.rank] for x in (k, v))
        if (heads // size) % k.shape[1]:
            raise UnsupportedModelError(
                f"{heads // size} query heads of a rank meet {k.shape[1]} heads of keys, which the layer changed "
                "after its cache had kept them",
                where=layer,
                fix="set sequence_parallel: ring",
            )
        return to_heads(q, self.shards.group, self.lengths), k, v

    def own_heads(self, sinks_H: Tensor | None) -> Tensor | None:
        """Return the values of this rank's heads, given one value for each head."""
        return None if sinks_H is None else sinks_H.chunk(self.shards.size)[self.shards.rank]

    def attended(self, out_BhTD: Tensor) -> Tensor:
        """Exchange the attention's output for the output of all heads ``[B, H, L, D]`` of this rank's tokens."""
        return to_shards(out_BhTD, self.shards.group, self.lengths)

    @property
    def ring(self) -> Ring:
        """Positions of the queries, and of every rank's keys, in the ring attention of this chunk."""
        shards, base = self.shards, self.part.start
        queries = [
            (slice(chunk.start - base, chunk.stop - base), shards.shard(chunk)) for chunk in shards.within(self.part)
        ]
        seen = shards.within(slice(self.first_key, self.part.stop))
        starts = list(accumulate((c.stop - c.start for c in seen), initial=0))

        def keys(rank: int) -> list[tuple[slice, slice]]:
            return [
                (slice(start, start + c.stop - c.start), shards.shard(c, rank))
                for start, c in zip(starts, seen, strict=False)
            ]

        return Ring(shards.group, queries, keys)


def _alone(block_start: Tensor | None) -> bool:
    """Return True if no two tokens are in one block, as in a vision model's mask without images."""
    return block_start is None or bool(
        (block_start == torch.arange(block_start.shape[-1], device=block_start.device)).all()
    )


def _same(x: Tensor, kept: Tensor) -> bool:
    """Return True if ``x`` is the tensor ``kept`` that the cache returned, or equals it in shape and values.

    If a layer has repeated heads in between, it is unknown which query heads the copies are for.
    """
    return x is kept or (x.shape == kept.shape and torch.equal(x, kept.to(x.dtype)))


FORMS = ("auto", "ulysses", "ring")


@dataclass(frozen=True)
class SequenceParallel:
    """Ranks that share each sequence.

    Args:
        group: Process group of ``torch.distributed``; None is all ranks. They make all calls together, with the same
            rows.
        form: ``ulysses`` exchanges heads for shards in every chunk, ``ring`` sends keys and values around. ``auto`` is
            ``ulysses`` if the number of ranks divides the number of query heads, and ``ring`` otherwise.

    Raises:
        ArgumentError: The form is unknown, or there are no process groups yet.
    """

    group: Any = None
    form: Literal["auto", "ulysses", "ring"] = "auto"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ArgumentError(f"the form of sequence parallel is {', '.join(FORMS)}, not {self.form!r}")
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "sequence parallel needs the ranks of torch.distributed, which is not initialised",
                fix="call torch.distributed.init_process_group first",
            )
        if self.group is None:
            object.__setattr__(self, "group", dist.group.WORLD)

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return dist.get_rank(self.group)


# The chunks of a rank's own tokens where layers carry states. Such a layer runs on the pieces of shards in which no row
# begins (``states``), and takes a piece of one token and a state for a step of decoding, which leaves no state. So
# chunks are a few tokens longer or shorter where a state would be lost: near the ends of a trunk, or where one of
# several packed sequences goes on.

FURTHEST = 16
"""Tokens that the end of a chunk is moved at most, and that are added to each rank's."""
TRIALS = 20_000


class _Lost(NamedTuple):
    """Positions at which a shard may not start, or end."""

    starts: frozenset[int]
    ends: frozenset[int]


def chunks_between_rows(schedule: Schedule, own: int, size: int, rows: PackedRows) -> list[slice]:
    """Return chunks of each rank's tokens, at least ``own``, with which no state is lost, near the schedule's."""
    borders = frozenset(rows.starts)
    everything = list(pairwise([*rows.starts, max(own * size, rows.starts[-1] + 1)]))
    rows.refuse_single(slice(*each) for each in everything[:-1])
    parts = [(start, stop) for start, stop in everything if stop - start > 1]
    lost = _Lost(
        frozenset(stop - 1 for _, stop in parts if stop in borders and rows.carries_on(stop)),
        frozenset(start + 1 for start, _ in parts if start and rows.state_before(start) is not None),
    )
    if not any(lost):
        return schedule.chunks(own)
    trials = iter(range(TRIALS))
    for length in range(own, own + FURTHEST + 1):
        found = _search([chunk.stop for chunk in schedule.chunks(length)], 0, size, lost, trials)
        if found is not None:
            return [slice(*each) for each in pairwise([0, *found])]
    raise UnsupportedModelError(
        f"rows of a few tokens cannot be cut for {size} ranks so that every part of a row that others go on from has "
        "two tokens or more on a rank, as layers with states need",
        fix="set share_prefix: never, pack with per_device_train_batch_size: 1, or sequence_parallel_size: 1",
    )


def _search(stops: list[int], start: int, size: int, lost: _Lost, trials: Iterator[int]) -> list[int] | None:
    """Return stops of chunks from ``start`` on, near ``stops`` and the last one equal; None if there are none."""
    if not stops:
        return []
    last = len(stops) == 1
    for stop in [stops[0]] if last else _near(stops[0]):
        if next(trials, None) is None:
            return None
        long_enough = stop - start >= 2 and (last or stops[-1] - stop >= 2)
        bounds = [start * size + rank * (stop - start) for rank in range(size + 1)]
        if not long_enough or lost.starts & set(bounds[:-1]) or lost.ends & set(bounds[1:]):
            continue
        if (rest := _search(stops[1:], stop, size, lost, trials)) is not None:
            return [stop, *rest]
    return None


def _near(stop: int) -> Iterator[int]:
    yield stop
    for distance in range(1, FURTHEST + 1):
        yield stop - distance
        yield stop + distance
