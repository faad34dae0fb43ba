"""Decide from the heartbeats of all ranks which rank has failed. The functions receive the time as an argument."""

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
    """Time limits in seconds after which a rank counts as failed."""

    silence: float = 15.0
    """Seconds without a message from a rank, after which the rank counts as stopped or unreachable."""
    no_progress: float = 16.0
    """Seconds without progress on any rank (plus the window of ``process_activity``, 4 s): a deadlock."""
    same_place: float = 1800.0
    """Seconds with every main thread at the same line, even if the threads compute, as in a wait for an accelerator."""
    external_wait: float = 7200.0
    """Seconds in which a rank waits for something outside the process, such as a reward function or a disk."""
    start: float = 900.0
    """Seconds until the slowest rank has connected."""
    straggler_window: float = 30.0
    """Shortest time in seconds over which a slow rank is measured."""


@dataclass(frozen=True)
class Heartbeat:
    """Message about a rank's activity, which the rank sends about once a second."""

    step: int = 0
    phase: str = "starting"
    waits_outside: bool = False
    """True if the rank may wait for something outside the process, such as a reward function or a slow disk."""
    idle_seconds: float = 0.0
    """Seconds since the rank last computed, read, wrote or sent."""
    same_place_seconds: float = 0.0
    """Seconds since the main thread last moved to another line of the code."""
    place: str = ""
    """Function and line of the main thread, such as ``all_reduce (train/step.py:88)``."""
    in_collective: bool = False
    busy_seconds: float = 0.0
    """Seconds since the start in which the main thread did not wait for other ranks."""
    broken_connection: str = ""
    """Remote address of a connection that does not acknowledge data; empty if all connections do."""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Heartbeat:
        """Return the heartbeat from the dict of :func:`dataclasses.asdict`; unknown keys are ignored."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__ if name in document})

    @property
    def step_text(self) -> str:
        """Step and phase as text, such as ``in step 3, batch 1/2``."""
        return f"in step {self.step}, {self.phase}" if self.step else "before the first step"

    @property
    def line_text(self) -> str:
        """Code line of the main thread as text, such as ``waits in all_reduce (train/step.py:88)``."""
        return f"{'waits' if self.in_collective else 'is'} in {self.place}"


@dataclass
class Peer:
    """Last known state of a rank, from its messages and, for a rank on this machine, from ``/proc``."""

    rank: int
    host: str
    last_heard: float
    """Monotonic time of the rank's last message."""
    process: tuple[str, int] = ("", 0)
    """The rank's :func:`process_identity`."""
    beat: Heartbeat = field(default_factory=Heartbeat)
    has_finished: bool = False
    """True if the rank has reported that it is done."""
    has_died: bool = False
    """True if the rank's connection was closed without a goodbye."""
    cpu_times: tuple[float, float] = (0.0, 0.0)
    """CPU seconds of the process, and seconds that it waited for a core, at the last check; 0 on other machines."""
    checked_at: float = float("-inf")
    """Time of the last check of CPU seconds."""
    computed_at: float = float("-inf")
    """Time of the last check after which the process counted as computing."""
    was_stopped: bool = False
    """True if the process was stopped by a signal at a check since its last message; it may have been killed since."""


def process_identity() -> tuple[str, int]:
    """Return an id of the machine (boot id and the process's namespaces; empty if unknown) and the process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path(f"/proc/self/ns/{space}").readlink()) for space in ("pid", "net")]
        return "/".join([boot, *spaces]), os.getpid()
    except OSError:
        return "", os.getpid()


def find_unresponsive_rank(peers: Iterable[Peer], now: float, limits: WatchLimits) -> Failure | None:
    """Return the failure of a rank that is dead, stopped or unreachable; None if all ranks respond or have finished."""
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
    """Record whether a rank on this machine that sends nothing is computing (a library holds the GIL) or stopped."""
    state, (ran, waited) = _process_state(peer), _cpu_seconds(peer)
    # Stays True, because a stopped rank that is killed runs for a moment. A rank that continues sends messages again.
    peer.was_stopped = peer.was_stopped or state in ("T", "t")
    if now - peer.checked_at >= CPU_CHECK_SECONDS:
        # The watchdog thread alone uses one or two percent of a core, also if only the network is down.
        if is_computing(ran - peer.cpu_times[0], waited - peer.cpu_times[1], now - peer.checked_at):
            peer.computed_at = now
        peer.cpu_times, peer.checked_at = (ran, waited), now


def kill_stopped_process(peer: Peer) -> None:
    """Kill a rank on this machine that a signal has stopped, because it cannot notice that other ranks ended."""
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
    """Return how many seconds a rank's threads ran, and how many seconds they waited for a core; 0 if unknown."""
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
    """Return a failure if no remaining rank makes progress; None if any rank does.

    While one rank computes, other ranks may wait for any time: this is not a deadlock.
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
            fix = "they wait in different collectives: find out why one rank took another path"
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
    """Finds ranks whose seconds per step, without waiting for other ranks, are far above the median of other ranks.

    Args:
        window_seconds: Shortest time in seconds over which a rank is measured; long, because waiting is only sampled.
        ratio: Multiple of the median above which a rank is slow.
        min_steps: Smallest number of steps that are measured.
        min_excess: Seconds per step by which a slow rank exceeds the median.
    """

    def __init__(
        self, window_seconds: float, ratio: float = 1.5, min_steps: int = 20, min_excess: float = 0.05
    ) -> None:
        self._window_seconds, self._ratio = window_seconds, ratio
        self._min_steps, self._min_excess = min_steps, min_excess
        self._reports: dict[int, deque[tuple[int, float, float]]] = {}
        self._reported: set[int] = set()

    def add_heartbeat(self, rank: int, step: int, busy_seconds: float, now: float) -> None:
        """Add the step and the busy seconds of a heartbeat that arrived at the monotonic time ``now``."""
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
        """Return slow ranks not returned before, each with its seconds per step and the median of other ranks."""
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
