"""Send the metrics of a run to trackers, each on its own thread, so that a slow tracker does not slow the run.

    training thread    step  step  step ...  finished, waits at most FLUSH_SECONDS
                         |     |     |
                       a queue of at most QUEUED calls
                         |     |     |
    tracker's thread   start, log, log, text ...  close

After its first error, or if its queue is full, a tracker gets no more calls. A note on the screen and in
``events.jsonl`` reports it, and the run continues.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune import train
from streamtune.base.privacy import redact_values, safe_text
from streamtune.errors import StreamTuneError
from streamtune.programs.trackers.services import CLASSES, Tracker, numeric_fields
from streamtune.train.progress import Listener, Listeners, RunFacts

MakeTracker = Callable[[RunFacts, dict[str, Any], bool], Tracker]
"""Function ``(facts, ids, offline) -> tracker``, such as a tracker's class."""
QUEUED = 10_000
"""Maximum number of calls in the queue of a tracker."""
FLUSH_SECONDS = 30.0
"""Seconds for which the end of a run waits for all trackers together."""
_ids_lock = threading.Lock()


class Reporter(Listener):
    """Listener that forwards the metrics and events of a run to one tracker.

    Args:
        make: Function that creates the tracker, called on the tracker's thread.
        name: Name of the tracker in ``report_to``.
        offline: True to write local files only.
        notify: Called with a note for the user if the tracker fails.
    """

    def __init__(self, make: MakeTracker, name: str, *, offline: bool, notify: Callable[[str], None]) -> None:
        self.name, self._make, self._offline, self._notify = name, make, offline, notify
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self._run: train.RunDirectory | None = None
        self._step = 0
        self._drop_lock = threading.Lock()
        self.dropped = False
        """True after the tracker has failed; it gets no more calls."""

    def started(self, facts: RunFacts) -> None:
        self._run, self._step = train.RunDirectory(facts.directory), facts.step
        self._thread = threading.Thread(target=self._run_worker, args=(facts,), name=f"to {self.name}", daemon=True)
        self._thread.start()

    def step(self, record: dict[str, Any]) -> None:
        self._step = record["step"]
        self._queue_call(lambda tracker: tracker.log_numbers(record["step"], numeric_fields(record)))

    def evaluated(self, record: dict[str, Any]) -> None:
        self._queue_call(lambda tracker: tracker.log_numbers(record["step"], numeric_fields(record)))

    def sampled(self, samples: list[dict[str, Any]]) -> None:
        cleaned = redact_values(samples)
        if cleaned:
            self._queue_call(lambda tracker: tracker.log_samples(cleaned[0]["step"], cleaned))

    def saved(self, step: int, path: Path) -> None:
        self._queue_call(lambda tracker: tracker.log_event("checkpoint", {"step": step, "folder": path.name}))

    def event(self, name: str, details: dict[str, Any]) -> None:
        cleaned = redact_values(details)
        self._queue_call(lambda tracker: tracker.log_event(name, cleaned))

    def finished(self, outcome: dict[str, Any]) -> None:
        plot = self._run.loss_plot if self._run is not None else None
        if plot is not None and plot.is_file():
            self._queue_call(lambda tracker: tracker.log_image(self._step, plot))
        self._queue_call(lambda tracker: tracker.close(outcome["status"]))
        with suppress(queue.Full):
            self._calls.put_nowait(None)

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the tracker has processed all calls; after ``timeout_seconds``, drop the tracker."""
        if self._thread is None:
            return
        self._thread.join(max(timeout_seconds, 0.0))
        if self._thread.is_alive() and not self.dropped:
            self._drop_tracker("it did not accept all records in time at the end of the run")

    def _queue_call(self, call: Callable[[Tracker], None]) -> None:
        if self.dropped or self._thread is None:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._drop_tracker(f"its queue is full ({QUEUED:,} records)")

    def _run_worker(self, facts: RunFacts) -> None:
        try:
            tracker = self._make(facts, self._read_ids(), self._offline)
            self._save_ids(tracker.start())
            while (call := self._calls.get()) is not None and not self.dropped:
                call(tracker)
        except BaseException as error:  # a package may call sys.exit()
            self._drop_tracker(_describe_error(error))

    def _drop_tracker(self, why: str) -> None:
        """Send no more calls to the tracker, and notify the user once."""
        with self._drop_lock:
            if self.dropped:
                return
            self.dropped = True
        while True:  # frees the memory of waiting calls
            try:
                self._calls.get_nowait()
            except queue.Empty:
                break
        with suppress(queue.Full):
            self._calls.put_nowait(None)
        self._notify(f"{self.name} gets no more records of this run (the run continues): {why}")
        if self._run is not None:
            with suppress(StreamTuneError, OSError):
                train.append_event(self._run.events, "tracker_failed", tracker=self.name, why=why)

    def _read_ids(self) -> dict[str, Any]:
        assert self._run is not None
        return _read_all_ids(self._run.trackers).get(self.name, {})

    def _save_ids(self, ids: dict[str, Any]) -> None:
        """Save the tracker's ids at once, so that a run that is killed can resume under the same ids."""
        assert self._run is not None
        with _ids_lock:
            kept = {**_read_all_ids(self._run.trackers), self.name: ids}
            train.write_text_durably(self._run.trackers, json.dumps(kept, indent=1) + "\n")


@dataclass
class Reporters(Listeners):
    """Listeners of a run for all its trackers.

    Args:
        doing: Called with a message before slow work; returns a context manager that shows the message.
        seconds: Seconds for which the end of the run waits for all trackers together.
    """

    doing: Callable[[str], AbstractContextManager[Any]] = nullcontext
    seconds: float = FLUSH_SECONDS

    def finished(self, outcome: dict[str, Any]) -> None:
        super().finished(outcome)
        until = time.monotonic() + self.seconds
        for listener in self.listeners:
            if isinstance(listener, Reporter):
                with self.doing(f"waiting for {listener.name}"):
                    listener.wait(until - time.monotonic())


def _read_all_ids(path: Path) -> dict[str, dict[str, Any]]:
    """Return tracker name -> ids from ``trackers.json``; empty if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: ids for name, ids in found.items() if isinstance(ids, dict)}


def _describe_error(error: BaseException) -> str:
    text = safe_text(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def make_reporters(
    names: Sequence[str],
    *,
    offline: bool,
    notify: Callable[[str], None],
    doing: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Reporters:
    """Return a listener for the named trackers; their packages are imported later.

    Args:
        names: Keys of :data:`CLASSES`.
        offline: True to write local files only.
        notify: Called with a note for the user, from another thread.
        doing: Called with a message before slow work; returns a context manager that shows the message.
    """
    return Reporters([Reporter(CLASSES[name], name, offline=offline, notify=notify) for name in names], doing=doing)
