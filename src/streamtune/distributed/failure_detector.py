"""Decide from the heartbeats of all ranks which rank has failed."""

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
from streamtune.distributed.process_activity import is_computing

CPU_CHECK_SECONDS = 0.5
ALIVE_SECONDS = 5.0
"""Seconds since a process last computed within which the process counts as alive, even if it sends nothing."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class WatchLimits:
    """Time limits, in seconds, after which a rank counts as failed."""

    silence: float = 15.0
    """Time without a message from a rank, after which the rank counts as stopped or unreachable."""
    no_progress: float = 16.0
    """Time without progress on any rank, after which the ranks count as deadlocked."""
    same_place: float = 1800.0
    """Time in which all main threads stay at the same line of code, even if they use the CPU."""
    external_wait: float = 7200.0
    """Time that a rank may wait for something outside the process, such as a reward function or a disk."""
    start: float = 900.0
    """Time until the slowest rank must have connected."""
    straggler_window: float = 30.0
    """Shortest time over which the speed of a rank is measured, to find stragglers."""


@dataclass(frozen=True)
class Heartbeat:
    """Activity of a rank, which the rank sends about once a second."""

    step: int = 0
    phase: str = "starting"
    waits_outside: bool = False
    """True if the rank may wait for something outside the process, such as a reward function or a disk."""
    idle_seconds: float = 0.0
    """Seconds since the process last used the CPU, files or network."""
    same_place_seconds: float = 0.0
    """Seconds since the main thread last moved to another line of code."""
    place: str = ""
    """Function and line of the main thread, such as ``all_reduce (train/step.py:88)``."""
    in_collective: bool = False
    busy_seconds: float = 0.0
    """Total seconds in which the main thread did not wait for other ranks."""
    broken_connection: str = ""
    """Remote address of a TCP connection whose data is not acknowledged; empty if there is none."""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Heartbeat:
        """Return the heartbeat from the result of :func:`dataclasses.asdict`; unknown keys are ignored."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__ if name in document})

    @property
    def step_text(self) -> str:
        """Text such as ``in step 3, batch 1/2``."""
        return f"in step {self.step}, {self.phase}" if self.step else "before the first step"

    @property
    def line_text(self) -> str:
        """Text such as ``waits in all_reduce (train/step.py:88)``."""
        return f"{'waits' if self.in_collective else 'is'} in {self.place}"


@dataclass
class Peer:
    """Last known state of a rank."""

    rank: int
    host: str
    last_heard: float
    """Monotonic time in seconds of the rank's last message."""
    process: tuple[str, int] = ("", 0)
    """Machine and process id of the rank, from :func:`process_identity`."""
    beat: Heartbeat = field(default_factory=Heartbeat)
    has_finished: bool = False
    """True if the rank has reported that it finished."""
    has_died: bool = False
    """True if the connection was closed although the rank had not finished."""
    cpu_times: tuple[float, float] = (0.0, 0.0)
    """Seconds that the process ran, and waited for a CPU core, at the last check; 0 for a rank on another machine."""
    checked_at: float = float("-inf")
    """Monotonic time in seconds at which ``cpu_times`` was read."""
    computed_at: float = float("-inf")
    """Monotonic time in seconds at which the process was last seen to use the CPU."""
    was_stopped: bool = False
    """True if the process was stopped by a signal (SIGSTOP) since its last message."""


def process_identity() -> tuple[str, int]:
    """Return an id of the machine (boot id and Linux namespaces; empty if unknown), and the process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path(f"/proc/self/ns/{space}").readlink()) for space in ("pid", "net")]
        return "/".join([boot, *spaces]), os.getpid()
    except OSError:
        return "", os.getpid()


def find_unresponsive_rank(peers: Iterable[Peer], now: float, limits: WatchLimits) -> Failure | None:
    """Return the failure of a rank that is dead, stopped or unreachable; None if there is none."""
    peers = [peer for peer in peers if not peer.has_finished]
    for peer in peers:
        if peer.has_died:
            what = f"rank {peer.rank} on {peer.host} died without reporting an error, {peer.beat.step_text}"
            return Failure(peer.rank, peer.host, what, fix="see its log", own=False, seen="died")
    for peer in peers:
        if now - peer.last_heard > limits.silence / 3:
            _check_silent_process(peer, now)
        else:
            peer.was_stopped = False
    silent = [p for p in peers if now - p.last_heard > limits.silence and now - p.computed_at > ALIVE_SECONDS]
    if not silent:
        return None
    first = silent[0]
    hosts = sorted({peer.host for peer in silent})
    who = f"{describe_ranks([peer.rank for peer in silent])} on {', '.join(hosts)}"
    have = "have" if len(silent) > 1 else "has"
    # A process that dies closes its connection. So a silent rank that is gone had been stopped, and was then killed.
    stopped = first.was_stopped or _process_has_ended(first)
    why = "stopped by a signal" if stopped else "stopped or unreachable"
    what = f"{who} {have} not responded for {limits.silence:.0f} s: {why}, {first.beat.step_text}"
    fix = (
        f"find out who sent SIGSTOP to process {first.process[1]}"
        if stopped
        else f"check that {hosts[0]} runs and that its network is up"
    )
    return Failure(
        first.rank, first.host, f"{what}\nits last report: {first.beat.line_text}", fix=fix, own=False, seen="silent"
    )


def _check_silent_process(peer: Peer, now: float) -> None:
    """Record whether a rank on this machine that sends nothing still uses the CPU, or is stopped by a signal."""
    state, (ran, waited) = _process_state(peer), _cpu_seconds(peer)
    # Stays True, because a stopped rank that is killed runs for a moment. A rank that continues sends messages again.
    peer.was_stopped = peer.was_stopped or state in ("T", "t")
    if now - peer.checked_at >= CPU_CHECK_SECONDS:
        # The watchdog thread alone uses one or two percent of a core, also if only the network is down.
        if is_computing(ran - peer.cpu_times[0], waited - peer.cpu_times[1], now - peer.checked_at):
            peer.computed_at = now
        peer.cpu_times, peer.checked_at = (ran, waited), now


def kill_stopped_process(peer: Peer) -> None:
    """Kill a rank on this machine that is stopped by a signal, because it cannot notice that other ranks ended."""
    if _process_state(peer) in ("T", "t"):
        with suppress(OSError):
            os.kill(peer.process[1], signal.SIGKILL)


def _process_has_ended(peer: Peer) -> bool:
    return bool(peer.process[0]) and peer.process[0] == process_identity()[0] and _process_state(peer) in ("", "Z", "X")


def _proc_stat_fields(peer: Peer) -> list[str]:
    if not peer.process[0] or peer.process[0] != process_identity()[0]:
        return []
    try:
        return Path(f"/proc/{peer.process[1]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def _process_state(peer: Peer) -> str:
    fields = _proc_stat_fields(peer)
    return fields[0] if fields else ""


def _cpu_seconds(peer: Peer) -> tuple[float, float]:
    """Return (seconds run, seconds waited for a CPU core), each summed over a rank's threads; 0 if unknown."""
    fields = _proc_stat_fields(peer)
    if not fields:
        return 0.0, 0.0
    try:
        tasks = list(Path(f"/proc/{peer.process[1]}/task").iterdir())
        times = [(task / "schedstat").read_text(encoding="ascii").split() for task in tasks]
        return sum(int(ran) for ran, *_ in times) * 1e-9, sum(int(waited) for _, waited, _ in times) * 1e-9
    except (OSError, ValueError):
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS, 0.0


def find_deadlock(peers: Iterable[Peer], limits: WatchLimits) -> Failure | None:
    """Return a failure if no unfinished rank makes progress; None if at least one does.

    While one rank computes, the other ranks may wait for it as long as needed.
    """
    left = [peer for peer in peers if not peer.has_finished]
    if not left or any(peer.beat.phase == "starting" for peer in left):
        return None
    outside = [peer for peer in left if not peer.beat.in_collective]
    waiting = [peer for peer in outside if peer.beat.waits_outside]
    still = min(peer.beat.idle_seconds for peer in left)
    placed = min(peer.beat.same_place_seconds for peer in left)
    longest = limits.external_wait if waiting else limits.same_place
    if still < (limits.external_wait if waiting else limits.no_progress) and placed < longest:
        return None
    seconds = max(still, placed if placed >= longest else 0.0)
    first = (waiting or outside or left)[0]
    lines = [f"- {who} {standing}" for standing, who in _group_by_code_line(left)]
    cut = [peer for peer in left if peer.beat.broken_connection]
    lines += [f"- data from rank {p.rank} on {p.host} to {p.beat.broken_connection} does not arrive" for p in cut[:8]]
    if outside and len(outside) < len(left):
        who = f"{describe_ranks([peer.rank for peer in outside])} on {', '.join(sorted({p.host for p in outside}))}"
        have = "have" if len(outside) > 1 else "has"
        head = f"{who} {have} made no progress for {seconds:.0f} s while the others wait, {first.beat.step_text}"
        fix = "see the line of code where it hangs, and its log"
    else:
        head = f"deadlock: no rank has made progress for {seconds:.0f} s, {first.beat.step_text}"
        same = len({peer.beat.place.partition(" ")[0] for peer in left}) == 1
        if cut or (same and not outside):  # if a connection breaks, one rank may be a collective ahead
            fix = "a connection between them is blocked: check the network and firewalls of the hosts"
        elif outside:
            fix = "see the lines of code where they hang"
        else:
            fix = "they wait in different collectives: find out why one rank took another code path"
    return Failure(first.rank, first.host, "\n".join([head, *lines]), fix=fix, own=False, seen="still")


def _group_by_code_line(peers: Sequence[Peer]) -> list[tuple[str, str]]:
    peers_by_line: dict[str, list[Peer]] = {}
    for peer in peers:
        peers_by_line.setdefault(peer.beat.line_text, []).append(peer)
    return [
        (
            standing if len(who) == 1 else standing.replace("waits in", "wait in", 1).replace("is in", "are in", 1),
            f"{describe_ranks([p.rank for p in who])} on {', '.join(sorted({p.host for p in who})[:4])}",
        )
        for standing, who in list(peers_by_line.items())[:8]
    ]


class Stragglers:
    """Finds slow ranks: their seconds per step, without waiting for other ranks, are far above the other ranks' median.

    Args:
        window_seconds: Shortest time over which a rank is measured.
        ratio: Multiple of the median above which a rank is slow.
        min_steps: Smallest number of steps over which a rank is measured.
        min_excess: Seconds per step above the median from which on a rank is slow.
    """

    def __init__(
        self, window_seconds: float, ratio: float = 1.5, min_steps: int = 20, min_excess: float = 0.05
    ) -> None:
        self._window_seconds, self._ratio = window_seconds, ratio
        self._min_steps, self._min_excess = min_steps, min_excess
        self._reports: dict[int, deque[tuple[int, float, float]]] = {}
        self._reported: set[int] = set()

    def add_heartbeat(self, rank: int, step: int, busy_seconds: float, now: float) -> None:
        """Add step and busy seconds of a heartbeat that arrived at the monotonic time ``now``."""
        reports = self._reports.setdefault(rank, deque())
        if reports and step < reports[-1][0]:
            reports.clear()
        if not reports or step > reports[-1][0]:
            reports.append((step, busy_seconds, now))
        while len(reports) > 2 and self._is_long_enough(reports, 1):
            reports.popleft()

    def _is_long_enough(self, reports: deque[tuple[int, float, float]], start: int = 0) -> bool:
        first, last = reports[start], reports[-1]
        return last[0] - first[0] >= self._min_steps and last[2] - first[2] >= self._window_seconds

    def new_stragglers(self) -> list[tuple[int, float, float]]:
        """Return (rank, seconds per step, median of the other ranks) of each slow rank that was not returned before."""
        step_seconds = {
            rank: (reports[-1][1] - reports[0][1]) / (reports[-1][0] - reports[0][0])
            for rank, reports in self._reports.items()
            if len(reports) > 1 and self._is_long_enough(reports)
        }
        if len(step_seconds) < max(2, len(self._reports)):
            return []
        slow = []
        for rank, seconds in step_seconds.items():
            median = statistics.median(other for peer, other in step_seconds.items() if peer != rank)
            if seconds > self._ratio * median and seconds - median > self._min_excess and rank not in self._reported:
                self._reported.add(rank)
                slow.append((rank, seconds, median))
        return slow
