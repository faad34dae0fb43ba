"""Attention outputs kept from the forward, so that no later pass runs attention again.

The backward of an attention needs its queries, keys, values, its output o and log-sum-exp lse. A chunk's replay
computes the first three by projections, which cost T C^2; o and lse cost T^2 C, and are as long as the layer's input.
Kept, they take attention's forward out of the backward (Li et al., DISTFLASHATTN, arXiv 2310.03294, section 3.3, places
its checkpoints so that this comes for free; here it is a choice, and may be kept on the host).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from torch import Tensor

from streamtune.engine.memory.tiers import Block, Tier
from streamtune.engine.observe import hold

__all__ = ["KeptAttention", "Turn", "remembered"]

_local = threading.local()


class KeptAttention:
    """o and lse of each attention of one layer call, for each chunk.

    Args:
        tier: The tier that stores them.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.blocks: dict[tuple[int, int], tuple[Block, Block]] = {}
        self._next: dict[int, int] = {}

    def expect(self, chunks: Sequence[slice]) -> None:
        """Set the order in which chunks will be replayed: while one is worked on, the next is fetched."""
        starts = [chunk.start for chunk in chunks]
        self._next = dict(pairwise(starts))

    @contextmanager
    def chunk(self, start: int, last: bool) -> Iterator[None]:
        """Assign attentions inside the context to the chunk from ``start`` on; ``last`` frees outputs once recalled."""
        before, _local.turn = getattr(_local, "turn", None), Turn(self, start, last)
        try:
            yield
        finally:
            _local.turn = before


class Turn:
    """One run of a layer on a chunk; its attentions are identified by their order."""

    def __init__(self, kept: KeptAttention, start: int, last: bool) -> None:
        self.kept, self.start, self.last, self.index = kept, start, last, -1

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """Return o and lse of the next attention if it ran before, else None."""
        self.index += 1
        blocks = self.kept.blocks.get((self.start, self.index))
        if blocks is None:
            return None
        o, lse = (block.get() for block in blocks)
        if self.last:
            for block in self.kept.blocks.pop((self.start, self.index)):
                block.free()
            for block in self.kept.blocks.get((self.kept._next.get(self.start, -1), self.index), ()):
                block.prefetch()
        return o, lse

    def keep(self, o: Tensor, lse: Tensor) -> None:
        """Keep o and lse of the attention for which :meth:`recall` returned None."""
        hold("attention output", o, lse)
        self.kept.blocks[self.start, self.index] = self.kept.tier.put(o), self.kept.tier.put(lse)


def remembered() -> Turn | None:
    """Return the object through which an attention that runs now recalls or keeps its outputs; None if none does."""
    turn: Turn | None = getattr(_local, "turn", None)
    return turn
