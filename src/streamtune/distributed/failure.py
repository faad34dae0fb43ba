"""Failures of ranks: how a rank reports its error to the launcher, and which rank failed first.

With ``streamtune --nproc`` a rank does not print its error, but writes the error as JSON into a file whose path the
launcher has set. The launcher prints only the error of the rank that failed first.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamtune import errors
from streamtune.errors import DistributedError, StreamTuneError

ERROR_FILE_VARIABLE = "STREAMTUNE_ERROR_FILE"
"""Variable with the path of the file for a rank's failure; if it is not set, the rank prints its error."""
TAIL_LINES = 8
NOTICE_SECONDS = 2.0
"""Seconds within which ranks notice a dead rank; ends closer together than this are not ordered by time."""
EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals from outside, about which a rank's log says nothing."""
FIXES = {
    "SIGKILL": "host memory may be exhausted: see `dmesg`, and try fewer ranks on this host",
    "SIGSEGV": "a library crashed: see the last lines of the log",
    "SIGABRT": "a library aborted: see the last lines of the log",
    "SIGBUS": "shared memory or a disk is full: see `df -h /dev/shm /tmp`; or a file was truncated while it was read",
}


@dataclass(frozen=True)
class Failure:
    """Error of a rank, in a form that can be sent to other processes as JSON."""

    rank: int
    """Rank that failed."""
    host: str
    what: str
    where: str = ""
    fix: str = ""
    kind: str = "DistributedError"
    """Name of the error class in ``streamtune.errors``."""
    exit_code: int = 1
    own: bool = True
    """True if the failed rank reported the error itself; False if another rank noticed the failure."""
    seen: str = ""
    """Sign by which another rank noticed the failure: ``died``, ``silent``, ``still`` (hangs) or ``missing``; empty
    if ``own``."""
    time: float = field(default_factory=time.time)

    @classmethod
    def from_error(cls, error: BaseException, rank: int, host: str) -> Failure:
        if isinstance(error, StreamTuneError):
            kind = type(error).__name__
            return cls(rank, host, error.what, error.where, error.fix, kind, error.exit_code)
        return cls(rank, host, f"{type(error).__name__}: {error}".strip().removesuffix(":"), kind="StreamTuneError")

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Failure:
        """Return the failure from the result of :func:`dataclasses.asdict`; unknown keys are ignored."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__ if name in document})

    def to_error(self, *, with_rank: bool = True) -> StreamTuneError:
        """Return the error in its original class; StreamTuneError if ``errors`` has no such class.

        Args:
            with_rank: True to name rank and host in front of a message that the failed rank reported itself.
        """
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, StreamTuneError)):
            kind = StreamTuneError
        what = f"rank {self.rank} on {self.host} failed: {self.what}" if with_rank and not self.seen else self.what
        return kind(what, where=self.where, fix=self.fix)


def write_failure(failure: Failure, path: str | Path | None = None) -> bool:
    """Write a failure for the launcher, unless this rank has written one; return True if the launcher will print a
    failure.

    Args:
        failure: The failure.
        path: Path of the file; None: the path that the launcher has set.
    """
    path = path or os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    target = Path(path)
    if target.exists():
        return True
    try:
        staged = target.with_name(f".tmp-{target.name}-{os.getpid()}-{time.monotonic_ns()}")
        staged.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        staged.replace(target)
    except OSError:
        return False
    return True


def read_failure(path: Path) -> Failure | None:
    try:
        return Failure.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class RankEnd:
    """End of a rank's process: exit code or signal."""

    rank: int
    host: str
    code: int
    """Exit code; negative: number of the signal that killed the process."""
    failure: Failure | None = None
    tail: tuple[str, ...] = ()
    """Last lines of the rank's log."""
    log: str = ""
    time: float = field(default_factory=time.monotonic)
    """Monotonic time in seconds at which the launcher noticed the end."""
    sent_signals: tuple[int, ...] = ()
    """Signals that the launcher had sent to the rank."""

    @property
    def was_stopped(self) -> bool:
        """True if the process ended because of SIGINT, SIGTERM or a signal from the launcher."""
        return self.code in (128 + signal.SIGINT, 128 + signal.SIGTERM) or -self.code in self.sent_signals

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 plus the signal number for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code


def error_of_first_failed_rank(ends: Sequence[RankEnd]) -> tuple[StreamTuneError, int] | None:
    """Return the error and exit code of the rank that failed first; None if no rank failed."""
    failed = sorted((end for end in ends if end.code != 0 and not end.was_stopped), key=lambda end: end.time)
    if not failed:
        return None
    # If the connection between two ranks breaks, each reports that the other failed; rank 0's report counts.
    ends_by_rank = sorted(ends, key=lambda end: end.rank)
    reports_on_others = [end.failure for end in ends_by_rank if end.failure is not None and not end.failure.own]
    accused = {failure.rank for failure in reports_on_others}
    # Ranks that did not end because of another rank. Killed ranks come first, because their death causes errors.
    candidates = [end for end in failed if end.failure is None or end.failure.own]
    candidates.sort(
        key=lambda end: (end.time > failed[0].time + NOTICE_SECONDS, end.code >= 0, end.rank not in accused, end.time)
    )
    if not candidates:
        return reports_on_others[0].to_error(), failed[0].exit_code
    first = candidates[0]
    accusations = [failure for failure in reports_on_others if failure.rank == first.rank]
    # A rank that was killed for another reason also died, so "died" has the lowest priority.
    seen = min(accusations, key=lambda failure: failure.seen == "died", default=None)
    if first.failure is None and seen is not None and seen.seen != "died":
        return seen.to_error(), 1
    if first.failure is None:
        return _error_of_unreported_end(first, seen), first.exit_code
    messages = {end.failure.what for end in candidates if end.failure is not None}
    with_rank = len(messages) > 1 or len(candidates) < len(ends)
    return first.failure.to_error(with_rank=with_rank), first.failure.exit_code


def _error_of_unreported_end(end: RankEnd, other_failure: Failure | None) -> StreamTuneError:
    what, fix = f"rank {end.rank} on {end.host} ended with exit code {end.code}", ""
    if end.code < 0:
        name = _signal_name(-end.code)
        what, fix = f"rank {end.rank} on {end.host} was killed by {name}", FIXES.get(name, "")
    if other_failure is not None and (doing := re.search(r", (in step .*)", other_failure.what.splitlines()[0])):
        what += f", {doing[1]}"
    if end.tail and -end.code not in EXTERNAL_SIGNALS:
        what += "\nlast lines of its log:\n" + "\n".join(end.tail)
    return DistributedError(what, where=end.log, fix=fix)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def last_log_lines(path: Path, max_lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last ``max_lines`` non-blank lines of a log, without colour codes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return tuple(line.rstrip()[:300] for line in plain.splitlines() if line.strip())[-max_lines:]
