"""Verdicts on ranks: the rank at fault, found from the reports of all. The functions read no clock."""

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
"""A process that computed within so many seconds is alive, even if other processes take all cores."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class WatchLimits:
    """Limits in seconds, beyond which ranks are at fault."""

    silence: float = 15.0
    """Without a message from a rank: it is stopped, or its machine cannot be reached."""
    stillness: float = 16.0
    """All ranks stand still for so long (and the window of ``vitals``, 4 s): nobody does the work that they wait
    for."""
    place: float = 1800.0
    """Every main thread is at one place for so long, even if it keeps a core busy there, as it does while it waits for
    an accelerator.
    """
    waiting: float = 7200.0
    """A rank waits for so long for something outside: a reward's answer, a disk."""
    start: float = 900.0
    """Wait for the slowest rank to come."""
    course: float = 30.0
    """Shortest measurement of a slow rank."""


@dataclass(frozen=True)
class Beat:
    """Report of a rank on itself, about once a second."""

    step: int = 0
    phase: str = "starting"
    patient: bool = False
    """True if it may wait for something outside: a reward's answer, a slow disk."""
    still: float = 0.0
    """Seconds without computing, reading, writing or sending."""
    placed: float = 0.0
    """Seconds that its main thread has been at one place."""
    place: str = ""
    collective: bool = False
    busy: float = 0.0
    """Seconds since the start in which its main thread did not wait for other ranks."""
    unanswered: str = ""
    """Address of a connection whose other end does not acknowledge."""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Beat:
        """Make a report from :func:`dataclasses.asdict`; keys of another version are left out."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__ if name in document})

    @property
    def doing(self) -> str:
        """The step and its phase: ``in step 3, batch 1/2``."""
        return f"in step {self.step}, {self.phase}" if self.step else "before the first step"

    @property
    def standing(self) -> str:
        """The place of the main thread: ``waits in all_reduce (train/step.py:88)``."""
        return f"{'waits' if self.collective else 'stands'} in {self.place}"


@dataclass
class Peer:
    """State of a rank, as far as it is known."""

    rank: int
    host: str
    last_heard: float
    """Time of its last message."""
    process: tuple[str, int] = ("", 0)
    """:func:`this_process` of that rank."""
    beat: Beat = field(default_factory=Beat)
    done: bool = False
    """True if it has said that it is done."""
    gone: bool = False
    """True if its connection was closed without a word."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """CPU seconds of its process and seconds that it waited for a core, at the last look, if it is on this machine."""
    looked: float = float("-inf")
    """Time of the last look."""
    ran: float = float("-inf")
    """Time at which it was last seen to compute."""
    was_stopped: bool = False
    """True if a signal had stopped it at a look since its last message. Another rank may have killed it since."""


def this_process() -> tuple[str, int]:
    """Return a name of the machine (boot, and name spaces of processes and network) and the process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path(f"/proc/self/ns/{space}").readlink()) for space in ("pid", "net")]
        return "/".join([boot, *spaces]), os.getpid()
    except OSError:
        return "", os.getpid()


def find_failure(peers: Iterable[Peer], now: float, limits: WatchLimits) -> Failure | None:
    """Return the failure of a rank that is gone, stopped or out of reach; None if all are well."""
    peers = [peer for peer in peers if not peer.done]
    for peer in peers:
        if peer.gone:
            what = f"rank {peer.rank} on {peer.host} died without a word, {peer.beat.doing}"
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
    # A dead rank would have closed its connection: a silent rank that is gone was killed by another for that.
    stopped = first.was_stopped or _is_gone(first)
    why = "stopped by a signal" if stopped else "stopped, or out of reach"
    what = f"{who} {have} said nothing for {limits.silence:.0f} s: {why}, {first.beat.doing}"
    fix = (
        f"find out who sent SIGSTOP to process {first.process[1]}"
        if stopped
        else f"see whether {hosts[0]} runs, and whether its network is up"
    )
    return Failure(
        first.rank, first.host, f"{what}\nlast seen: it {first.beat.standing}", fix=fix, own=False, seen="silent"
    )


def _watch_from_outside(peer: Peer, now: float) -> None:
    """Record whether a silent rank on this machine still computes: a library may hold the interpreter's lock."""
    state, (ran, waited) = _state(peer), _cpu_seconds(peer)
    # Another rank may end it meanwhile: then it runs for a moment until it is gone. A rank that goes on is heard again.
    peer.was_stopped = peer.was_stopped or state in ("T", "t")
    if now - peer.looked >= LOOK_SECONDS:
        # Its watchdog alone takes a percent or two, which it also does where only the network is gone.
        if computes(ran - peer.seconds[0], waited - peer.seconds[1], now - peer.looked):
            peer.ran = now
        peer.seconds, peer.looked = (ran, waited), now


def end_stopped(peer: Peer) -> None:
    """Kill the process of a stopped rank on this machine, which could not notice that the others have ended."""
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
    """Return the seconds that the threads of its process had a core and waited for one; 0 if unknown."""
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
    """Return a failure if all ranks that are left stand still and wait in vain; None if one of them moves.

    A rank that computes may keep all others waiting for as long as it takes: that is not a deadlock.
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
    lines += [f"- what rank {p.rank} on {p.host} sends to {p.beat.unanswered} does not arrive" for p in cut[:8]]
    if outside and len(outside) < len(left):
        who = f"{describe_ranks([peer.rank for peer in outside])} on {', '.join(sorted({p.host for p in outside}))}"
        have = "have" if len(outside) > 1 else "has"
        head = f"{who} {have} stood still for {seconds:.0f} s while the others wait, {first.beat.doing}"
        fix = "see the line it stands at, and its log"
    else:
        head = f"all ranks have stood still for {seconds:.0f} s, {first.beat.doing}: nothing is computed or sent"
        same = len({peer.beat.place.partition(" ")[0] for peer in left}) == 1
        if cut or (same and not outside):  # one may be a step ahead of the other when their connection breaks
            fix = "a connection between them is blocked: see the network and the firewalls of the hosts"
        elif outside:
            fix = "see the lines they stand at"
        else:
            fix = "they stand in different places: see whether one left the path that the others took"
    return Failure(first.rank, first.host, "\n".join([head, *lines]), fix=fix, own=False, seen="still")


def _by_place(peers: Sequence[Peer]) -> list[tuple[str, str]]:
    peers_by_place: dict[str, list[Peer]] = {}
    for peer in peers:
        peers_by_place.setdefault(peer.beat.standing, []).append(peer)
    return [
        (
            standing if len(who) == 1 else standing.replace("waits", "wait", 1).replace("stands", "stand", 1),
            f"{describe_ranks([p.rank for p in who])} on {', '.join(sorted({p.host for p in who})[:4])}",
        )
        for standing, who in list(peers_by_place.items())[:8]
    ]


class Stragglers:
    """Finds ranks that take much longer than the median for their part of each step.

    They take more than ``ratio`` times the median and ``seconds`` longer a step. At least ``course`` seconds and
    ``steps`` are measured: the time a rank waits is sampled.
    """

    def __init__(self, course: float, ratio: float = 1.5, steps: int = 20, seconds: float = 0.05) -> None:
        self._course, self._ratio, self._steps, self._seconds = course, ratio, steps, seconds
        self._courses: dict[int, deque[tuple[int, float, float]]] = {}
        self._named: set[int] = set()

    def add(self, rank: int, step: int, busy: float, now: float) -> None:
        """Add a report at time ``now``: when a rank came to ``step`` it had been busy for ``busy`` seconds."""
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
        """Return each slow rank once, with its seconds a step and the median of the others."""
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
