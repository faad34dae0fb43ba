"""Read the rows of all sources for rendering, and count them as rows of their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from streamtune.data.faults import BadRows
from streamtune.data.fit import (
    LengthFit,
)
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import BUILT_IN, Source, with_progress
from streamtune.data.rendering.counts import RenderLog

if TYPE_CHECKING:
    pass

from streamtune.data.rendering.pool import Item, Rendered

__all__ = ["Reading"]

ItemT = TypeVar("ItemT")


if TYPE_CHECKING:
    from streamtune.data.fit import LengthFit


@dataclass(frozen=True)
class Reading:
    """The rows of all sources, and what counts them: as rows of their source, as bad ones, by what rendering finds."""

    sources: Sequence[Source]
    fit: LengthFit[Any, Any]
    log: RenderLog
    bad: BadRows
    _begun: list[Source] = field(default_factory=list)

    def items(self, read: Callable[[Reading, Source], Iterator[Item[ItemT]]]) -> Iterator[Item[ItemT]]:
        """Yield the rows of every source, given a function that reads one; they may be read ahead of being counted."""
        for number, source in enumerate(self.sources):
            for item in read(self, source):
                item.source = number
                yield item

    def rendered(
        self, render: Callable[[Iterable[Item[ItemT]]], Rendered[ItemT]], items: Iterator[Item[ItemT]]
    ) -> Rendered[ItemT]:
        """Yield every row with its outcome; what is counted then is counted for its source. Shows progress."""
        for item, outcome in with_progress(render(items)):
            self._begin(item.source + 1)
            yield item, outcome
            del item, outcome  # of a long row the memory counts
        self._begin(len(self.sources))

    def _begin(self, count: int) -> None:
        """Begin so many sources, those of which no row is left among them."""
        while len(self._begun) < count:
            self._begun.append(self.sources[len(self._begun)])
            self.fit.begin(self._begun[-1])

    def find_unread(self, path: str, row: Row, read: Sequence[str]) -> None:
        """Record columns that are not read and hold something, but for those of the built-in sets."""
        if path not in BUILT_IN:
            self.log.of(path).unread_columns |= dict.fromkeys(
                name for name, value in row.columns.items() if name not in read and value not in (None, "", [])
            )

    def finish(self) -> None:
        """Raise if rows are bad or none is left; notify the user of the rows that are left out or changed."""
        self.bad.check()
        if not self.fit.rows:
            self.bad.nothing_left()
        self.log.finish()
        self.fit.bad_rows = self.bad.to_json()
        self.fit.check(self.bad.notify)
