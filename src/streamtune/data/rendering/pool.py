"""Render rows in several processes; order and counts are the same as with one process.

    rows --batches--> child 1 .. N: a renderer each --outcomes, counts, messages--> rows with their outcomes

Each child process is spawned with a copy of the tokenizer, and ends when its pipe is closed. One thread per child sends
a batch and waits for the answer. So parent and child never both wait to write to a full pipe.
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
from streamtune.data.templates import fix_template_date, fixed_template_date
from streamtune.errors import ArgumentError, DataError, RunError, StreamTuneError

ItemT = TypeVar("ItemT")
Notify = Callable[[str], None]

BATCH_ROWS, BATCH_CHARACTERS = 256, 1 << 20
"""Maximum number of rows, and of characters, that are sent to a process at once."""
ENDING_SECONDS = 5.0
"""Seconds to wait for a child process to end."""


@dataclass
class Item(Generic[ItemT]):
    """A row to render. Its data is released once it is rendered, because long rows take much memory."""

    path: str
    """path of the dataset"""
    origin: str
    """file and line of the row, for errors"""
    size: int
    """approximate number of characters of the row"""
    row: ItemT | None
    """row; None after :meth:`take_row`, or if the row could not be read"""
    weight: float = 1.0
    """factor of the row's loss"""
    source: int = 0
    """index of the dataset in the recipe"""
    error: DataError | None = None
    """error if the row could not be read"""

    def take_row(self) -> ItemT:
        """Return the row and drop this item's reference to it; a second call fails."""
        row, self.row = self.row, None
        assert row is not None, "the row was already taken"
        return row


class Renderer(Protocol):
    """Renders rows of one kind, and counts what the user should know about them (:class:`RenderLog`)."""

    log: RenderLog

    def render_item(self, item: Item[Any]) -> Any:
        """Return the rendering of the item's row, and release the row; raise ``DataError`` if rendering fails."""
        ...

    def render_ahead(self, items: Sequence[Item[Any]]) -> None:
        """Render the chat templates of several rows in one request to the template process, to save time."""
        ...


@dataclass(frozen=True)
class RowOutcome:
    """The rendering of a row, or the error that prevented it."""

    value: Any = None
    error: StreamTuneError | None = None
    """error if the row could not be read or rendered"""

    def get_or_raise(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


RenderedItems = Iterator[tuple[Item[ItemT], RowOutcome]]
Render = Callable[[Iterable[Item[Any]]], RenderedItems[Any]]


@contextmanager
def open_renderer(
    make_renderer: Callable[..., Renderer], processes: int, notify: Notify, *, rows_at_once: int = 128
) -> Iterator[tuple[RenderLog, Render]]:
    """Yield the :class:`RenderLog` and a function that renders items in order, as a context manager.

    Args:
        make_renderer: Function with the argument ``notify`` that returns a renderer; it is pickled for child processes.
        processes: Number of child processes that render; 1 renders in the calling process.
        rows_at_once: Number of rows that are read before the first of them is rendered, if ``processes`` is 1.

    Raises:
        ArgumentError: The renderer cannot be pickled, because its tokenizer runs its own code.
        RunError: A process ended unexpectedly.
    """
    renderer = make_renderer(notify=notify)
    if processes == 1:
        yield renderer.log, lambda items: _render_in_process(renderer, items, rows_at_once)
        return
    try:
        packed = pickle.dumps((make_renderer, fixed_template_date()))
    except Exception as error:  # any exception of a third-party tokenizer
        raise ArgumentError(
            f"the tokenizer cannot be pickled for another process: {error}",
            where="dataset_num_proc",
            fix="set dataset_num_proc: 1",
        ) from error
    children = [Child(_render_batches, packed) for _ in range(processes)]
    threads = ThreadPoolExecutor(processes)
    try:
        yield renderer.log, lambda items: _render_in_children(children, threads, renderer.log, items)
    except BaseException:
        for child in children:
            child.process.kill()  # a thread that waits for its answer then gets an error
        raise
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
        for child in children:
            child.close(seconds=ENDING_SECONDS)


def batch_items(items: Iterable[Item[ItemT]], max_rows: int, max_characters: int) -> Iterator[list[Item[ItemT]]]:
    """Yield batches of items of one source, limited by rows and characters; a longer item is a batch by itself."""
    batch: list[Item[ItemT]] = []
    size = 0
    for item in items:
        if batch and (len(batch) >= max_rows or size + item.size > max_characters or item.source != batch[0].source):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch


def _render_in_process(renderer: Renderer, items: Iterable[Item[ItemT]], rows_at_once: int) -> RenderedItems[ItemT]:
    for batch in batch_items(items, rows_at_once, BATCH_CHARACTERS):
        renderer.log.start_dataset(batch[0].path)
        renderer.render_ahead(batch)
        batch.reverse()
        while batch:
            item = batch.pop()
            yield item, _render_one(renderer, item)


def _render_one(renderer: Renderer, item: Item[Any]) -> RowOutcome:
    if item.error is not None:
        return RowOutcome(error=item.error)
    try:
        return RowOutcome(renderer.render_item(item))
    except DataError as error:  # an error of this row; any other error ends the preparation
        return RowOutcome(error=error)


def _render_in_children(
    children: Sequence[Child], threads: ThreadPoolExecutor, log: RenderLog, items: Iterable[Item[ItemT]]
) -> RenderedItems[ItemT]:
    free: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        free.put(child)

    def render_in_child(batch: list[Item[ItemT]]) -> Any:
        child = free.get()
        try:
            child.connection.send_bytes(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
            for item in batch:
                item.row = None
            return pickle.loads(child.connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise RunError(
                "a process that prepares rows ended unexpectedly",
                where="dataset_num_proc",
                fix="it may have run out of memory: set dataset_num_proc to a smaller number",
            ) from error
        finally:
            free.put(child)

    waiting: deque[tuple[list[Item[ItemT]], Future[Any]]] = deque()

    def yield_oldest_batch() -> RenderedItems[ItemT]:
        batch, future = waiting.popleft()
        outcomes, counts, messages, failure = future.result()
        if failure is not None:
            raise failure
        log.start_dataset(batch[0].path)
        log.current.add_counts(counts)
        for message in messages:
            log.notify_once(message)
        batch.reverse()
        outcomes.reverse()
        while batch:
            yield batch.pop(), outcomes.pop()

    for batch in batch_items(items, BATCH_ROWS, BATCH_CHARACTERS):
        waiting.append((batch, threads.submit(render_in_child, batch)))
        if len(waiting) >= 2 * len(children):
            yield from yield_oldest_batch()
    while waiting:
        yield from yield_oldest_batch()


def _render_batches(connection: Any, pickled_renderer: bytes) -> None:
    messages: list[str] = []
    make, date = pickle.loads(pickled_renderer)
    fix_template_date(date)  # all processes of a run render the same date
    renderer: Renderer = make(notify=messages.append)
    while True:
        try:
            batch: list[Item[Any]] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        messages.clear()
        renderer.log.by_path.clear()
        renderer.log.start_dataset(batch[0].path)
        outcomes, failure = [], None
        try:
            renderer.render_ahead(batch)
            outcomes = [_render_one(renderer, item) for item in batch]
        except StreamTuneError as error:
            failure = error
        answer = (outcomes, renderer.log.current, list(messages), failure)
        try:
            connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        except OSError:  # the parent process was killed
            return
