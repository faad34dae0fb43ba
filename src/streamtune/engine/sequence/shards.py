"""Shards: the tokens of a sequence that each rank has, and the exchange of keys, values and heads between ranks.

The schedule cuts a rank's own tokens into chunks. Chunk i of the sequence consists of chunk i of every rank, in the
order of the ranks. Each rank's part of a chunk is called a shard:

    rank 0 | 0 1 . . . . 6 7  . . . .      tokens of the sequence, 2 to a shard, 3 ranks
    rank 1 | . . 2 3 . . . .  8 9 . .
    rank 2 | . . . . 4 5 . .  . . A B
             first chunk      second

So all tokens before a chunk of the sequence are in earlier chunks, and every rank computes part of the causal attention
of each chunk.

Shape suffixes: B batch, T tokens of the sequence, L tokens of this rank, H query heads, G key/value heads, D head
dimension.
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
from streamtune.ops.exchange import gather_columns, heads_to_shards, shards_to_heads
from streamtune.schedule import Schedule


@dataclass(eq=False)
class SequenceShards:
    """Division of a sequence into chunks, and of each chunk into shards: the consecutive tokens of one rank.

    Args:
        group: Process group of the ranks that share the tokens.
        form: ``ring`` or ``ulysses``: how the ranks exchange keys and values.
        schedule: Schedule that cuts each rank's own tokens into chunks.
        batch: Number of sequences B.
        length: Number of tokens T of each sequence, before padding.
        rows: Packed rows. Their mask is built here, because the model on a rank gets only that rank's tokens.
        targets: Target ``[B, T]`` of each token, -100 for none; None if no loss is computed.
        min_tokens: Smallest number of tokens per rank: 2 for layers with states, which treat one token as a decoding
            step.
    """

    group: Any
    form: str
    schedule: Schedule
    batch: int
    length: int
    rows: PackedRows | None = None
    targets: Tensor | None = None
    min_tokens: int = 1
    trees: PackedRows | None = None
    """Rows that share a prefix; their mask is built elsewhere (``Branches.restrict_mask``)."""
    padding: Tensor | None = None
    """Padding mask ``[B, L * S]`` that the model gets, 0 for padding; S is the number of ranks."""
    routes: Any = None
    """Ranks that exchange each recurrent state (``StateRoutes``); set by the first layer with states."""
    _masks: dict[int, tuple[LazyMask, LazyMask]] = field(default_factory=dict)
    _paddings: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    _token_positions: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        """Number S of ranks."""
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """Index of this rank in the process group."""
        return dist.get_rank(self.group)

    @cached_property
    def own_length(self) -> int:
        """Number L of tokens on each rank, including padding."""
        return self.chunks[-1].stop

    @property
    def padded_length(self) -> int:
        """Number of tokens of the padded sequence: L tokens per rank times S ranks."""
        return self.own_length * self.size

    @cached_property
    def chunks(self) -> list[slice]:
        """Chunks of one rank's tokens, as slices of these tokens; they are equal on all ranks."""
        own_length, rows = max(self.min_tokens, -(-self.length // self.size)), self.trees or self.rows
        if rows is None or self.min_tokens < 2:
            return self.schedule.chunks(own_length)
        return chunks_between_rows(self.schedule, own_length, self.size, rows)

    @property
    def all_tokens(self) -> slice:
        """Slice that covers all tokens of one rank."""
        return slice(0, self.own_length)

    def global_chunk(self, chunk: slice) -> slice:
        """Return the slice of the sequence that all ranks together have in ``chunk``, a slice of one rank's tokens."""
        return slice(chunk.start * self.size, chunk.stop * self.size)

    def shard_positions(self, chunk: slice, rank: int | None = None) -> slice:
        """Return the slice of the sequence that one rank (None: this one) has in ``chunk``, a slice of its tokens."""
        length = chunk.stop - chunk.start
        start = chunk.start * self.size + (self.rank if rank is None else rank) * length
        return slice(start, start + length)

    def sequence_slice(self, part: slice, rank: int | None = None) -> slice:
        """Return the slice of the sequence for ``part``, a slice of one rank's tokens that lies inside one chunk."""
        chunk = next(chunk for chunk in reversed(self.chunks) if chunk.start <= part.start)
        start = self.shard_positions(chunk, rank).start + part.start - chunk.start
        return slice(start, start + part.stop - part.start)

    def chunks_within(self, part: slice) -> list[slice]:
        """Return the chunks inside ``part``, a slice of one rank's tokens that consists of whole chunks."""
        return [chunk for chunk in self.chunks if part.start <= chunk.start and chunk.stop <= part.stop]

    def local_chunk_start(self, position: int) -> int:
        """Return the start, among one rank's tokens, of the chunk that contains ``position`` of the sequence."""
        return next(chunk.start for chunk in reversed(self.chunks) if chunk.start * self.size <= position)

    def token_positions(self, rank: int, device: torch.device) -> Tensor:
        """Return the positions ``[L]`` in the sequence of the tokens of one rank."""
        if rank not in self._token_positions:
            shards = [self.shard_positions(chunk, rank) for chunk in self.chunks]
            self._token_positions[rank] = torch.cat([torch.arange(s.start, s.stop, device=device) for s in shards])
        return self._token_positions[rank].to(device)

    def select_tokens(self, x: Tensor, dim: int, fill: float | bool | None = None) -> Tensor:
        """Return this rank's part of ``x`` along ``dim``; padding at the end is ``fill`` (None: the last value)."""
        missing = self.padded_length - x.shape[dim]
        if missing:
            last = x.narrow(dim, x.shape[dim] - 1, 1)
            last = last if fill is None else torch.full_like(last, fill)
            x = torch.cat([x, last.repeat_interleave(missing, dim)], dim)
        return x.index_select(dim, self.token_positions(self.rank, x.device))

    def own_padding(self, mask: Tensor) -> Tensor | None:
        """Return the padding mask ``[B, L]`` of this rank's tokens, for a layer with a state.

        ``mask`` is the mask that the model gives the layer: the padding mask of the whole sequence, or its last L
        columns. Return None if ``mask`` is another mask.
        """
        cached = self._paddings.get(id(mask))
        if cached is None or cached[0] is not mask:
            cached = self._paddings[id(mask)] = (mask, self._cut_padding(mask))
        return cached[1]

    def _cut_padding(self, mask: Tensor) -> Tensor | None:
        padding = self.padding
        if padding is None or mask.dim() != 2 or mask.shape[1] not in (self.own_length, self.padded_length):
            return None
        padding = padding.to(mask.dtype)
        return self.select_tokens(padding, 1) if torch.equal(mask, padding[:, -mask.shape[1] :]) else None

    def gather_tokens(self, x_BL: Tensor) -> Tensor:
        """Return ``[B, T]`` for the whole sequence, gathered from ``[B, L]`` of each rank."""
        places = [self.token_positions(rank, x_BL.device) for rank in range(self.size)]
        return gather_columns(x_BL, self.group, places, self.length)

    def whole_mask(self, mask: LazyMask) -> LazyMask:
        """Return the mask for the whole sequence, given the mask that the model built for this rank's queries.

        Only the number of queries and the starts of packed rows change. The other fields already describe the whole
        sequence, because the model gets an attention mask over the whole sequence.
        """
        cached = self._masks.get(id(mask))
        if cached is None or cached[0] is not mask:
            cached = self._masks[id(mask)] = (mask, self._full_sequence_mask(mask))
        return cached[1]

    def _full_sequence_mask(self, mask: LazyMask) -> LazyMask:
        if not mask.causal or not _has_no_blocks(mask.block_start):
            raise UnsupportedModelError(
                "the attention mask lets a token see later tokens, which may be on another rank",
                fix="set sequence_parallel_size: 1",
            )
        row_start = None
        if self.rows is not None:
            if mask.function is not None or mask.span_start is not None:
                raise UnsupportedModelError(
                    "the attention mask of packed rows depends on positions within a row; ranks that share a sequence "
                    "cannot compute this mask",
                    fix="set packing: false, or sequence_parallel_size: 1",
                )
            begins = torch.nn.functional.pad(self.rows.is_row_start, (0, self.padded_length - self.length))
            begins[:, self.length :] = True
            row_start = run_starts(begins.cumsum(1)).to(mask.device)
        return replace(mask, q_length=self.padded_length, row_start=row_start, block_start=None)


class ChunkExchange:
    """Exchanges keys, values and heads with other ranks while a layer runs on ``part``, a slice of this rank's tokens.

    ``first_key``, the cache position of the first key that the attention gets, is set after creation.
    """

    def __init__(self, shards: SequenceShards, part: slice) -> None:
        self.shards, self.part = shards, part
        self.lengths = [chunk.stop - chunk.start for chunk in shards.chunks_within(part)]
        self.first_key = 0
        self.has_one_head = False
        """True if every rank caches the same single head, from which a layer may compute all key and value heads."""
        self.returned_kv: tuple[Tensor, Tensor] | None = None
        """Keys and values that the cache returned in the layer's last update."""

    @property
    def uses_ring(self) -> bool:
        """True for ring attention, where each rank caches the keys and values of its own tokens."""
        return self.shards.form == "ring"

    @property
    def cache_slice(self) -> slice:
        """Positions of the keys and values of ``part`` in this rank's cache."""
        return self.part if self.uses_ring else self.shards.global_chunk(self.part)

    @property
    def position(self) -> int:
        """Position in the sequence of the first token of ``part``. Raises an error if ``part`` spans several chunks."""
        if len(self.lengths) > 1:
            raise UnsupportedModelError(
                "a layer counts positions from the length of its cache, but this rank's tokens are not consecutive",
                fix="set keep_layers: 0",
            )
        return self.start

    @property
    def start(self) -> int:
        """Position in the sequence of the first token of ``part``."""
        return self.shards.sequence_slice(self.part).start

    def kv_to_cache(self, k_BGLD: Tensor, v_BGLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values to cache on this rank, given all heads for this rank's tokens.

        For ``ring`` they are unchanged. For ``ulysses`` ranks exchange them. This rank then gets the heads that its
        query heads attend to, for the tokens of all ranks. With fewer heads than ranks, several ranks cache the same
        head.
        """
        if self.uses_ring:
            return k_BGLD, v_BGLD
        heads = k_BGLD.shape[1]
        self.has_one_head = heads == 1
        copies = math.lcm(heads, self.shards.size) // heads
        both = torch.cat([k_BGLD, v_BGLD], -1).repeat_interleave(copies, 1)
        k, v = shards_to_heads(both, self.shards.group, self.lengths).split([k_BGLD.shape[-1], v_BGLD.shape[-1]], -1)
        return k.contiguous(), v.contiguous()

    def exchange_heads(self, q: Tensor, k: Tensor, v: Tensor, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, for the tokens of all ranks.

        Only queries are exchanged. The cache already stores the keys and values of these heads.

        Args:
            q: Queries ``[B, H, L, D]`` of this rank's tokens.
            k, v: Keys and values that the layer attends to, as the cache returned them.
            layer: Name of the layer, for error messages.

        Raises:
            UnsupportedModelError: Heads cannot be divided among the ranks, or the layer changed keys or values.
        """
        heads, size = q.shape[1], self.shards.size
        if heads % size:
            what = f"{heads} query heads cannot be divided among {size} ranks"
            raise UnsupportedModelError(what, where=layer, fix="set sequence_parallel: ring")
        # Only the first chunk is checked.
        checked = self.returned_kv is None or self.has_one_head or self.part.start > 0
        if not checked and not all(
            _is_same_tensor(x, cached) for x, cached in zip((k, v), self.returned_kv or (), strict=True)
        ):
            raise UnsupportedModelError(
                "the layer attends to keys or values that its cache did not return, so ranks cannot divide their heads",
                where=layer,
                fix="set sequence_parallel: ring",
            )
        if self.has_one_head and k.shape[1] > 1:  # computed from a latent: every rank has all heads
            copies = math.lcm(k.shape[1], size) // k.shape[1]
            k, v = (x.repeat_interleave(copies, 1).chunk(size, 1)[self.shards.rank] for x in (k, v))
        if (heads // size) % k.shape[1]:
            raise UnsupportedModelError(
                f"a rank has {heads // size} query heads and {k.shape[1]} key heads: the layer changed the keys after "
                "its cache had stored them",
                where=layer,
                fix="set sequence_parallel: ring",
            )
        return shards_to_heads(q, self.shards.group, self.lengths), k, v

    def sinks_of_rank(self, sinks_H: Tensor | None) -> Tensor | None:
        """Return the attention-sink logits of this rank's heads, given the logits ``[H]`` of all heads."""
        return None if sinks_H is None else sinks_H.chunk(self.shards.size)[self.shards.rank]

    def exchange_heads_back(self, out_BhTD: Tensor) -> Tensor:
        """Exchange attention outputs of this rank's heads for all heads of this rank's tokens, ``[B, H, L, D]``."""
        return heads_to_shards(out_BhTD, self.shards.group, self.lengths)

    @property
    def ring_layout(self) -> Ring:
        """Positions, within the sequence, of this chunk's queries and of every rank's keys, for ring attention."""
        shards, base = self.shards, self.part.start
        queries = [
            (slice(chunk.start - base, chunk.stop - base), shards.shard_positions(chunk))
            for chunk in shards.chunks_within(self.part)
        ]
        seen = shards.chunks_within(slice(self.first_key, self.part.stop))
        starts = list(accumulate((c.stop - c.start for c in seen), initial=0))

        def key_slices(rank: int) -> list[tuple[slice, slice]]:
            return [
                (slice(start, start + c.stop - c.start), shards.shard_positions(c, rank))
                for start, c in zip(starts, seen, strict=False)
            ]

        return Ring(shards.group, queries, key_slices)


def _has_no_blocks(block_start: Tensor | None) -> bool:
    return block_start is None or bool(
        (block_start == torch.arange(block_start.shape[-1], device=block_start.device)).all()
    )


def _is_same_tensor(x: Tensor, cached: Tensor) -> bool:
    """Return True if ``x`` equals the tensor that the cache returned. If not, the layer may have repeated heads."""
    return x is cached or (x.shape == cached.shape and torch.equal(x, cached.to(x.dtype)))


EXCHANGE_FORMS = ("auto", "ulysses", "ring")


@dataclass(frozen=True)
class SequenceParallel:
    """Sequence parallelism: the ranks that share each sequence, and how they exchange keys and values.

    Args:
        group: Process group of ``torch.distributed``; None is all ranks. The ranks make all calls together, with the
            same rows.
        form: ``ulysses`` exchanges attention heads for tokens in every chunk. ``ring`` passes keys and values from rank
            to rank. ``auto`` is ``ulysses`` if the number of ranks divides the number of query heads, else ``ring``.

    Raises:
        ArgumentError: The form is unknown, or ``torch.distributed`` is not initialised.

    Example:
        >>> handle = streamtune.stream(model, sequence_parallel=SequenceParallel(group))  # doctest: +SKIP
    """

    group: Any = None
    form: Literal["auto", "ulysses", "ring"] = "auto"

    def __post_init__(self) -> None:
        if self.form not in EXCHANGE_FORMS:
            raise ArgumentError(
                f"SequenceParallel.form must be {' or '.join(map(repr, EXCHANGE_FORMS))}, found {self.form!r}"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "sequence parallelism needs torch.distributed, which is not initialised",
                fix="call torch.distributed.init_process_group first",
            )
        if self.group is None:
            object.__setattr__(self, "group", dist.group.WORLD)

    @property
    def size(self) -> int:
        """Number of ranks in the process group."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Index of this rank in the process group."""
        return dist.get_rank(self.group)


# The chunks of a rank's own tokens if layers carry states. Such a layer runs on fragments: parts of shards in which no
# row begins (``states``). It treats a fragment of one token with a state as a decoding step, which passes on no state.
# So chunks are a few tokens longer or shorter where a state would be lost: near the end of a trunk, or where one of
# several packed sequences continues.

MAX_SHIFT = 16
"""Largest number of tokens by which a chunk's end is moved, and by which a rank's tokens are padded to allow this."""
MAX_TRIALS = 20_000
"""Largest number of chunk ends that the search tries."""


class _ForbiddenBorders(NamedTuple):
    starts: frozenset[int]
    ends: frozenset[int]


def chunks_between_rows(schedule: Schedule, min_tokens: int, size: int, rows: PackedRows) -> list[slice]:
    """Return chunks of each rank's tokens, close to the schedule's, at whose borders no recurrent state is lost.

    A layer loses the state if a shard has a single token of a row that continues.

    Args:
        schedule: Schedule whose chunks are changed as little as needed.
        min_tokens: Smallest number of tokens per rank.
        size: Number of ranks.
        rows: Packed rows, or rows that share a prefix.

    Raises:
        UnsupportedModelError: No such chunks were found.
    """
    borders = frozenset(rows.row_starts)
    intervals = list(pairwise([*rows.row_starts, max(min_tokens * size, rows.row_starts[-1] + 1)]))
    rows.refuse_single_token_chunks(slice(*each) for each in intervals[:-1])
    parts = [(start, stop) for start, stop in intervals if stop - start > 1]
    forbidden = _ForbiddenBorders(
        frozenset(stop - 1 for _, stop in parts if stop in borders and rows.continues_past(stop)),
        frozenset(start + 1 for start, _ in parts if start and rows.start_state_position(start) is not None),
    )
    if not any(forbidden):
        return schedule.chunks(min_tokens)
    trials = iter(range(MAX_TRIALS))
    for length in range(min_tokens, min_tokens + MAX_SHIFT + 1):
        stops = _search_chunk_ends([chunk.stop for chunk in schedule.chunks(length)], 0, size, forbidden, trials)
        if stops is not None:
            return [slice(*each) for each in pairwise([0, *stops])]
    raise UnsupportedModelError(
        f"rows this short cannot be divided among {size} ranks: if a row continues on another rank, a rank needs two "
        "or more tokens of that row",
        fix="set share_prefix: never, pack with per_device_train_batch_size: 1, or sequence_parallel_size: 1",
    )


def _search_chunk_ends(
    stops: list[int], start: int, size: int, forbidden: _ForbiddenBorders, trials: Iterator[int]
) -> list[int] | None:
    """Return allowed chunk ends after ``start``, each near its entry of ``stops``; the last equals its entry.

    Return None if there are no such ends, or if ``trials``, an iterator with an item per end to try, is exhausted.
    """
    if not stops:
        return []
    last = len(stops) == 1
    for stop in [stops[0]] if last else _positions_near(stops[0]):
        if next(trials, None) is None:
            return None
        long_enough = stop - start >= 2 and (last or stops[-1] - stop >= 2)
        bounds = [start * size + rank * (stop - start) for rank in range(size + 1)]
        if not long_enough or forbidden.starts & set(bounds[:-1]) or forbidden.ends & set(bounds[1:]):
            continue
        if (rest := _search_chunk_ends(stops[1:], stop, size, forbidden, trials)) is not None:
            return [stop, *rest]
    return None


def _positions_near(stop: int) -> Iterator[int]:
    yield stop
    for distance in range(1, MAX_SHIFT + 1):
        yield stop - distance
        yield stop + distance
