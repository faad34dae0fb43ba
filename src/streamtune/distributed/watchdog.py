"""End all ranks when one is gone, stopped, out of reach or stands still, and name that rank.

Once a second a thread of each rank reports to rank 0, over a connection of its own, its step and whether it computes.
Rank 0 decides from the reports whether a rank has failed (:mod:`.verdict`), and sends what it finds to all others. Each
rank then ends its process at once, because a thread that waits in a collective cannot be woken. A rank that receives
nothing from rank 0 takes rank 0 for the failed one.

    with Watchdog(environment) as watchdog:
        watchdog.at(step, "batch 1/2")     # an assignment, nothing more
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from streamtune.distributed.environment import RankEnvironment
from streamtune.distributed.failure import Failure, write_failure
from streamtune.distributed.verdict import (
    Beat,
    Peer,
    Stragglers,
    WatchLimits,
    end_stopped,
    find_deadlock,
    find_failure,
    this_process,
)
from streamtune.distributed.vitals import Vitals
from streamtune.distributed.wire import Admission, Line, dial, listen
from streamtune.errors import ArgumentError, StreamTuneError

PURPOSE = "watch"
VARIABLE = "STREAMTUNE_WATCHDOG"
MOST_SECONDS = 10**6
SAMPLE_SECONDS = 0.1
BEAT_SECONDS = 1.0
MOVE_SECONDS = 0.2
"""Delay after which a rank reports another step or phase."""
SUSPENDED_SECONDS = 5.0
"""Time between two turns of the thread after which this process was stopped, or the whole machine slept."""
VERDICT_SECONDS = 4.0
"""Time that a rank whose collective fails waits to learn which rank is to blame."""
LEAVE_SECONDS = 10.0
"""Time for a rank with an error to be gone."""
COMMUNICATION = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")

Show = Callable[[StreamTuneError], None]
Event = Callable[[str, dict[str, Any]], None]


def _print(error: StreamTuneError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


class Watchdog:
    """A watch over all ranks while its context is entered; with one rank it does nothing.

    ``STREAMTUNE_WATCHDOG=off`` switches it off, and a number is the seconds for which all ranks may stand still.

    ``show`` prints an error where no launcher does. ``event`` logs an event by name and details, on rank 0 and from
    another thread.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        *,
        show: Show = _print,
        event: Event = lambda name, details: None,
        limits: WatchLimits | None = None,
    ) -> None:
        self.environment = environment
        self.event = event
        """May be set later, when there is a place to write to."""
        self._show = show
        self._at = (0, "starting", False)
        asked = _asked_limits() if environment.world_size > 1 else None
        self._limits = limits or asked or WatchLimits()
        self._on = asked is not None
        self._verdict: Failure | None = None
        self._decided = threading.Event()
        self._leaving = threading.Event()
        """The main thread is on its way out: no verdict ends it any more."""
        self._own: Failure | None = None
        self._thread: threading.Thread | None = None
        self._post: _Hub | _Client | None = None

    def at(self, step: int, phase: str, *, patient: bool = False) -> None:
        """Record the step, counted from 1, and the phase of the main thread.

        ``patient`` is True if the thread may wait for something outside this process without computing.
        """
        self._at = (step, phase, patient)

    def __enter__(self) -> Watchdog:
        if self._on:
            post = _Hub if self.environment.is_main else _Client
            self._post = post(self.environment, self._limits, lambda name, details: self.event(name, details))
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if isinstance(error, Exception):
            # An error of a collective follows from another rank's end, which is known an instant later.
            if _is_communication(error):
                self._decided.wait(VERDICT_SECONDS)
            self._leaving.set()
            if self._verdict is not None and self._verdict.rank != self.environment.rank:
                write_failure(replace(self._verdict, own=False))
                self._note(self._verdict)
                self._leave_soon()
                raise self._verdict.error() from error
            self._own = Failure.of(error, self.environment.rank, self.environment.host)
            self._leave_soon()
        self._leaving.set()
        self._thread.join(VERDICT_SECONDS)

    def _leave_soon(self) -> None:
        """End the process after ``LEAVE_SECONDS``: leaving the process group may hang when a rank is missing."""
        timer = threading.Timer(LEAVE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _note(self, verdict: Failure) -> None:
        """Log the failure on rank 0, waiting at most 2 s for the disk."""
        if self.environment.is_main:
            details = {"rank": verdict.rank, "host": verdict.host, "what": verdict.what}
            writing = threading.Thread(target=self.event, args=("rank failure", details), daemon=True)
            writing.start()
            writing.join(2.0)

    def _run(self) -> None:
        """Watch in the thread; end the process if a rank has failed and the main thread is not leaving already."""
        assert self._post is not None
        try:
            verdict = self._watch(self._post)
        finally:
            self._decided.set()
        if verdict is not None and not self._leaving.is_set():
            self._end(verdict)

    def _watch(self, post: _Hub | _Client) -> Failure | None:
        """Return the failure of a rank as soon as one is found, or None when this rank leaves."""
        vitals = Vitals(post.descriptors)
        at = sent = self._at
        turn = time.monotonic()
        look_at = beat_at = turn
        try:
            while not self._leaving.is_set():
                post.wait(SAMPLE_SECONDS)
                now = time.monotonic()
                if now - turn > SUSPENDED_SECONDS:
                    vitals.forget()
                    post.forget(now)
                turn = now
                vitals.sample()
                if (latest := self._at) is not at:
                    vitals.progress()
                    at = latest
                if now >= look_at:
                    look_at = now + BEAT_SECONDS
                    vitals.ours = post.descriptors
                    vitals.look()
                if now >= beat_at or (at is not sent and now >= beat_at - BEAT_SECONDS + MOVE_SECONDS):
                    beat_at, sent = now + BEAT_SECONDS, at
                    post.beat(self._beat(vitals, at), now)
                self._verdict = post.verdict(now)
                if self._verdict is not None:
                    self._decided.set()
                    return self._verdict
            return None
        finally:
            post.close(self._own, self._verdict)

    @staticmethod
    def _beat(vitals: Vitals, at: tuple[int, str, bool]) -> Beat:
        place, busy = vitals.place, round(vitals.busy, 3)
        return Beat(*at, vitals.still, vitals.placed, place.text, place.collective, busy, vitals.unanswered)

    def _end(self, verdict: Failure) -> None:
        """Show the failure and end the process, unless the main thread leaves within one second."""
        env = self.environment
        if self._leaving.wait(1.0):
            return
        shown_elsewhere = write_failure(replace(verdict, own=False))
        shows = env.is_main or (verdict.rank == 0 and env.local_rank == (1 if verdict.host == env.host else 0))
        self._note(verdict)
        if shows and not shown_elsewhere:
            with suppress(Exception):
                self._show(verdict.error())
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def _asked_limits() -> WatchLimits | None:
    """Return the limits of ``STREAMTUNE_WATCHDOG``; None for ``off``."""
    text = os.environ.get(VARIABLE, "")
    if text == "off":
        return None
    if not text:
        return WatchLimits()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= MOST_SECONDS:
        raise ArgumentError(
            f"'{text[:40]}' is neither off nor a number of seconds from 1 to {MOST_SECONDS:,}",
            where=VARIABLE,
            fix="unset it: ranks that all stand still for 16 seconds end the run",
        )
    usual = WatchLimits()
    longer = {name: max(getattr(usual, name), seconds) for name in ("place", "waiting", "silence")}
    return replace(usual, stillness=seconds, **longer)


def _is_communication(error: BaseException) -> bool:
    """Return True if an error comes out of a collective, as it does when another rank is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StreamTuneError):
            return False
        trace = seen.__traceback__
        while trace is not None:
            if "/torch/distributed/" in trace.tb_frame.f_code.co_filename:
                return True
            trace = trace.tb_next
        text = str(seen)
        if type(seen).__name__ in COMMUNICATION or "gloo" in text or "NCCL" in text or "closed by peer" in text:
            return True
        seen = seen.__cause__
    return False


class _Hub:
    """Rank 0's side: receives all reports, finds the failed rank, and names it to all others."""

    def __init__(self, environment: RankEnvironment, limits: WatchLimits, event: Event) -> None:
        self._env, self._limits, self._event = environment, limits, event
        self._selector = selectors.DefaultSelector()
        server, about = listen(environment, PURPOSE), {"process": this_process()}
        self._admission = Admission(server, environment, PURPOSE, about, self._selector)
        self._started = time.monotonic()
        self._lines: dict[int, Line] = {}
        self._spoken: set[int] = set()
        """Ranks that know they have been let in."""
        self._peers: dict[int, Peer] = {0: Peer(0, environment.host, self._started)}
        self._received: Failure | None = None
        self._stragglers = Stragglers(limits.course)

    @property
    def descriptors(self) -> frozenset[int]:
        return frozenset({*self._admission.descriptors, *(line.connection.fileno() for line in self._lines.values())})

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for messages and new connections, and process those that are there."""
        for key, _ in self._selector.select(seconds):
            if key.data is not self._admission:
                self._hear(key.data)
            elif (admitted := self._admission.take(key.fileobj)) is not None:
                self._admit(*admitted)
        self._admission.tidy()
        if len(self._spoken) == self._env.world_size - 1:
            self._admission.close()

    def _admit(self, line: Line, said: dict[str, Any]) -> None:
        rank = said["rank"]
        try:
            machine, pid = said["process"]
            peer = Peer(rank, said["host"], time.monotonic(), (str(machine), int(pid)))
        except (KeyError, ValueError, TypeError):
            line.close()
            return
        if (before := self._lines.get(rank)) is not None:  # it has called again: the first answer came too late
            with suppress(KeyError, ValueError):
                self._selector.unregister(before.connection)
            before.close()
        self._lines[rank], self._peers[rank] = line, peer
        self._selector.register(line.connection, selectors.EVENT_READ, rank)

    def _hear(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            messages = self._lines[rank].drain()
        except OSError:
            self._selector.unregister(self._lines[rank].connection)
            messages = self._lines[rank].arrived()
            peer.gone = True
        for message in messages:
            peer.last_heard = time.monotonic()
            self._spoken.add(rank)
            if "beat" in message:
                peer.beat = Beat.from_dict(message["beat"])
                self._stragglers.add(rank, peer.beat.step, peer.beat.busy, peer.last_heard)
            elif "bye" in message:
                peer.done = True
            elif "failed" in message and self._received is None:
                self._received = Failure.from_dict(message["failed"])

    def beat(self, beat: Beat, now: float) -> None:
        """Record rank 0's own report, send it to the others as a sign of life, and log slow ranks."""
        self._peers[0].beat, self._peers[0].last_heard = beat, now
        self._stragglers.add(0, beat.step, beat.busy, now)
        for rank, line in self._lines.items():
            if not self._peers[rank].gone:
                with suppress(OSError):  # a stopped rank's buffer fills up; its stop is noticed otherwise
                    line.send({"tick": True, "beat": asdict(beat)}, seconds=0.05)
        for rank, seconds, median in self._stragglers.found():
            details = {"rank": rank, "host": self._peers[rank].host, "seconds_per_step": round(seconds, 3)}
            self._event("straggler", {**details, "median_of_others": round(median, 3)})

    def forget(self, now: float) -> None:
        """Count the silence of all ranks from now on: this process was suspended and received nothing."""
        for peer in self._peers.values():
            peer.last_heard = now

    def verdict(self, now: float) -> Failure | None:
        if self._received is not None:
            return self._received
        missing = [rank for rank in range(self._env.world_size) if rank not in self._peers]
        if missing:
            if now - self._started < self._limits.start:
                return find_failure(self._peers.values(), now, self._limits)
            what = f"rank {missing[0]} has not come to train within {self._limits.start:.0f} s"
            return Failure(missing[0], "?", what, fix="see its log", own=False, seen="missing")
        return find_failure(self._peers.values(), now, self._limits) or find_deadlock(
            self._peers.values(), self._limits
        )

    def close(self, own: Failure | None, verdict: Failure | None) -> None:
        """Send the failure, or a goodbye, to all others; they have 1 s to receive a failure."""
        failure = own or verdict
        message = {"verdict": asdict(failure)} if failure is not None else {"bye": True}
        for rank, line in self._lines.items():
            if not self._peers[rank].gone:
                with suppress(OSError):
                    line.send(message, seconds=0.2)
                    line.connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 1.0
        for rank, line in self._lines.items():
            with suppress(OSError):
                while failure is not None and not self._peers[rank].gone and time.monotonic() < until:
                    line.receive(until - time.monotonic())
            line.close()
        for peer in self._peers.values():
            if failure is not None and peer.rank == failure.rank:
                end_stopped(peer)
        self._admission.close()
        self._selector.close()


class _Client:
    """The other ranks' side: reports to rank 0, and receives its signs of life and the failure it names."""

    def __init__(self, environment: RankEnvironment, limits: WatchLimits, event: Event) -> None:
        self._env, self._limits = environment, limits
        self._line = dial(environment, PURPOSE, {"process": this_process()}, limits.start)
        said = self._line.greeting
        machine, pid = said["process"]
        self._main = Peer(0, said["host"], time.monotonic(), (machine, pid))
        self._received: Failure | None = None

    @property
    def descriptors(self) -> frozenset[int]:
        return frozenset({self._line.connection.fileno()})

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for messages, and process those that are there."""
        if self._main.gone or self._main.done:
            time.sleep(seconds)
            return
        messages = []
        try:
            messages.append(self._line.receive(seconds))
            messages += self._line.drain()
        except TimeoutError:
            return
        except OSError:
            messages += self._line.arrived()
            self._main.gone = True
        for message in messages:
            self._main.last_heard = time.monotonic()
            if "beat" in message:
                self._main.beat = Beat.from_dict(message["beat"])
            elif "bye" in message:
                self._main.done = True
            elif "verdict" in message:
                self._received = Failure.from_dict(message["verdict"])

    def beat(self, beat: Beat, now: float) -> None:
        with suppress(OSError):
            self._line.send({"beat": asdict(beat)}, seconds=0.5)

    def forget(self, now: float) -> None:
        """Count the silence of rank 0 from now on: this process was suspended and received nothing."""
        self._main.last_heard = now

    def verdict(self, now: float) -> Failure | None:
        """Return the failure that rank 0 has sent, or that rank 0 itself is gone or silent; else None."""
        return self._received or find_failure([self._main], now, self._limits)

    def close(self, own: Failure | None, verdict: Failure | None) -> None:
        with suppress(OSError):
            self._line.send({"failed": asdict(own)} if own is not None else {"bye": True})
        self._line.close()
        if verdict is not None and verdict.rank == 0:
            end_stopped(self._main)
