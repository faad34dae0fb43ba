"""Where the rows of a tree lie in a sequence: trunks, and the branches that go on from them.

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
    """Places ``[start, stop)``, which also see all of ``[trunk_start, trunk_stop)``; a trunk itself sees nothing more.

    ``trunk_start`` is where its row begins; its first position is the length of its trunk.
    """

    start: int
    stop: int
    trunk_start: int
    trunk_stop: int

    @property
    def shift(self) -> int:
        """What to take from a place in it to have its position."""
        return self.start - (self.trunk_stop - self.trunk_start)


@dataclass(frozen=True)
class BranchTable:
    """All parts of a sequence, in order, without a gap."""

    parts: tuple[Branch, ...]

    @property
    def length(self) -> int:
        """Places T."""
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
        """The part a place lies in."""
        return self.parts[bisect_right(self._starts, place) - 1]

    def clipped(self, start: int, stop: int) -> Iterator[tuple[int, int, Branch]]:
        """The parts that places ``[start, stop)`` lie in, each with those that do."""
        index = bisect_right(self._starts, start) - 1
        while index < len(self.parts) and self.parts[index].start < stop:
            part = self.parts[index]
            yield max(start, part.start), min(stop, part.stop), part
            index += 1

    @cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.parts]
