"""End all ranks when one is dead, stopped, unreachable or hangs, and name that rank.

Once a second, a thread of each rank reports its step and activity to rank 0, over a connection of its own. Rank 0
decides from the reports whether a rank has failed (:mod:`.verdict`), and sends the failure to all other ranks. Each
rank then ends its process at once, because a thread that waits in a collective cannot be woken. If rank 0 is silent,
the other ranks conclude that rank 0 has failed.

    with Watchdog(environment) as watchdog:
        watchdog.at(step, "batch 1/2")     # only an assignment
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
from streamtune.distributed.wire import Admission, Channel, dial, listen
from streamtune.errors import ArgumentError, StreamTuneError

PURPOSE = "watch"
VARIABLE = "STREAMTUNE_WATCHDOG"
MOST_SECONDS = 10**6
SAMPLE_SECONDS = 0.1
BEAT_SECONDS = 1.0
MOVE_SECONDS = 0.2
"""Seconds after which a rank reports a new step or phase."""
SUSPENDED_SECONDS = 5.0
"""Seconds between two loops of the thread after which the process or the machine must have been suspended."""
VERDICT_SECONDS = 4.0
"""Seconds that a rank whose collective failed waits for the name of the failed rank."""
LEAVE_SECONDS = 10.0
"""Seconds after which a rank with an error is killed if it has not ended."""
COMMUNICATION = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")

Show = Callable[[StreamTuneError], None]
Event = Callable[[str, dict[str, Any]], None]


def _print(error: StreamTuneError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


class Watchdog:
    """Context manager that watches all ranks; with one rank it does nothing.

    ``STREAMTUNE_WATCHDOG=off`` disables it; a number is the seconds without progress after which the run ends.

    Args:
        environment: Environment of this rank.
        show: Function that prints an error, called if no launcher shows it.
        event: Function that logs an event by name and details; called on rank 0 from another thread.
        limits: Time limits; None: the defaults, or as ``STREAMTUNE_WATCHDOG`` says.
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
        """Function that logs an event; may be set later, when there is a run directory."""
        self._show = show
        self._at = (0, "starting", False)
        asked = _read_limits() if environment.world_size > 1 else None
        self._limits = limits or asked or WatchLimits()
        self._on = asked is not None
        self._verdict: Failure | None = None
        self._decided = threading.Event()
        self._leaving = threading.Event()
        """Set when the main thread is leaving the context, so that the watchdog does not end the process."""
        self._own_failure: Failure | None = None
        self._thread: threading.Thread | None = None
        self._side: _Hub | _Client | None = None

    def at(self, step: int, phase: str, *, patient: bool = False) -> None:
        """Record the current step and phase of the main thread.

        Args:
            step: Step, counted from 1.
            phase: Description of the phase.
            patient: True if the main thread may wait for something outside this process without computing.
        """
        self._at = (step, phase, patient)

    def __enter__(self) -> Watchdog:
        if self._on:
            post = _Hub if self.environment.is_main else _Client
            self._side = post(self.environment, self._limits, lambda name, details: self.event(name, details))
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if isinstance(error, Exception):
            # A collective fails if another rank has ended, which the watchdog learns a moment later.
            if _is_communication(error):
                self._decided.wait(VERDICT_SECONDS)
            self._leaving.set()
            if self._verdict is not None and self._verdict.rank != self.environment.rank:
                write_failure(replace(self._verdict, own=False))
                self._log_failure(self._verdict)
                self._leave_soon()
                raise self._verdict.error() from error
            self._own_failure = Failure.of(error, self.environment.rank, self.environment.host)
            self._leave_soon()
        self._leaving.set()
        self._thread.join(VERDICT_SECONDS)

    def _leave_soon(self) -> None:
        """Kill the process after ``LEAVE_SECONDS``, because leaving the process group may hang without all ranks."""
        timer = threading.Timer(LEAVE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _log_failure(self, verdict: Failure) -> None:
        """Log the failure on rank 0; wait at most 2 s for the disk."""
        if self.environment.is_main:
            details = {"rank": verdict.rank, "host": verdict.host, "what": verdict.what}
            writing = threading.Thread(target=self.event, args=("rank failure", details), daemon=True)
            writing.start()
            writing.join(2.0)

    def _run(self) -> None:
        """Watch in the thread; end the process if a rank has failed, unless the main thread is already leaving."""
        assert self._side is not None
        try:
            verdict = self._watch(self._side)
        finally:
            self._decided.set()
        if verdict is not None and not self._leaving.is_set():
            self._end(verdict)

    def _watch(self, post: _Hub | _Client) -> Failure | None:
        """Return the failure of a rank as soon as it is found; None when this rank leaves the context."""
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
            post.close(self._own_failure, self._verdict)

    @staticmethod
    def _beat(vitals: Vitals, at: tuple[int, str, bool]) -> Beat:
        place, busy = vitals.place, round(vitals.busy, 3)
        return Beat(*at, vitals.still, vitals.placed, place.text, place.collective, busy, vitals.unanswered)

    def _end(self, verdict: Failure) -> None:
        """Show the failure and end the process, unless the main thread leaves the context within one second."""
        env = self.environment
        if self._leaving.wait(1.0):
            return
        shown_elsewhere = write_failure(replace(verdict, own=False))
        shows = env.is_main or (verdict.rank == 0 and env.local_rank == (1 if verdict.host == env.host else 0))
        self._log_failure(verdict)
        if shows and not shown_elsewhere:
            with suppress(Exception):
                self._show(verdict.error())
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def _read_limits() -> WatchLimits | None:
    """Return the time limits from ``STREAMTUNE_WATCHDOG``; None for ``off``.

    Raises:
        ArgumentError: The variable is neither ``off`` nor a valid number.
    """
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
            f"{VARIABLE} must be off, or a number of seconds from 1 to {MOST_SECONDS:,}, found '{text[:40]}'",
            where=VARIABLE,
            fix="unset it for the default: the run ends after 16 seconds without progress on any rank",
        )
    defaults = WatchLimits()
    longer = {name: max(getattr(defaults, name), seconds) for name in ("place", "waiting", "silence")}
    return replace(defaults, stillness=seconds, **longer)


def _is_communication(error: BaseException) -> bool:
    """Return True if an error was raised by a collective, as when another rank has ended."""
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
    """Rank 0's side of the watchdog: receives all reports, finds a failed rank, and sends the failure to all others."""

    def __init__(self, environment: RankEnvironment, limits: WatchLimits, event: Event) -> None:
        self._env, self._limits, self._event = environment, limits, event
        self._selector = selectors.DefaultSelector()
        server, about = listen(environment, PURPOSE), {"process": this_process()}
        self._admission = Admission(server, environment, PURPOSE, about, self._selector)
        self._started = time.monotonic()
        self._channels: dict[int, Channel] = {}
        self._heard_from: set[int] = set()
        """Ranks that have sent a message after they were admitted."""
        self._peers: dict[int, Peer] = {0: Peer(0, environment.host, self._started)}
        self._received: Failure | None = None
        self._stragglers = Stragglers(limits.course)

    @property
    def descriptors(self) -> frozenset[int]:
        return frozenset(
            {*self._admission.descriptors, *(channel.connection.fileno() for channel in self._channels.values())}
        )

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for messages and new connections, and process them."""
        for key, _ in self._selector.select(seconds):
            if key.data is not self._admission:
                self._receive(key.data)
            elif (admitted := self._admission.take(key.fileobj)) is not None:
                self._admit(*admitted)
        self._admission.close_late()
        if len(self._heard_from) == self._env.world_size - 1:
            self._admission.close()

    def _admit(self, channel: Channel, said: dict[str, Any]) -> None:
        rank = said["rank"]
        try:
            machine, pid = said["process"]
            peer = Peer(rank, said["host"], time.monotonic(), (str(machine), int(pid)))
        except (KeyError, ValueError, TypeError):
            channel.close()
            return
        if (before := self._channels.get(rank)) is not None:  # it has connected again
            with suppress(KeyError, ValueError):
                self._selector.unregister(before.connection)
            before.close()
        self._channels[rank], self._peers[rank] = channel, peer
        self._selector.register(channel.connection, selectors.EVENT_READ, rank)

    def _receive(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            messages = self._channels[rank].receive_all()
        except OSError:
            self._selector.unregister(self._channels[rank].connection)
            messages = self._channels[rank].take_received()
            peer.gone = True
        for message in messages:
            peer.last_heard = time.monotonic()
            self._heard_from.add(rank)
            if "beat" in message:
                peer.beat = Beat.from_dict(message["beat"])
                self._stragglers.add(rank, peer.beat.step, peer.beat.busy, peer.last_heard)
            elif "bye" in message:
                peer.done = True
            elif "failed" in message and self._received is None:
                self._received = Failure.from_dict(message["failed"])

    def beat(self, beat: Beat, now: float) -> None:
        """Record rank 0's own report, send it to the others as a heartbeat, and log slow ranks."""
        self._peers[0].beat, self._peers[0].last_heard = beat, now
        self._stragglers.add(0, beat.step, beat.busy, now)
        for rank, channel in self._channels.items():
            if not self._peers[rank].gone:
                with suppress(
                    OSError
                ):  # the buffer of a stopped rank fills up; that it is stopped is noticed elsewhere
                    channel.send({"tick": True, "beat": asdict(beat)}, seconds=0.05)
        for rank, seconds, median in self._stragglers.found():
            details = {"rank": rank, "host": self._peers[rank].host, "seconds_per_step": round(seconds, 3)}
            self._event("straggler", {**details, "median_of_others": round(median, 3)})

    def forget(self, now: float) -> None:
        """Reset the silence of all ranks, because this process was suspended and received nothing."""
        for peer in self._peers.values():
            peer.last_heard = now

    def verdict(self, now: float) -> Failure | None:
        if self._received is not None:
            return self._received
        missing = [rank for rank in range(self._env.world_size) if rank not in self._peers]
        if missing:
            if now - self._started < self._limits.start:
                return find_failure(self._peers.values(), now, self._limits)
            what = f"rank {missing[0]} did not start training within {self._limits.start:.0f} s"
            return Failure(missing[0], "?", what, fix="see its log", own=False, seen="missing")
        return find_failure(self._peers.values(), now, self._limits) or find_deadlock(
            self._peers.values(), self._limits
        )

    def close(self, own: Failure | None, verdict: Failure | None) -> None:
        """Send the failure or a goodbye to all other ranks; wait at most 1 s until a failure is received."""
        failure = own or verdict
        message = {"verdict": asdict(failure)} if failure is not None else {"bye": True}
        for rank, channel in self._channels.items():
            if not self._peers[rank].gone:
                with suppress(OSError):
                    channel.send(message, seconds=0.2)
                    channel.connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 1.0
        for rank, channel in self._channels.items():
            with suppress(OSError):
                while failure is not None and not self._peers[rank].gone and time.monotonic() < until:
                    channel.receive(until - time.monotonic())
            channel.close()
        for peer in self._peers.values():
            if failure is not None and peer.rank == failure.rank:
                end_stopped(peer)
        self._admission.close()
        self._selector.close()


class _Client:
    """The other ranks' side of the watchdog: reports to rank 0, and receives its heartbeats and failures."""

    def __init__(self, environment: RankEnvironment, limits: WatchLimits, event: Event) -> None:
        self._env, self._limits = environment, limits
        self._channel = dial(environment, PURPOSE, {"process": this_process()}, limits.start)
        said = self._channel.greeting
        machine, pid = said["process"]
        self._main = Peer(0, said["host"], time.monotonic(), (machine, pid))
        self._received: Failure | None = None

    @property
    def descriptors(self) -> frozenset[int]:
        return frozenset({self._channel.connection.fileno()})

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for messages, and process them."""
        if self._main.gone or self._main.done:
            time.sleep(seconds)
            return
        messages = []
        try:
            messages.append(self._channel.receive(seconds))
            messages += self._channel.receive_all()
        except TimeoutError:
            return
        except OSError:
            messages += self._channel.take_received()
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
            self._channel.send({"beat": asdict(beat)}, seconds=0.5)

    def forget(self, now: float) -> None:
        """Reset the silence of rank 0, because this process was suspended and received nothing."""
        self._main.last_heard = now

    def verdict(self, now: float) -> Failure | None:
        """Return the failure that rank 0 has sent, or the failure of rank 0 itself; None if there is none."""
        return self._received or find_failure([self._main], now, self._limits)

    def close(self, own: Failure | None, verdict: Failure | None) -> None:
        with suppress(OSError):
            self._channel.send({"failed": asdict(own)} if own is not None else {"bye": True})
        self._channel.close()
        if verdict is not None and verdict.rank == 0:
            end_stopped(self._main)
