"""Stream rows: read, render and fit them on demand, pass after pass over the data, without storing them.

    sources -> in turn, or by weight -> shuffle buffer -> render -> fit -> examples

The order of a pass depends only on the sources, the seed and the number of the pass, so a row count is enough to store
a position. To resume, the rows before the position are read and drawn again, but not rendered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from streamtune.data.bad_rows import BadRows
from streamtune.data.batches.sampler import seeded_random
from streamtune.data.fit import RowFitter
from streamtune.data.options import DataOptions
from streamtune.data.prepare import Reading, read_training_rows
from streamtune.data.reading.contents import StreamedFiles
from streamtune.data.reading.sources import Source
from streamtune.data.record_table import Example, Record, TableWriter
from streamtune.data.rendering.counts import RenderLog
from streamtune.data.rendering.pool import Item, Notify, open_renderer
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import Content
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUFFER_CHARACTERS = 1 << 27
"""Number of characters at which the shuffle buffer is full, so that long rows do not exhaust memory."""
MOST_TOLD = 10
"""Maximum number of bad rows per pass that are shown to the user one by one."""

Items = Iterator[Item[Content]]


@dataclass(frozen=True)
class StreamPosition:
    """Position after an example of a stream: number of the pass, the row and the example, and counts so far."""

    epoch: int = 0
    """number of the pass over the data, from 0"""
    rows: int = 0
    """number of finished rows of the pass, in the order in which they are drawn"""
    pieces: int = 0
    """number of examples of the next row that were already yielded"""
    counts: Mapping[str, int] = field(default_factory=dict)
    """counts of the finished rows, by name"""
    bad_places: Sequence[str] = ()
    """places of finished rows that are bad, if the pass may read a row again"""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bad_places": list(self.bad_places)}  # equal to the state in a checkpoint


class RowStream:
    """An endless stream of training examples, which reads and renders all rows of the sources again and again.

    Args:
        sources: Sources of the rows, read one after the other, or drawn by their weights.
        tokenizer: Tokenizer with the chat template; rendering uses it in the thread that iterates over ``examples``.
        notify: Function that shows the user a message; it may be replaced.

    Attributes:
        left_out: Function that receives the error of each skipped bad row.
        files: Object that checks that files have not changed since the run began; None checks nothing.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        notify: Notify = lambda message: None,
    ) -> None:
        self.sources, self.tokenizer, self.options = sources, tokenizer, options
        self.policy = options.row_policy()
        self.notify = notify
        self.left_out: Callable[[DataError], None] = lambda error: None
        self.files: StreamedFiles | None = None
        self._noted: set[str] = set()

    def check_first_rows(self) -> None:
        """Read the first row of each source, to find wrong paths before a model is loaded.

        Raises:
            DataError: A file or dataset does not exist, or has no valid row.
        """
        log = RenderLog(self.options.chat, self._notify_once)
        for number, source in enumerate(self.sources):
            bad = self._make_bad_rows()
            reading = Reading(self.sources, self._make_fitter()[0], log, bad)
            if next(self._read_source_rows(number, reading), None) is None:
                bad.raise_if_all_bad()
                raise DataError(
                    f"'{source.path}' has no rows", where=source.place, fix="add rows, or remove the dataset"
                )

    def check_files(self) -> None:
        """Check that the files being read have not changed since the run began.

        Raises:
            DataError: A file was changed, replaced or removed.
        """
        if self.files is not None:
            self.files.check_open_files()

    def examples(self, start: StreamPosition) -> Generator[tuple[Example | None, StreamPosition]]:
        """Yield examples, each with the position after it, and None at the end of each pass over the data.

        Close the generator to end its processes.

        Args:
            start: Position to begin at; the rows before it are read, but not rendered.

        Raises:
            DataError: A row is bad, too many rows are bad, a file changed, or no row of a pass is left.
        """
        options, position = self.options, start
        make = partial(
            RowRenderer,
            self.tokenizer,
            train_on=options.train_on,
            chat=options.chat,
            policy=self.policy,
            images=options.images,
        )
        with open_renderer(make, options.processes, self._notify_once) as (log, render):
            while True:
                bad = self._make_bad_rows()
                bad.count = position.counts.get("bad", 0)
                bad.places.update(position.bad_places)
                order = self._order_rows(position.epoch, Reading(self.sources, self._make_fitter()[0], log, bad))
                rendered = render(islice(order, position.rows, None))
                yield from self._iterate_pass(position, rendered, log, bad)
                position = StreamPosition(position.epoch + 1)
                yield None, position

    def _iterate_pass(
        self, start: StreamPosition, rendered: Iterator[tuple[Item[Content], Any]], log: RenderLog, bad: _BadRowsOfPass
    ) -> Iterator[tuple[Example, StreamPosition]]:
        counts, reported_errors, handed_out = Counter(start.counts), 0, bool(start.rows or start.pieces)
        may_repeat = any(source.repeat > 1 or source.weight is not None for source in self.sources)
        bad_places = tuple(start.bad_places)
        rows, done = start.rows, start.pieces
        for item, outcome in rendered:
            of_row: Counter[str] = Counter()
            examples: list[Example] = []
            before = bad.count
            with bad:
                examples, of_row = self._make_examples(outcome.get_or_raise(), item.origin)
            if bad.count > before:
                of_row = Counter(rows=1, bad=1)  # empty if an earlier reading of the row was counted
                bad_places += (bad.last_place,) if may_repeat else ()
            log.raise_errors()
            reported_errors = self._report_bad_rows(bad, reported_errors)
            for piece in range(done, len(examples)):
                handed_out = True
                if piece + 1 < len(examples):
                    yield examples[piece], StreamPosition(start.epoch, rows, piece + 1, dict(counts), bad_places)
                else:
                    behind = counts.copy()
                    behind.update(of_row)
                    yield examples[piece], StreamPosition(start.epoch, rows + 1, 0, dict(behind), bad_places)
            rows, done = rows + 1, 0
            counts.update(of_row)
        self._report_bad_rows(bad, reported_errors)
        if not handed_out:
            bad.raise_if_all_bad()
            raise DataError(
                f"no row of a pass is left to train on: all {rows:,} were dropped",
                where=self.sources[0].place,
                fix="check max_length, overlength and on_empty",
            )
        log.notify_or_raise()
        log.clear_counts()
        counts.update(rows=bad.count - counts["bad"], bad=bad.count - counts["bad"])  # rows that could not be read
        self.notify(f"pass {start.epoch + 1} over the data finished: {describe_pass_counts(counts)}")

    def _make_examples(self, rendered: Any, origin: str) -> tuple[list[Example], Counter[str]]:
        """Return the examples of a rendered row, and its counts; ``rendered`` is None for an empty answer."""
        fitter, writer = self._make_fitter()
        if rendered is None:
            fitter.count_empty_row()
        else:
            fitter.add(rendered, origin)
            if fitter.counts["too_long"]:
                self._notify_once(
                    f"some rows exceed max_length (the first: {origin}, {fitter.longest_length} tokens); a message "
                    "after each pass says how many were dropped, truncated or split",
                    "too_long",
                )
        fitter.counts["rows"] = 1
        return writer.records, fitter.counts

    def _make_bad_rows(self) -> _BadRowsOfPass:
        action = "skip" if self.options.on_bad_row == "skip" else "raise"
        return _BadRowsOfPass(action, self.options.max_bad_rows, self._notify_once)

    def _make_fitter(self) -> tuple[RowFitter, _ExampleCollector]:
        writer = _ExampleCollector()
        return RowFitter(writer, self.policy), writer

    def _report_bad_rows(self, bad: BadRows, reported_errors: int) -> int:
        for error in bad.errors[reported_errors:]:
            self.left_out(error)
            if reported_errors < MOST_TOLD:
                self._notify_once(f"bad row skipped at {error.where}: {error.what}")
            reported_errors += 1
        return reported_errors

    def _notify_once(self, message: str, key: str = "") -> None:
        """Show the user a message, once per ``key`` (default: the message) in all passes over the data."""
        if (key or message) not in self._noted:
            self._noted.add(key or message)
            self.notify(message)

    # --- the order ---------------------------------------------------------------------------------------------

    def _order_rows(self, epoch: int, reading: Reading) -> Items:
        weighted = self.sources[0].weight is not None
        items = self._read_by_weight(epoch, reading) if weighted else self._read_sources_in_turn(reading)
        if self.options.shuffle_buffer == 1:
            return items
        return _shuffle(items, self.options.shuffle_buffer, seeded_random(self.options.seed, epoch, 0))

    def _read_source_rows(self, source_index: int, reading: Reading) -> Items:
        for item in read_training_rows(self.tokenizer, reading, replace(self.sources[source_index], watch=self.files)):
            item.source = source_index
            yield item
            del item  # frees the memory of a long row

    def _read_sources_in_turn(self, reading: Reading) -> Items:
        for number, source in enumerate(self.sources):
            for _ in range(source.repeat):
                yield from self._read_source_rows(number, reading)

    def _read_by_weight(self, epoch: int, reading: Reading) -> Items:
        """Yield rows; the source of each row is drawn at random by the sources' weights.

        An exhausted source starts again. The pass ends when every source was exhausted once.

        Raises:
            DataError: A source has no valid row.
        """
        chosen = [number for number, source in enumerate(self.sources) if source.weight]
        odds = np.cumsum([self.sources[number].weight for number in chosen])
        random = seeded_random(self.options.seed, epoch, 1)
        reads, ended = [self._read_source_rows(number, reading) for number in chosen], set[int]()
        while True:
            draw = min(int(np.searchsorted(odds, random.random_sample() * odds[-1], side="right")), len(odds) - 1)
            item = next(reads[draw], None)
            if item is None:
                ended.add(draw)
                if len(ended) == len(chosen):
                    return
                reads[draw] = self._read_source_rows(chosen[draw], reading)
                item = next(reads[draw], None)
            if item is None:
                source = self.sources[chosen[draw]]
                raise DataError(
                    f"'{source.path}' has no valid row: every row was skipped",
                    where=source.place,
                    fix="correct its rows, or remove the dataset",
                )
            yield item
            del item


class _BadRowsOfPass(BadRows):
    """Counts each bad row once, although one pass over the data may read a source several times.

    Attributes:
        places: Places of the bad rows that were counted.
        last_place: Place of the last of them.
    """

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.places = set[str]()
        self.last_place = ""

    def report(self, error: DataError) -> None:
        if self.on_bad_row != "skip" or error.where not in self.places:
            self.places.add(error.where)
            self.last_place = error.where
            super().report(error)


class _ExampleCollector(TableWriter):
    """Table writer that only collects examples in memory."""

    def __init__(self) -> None:
        super().__init__(None, Example.schema)
        self.records: list[Example] = []

    def append(self, record: Record) -> None:
        assert isinstance(record, Example), "a stream yields examples"
        self.records.append(record)


def describe_pass_counts(counts: Mapping[str, int]) -> str:
    """Return a line such as "5 rows; 1 dropped; 90 tokens, 40 of them trained"; counts of zero are left out."""
    counts_by_change = {
        "dropped": counts.get("dropped", 0),
        "truncated": counts.get("truncated", 0),
        "split": counts.get("split", 0),
        "skipped as bad": counts.get("bad", 0),
    }
    parts = [
        f"{counts.get('rows', 0):,} rows",
        *(f"{count:,} {change}" for change, count in counts_by_change.items() if count),
    ]
    parts.append(f"{counts.get('tokens', 0):,} tokens, {counts.get('supervised_tokens', 0):,} of them trained")
    if lost := counts.get("tokens_lost", 0):
        about = "about " if counts.get("estimated") else ""
        parts.append(f"{about}{lost:,} tokens and {counts.get('supervised_tokens_lost', 0):,} trained tokens lost")
    return "; ".join(parts)


def _shuffle(items: Items, size: int, random: np.random.RandomState) -> Items:
    """Yield the items, each drawn at random from a buffer of the next ``size`` items."""
    buffer: list[Item[Content]] = []
    characters = 0
    for item in items:
        buffer.append(item)
        characters += item.size
        del item
        while buffer and (len(buffer) >= size or characters > BUFFER_CHARACTERS):
            characters -= _move_random_to_end(buffer, random)
            yield buffer.pop()
    while buffer:
        _move_random_to_end(buffer, random)
        yield buffer.pop()


def _move_random_to_end(buffer: list[Item[Content]], random: np.random.RandomState) -> int:
    """Swap a random row of the buffer with the last row; return its size in characters."""
    place = int(random.randint(len(buffer)))
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer[-1].size
