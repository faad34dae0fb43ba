"""Render rows in several processes; they come back in order, with the counts of a single process.

    rows --batches--> child 1 .. N: a renderer each --outcomes, counts, messages--> rows with their outcomes

A child is spawned with a copy of the tokenizer, and ends when its pipe is closed. Each has a thread that sends a batch
and waits for the answer, so that no pipe is filled from both ends.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from streamtune.base.child import Child
from streamtune.data.rendering.counts import RenderLog
from streamtune.data.templates import fix_date, fixed_date
from streamtune.errors import ArgumentError, DataError, RunError, StreamTuneError

ItemT = TypeVar("ItemT")
Notify = Callable[[str], None]

BATCH_ROWS, BATCH_CHARACTERS = 256, 1 << 20
"""Most rows and characters of a batch for a process."""
ENDING_SECONDS = 5.0


@dataclass
class Item(Generic[ItemT]):
    """A row to be rendered, and dropped then: a long row takes much memory."""

    path: str
    """dataset of the row"""
    origin: str
    """row, for errors"""
    size: int
    """its characters, about"""
    row: ItemT | None
    weight: float = 1.0
    """factor of its loss"""
    source: int = 0
    """number of its source"""
    error: DataError | None = None
    """fault of a row that could not be read"""

    def take(self) -> ItemT:
        row, self.row = self.row, None
        assert row is not None, "a row is rendered once"
        return row


class Renderer(Protocol):
    """Renders one kind of rows, and counts what it finds in them."""

    log: RenderLog

    def render_item(self, item: Item[Any]) -> Any:
        """Return a row as it is fitted to the length, and drop it; raise ``DataError`` if it cannot be rendered."""
        ...

    def render_ahead(self, items: Sequence[Item[Any]]) -> None:
        """Prepare for rows that are rendered next."""
        ...


@dataclass(frozen=True)
class RowOutcome:
    """Result of rendering a row: a value, or an error."""

    value: Any = None
    error: StreamTuneError | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


RenderedItems = Iterator[tuple[Item[ItemT], RowOutcome]]
Render = Callable[[Iterable[Item[Any]]], RenderedItems[Any]]


@contextmanager
def rendering(
    make: Callable[..., Renderer], processes: int, note: Notify, *, rows_at_once: int = 128
) -> Iterator[tuple[RenderLog, Render]]:
    """Yield a log, and a function that renders items in order; afterwards the log is complete.

    Args:
        make: Makes a renderer, given ``notify`` for messages to the user. It is pickled for other processes.
        processes: Processes that render; 1 renders in this process.
        rows_at_once: Rows that this process looks at before it renders the first.

    Raises:
        ArgumentError: The renderer cannot be pickled: its tokenizer has code of its own.
        RunError: A process ended.
    """
    renderer = make(notify=note)
    if processes == 1:
        yield renderer.log, lambda items: _here(renderer, items, rows_at_once)
        return
    try:
        packed = pickle.dumps((make, fixed_date()))
    except Exception as error:  # whatever a tokenizer of others raises
        raise ArgumentError(
            f"the tokenizer cannot be sent to another process: {error}",
            where="dataset_num_proc",
            fix="set dataset_num_proc: 1",
        ) from error
    children = [Child(_serve, packed) for _ in range(processes)]
    threads = ThreadPoolExecutor(processes)
    try:
        yield renderer.log, lambda items: _elsewhere(children, threads, renderer.log, items)
    except BaseException:
        for child in children:
            child.process.kill()  # a thread that waits for an answer gets an error
        raise
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
        for child in children:
            child.close(seconds=ENDING_SECONDS)


def batches(items: Iterable[Item[ItemT]], rows: int, characters: int) -> Iterator[list[Item[ItemT]]]:
    """Yield batches of at most ``rows`` items or ``characters``, each of one source."""
    batch: list[Item[ItemT]] = []
    size = 0
    for item in items:
        if batch and (len(batch) >= rows or size + item.size > characters or item.source != batch[0].source):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch


def _here(renderer: Renderer, items: Iterable[Item[ItemT]], rows_at_once: int) -> RenderedItems[ItemT]:
    for batch in batches(items, rows_at_once, BATCH_CHARACTERS):
        renderer.log.begin(batch[0].path)
        renderer.render_ahead(batch)
        batch.reverse()
        while batch:
            item = batch.pop()
            yield item, _outcome(renderer, item)


def _outcome(renderer: Renderer, item: Item[Any]) -> RowOutcome:
    if item.error is not None:
        return RowOutcome(error=item.error)
    try:
        return RowOutcome(renderer.render_item(item))
    except DataError as error:  # of the row: any other error ends the preparation
        return RowOutcome(error=error)


def _elsewhere(
    children: Sequence[Child], threads: ThreadPoolExecutor, log: RenderLog, items: Iterable[Item[ItemT]]
) -> RenderedItems[ItemT]:
    free: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        free.put(child)

    def ask(batch: list[Item[ItemT]]) -> Any:
        child = free.get()
        try:
            child.connection.send_bytes(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
            for item in batch:
                item.row = None
            return pickle.loads(child.connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise RunError(
                "a process that prepares rows ended",
                where="dataset_num_proc",
                fix="it was killed, perhaps for want of memory: set dataset_num_proc to less",
            ) from error
        finally:
            free.put(child)

    waiting: deque[tuple[list[Item[ItemT]], Future[Any]]] = deque()

    def take() -> RenderedItems[ItemT]:
        batch, future = waiting.popleft()
        outcomes, counts, messages, failure = future.result()
        if failure is not None:
            raise failure
        log.begin(batch[0].path)
        log.now.add(counts)
        for message in messages:
            log.note(message)
        batch.reverse()
        outcomes.reverse()
        while batch:
            yield batch.pop(), outcomes.pop()

    for batch in batches(items, BATCH_ROWS, BATCH_CHARACTERS):
        waiting.append((batch, threads.submit(ask, batch)))
        if len(waiting) >= 2 * len(children):
            yield from take()
    while waiting:
        yield from take()


def _serve(connection: Any, packed: bytes) -> None:
    messages: list[str] = []
    make, date = pickle.loads(packed)
    fix_date(date)  # the one that templates of this run print
    renderer: Renderer = make(notify=messages.append)
    while True:
        try:
            batch: list[Item[Any]] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        messages.clear()
        renderer.log.by_path.clear()
        renderer.log.begin(batch[0].path)
        outcomes, failure = [], None
        try:
            renderer.render_ahead(batch)
            outcomes = [_outcome(renderer, item) for item in batch]
        except StreamTuneError as error:
            failure = error
        answer = (outcomes, renderer.log.now, list(messages), failure)
        try:
            connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        except OSError:  # nobody waits for it: the first process was killed
            return
