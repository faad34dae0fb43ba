"""Failures of ranks: the file that a rank writes for its launcher, and the choice of the first failure.

A rank of ``streamtune --nproc`` does not print its error. It writes it as JSON into the file its launcher named, and
the launcher shows the error of the rank that failed first. A rank that ends only because another failed names the
other.
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
"""Names the file for a rank's failure; without it the rank prints the error."""
TAIL_LINES = 8
AT_ONCE = 2.0
"""Seconds within which the order of several ends says nothing: ranks notice a dead peer that fast."""
ENDED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of which the log of a rank knows nothing."""
FIXES = {
    "SIGKILL": "the system kills what takes the host's last memory: see `dmesg`, and try fewer ranks on this host",
    "SIGSEGV": "a library crashed: its last lines are in the log",
    "SIGABRT": "a library gave up: its last lines are in the log",
    "SIGBUS": "shared memory or a disk is full, see `df -h /dev/shm /tmp`; or a file was cut while it was read",
}


@dataclass(frozen=True)
class Failure:
    """An error of a rank, in the form that processes send each other."""

    rank: int
    """The rank at fault."""
    host: str
    what: str
    where: str = ""
    fix: str = ""
    kind: str = "DistributedError"
    """Name of the error's class."""
    exit_code: int = 1
    own: bool = True
    """True if the rank reports its own error."""
    seen: str = ""
    """Finding of other ranks: it ``died``, is ``silent``, stands ``still`` or is ``missing``."""
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, rank: int, host: str) -> Failure:
        if isinstance(error, StreamTuneError):
            kind = type(error).__name__
            return cls(rank, host, error.what, error.where, error.fix, kind, error.exit_code)
        return cls(rank, host, f"{type(error).__name__}: {error}".strip().removesuffix(":"), kind="StreamTuneError")

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Failure:
        """Make a failure from :func:`dataclasses.asdict`; keys of another version are left out."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__ if name in document})

    def error(self, *, named: bool = True) -> StreamTuneError:
        """Return the error in its own class; ``named`` puts rank and host in front, unless other ranks found it."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, StreamTuneError)):
            kind = StreamTuneError
        what = f"rank {self.rank} on {self.host} failed: {self.what}" if named and not self.seen else self.what
        return kind(what, where=self.where, fix=self.fix)


def write_failure(failure: Failure, path: str | Path | None = None) -> bool:
    """Write a failure for the launcher, atomically; return True if there is a launcher to show it.

    The first failure that is written stays. ``path`` defaults to the file that the launcher named.
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
    """The end of a rank's process."""

    rank: int
    host: str
    code: int
    """Exit code; the negative number of the signal that killed it."""
    failure: Failure | None = None
    tail: tuple[str, ...] = ()
    """Last lines of its log."""
    log: str = ""
    at: float = field(default_factory=time.monotonic)
    """Monotonic time at which its launcher saw the end."""
    sent: tuple[int, ...] = ()
    """Signals that its launcher had sent before."""

    @property
    def stopped(self) -> bool:
        """True if it ended on request: by SIGINT, SIGTERM or a signal that its launcher sent."""
        return self.code in (128 + signal.SIGINT, 128 + signal.SIGTERM) or -self.code in self.sent

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it."""
        return self.code if self.code >= 0 else 128 - self.code


def first_failure(ends: Sequence[RankEnd]) -> tuple[StreamTuneError, int] | None:
    """Return the error to show for the ranks that ended, and the exit code; None if none failed."""
    failed = sorted((end for end in ends if end.code != 0 and not end.stopped), key=lambda end: end.at)
    if not failed:
        return None
    # Where the connection of two ranks is cut, each accuses the other: the accusation of rank 0 comes first.
    in_order = sorted(ends, key=lambda end: end.rank)
    accused = [end.failure for end in in_order if end.failure is not None and not end.failure.own]
    blamed = {failure.rank for failure in accused}
    # Ranks that did not end because of another; a killed process comes before the errors its death caused.
    culprits = [end for end in failed if end.failure is None or end.failure.own]
    culprits.sort(key=lambda end: (end.at > failed[0].at + AT_ONCE, end.code >= 0, end.rank not in blamed, end.at))
    if not culprits:
        return accused[0].error(), failed[0].exit_code
    first = culprits[0]
    about = [failure for failure in accused if failure.rank == first.rank]
    # A rank that is ended for another reason dies too: that it died comes last.
    seen = min(about, key=lambda failure: failure.seen == "died", default=None)
    if first.failure is None and seen is not None and seen.seen != "died":
        return seen.error(), 1
    if first.failure is None:
        return _silent_end(first, seen), first.exit_code
    same = {end.failure.what for end in culprits if end.failure is not None}
    named = len(same) > 1 or len(culprits) < len(ends)
    return first.failure.error(named=named), first.failure.exit_code


def _silent_end(end: RankEnd, seen: Failure | None) -> StreamTuneError:
    """Return an error for a rank that wrote none, with the observations of the other ranks."""
    what, fix = f"rank {end.rank} on {end.host} ended with exit code {end.code}", ""
    if end.code < 0:
        name = _signal_name(-end.code)
        what, fix = f"rank {end.rank} on {end.host} was killed by {name}", FIXES.get(name, "")
    if seen is not None and (doing := re.search(r", (in step .*)", seen.what.splitlines()[0])):
        what += f", {doing[1]}"
    if end.tail and -end.code not in ENDED_FROM_OUTSIDE:
        what += "\nits last lines:\n" + "\n".join(end.tail)
    return DistributedError(what, where=end.log, fix=fix)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def log_tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines of a log that are not blank, without colours."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return tuple(line.rstrip()[:300] for line in plain.splitlines() if line.strip())[-lines:]
