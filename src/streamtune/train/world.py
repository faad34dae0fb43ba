"""The ranks that train one model together, and the little they have to tell each other beside gradients.

W ranks are laid out as DP x SP: consecutive ranks share a sequence (``sequence_size`` of them), each such group is one
*data rank* and has rows of its own. What is counted (targets, losses) is counted by data ranks, so a sum over ranks is
divided by ``sequence_size``.

Everything here is a few numbers through the CPU; with one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import distributed

from streamtune.errors import RunError, StreamTuneError

__all__ = ["World"]

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands among the ranks of a run; ``World()`` is a run of one.

    The default process group must be there where ``size`` is more than 1; it, or ``group``, carries CPU tensors.
    """

    rank: int = 0
    size: int = 1
    sequence_size: int = 1
    """Ranks that share each sequence."""
    group: distributed.ProcessGroup | None = None
    """Over which they talk; None is the default group."""

    def apart(self) -> World:
        """The same ranks over a group of their own: for a thread that talks while others do. Called by all ranks."""
        return replace(self, group=distributed.new_group(backend="gloo")) if self.size > 1 else self

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and talks to the user."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank has."""
        return self.rank // self.sequence_size

    @property
    def data_size(self) -> int:
        """Shares of the rows."""
        return self.size // self.sequence_size

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the data ranks."""
        if self.size == 1:
            return list(values)
        found = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(found, group=self.group)
        return [value / self.sequence_size for value in found.tolist()]

    def count(self, value: int) -> int:
        """A count summed over the data ranks."""
        return round(self.sums([value])[0])

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank: what all of them then act on."""
        return flag if self.size == 1 else self.sums([float(flag)])[0] > 0

    def gather(self, value: T) -> list[T]:
        """What each data rank has, in their order; picklable, small."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.group)
        return found[:: self.sequence_size]

    def collect(self, value: T) -> list[T]:
        """What each rank has, in their order, those that share a sequence included; picklable, small."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.group)
        return found

    def together(self, work: Callable[[], T]) -> T:
        """``work()`` done by every rank; where it fails on one it fails on all of them.

        No rank may wait for another within ``work`` where one of them can fail alone.

        Raises:
            StreamTuneError: The rank's own; on the others that of the first rank that failed, which is named.
            Exception: The rank's own, of any kind.
        """
        if self.size == 1:
            return work()
        result: T
        error: Exception | None = None
        try:
            result = work()
        except Exception as failed:
            error = failed
        told = error if isinstance(error, StreamTuneError) else None  # any other may not be for another process
        outcomes = self.collect(None if error is None else (type(error).__name__, told, str(error)))
        if error is not None:
            raise error
        first = next((rank for rank, outcome in enumerate(outcomes) if outcome is not None), None)
        if first is not None:
            kind, theirs, text = outcomes[first] or ("", None, "")
            if isinstance(theirs, StreamTuneError):
                theirs.what = f"rank {first}: {theirs.what}"
                raise theirs
            raise RunError(f"rank {first} failed: {kind}: {text}")
        return result

    def largest(self, value: int) -> int:
        """The largest of a number over the ranks."""
        return max(self.gather(value))

    def main(self, work: Callable[[], T]) -> T:
        """``work()`` done by rank 0 alone, its result on every rank.

        Raises:
            StreamTuneError: Where it raises one, on every rank; any other error of rank 0 reaches the others as one.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        error: Exception | None = None
        if self.is_main:
            try:
                outcome[0] = work()
            except StreamTuneError as failed:
                error, outcome[1] = failed, failed
            except Exception as failed:
                error, outcome[1] = failed, RunError(f"rank 0 failed: {type(failed).__name__}: {failed}")
        distributed.broadcast_object_list(outcome, src=0, group=self.group)
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            distributed.all_reduce(torch.zeros(1), group=self.group)
