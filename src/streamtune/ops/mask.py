"""A mask that is a function of positions: tiles of it exist only while a kernel reads them.

Shape suffixes: B batch, T queries of the tile, S keys of the tile. Positions are absolute: query ``q`` and key ``k``
count tokens from the start of the sequence, whatever part of it the caller holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from streamtune.errors import UnsupportedModelError

__all__ = ["ForeignAttentionError", "LazyMask", "MaskFunction", "MaskView", "Segment"]

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(batch, head, query, key) -> bool``: index tensors that broadcast together, True where the query sees the key."""

KEY_BLOCK = 2048
"""Keys a tile of an unrecognised mask function spans when it is examined (bytes: rows x KEY_BLOCK per batch row)."""


class ForeignAttentionError(UnsupportedModelError):
    """A layer's attention is more than ours: it must compute it itself, with a mask that is a tensor."""


class _MaskIsNoTensorError(ForeignAttentionError, AttributeError):
    """Also an AttributeError, so that ``hasattr`` stays a question."""


class _NoTensor:
    """What a layer that computes with its mask is told; an attention function only hands it on."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refuse(name)

    def __getitem__(self, key: Any) -> Any:
        raise self._refuse("indexing")

    def __eq__(self, other: object) -> Any:
        if isinstance(other, int | float | Tensor):  # Python would answer False, and the layer go on with that
            raise self._refuse("==")
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise cls._refuse(getattr(func, "__name__", str(func)))

    @staticmethod
    def _refuse(operation: str) -> _MaskIsNoTensorError:
        return _MaskIsNoTensorError(
            f"a layer of this model computes with its attention mask ({operation}); a streamed mask is never a tensor",
            mend="train this model without streaming",
        )


@dataclass(frozen=True)
class Segment:
    """A run of keys ``[start, stop)`` that one kernel call handles.

    ``causal`` asks the kernel for its own lower-triangular mask (the segment is then square and ends at the last
    query); ``masked`` says that :meth:`MaskView.bias` must be added.
    """

    start: int
    stop: int
    causal: bool = False
    masked: bool = False


@dataclass(eq=False)
class LazyMask(_NoTensor):
    """An attention mask over ``q_length`` queries and ``kv_length`` keys that is never built as a whole.

    Equal to the dense ``[B, 1, q_length, kv_length]`` boolean mask
    ``(k <= q if causal) & (q - k < window if window) & function(b, h, q, k) & padding[b, k]``.

    Args:
        batch_size: Rows B.
        q_length, kv_length: Tokens on either side.
        q_offset, kv_offset: Absolute position of the first query and the first key.
        causal: No query sees a later key.
        window: Keys a query sees, itself included (sliding window); None is unlimited.
        function: What the first two do not say; None where they say it all.
        padding: Boolean ``[B, >= kv_offset + kv_length]``, False at padding; None where there is none.
        vectorize: ``function`` takes scalars only and is mapped over the tile with ``torch.vmap``.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int = 0
    kv_offset: int = 0
    causal: bool = True
    window: int | None = None
    function: MaskFunction | None = None
    padding: Tensor | None = None
    vectorize: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._tiles: dict[tuple[int, int, int, int], bool | None] = {}
        if self.padding is not None and bool(self.padding.all()):
            self.padding = None

    @cached_property
    def unpadded(self) -> tuple[int, int]:
        """The longest run of keys ``[start, stop)`` that is padding in no row (empty unless padding is at the ends)."""
        if self.padding is None:
            return 0, self.kv_offset + self.kv_length
        valid = self.padding.int()
        starts, lengths = valid.argmax(dim=1), valid.sum(dim=1)
        positions = torch.arange(valid.shape[1], device=valid.device)
        one_run = (positions >= starts[:, None]) & (positions < (starts + lengths)[:, None])
        if not torch.equal(one_run, self.padding):
            return 0, 0
        return int(starts.max()), int((starts + lengths).min())

    @cached_property
    def sees_future(self) -> bool:
        """Whether any query sees a later key; such a mask cannot be streamed (answered exactly, once per mask)."""
        if self.causal:
            return False
        last = self.kv_offset + self.kv_length
        for start in range(self.q_offset, self.q_offset + self.q_length, KEY_BLOCK):
            stop = min(start + KEY_BLOCK, self.q_offset + self.q_length)
            for k_start in range(start, last, KEY_BLOCK):
                k_stop = min(k_start + KEY_BLOCK, last)
                q = torch.arange(start, stop, device=self.device)[:, None]
                k = torch.arange(k_start, k_stop, device=self.device)[None, :]
                if bool((self.tile(start, stop, k_start, k_stop) & (k > q)).any()):
                    return True
        return False

    def first_key(self, q_start: int) -> int:
        """The first key any query from ``q_start`` on can see."""
        if self.window is None:
            return self.kv_offset
        return max(self.kv_offset, q_start - self.window + 1)

    def rows(self, start: int, stop: int) -> MaskView:
        """The mask of queries ``[start, stop)``, counted from this mask's first query, over all keys."""
        last = self.kv_offset + self.kv_length
        return MaskView(self, self.q_offset + start, self.q_offset + stop, self.kv_offset, last)

    def chunk(self, start: int, stop: int, first_key: int) -> MaskView:
        """The mask of queries ``[start, stop)`` over the keys ``[first_key, stop)``, which are all a chunk has."""
        return MaskView(self, self.q_offset + start, self.q_offset + stop, first_key, self.q_offset + stop)

    @classmethod
    def from_dense(cls, allowed_B1TS: Tensor) -> LazyMask:
        """A mask that reads a dense boolean one, bottom-right aligned: its last query is its last key's token."""
        rows, _, queries, keys = allowed_B1TS.shape
        offset = keys - queries

        def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return allowed_B1TS[b % rows, 0, q - offset, k]

        device = allowed_B1TS.device
        return cls(rows, queries, keys, q_offset=offset, causal=False, function=function, device=device)

    def tile(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Tensor:
        """The boolean tile ``[B or 1, 1, T, S]``, True where attention is allowed."""
        q = torch.arange(q_start, q_stop, device=self.device)[None, None, :, None]
        k = torch.arange(k_start, k_stop, device=self.device)[None, None, None, :]
        allowed = torch.ones(1, 1, q_stop - q_start, k_stop - k_start, dtype=torch.bool, device=self.device)
        if self.causal:
            allowed = allowed & (k <= q)
        if self.window is not None:
            allowed = allowed & (q - k < self.window)
        if self.function is not None:
            allowed = allowed & self._evaluate(q.flatten(), k.flatten())
        if self.padding is not None:
            allowed = allowed & self.padding[:, None, None, k_start:k_stop]
        return allowed

    def _evaluate(self, q_T: Tensor, k_S: Tensor) -> Tensor:
        assert self.function is not None
        b, h = torch.arange(self.batch_size, device=self.device), torch.zeros(1, dtype=torch.long, device=self.device)
        if not self.vectorize:
            return self.function(b[:, None, None, None], h[:, None, None], q_T[:, None], k_S)
        mapped = self.function
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            mapped = torch.vmap(mapped, in_dims=dims, out_dims=0)
        return mapped(b, h, q_T, k_S)

    def uniform(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool | None:
        """True if the tile allows everything, False if nothing, None if mixed (remembered: layers share a mask)."""
        key = (q_start, q_stop, k_start, k_stop)
        if key not in self._tiles:
            tile = self.tile(*key)
            self._tiles[key] = True if bool(tile.all()) else (None if bool(tile.any()) else False)
        return self._tiles[key]


@dataclass(frozen=True, eq=False)
class MaskView(_NoTensor):
    """Queries ``[q_start, q_stop)`` and keys ``[k_start, k_stop)`` of a :class:`LazyMask` (absolute positions)."""

    mask: LazyMask
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the dense mask this stands for."""
        return (self.mask.batch_size, 1, self.q_stop - self.q_start, self.k_stop - self.k_start)

    def segments(self) -> list[Segment]:
        """Cover the visible keys with as few kernel calls as possible; key positions count from ``k_start``.

        A causal chunk is one rectangle (the prefix, no mask) and one square (lower triangle). A sliding window cuts the
        prefix to the window and adds one masked tile at its far edge. Anything else is examined block by block.
        """
        if self.mask.function is not None or not self.mask.causal:
            return self._examined_segments()
        q0, q1, window = self.q_start, self.q_stop, self.mask.window
        prefix_stop = min(q0, self.k_stop)
        pieces = []
        if window is None:
            if q1 - q0 == 1:  # one query sees the prefix and itself: a single rectangle
                return self._relative([Segment(self.k_start, self.k_stop)])
            pieces.append(Segment(self.k_start, prefix_stop))
            pieces.append(Segment(q0, q1, causal=True))
        else:
            first = max(self.k_start, q0 - window + 1)
            everyone = min(max(first, q1 - window), prefix_stop)  # from here on every query sees the key
            pieces.append(Segment(first, everyone, masked=True))
            pieces.append(Segment(everyone, prefix_stop))
            wide = q1 - q0 <= window
            pieces.append(Segment(q0, q1, causal=wide, masked=not wide))
        return self._relative([piece for piece in pieces if piece.stop > piece.start])

    def _relative(self, pieces: list[Segment]) -> list[Segment]:
        clean_start, clean_stop = self.mask.unpadded if self.mask.padding is not None else (0, self.k_stop)
        out = []
        for piece in pieces:
            padded = not (clean_start <= piece.start and piece.stop <= clean_stop)
            out.append(
                Segment(piece.start - self.k_start, piece.stop - self.k_start, piece.causal, piece.masked or padded)
            )
        return out

    def _examined_segments(self) -> list[Segment]:
        pieces: list[Segment] = []
        for start in range(self.k_start, self.k_stop, KEY_BLOCK):
            stop = min(start + KEY_BLOCK, self.k_stop)
            uniform = self.mask.uniform(self.q_start, self.q_stop, start, stop)
            if uniform is False:
                continue
            piece = Segment(start - self.k_start, stop - self.k_start, masked=uniform is None)
            if pieces and pieces[-1].stop == piece.start and not pieces[-1].masked and not piece.masked:
                piece = Segment(pieces.pop().start, piece.stop)
            pieces.append(piece)
        # A chunk none of whose queries sees anything still needs one kernel call to define its (unread) output.
        return pieces or [Segment(0, self.k_stop - self.k_start, masked=True)]

    def allowed(self, segment: Segment, rows: slice = slice(None)) -> Tensor:
        """Boolean tile ``[B or 1, 1, T or 1, S]`` of a segment; one row stands for all where only padding is masked."""
        start, stop = self.k_start + segment.start, self.k_start + segment.stop
        if self.padding_only(segment):
            assert self.mask.padding is not None
            return self.mask.padding[:, None, None, start:stop]
        first, last, _ = rows.indices(self.q_stop - self.q_start)
        return self.mask.tile(self.q_start + first, self.q_start + last, start, stop)

    def padding_only(self, segment: Segment) -> bool:
        """Whether padding is all that the segment's mask adds to what the kernel does by itself."""
        if self.mask.function is not None or not self.mask.causal or self.mask.padding is None:
            return False
        if segment.causal:
            return True
        start, stop, window = self.k_start + segment.start, self.k_start + segment.stop, self.mask.window
        in_prefix = stop <= self.q_start or self.q_stop - self.q_start == 1
        return in_prefix and (window is None or start >= self.q_stop - window)

    def bias(self, segment: Segment, dtype: torch.dtype) -> Tensor | None:
        """The additive mask ``[B or 1, 1, T, S]`` of a segment in ``dtype``, or None where nothing is masked.

        Masked places hold a large finite number, not -inf: a row that sees nothing in this segment then has a finite
        log-sum-exp whose weight in the merge is exactly zero, instead of NaN.
        """
        if not segment.masked:
            return None
        allowed = self.allowed(segment)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        bias.masked_fill_(~allowed, masked_score(dtype))
        return bias.expand(-1, -1, self.q_stop - self.q_start, -1)


def masked_score(dtype: torch.dtype) -> float:
    """The score of a masked place: finite, and so low that its weight beside any real score is exactly zero."""
    return torch.finfo(dtype).min / 4
