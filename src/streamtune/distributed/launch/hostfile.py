"""Hosts and how many ranks each takes, in DeepSpeed's format.

# a comment
node-a slots=8
node-b slots=8    # another
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamtune.distributed.ports import LOOPBACK, check_host
from streamtune.errors import ArgumentError

LINE = re.compile(r"(?P<name>\S+)(?:\s+slots=(?P<slots>-?[0-9]+))?")
MOST_SLOTS = 1024
"""Ranks of one machine: those known have 16 accelerators, and ranks on the CPU take a core each."""
LONGEST_LINE = 1000
MOST_BYTES = 1 << 20


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
        ArgumentError: With ``file:line``: a line that says something else, a host twice, no slots, too few slots, more
            than a machine has, or no host at all; or it is no text file.
    """
    text = _read_text(path)
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


def _read_text(path: Path) -> str:
    """Return the text of a hostfile; of a regular file, so that no pipe keeps us waiting and no device has no end."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ArgumentError(
                    f"the hostfile {path} is a pipe or a device, not a file", where="--hostfile", mend="name a file"
                )
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"the hostfile {_short(str(path))} cannot be read: {reason}", where="--hostfile",
                            mend="name a file with a line `HOST slots=N` for each host") from None  # fmt: skip
    if len(data) > MOST_BYTES:
        raise ArgumentError(f"the hostfile {path} has more than {MOST_BYTES >> 20} MiB", where="--hostfile",
                            mend="name a file with a line `HOST slots=N` for each host")  # fmt: skip
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ArgumentError(f"the hostfile {path} is not UTF-8 text", where=f"{path}:{line}",
                            mend="save it as UTF-8") from None  # fmt: skip


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _read_line(said: str, where: str, before: Sequence[Host], per_host: int | None) -> Host:
    found = LINE.fullmatch(said) if len(said) <= LONGEST_LINE else None
    if found is None or any(part.startswith("-") for part in found["name"].split("@")) or not said.isprintable():
        raise ArgumentError(f"{_short(repr(said))} is no line of a hostfile", where=where, mend="write `HOST slots=N`")
    check_host(found["name"], where, user=True)
    if found["slots"] is None:
        raise ArgumentError(f"'{said}' does not say how many ranks", where=where, mend=f"write `{said} slots=N`")
    digits = found["slots"]
    slots = int(digits) if len(digits) <= 20 else MOST_SLOTS + 1
    host = Host(found["name"], slots if per_host is None else per_host, where)
    if slots > MOST_SLOTS:
        raise ArgumentError(f"{host.name} has {_short(digits)} slots, which is more than any machine has", where=where,
                            mend=f"write the number of its devices, at most {MOST_SLOTS:,}")  # fmt: skip
    if slots < 1:
        raise ArgumentError(
            f"{host.name} has {'no' if slots == 0 else slots} slots",
            where=where,
            mend="give it at least 1, or take the line out",
        )
    if host.slots > slots:
        raise ArgumentError(
            f"--nproc {per_host} is more than the {slots} slots of {host.name}",
            where=where,
            mend=f"lower --nproc to {slots}, or raise the slots",
        )
    if any(known.address == host.address for known in before):
        raise ArgumentError(f"{host.name} is there twice", where=where, mend="write one line with all its slots")
    return host
