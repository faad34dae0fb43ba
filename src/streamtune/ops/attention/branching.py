"""The layout in a sequence of a tree of rows: trunks, and the branches that continue them.

Positions count within a row, through trunk and branch; places count from the start of the sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Branch", "BranchTable"]


@dataclass(frozen=True)
class Branch:
    """Places ``[start, stop)``, which also see all of ``[trunk_start, trunk_stop)``; for a trunk itself that is empty.

    Its row begins at ``trunk_start``; its first position in the row is the length of its trunk.
    """

    start: int
    stop: int
    trunk_start: int
    trunk_stop: int

    @property
    def shift(self) -> int:
        """The difference between a place in it and the position of that place in the row."""
        return self.start - (self.trunk_stop - self.trunk_start)


@dataclass(frozen=True)
class BranchTable:
    """All parts of a sequence, in order, without a gap."""

    parts: tuple[Branch, ...]

    @property
    def length(self) -> int:
        """Number of places T."""
        return self.parts[-1].stop

    @cached_property
    def positions(self) -> Tensor:
        """``[T]`` int64: the position of each place in its row."""
        return torch.cat([torch.arange(part.start - part.shift, part.stop - part.shift) for part in self.parts])

    @cached_property
    def bounds(self) -> Tensor:
        """``[3, T]`` int64: start of each place's part, start of its trunk, stop of its trunk."""
        lengths = torch.tensor([part.stop - part.start for part in self.parts])
        facts = torch.tensor([[part.start, part.trunk_start, part.trunk_stop] for part in self.parts])
        return facts.repeat_interleave(lengths, 0).T.contiguous()

    def at(self, place: int) -> Branch:
        """Return the part that contains a place."""
        return self.parts[bisect_right(self._starts, place) - 1]

    def clipped(self, start: int, stop: int) -> Iterator[tuple[int, int, Branch]]:
        """Yield each part that overlaps places ``[start, stop)``: start and stop of the overlap, and the part."""
        index = bisect_right(self._starts, start) - 1
        while index < len(self.parts) and self.parts[index].start < stop:
            part = self.parts[index]
            yield max(start, part.start), min(stop, part.stop), part
            index += 1

    @cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.parts]
