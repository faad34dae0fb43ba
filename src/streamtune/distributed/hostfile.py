"""Hosts and how many ranks each takes, in DeepSpeed's format.

# a comment
node-a slots=8
node-b slots=8    # another
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamtune.errors import ArgumentError

__all__ = ["Host", "read_hostfile"]

LINE = re.compile(r"(?P<name>\S+)(?:\s+slots=(?P<slots>\d+))?")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A machine, and the ranks it takes."""

    name: str
    """As ssh takes it: ``node-a``, ``user@10.0.0.1``."""
    slots: int
    where: str = ""
    """``file:line``."""

    @property
    def address(self) -> str:
        """Its name on the network, without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path, per_host: int | None = None) -> list[Host]:
    """Read a hostfile.

    Args:
        path: The file.
        per_host: Ranks to start on each host; None takes all its slots.

    Raises:
        ArgumentError: With ``file:line``: a line that says something else, a host twice, no slots, too few slots, or no
            host at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArgumentError(f"the hostfile {path} cannot be read: {reason}", where="--hostfile") from None
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        said = line.partition("#")[0].strip()
        if said:
            hosts.append(_read_line(said, f"{path}:{number}", hosts, per_host))
    if not hosts:
        raise ArgumentError("the hostfile names no host", where=str(path), mend="write a line `HOST slots=N` for each")
    alone = next((host for host in hosts if host.address in LOOPBACK), None)
    if alone is not None and len(hosts) > 1:
        raise ArgumentError(
            f"'{alone.address}' is another machine on every host",
            where=alone.where,
            mend="write the name or address by which the other hosts reach it",
        )
    return hosts


def _read_line(said: str, where: str, before: Sequence[Host], per_host: int | None) -> Host:
    found = LINE.fullmatch(said)
    if found is None or found["name"].startswith("-"):
        raise ArgumentError(f"'{said}' is no line of a hostfile", where=where, mend="write `HOST slots=N`")
    if found["slots"] is None:
        raise ArgumentError(f"'{said}' does not say how many ranks", where=where, mend=f"write `{said} slots=N`")
    slots = int(found["slots"])
    host = Host(found["name"], slots if per_host is None else per_host, where)
    if slots < 1:
        raise ArgumentError(f"{host.name} has no slots", where=where, mend="give it at least 1, or take the line out")
    if host.slots > slots:
        raise ArgumentError(
            f"--nproc {per_host} is more than the {slots} slots of {host.name}",
            where=where,
            mend=f"lower --nproc to {slots}, or raise the slots",
        )
    if any(known.address == host.address for known in before):
        raise ArgumentError(f"{host.name} is there twice", where=where, mend="write one line with all its slots")
    return host
