"""Ending of all ranks when one is dead, stopped, unreachable or hangs, with an error that names the rank.

Once a second, a thread of each rank sends a heartbeat with its step and activity to rank 0, over a separate connection.
Rank 0 finds failed ranks (:mod:`.failure_detector`), and sends the failure to all other ranks. Each rank then ends its
process at once, because a thread that waits in a collective cannot be interrupted. Other ranks detect a failure of rank
0 by its missing heartbeats.

    with Watchdog(environment) as watchdog:
        watchdog.record_phase(step, "batch 1/2")     # only an assignment
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from streamtune.distributed.environment import RankEnvironment
from streamtune.distributed.failure import Failure, write_failure
from streamtune.distributed.failure_detector import (
    Heartbeat,
    Peer,
    Stragglers,
    WatchLimits,
    find_deadlock,
    find_unresponsive_rank,
    kill_stopped_process,
    process_identity,
)
from streamtune.distributed.process_activity import ProcessActivity
from streamtune.distributed.wire import Admission, Channel, connect_to_rank_0, listen_for_ranks
from streamtune.errors import ArgumentError, StreamTuneError

PURPOSE = "watch"
VARIABLE = "STREAMTUNE_WATCHDOG"
MAX_SECONDS = 10**6
SAMPLE_SECONDS = 0.1
BEAT_SECONDS = 1.0
PHASE_CHANGE_SECONDS = 0.2
"""Seconds from a heartbeat until a new step or phase is sent."""
SUSPENDED_SECONDS = 5.0
"""Seconds between two loops of the thread above which the process or the machine must have been suspended."""
FAILURE_WAIT_SECONDS = 4.0
"""Seconds that a rank whose collective failed waits for rank 0 to name the failed rank."""
EXIT_SECONDS = 10.0
"""Seconds after which a rank with an error is killed if it has not ended."""
COMMUNICATION_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")

ShowError = Callable[[StreamTuneError], None]
LogEvent = Callable[[str, dict[str, Any]], None]


def _print_error(error: StreamTuneError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


class Watchdog:
    """Context manager that watches all ranks, and ends this process if a rank fails; a no-op with one rank.

    ``STREAMTUNE_WATCHDOG=off`` disables it. A number sets the seconds without progress after which the run ends.

    Args:
        environment: Environment of this rank.
        show: Function that prints an error, called if no launcher prints it.
        event: Function that logs an event, given its name and details; called on rank 0, from another thread.
        limits: Time limits; None: from ``STREAMTUNE_WATCHDOG``, or the defaults.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        *,
        show: ShowError = _print_error,
        event: LogEvent = lambda name, details: None,
        limits: WatchLimits | None = None,
    ) -> None:
        self.environment = environment
        self.event = event
        """Function that logs an event; may be set later, when the run directory exists."""
        self._show = show
        self._phase = (0, "starting", False)
        configured_limits = _read_limits() if environment.world_size > 1 else None
        self._limits = limits or configured_limits or WatchLimits()
        self._enabled = configured_limits is not None
        self._failure: Failure | None = None
        self._failure_decided = threading.Event()
        self._exiting = threading.Event()
        """Set when the main thread leaves the context; then the watchdog does not end the process."""
        self._own_failure: Failure | None = None
        self._thread: threading.Thread | None = None
        self._endpoint: _Hub | _Client | None = None

    def record_phase(self, step: int, phase: str, *, waits_outside: bool = False) -> None:
        """Record the current step and phase of the main thread.

        Args:
            step: Step, counted from 1.
            phase: Description of the phase, such as ``batch 1/2``.
            waits_outside: True if the main thread may wait for something outside this process, such as a disk.
        """
        self._phase = (step, phase, waits_outside)

    @contextmanager
    def waiting_outside(self, doing: str) -> Iterator[None]:
        """Context manager in which the main thread may wait for something outside this process, such as a disk."""
        before = self._phase
        self.record_phase(before[0], doing, waits_outside=True)
        try:
            yield
        finally:
            self._phase = before

    def __enter__(self) -> Watchdog:
        if self._enabled:
            endpoint = _Hub if self.environment.is_main else _Client
            self._endpoint = endpoint(self.environment, self._limits, lambda name, details: self.event(name, details))
            self._thread = threading.Thread(target=self._run_thread, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if isinstance(error, Exception):
            # A collective fails if another rank has ended; the watchdog is informed a moment later.
            if _is_communication_error(error):
                self._failure_decided.wait(FAILURE_WAIT_SECONDS)
            self._exiting.set()
            if self._failure is not None and self._failure.rank != self.environment.rank:
                write_failure(replace(self._failure, own=False))
                self._log_failure(self._failure)
                self._kill_this_process_later()
                raise self._failure.to_error() from error
            self._own_failure = Failure.from_error(error, self.environment.rank, self.environment.host)
            self._kill_this_process_later()
        self._exiting.set()
        self._thread.join(FAILURE_WAIT_SECONDS)

    def _kill_this_process_later(self) -> None:
        """Kill the process after :data:`EXIT_SECONDS`, because leaving the process group may hang without the failed
        rank."""
        timer = threading.Timer(EXIT_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _log_failure(self, failure: Failure) -> None:
        if self.environment.is_main:
            details = {"rank": failure.rank, "host": failure.host, "what": failure.what}
            writing = threading.Thread(target=self.event, args=("rank failure", details), daemon=True)
            writing.start()
            writing.join(2.0)

    def _run_thread(self) -> None:
        assert self._endpoint is not None
        try:
            failure = self._watch(self._endpoint)
        finally:
            self._failure_decided.set()
        if failure is not None and not self._exiting.is_set():
            self._end_process(failure)

    def _watch(self, endpoint: _Hub | _Client) -> Failure | None:
        """Return the failure as soon as a rank has failed; None if the main thread leaves the context."""
        activity = ProcessActivity(endpoint.socket_descriptors)
        phase = sent_phase = self._phase
        last_loop_at = time.monotonic()
        sample_at = beat_at = last_loop_at
        try:
            while not self._exiting.is_set():
                endpoint.process_messages(SAMPLE_SECONDS)
                now = time.monotonic()
                if now - last_loop_at > SUSPENDED_SECONDS:
                    activity.discard_samples()
                    endpoint.reset_last_heard(now)
                last_loop_at = now
                activity.sample_main_thread()
                if (latest := self._phase) is not phase:
                    activity.record_progress()
                    phase = latest
                if now >= sample_at:
                    sample_at = now + BEAT_SECONDS
                    activity.ignored_descriptors = endpoint.socket_descriptors
                    activity.sample_process()
                if now >= beat_at or (phase is not sent_phase and now >= beat_at - BEAT_SECONDS + PHASE_CHANGE_SECONDS):
                    beat_at, sent_phase = now + BEAT_SECONDS, phase
                    endpoint.send_heartbeat(self._make_heartbeat(activity, phase), now)
                self._failure = endpoint.find_failure(now)
                if self._failure is not None:
                    self._failure_decided.set()
                    return self._failure
            return None
        finally:
            endpoint.close(self._own_failure, self._failure)

    @staticmethod
    def _make_heartbeat(activity: ProcessActivity, phase: tuple[int, str, bool]) -> Heartbeat:
        place, busy = activity.place, round(activity.busy_seconds, 3)
        times = activity.idle_seconds, activity.same_place_seconds
        return Heartbeat(*phase, *times, place.text, place.in_collective, busy, activity.broken_connection)

    def _end_process(self, failure: Failure) -> None:
        """Print the failure and end the process, unless the main thread leaves the context within 1 s."""
        env = self.environment
        if self._exiting.wait(1.0):
            return
        shown_elsewhere = write_failure(replace(failure, own=False))
        shows = env.is_main or (failure.rank == 0 and env.local_rank == (1 if failure.host == env.host else 0))
        self._log_failure(failure)
        if shows and not shown_elsewhere:
            with suppress(Exception):
                self._show(failure.to_error())
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def _read_limits() -> WatchLimits | None:
    """Return the time limits from ``STREAMTUNE_WATCHDOG``; None if the watchdog is off."""
    text = os.environ.get(VARIABLE, "")
    if text == "off":
        return None
    if not text:
        return WatchLimits()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= MAX_SECONDS:
        raise ArgumentError(
            f"{VARIABLE} must be off, or a number of seconds from 1 to {MAX_SECONDS:,}, found '{text[:40]}'",
            where=VARIABLE,
            fix="unset it for the default: the run ends after 16 seconds without progress on any rank",
        )
    defaults = WatchLimits()
    longer = {name: max(getattr(defaults, name), seconds) for name in ("same_place", "external_wait", "silence")}
    return replace(defaults, no_progress=seconds, **longer)


def _is_communication_error(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StreamTuneError):
            return False
        trace = cause.__traceback__
        while trace is not None:
            if "/torch/distributed/" in trace.tb_frame.f_code.co_filename:
                return True
            trace = trace.tb_next
        text = str(cause)
        if type(cause).__name__ in COMMUNICATION_ERRORS or "gloo" in text or "NCCL" in text or "closed by peer" in text:
            return True
        cause = cause.__cause__
    return False


class _Hub:
    """Watchdog connections of rank 0: receives all heartbeats, and sends failures to all other ranks."""

    def __init__(self, environment: RankEnvironment, limits: WatchLimits, event: LogEvent) -> None:
        self._env, self._limits, self._event = environment, limits, event
        self._selector = selectors.DefaultSelector()
        server, entries = listen_for_ranks(environment, PURPOSE), {"process": process_identity()}
        self._admission = Admission(server, environment, PURPOSE, entries, self._selector)
        self._started = time.monotonic()
        self._channels: dict[int, Channel] = {}
        self._reporting_ranks: set[int] = set()
        """Ranks that have sent a message after their admission."""
        self._peers: dict[int, Peer] = {0: Peer(0, environment.host, self._started)}
        self._received_failure: Failure | None = None
        self._stragglers = Stragglers(limits.straggler_window)

    @property
    def socket_descriptors(self) -> frozenset[int]:
        return frozenset(
            {*self._admission.socket_descriptors, *(channel.connection.fileno() for channel in self._channels.values())}
        )

    def process_messages(self, seconds: float) -> None:
        """Process messages and new connections, after waiting up to ``seconds`` for the first."""
        for key, _ in self._selector.select(seconds):
            if key.data is not self._admission:
                self._receive(key.data)
            elif (admitted := self._admission.process_ready_socket(key.fileobj)) is not None:
                self._add_rank(*admitted)
        self._admission.close_overdue_callers()
        if len(self._reporting_ranks) == self._env.world_size - 1:
            self._admission.close()

    def _add_rank(self, channel: Channel, greeting: dict[str, Any]) -> None:
        rank = greeting["rank"]
        try:
            machine, pid = greeting["process"]
            peer = Peer(rank, greeting["host"], time.monotonic(), (str(machine), int(pid)))
        except (KeyError, ValueError, TypeError):
            channel.close()
            return
        if (previous := self._channels.get(rank)) is not None:  # the rank has reconnected
            with suppress(KeyError, ValueError):
                self._selector.unregister(previous.connection)
            previous.close()
        self._channels[rank], self._peers[rank] = channel, peer
        self._selector.register(channel.connection, selectors.EVENT_READ, rank)

    def _receive(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            messages = self._channels[rank].receive_all()
        except OSError:
            self._selector.unregister(self._channels[rank].connection)
            messages = self._channels[rank].pop_received()
            peer.has_died = True
        for message in messages:
            peer.last_heard = time.monotonic()
            self._reporting_ranks.add(rank)
            if "beat" in message:
                peer.beat = Heartbeat.from_dict(message["beat"])
                self._stragglers.add_heartbeat(rank, peer.beat.step, peer.beat.busy_seconds, peer.last_heard)
            elif "bye" in message:
                peer.has_finished = True
            elif "failed" in message and self._received_failure is None:
                self._received_failure = Failure.from_dict(message["failed"])

    def send_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Send rank 0's heartbeat to all other ranks, and log slow ranks."""
        self._peers[0].beat, self._peers[0].last_heard = beat, now
        self._stragglers.add_heartbeat(0, beat.step, beat.busy_seconds, now)
        for rank, channel in self._channels.items():
            if not self._peers[rank].has_died:
                with suppress(OSError):  # the buffer of a stopped rank fills up; `find_failure` reports that rank
                    channel.send({"tick": True, "beat": asdict(beat)}, seconds=0.05)
        for rank, seconds, median in self._stragglers.new_stragglers():
            details = {"rank": rank, "host": self._peers[rank].host, "seconds_per_step": round(seconds, 3)}
            self._event("straggler", {**details, "median_of_others": round(median, 3)})

    def reset_last_heard(self, now: float) -> None:
        """Count all ranks as heard at ``now``, because this process was suspended and could receive nothing."""
        for peer in self._peers.values():
            peer.last_heard = now

    def find_failure(self, now: float) -> Failure | None:
        """Return a failure that a rank has sent or that the heartbeats show; None if there is none."""
        if self._received_failure is not None:
            return self._received_failure
        missing = [rank for rank in range(self._env.world_size) if rank not in self._peers]
        if missing:
            if now - self._started < self._limits.start:
                return find_unresponsive_rank(self._peers.values(), now, self._limits)
            what = f"rank {missing[0]} did not start training within {self._limits.start:.0f} s"
            return Failure(missing[0], "?", what, fix="see its log", own=False, seen="missing")
        return find_unresponsive_rank(self._peers.values(), now, self._limits) or find_deadlock(
            self._peers.values(), self._limits
        )

    def close(self, own_failure: Failure | None, other_failure: Failure | None) -> None:
        """Send the failure, if any, or the end of this rank to all other ranks, and close all connections."""
        failure = own_failure or other_failure
        message = {"verdict": asdict(failure)} if failure is not None else {"bye": True}
        for rank, channel in self._channels.items():
            if not self._peers[rank].has_died:
                with suppress(OSError):
                    channel.send(message, seconds=0.2)
                    channel.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 1.0
        for rank, channel in self._channels.items():
            with suppress(OSError):
                while failure is not None and not self._peers[rank].has_died and time.monotonic() < deadline:
                    channel.receive(deadline - time.monotonic())
            channel.close()
        for peer in self._peers.values():
            if failure is not None and peer.rank == failure.rank:
                kill_stopped_process(peer)
        self._admission.close()
        self._selector.close()


class _Client:
    """Watchdog connection of a rank other than 0: sends heartbeats to rank 0, and receives heartbeats and failures."""

    def __init__(self, environment: RankEnvironment, limits: WatchLimits, event: LogEvent) -> None:
        self._env, self._limits = environment, limits
        self._channel = connect_to_rank_0(environment, PURPOSE, {"process": process_identity()}, limits.start)
        greeting = self._channel.greeting
        machine, pid = greeting["process"]
        self._main = Peer(0, greeting["host"], time.monotonic(), (machine, pid))
        self._received_failure: Failure | None = None

    @property
    def socket_descriptors(self) -> frozenset[int]:
        return frozenset({self._channel.connection.fileno()})

    def process_messages(self, seconds: float) -> None:
        """Process messages from rank 0, after waiting up to ``seconds`` for the first."""
        if self._main.has_died or self._main.has_finished:
            time.sleep(seconds)
            return
        messages = []
        try:
            messages.append(self._channel.receive(seconds))
            messages += self._channel.receive_all()
        except TimeoutError:
            return
        except OSError:
            messages += self._channel.pop_received()
            self._main.has_died = True
        for message in messages:
            self._main.last_heard = time.monotonic()
            if "beat" in message:
                self._main.beat = Heartbeat.from_dict(message["beat"])
            elif "bye" in message:
                self._main.has_finished = True
            elif "verdict" in message:
                self._received_failure = Failure.from_dict(message["verdict"])

    def send_heartbeat(self, beat: Heartbeat, now: float) -> None:
        with suppress(OSError):
            self._channel.send({"beat": asdict(beat)}, seconds=0.5)

    def reset_last_heard(self, now: float) -> None:
        """Count rank 0 as heard at ``now``, because this process was suspended and could receive nothing."""
        self._main.last_heard = now

    def find_failure(self, now: float) -> Failure | None:
        """Return a failure that rank 0 has sent, or the failure of rank 0 itself; None if there is none."""
        return self._received_failure or find_unresponsive_rank([self._main], now, self._limits)

    def close(self, own_failure: Failure | None, other_failure: Failure | None) -> None:
        with suppress(OSError):
            self._channel.send({"failed": asdict(own_failure)} if own_failure is not None else {"bye": True})
        self._channel.close()
        if other_failure is not None and other_failure.rank == 0:
            kill_stopped_process(self._main)
