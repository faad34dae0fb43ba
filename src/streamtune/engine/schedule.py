"""How a streamed step is cut and what it keeps: a small frozen value, chosen once, read everywhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from streamtune.errors import ArgumentError

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """A schedule of the streamed step. Every schedule gives the same gradient; they differ in time and memory.

    Args:
        chunk_size: Most tokens of the sequence whose layer activations exist at once.
        head_chunk_size: Most tokens whose logits exist at once.
        keep_kv: Keep every layer's keys and values from the forward to the backward instead of projecting them again.
            Costs two key/value rows per token and layer, saves that projection.
        grad_dtype: Dtype in which parameter terms and dK, dV are summed over chunks: ``float32``, or ``param`` for the
            dtype of the tensor itself.

    Raises:
        ArgumentError: A size is not positive, or ``grad_dtype`` is unknown.
    """

    chunk_size: int = 2048
    head_chunk_size: int = 1024
    keep_kv: bool = False
    grad_dtype: Literal["float32", "param"] = "float32"

    def __post_init__(self) -> None:
        for name in ("chunk_size", "head_chunk_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} must be a positive number of tokens, not {value!r}")
        if self.grad_dtype not in ("float32", "param"):
            raise ArgumentError(f"grad_dtype must be 'float32' or 'param', not {self.grad_dtype!r}")

    def chunks(self, length: int, cuts: Sequence[int] | None = None) -> list[slice]:
        """Cut ``length`` tokens into the fewest chunks of at most ``chunk_size``, as equal as they can be.

        Equal chunks leave no ragged tail. No chunk is a single token unless the sequence is: that would send some
        layers down their decoding path, which writes states in place.

        Args:
            length: Tokens of the sequence.
            cuts: Sorted positions where it may be cut (``LazyMask.cuts``), ``length`` among them; None is anywhere. A
                chunk then ends at the allowed cut nearest to where it would, and is larger than ``chunk_size`` only
                where the next allowed cut is further away than that.
        """
        if cuts is None:
            count = min(-(-length // self.chunk_size), length // 2)
            return list(_equal_slices(length, max(1, count)))
        chunks: list[slice] = []
        start = 0
        while start < length or not chunks:
            stop = self._cut(start, length, cuts)
            chunks.append(slice(start, stop))
            start = stop
        return chunks

    def _cut(self, start: int, length: int, cuts: Sequence[int]) -> int:
        """Where the chunk that begins at ``start`` ends."""
        count = -(-(length - start) // self.chunk_size)
        if count <= 1:
            return length
        ideal = start - (-(length - start) // count)
        within = cuts[bisect_right(cuts, start) : bisect_right(cuts, start + self.chunk_size)]
        if within:
            return min(within, key=lambda cut: (abs(cut - ideal), cut))
        return cuts[bisect_right(cuts, start)]


def _equal_slices(length: int, count: int) -> Iterator[slice]:
    size, longer = divmod(length, count)
    start = 0
    for index in range(count):
        stop = start + size + (index < longer)
        yield slice(start, stop)
        start = stop
