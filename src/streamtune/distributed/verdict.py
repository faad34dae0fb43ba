"""Find the rank at fault from the reports of all ranks. The functions take the time as an argument."""

from __future__ import annotations

import os
import signal
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamtune.distributed.agree import describe_ranks
from streamtune.distributed.failure import Failure
from streamtune.distributed.vitals import computes

LOOK_SECONDS = 0.5
RAN_SECONDS = 5.0
"""Seconds since a process last computed within which it counts as alive, even if other processes take all cores."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class WatchLimits:
    """Time limits in seconds after which a rank counts as failed."""

    silence: float = 15.0
    """Without a message from a rank: it is stopped, or its machine cannot be reached."""
    stillness: float = 16.0
    """Without progress on any rank (plus the window of ``vitals``, 4 s): the ranks are deadlocked."""
    place: float = 1800.0
    """With every main thread at the same place in the code, even if it keeps a core busy, as when it waits for an
    accelerator.
    """
    waiting: float = 7200.0
    """With a rank waiting for something outside, such as a reward function or a disk."""
    start: float = 900.0
    """Until the slowest rank has connected."""
    course: float = 30.0
    """Shortest time over which a slow rank is measured."""


@dataclass(frozen=True)
class Beat:
    """The report that a rank sends about itself, about once a second."""

    step: int = 0
    phase: str = "starting"
    patient: bool = False
    """True if it may wait for something outside, such as a reward function or a slow disk."""
    still: float = 0.0
    """Seconds since it last computed, read, wrote or sent."""
    placed: float = 0.0
    """Seconds since its main thread last moved to another place in the code."""
    place: str = ""
    collective: bool = False
    busy: float = 0.0
    """Seconds since the start in which its main thread did not wait for other ranks."""
    unanswered: str = ""
    """Address of a connection whose other end does not acknowledge data; empty if there is none."""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Beat:
        """Return the report from the dict of :func:`dataclasses.asdict`; unknown keys are ignored."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__ if name in document})

    @property
    def doing(self) -> str:
        """Step and phase as text, such as ``in step 3, batch 1/2``."""
        return f"in step {self.step}, {self.phase}" if self.step else "before the first step"

    @property
    def standing(self) -> str:
        """Place of the main thread as text, such as ``waits in all_reduce (train/step.py:88)``."""
        return f"{'waits' if self.collective else 'is'} in {self.place}"


@dataclass
class Peer:
    """The state of a rank, as far as it is known."""

    rank: int
    host: str
    last_heard: float
    """Time of its last message."""
    process: tuple[str, int] = ("", 0)
    """:func:`this_process` of that rank."""
    beat: Beat = field(default_factory=Beat)
    done: bool = False
    """True if it has reported that it is done."""
    gone: bool = False
    """True if its connection was closed without a goodbye."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """CPU seconds of its process, and seconds that it waited for a core, at the last check; 0 on other machines."""
    looked: float = float("-inf")
    """Time of the last check."""
    ran: float = float("-inf")
    """Time of the last check that found it computing."""
    was_stopped: bool = False
    """True if a check since its last message found it stopped by a signal; another rank may have killed it since."""


def this_process() -> tuple[str, int]:
    """Return a unique name of the machine (boot id and the process's namespaces) and the process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path(f"/proc/self/ns/{space}").readlink()) for space in ("pid", "net")]
        return "/".join([boot, *spaces]), os.getpid()
    except OSError:
        return "", os.getpid()


def find_failure(peers: Iterable[Peer], now: float, limits: WatchLimits) -> Failure | None:
    """Return the failure of a rank that is dead, stopped or unreachable; None if all ranks are well.

    Args:
        peers: State of each rank.
        now: Monotonic time.
        limits: Time limits.
    """
    peers = [peer for peer in peers if not peer.done]
    for peer in peers:
        if peer.gone:
            what = f"rank {peer.rank} on {peer.host} died without reporting an error, {peer.beat.doing}"
            return Failure(peer.rank, peer.host, what, fix="see its log", own=False, seen="died")
    for peer in peers:
        if now - peer.last_heard > limits.silence / 3:
            _watch_from_outside(peer, now)
        else:
            peer.was_stopped = False
    silent = [peer for peer in peers if now - peer.last_heard > limits.silence and now - peer.ran > RAN_SECONDS]
    if not silent:
        return None
    first = silent[0]
    hosts = sorted({peer.host for peer in silent})
    who = f"{describe_ranks([peer.rank for peer in silent])} on {', '.join(hosts)}"
    have = "have" if len(silent) > 1 else "has"
    # A process that dies closes its connection. So a silent rank that is gone had been stopped, and was then killed.
    stopped = first.was_stopped or _is_gone(first)
    why = "stopped by a signal" if stopped else "stopped or unreachable"
    what = f"{who} {have} not responded for {limits.silence:.0f} s: {why}, {first.beat.doing}"
    fix = (
        f"find out who sent SIGSTOP to process {first.process[1]}"
        if stopped
        else f"check that {hosts[0]} runs and that its network is up"
    )
    return Failure(
        first.rank, first.host, f"{what}\nits last report: {first.beat.standing}", fix=fix, own=False, seen="silent"
    )


def _watch_from_outside(peer: Peer, now: float) -> None:
    """Record whether a silent rank on this machine still computes; it is silent if a library holds the GIL."""
    state, (ran, waited) = _state(peer), _cpu_seconds(peer)
    # Kept, because a rank that another one kills runs for a moment. A rank that continues sends messages again.
    peer.was_stopped = peer.was_stopped or state in ("T", "t")
    if now - peer.looked >= LOOK_SECONDS:
        # The watchdog thread alone takes one or two percent of a core, also if only the network is down.
        if computes(ran - peer.seconds[0], waited - peer.seconds[1], now - peer.looked):
            peer.ran = now
        peer.seconds, peer.looked = (ran, waited), now


def end_stopped(peer: Peer) -> None:
    """Kill a rank's process on this machine if a signal has stopped it; it cannot notice that the others ended."""
    if _state(peer) in ("T", "t"):
        with suppress(OSError):
            os.kill(peer.process[1], signal.SIGKILL)


def _is_gone(peer: Peer) -> bool:
    return bool(peer.process[0]) and peer.process[0] == this_process()[0] and _state(peer) in ("", "Z", "X")


def _stat(peer: Peer) -> list[str]:
    if not peer.process[0] or peer.process[0] != this_process()[0]:
        return []
    try:
        return Path(f"/proc/{peer.process[1]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def _state(peer: Peer) -> str:
    fields = _stat(peer)
    return fields[0] if fields else ""


def _cpu_seconds(peer: Peer) -> tuple[float, float]:
    """Return the seconds that a rank's threads ran, and the seconds that they waited for a core; 0 if unknown."""
    fields = _stat(peer)
    if not fields:
        return 0.0, 0.0
    try:
        tasks = list(Path(f"/proc/{peer.process[1]}/task").iterdir())
        times = [(task / "schedstat").read_text(encoding="ascii").split() for task in tasks]
        return sum(int(ran) for ran, *_ in times) * 1e-9, sum(int(waited) for _, waited, _ in times) * 1e-9
    except (OSError, ValueError):
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS, 0.0


def find_deadlock(peers: Iterable[Peer], limits: WatchLimits) -> Failure | None:
    """Return a failure if no remaining rank makes progress; None if one of them does.

    If one rank computes, the others may wait for it for any time; that is not a deadlock.

    Args:
        peers: State of each rank.
        limits: Time limits.
    """
    left = [peer for peer in peers if not peer.done]
    if not left or any(peer.beat.phase == "starting" for peer in left):
        return None
    outside = [peer for peer in left if not peer.beat.collective]
    waiting = [peer for peer in outside if peer.beat.patient]
    still = min(peer.beat.still for peer in left)
    placed = min(peer.beat.placed for peer in left)
    longest = limits.waiting if waiting else limits.place
    if still < (limits.waiting if waiting else limits.stillness) and placed < longest:
        return None
    seconds = max(still, placed if placed >= longest else 0.0)
    first = (waiting or outside or left)[0]
    lines = [f"- {who} {standing}" for standing, who in _by_place(left)]
    cut = [peer for peer in left if peer.beat.unanswered]
    lines += [f"- data from rank {p.rank} on {p.host} to {p.beat.unanswered} does not arrive" for p in cut[:8]]
    if outside and len(outside) < len(left):
        who = f"{describe_ranks([peer.rank for peer in outside])} on {', '.join(sorted({p.host for p in outside}))}"
        have = "have" if len(outside) > 1 else "has"
        head = f"{who} {have} made no progress for {seconds:.0f} s while the others wait, {first.beat.doing}"
        fix = "see the line of code where it hangs, and its log"
    else:
        head = f"deadlock: no rank has made progress for {seconds:.0f} s, {first.beat.doing}"
        same = len({peer.beat.place.partition(" ")[0] for peer in left}) == 1
        if cut or (same and not outside):  # if a connection breaks, one rank may be a step ahead of the other
            fix = "a connection between them is blocked: check the network and firewalls of the hosts"
        elif outside:
            fix = "see the lines of code where they hang"
        else:
            fix = "they wait in different collectives: find out why one rank took another path"
    return Failure(first.rank, first.host, "\n".join([head, *lines]), fix=fix, own=False, seen="still")


def _by_place(peers: Sequence[Peer]) -> list[tuple[str, str]]:
    peers_by_place: dict[str, list[Peer]] = {}
    for peer in peers:
        peers_by_place.setdefault(peer.beat.standing, []).append(peer)
    return [
        (
            standing if len(who) == 1 else standing.replace("waits in", "wait in", 1).replace("is in", "are in", 1),
            f"{describe_ranks([p.rank for p in who])} on {', '.join(sorted({p.host for p in who})[:4])}",
        )
        for standing, who in list(peers_by_place.items())[:8]
    ]


class Stragglers:
    """Finds ranks that take much longer for a step than the median of the others, without waiting for other ranks.

    Args:
        course: Shortest time over which a rank is measured, in seconds; waiting is only sampled, so it must be long.
        ratio: Multiple of the median above which a rank is slow.
        steps: Smallest number of steps that are measured.
        seconds: Smallest number of seconds per step by which a slow rank exceeds the median.
    """

    def __init__(self, course: float, ratio: float = 1.5, steps: int = 20, seconds: float = 0.05) -> None:
        self._course, self._ratio, self._steps, self._seconds = course, ratio, steps, seconds
        self._courses: dict[int, deque[tuple[int, float, float]]] = {}
        self._named: set[int] = set()

    def add(self, rank: int, step: int, busy: float, now: float) -> None:
        """Add a report of a rank.

        Args:
            rank: The rank.
            step: Current step of the rank.
            busy: Seconds since its start in which it did not wait for other ranks.
            now: Monotonic time of the report.
        """
        course = self._courses.setdefault(rank, deque())
        if course and step < course[-1][0]:
            course.clear()
        if not course or step > course[-1][0]:
            course.append((step, busy, now))
        while len(course) > 2 and self._is_long(course, 1):
            course.popleft()

    def _is_long(self, course: deque[tuple[int, float, float]], start: int = 0) -> bool:
        first, last = course[start], course[-1]
        return last[0] - first[0] >= self._steps and last[2] - first[2] >= self._course

    def found(self) -> list[tuple[int, float, float]]:
        """Return newly found slow ranks, with their seconds per step and the median of the others."""
        step_seconds = {
            rank: (course[-1][1] - course[0][1]) / (course[-1][0] - course[0][0])
            for rank, course in self._courses.items()
            if len(course) > 1 and self._is_long(course)
        }
        if len(step_seconds) < max(2, len(self._courses)):
            return []
        slow = []
        for rank, seconds in step_seconds.items():
            median = statistics.median(other for peer, other in step_seconds.items() if peer != rank)
            if seconds > self._ratio * median and seconds - median > self._seconds and rank not in self._named:
                self._named.add(rank)
                slow.append((rank, seconds, median))
        return slow
