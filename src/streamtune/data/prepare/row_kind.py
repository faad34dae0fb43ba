"""Prepare the rows of one kind: read all sources, render and fit the rows, and count them by source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from streamtune.data.faults import ON_BAD_ROW, BadRows
from streamtune.data.fit import LengthFit, Prepared
from streamtune.data.options import DataOptions, check_choice
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import BUILT_IN, Source, with_progress
from streamtune.data.record_table import Record, TableWriter
from streamtune.data.rendering.counts import RenderLog
from streamtune.data.rendering.pool import Item, Notify, Rendered, Renderer, rendering
from streamtune.data.row_cache import MadeOf, fit_rows
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")
FitT = TypeVar("FitT", bound=LengthFit[Any, Any])
Read = Callable[["Reading", Source], Iterator[Item[ItemT]]]
"""Yields the rows of a source in their normal form; gives the faulty ones to ``Reading.bad``."""


@dataclass(frozen=True)
class RowKind(Generic[FitT]):
    """One kind of records: how its rows are read, rendered and fitted to the length."""

    record: type[Record]
    _: KW_ONLY
    settings: Mapping[str, Any]
    """all that decides the records beside sources, tokenizer and the handling of bad rows; see :class:`MadeOf`"""
    make_fit: Callable[[TableWriter], FitT]
    """makes an empty fit, given the writer of its records"""
    make_renderer: Callable[..., Renderer]
    """makes the renderer of a row, given ``notify``"""
    read: Read[Any]
    """yields the rows of a source"""
    add: Callable[[FitT, Any, str], None]
    """gives a rendered row to the fit, with its origin"""


def prepare_kind(
    kind: RowKind[FitT],
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify,
) -> Prepared[Any, Any]:
    """Read, render and fit the rows of all sources, or find what was made of them before; hold some out.

    Raises:
        DataError: A file is missing, rows are bad or too long, or nothing is left.
        ArgumentError: ``on_bad_row`` is none of the known words.
    """
    check_choice("on_bad_row", options.on_bad_row, ON_BAD_ROW)

    def fill(fit: FitT, note: Notify) -> None:
        bad = BadRows(options.on_bad_row, options.max_bad_rows, note)
        with rendering(kind.make_renderer, options.processes, note) as (log, render):
            reading = Reading(sources, fit, log, bad)
            for item, outcome in reading.rendered(render, reading.items(kind.read)):
                with bad:
                    rendered = outcome.get()
                    del outcome  # of a long row the memory counts
                    kind.add(fit, rendered, item.origin)
                    del rendered
            reading.finish()

    settings = {**kind.settings, "on_bad_row": options.on_bad_row, "max_bad_rows": options.max_bad_rows}
    made_of = MadeOf(kind.record, sources, tokenizer, settings)
    fit, table = fit_rows(made_of, kind.make_fit, fill, options.cache, notify)
    return fit.prepared(table, options.val_size, options.seed, notify)


class _ReadAhead(BadRows):
    """Faulty rows that are found while rows are read ahead: each takes its place among the others.

    Args:
        bad: Gets them where they would become too many to wait.
    """

    def __init__(self, bad: BadRows) -> None:
        super().__init__(bad.on_bad_row, bad.limit, bad.notify)
        self._bad = bad

    def report(self, error: DataError) -> None:
        """Keep the error of a row until its turn."""
        self.count += 1
        self.errors.append(error)
        if len(self.errors) >= MOST_WAITING:
            for waiting in self.take():
                self._bad.report(waiting)

    def take(self) -> list[DataError]:
        """Return the errors that wait, and forget them."""
        waiting, self.errors = self.errors, []
        return waiting


MOST_WAITING = 1_000
"""Faulty rows, one after the other, that wait for their turn."""


@dataclass(frozen=True)
class Reading:
    """The rows of all sources, and what counts them: as rows of their source, as bad ones, by what rendering finds."""

    sources: Sequence[Source]
    fit: LengthFit[Any, Any]
    log: RenderLog
    bad: BadRows
    _begun: list[Source] = field(default_factory=list)

    def items(self, read: Read[ItemT]) -> Iterator[Item[ItemT]]:
        """Yield the rows of every source, the faulty ones among them; they may be read ahead of being counted."""
        ahead = _ReadAhead(self.bad)
        reading = replace(self, bad=ahead)
        for number, source in enumerate(self.sources):
            for item in read(reading, source):
                for error in ahead.take():
                    yield Item(source.path, error.where, 0, None, source=number, error=error)
                item.source = number
                yield item
                del item  # of a long row the memory counts
            for error in ahead.take():
                yield Item(source.path, error.where, 0, None, source=number, error=error)

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
        self.fit.counts["special_rows"] = sum(counts.special_rows for counts in self.log.by_path.values())
        self.fit.bad_rows = self.bad.to_json()
        self.fit.check(self.bad.notify)
