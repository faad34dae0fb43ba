"""Names of hosts, hostfiles, and the ports on which ranks find each other besides the process group's.

A hostfile has DeepSpeed's format:

    # a comment
    node-a slots=8
    node-b slots=8    # another

Names of hosts are safe to give to ssh and to look up: letters, digits, dots and dashes. No name begins as an option.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from streamtune.base.privacy import allow_rank_connections
from streamtune.errors import ArgumentError

SIDE_PORTS = 8


def free_port() -> int:
    """Return a free port, if possible outside the range that the system gives to connections."""
    for _ in range(100):  # random: two runs that start at once should find different ports
        port = 25000 + secrets.randbelow(7000)
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at the one address at which other ranks call rank 0: on one machine, the loopback.

    If the address does not belong to this machine (others reach it through address translation), listen on all
    interfaces: it is unknown on which one the calls arrive. OSError if the port is taken.
    """
    places: list[tuple[int, str]] = []
    with suppress(OSError), allow_rank_connections():
        places += [
            (int(family), str(address[0]))
            for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[:1]
        ]
    for family, address in [*places, (socket.AF_INET, "")]:
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address, port))
            server.listen(1024)
            return server
        except OSError as error:
            server.close()
            if not address or error.errno != errno.EADDRNOTAVAIL:
                raise
    raise AssertionError("the last place returns or raises")


def side_ports(master_port: int) -> list[int]:
    """Return ports derived from the process group's port; rank 0 takes the first free one.

    Neighbouring ports give different ones: two runs on one machine seldom collide, and notice if they do.
    """
    first = master_port * SIDE_PORTS % 10000
    return [15000 + (first + index) % 10000 for index in range(SIDE_PORTS)]


LOOPBACK = ("localhost", "127.0.0.1", "::1")
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}"
ADDRESS_6 = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_][A-Za-z0-9._-]{0,30})?"
HOST = re.compile(f"{NAME}|{ADDRESS_6}")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}")
SHOWN_LENGTH = 80


def check_host(name: str, where: str, *, user: bool = False) -> None:
    """Refuse a name that is not a host, or that ssh would read as an option (``-oProxyCommand=...``).

    ``where`` is the place for the error: ``file:line`` or a variable. ``user`` allows users before it: ``user@host``.
    """
    *users, host = name.split("@") if user else [name]
    if HOST.fullmatch(host) and all(USER.fullmatch(part) for part in users):
        return
    shown = ascii(name if len(name) <= SHOWN_LENGTH else f"{name[:SHOWN_LENGTH]}...")
    raise ArgumentError(
        f"{shown} is no name of a host",
        where=where,
        fix="a name has letters, digits, dots, dashes and underscores, and does not begin with a dash; "
        + ("USER@ may stand before it; " if user else "")
        + "give other options of ssh in ~/.ssh/config",
    )


LINE = re.compile(r"(?P<name>\S+)(?:\s+slots=(?P<slots>-?[0-9]+))?")
MOST_SLOTS = 1024
"""Most ranks of one machine: known machines have 16 accelerators, and ranks on the CPU take a core each."""
LONGEST_LINE = 1000
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """A machine, and the ranks it takes."""

    name: str
    """Name for ssh: ``node-a``, ``user@10.0.0.1``."""
    slots: int
    where: str = ""
    """``file:line``."""

    @property
    def address(self) -> str:
        """Name on the network, without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path, per_host: int | None = None) -> list[Host]:
    """Read a hostfile; ``per_host`` ranks start on each host, None takes all slots.

    Errors have ``file:line`` of a line that is not valid, or whose slots do not allow ``per_host``.
    """
    text = _read_text(path)
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        said = line.partition("#")[0].strip()
        if said:
            hosts.append(_read_line(said, f"{path}:{number}", hosts, per_host))
    if not hosts:
        raise ArgumentError("the hostfile names no host", where=str(path), fix="write a line `HOST slots=N` for each")
    alone = next((host for host in hosts if host.address in LOOPBACK), None)
    if alone is not None and len(hosts) > 1:
        raise ArgumentError(
            f"'{alone.address}' is another machine on every host",
            where=alone.where,
            fix="write the name or address by which the other hosts reach it",
        )
    return hosts


def _read_text(path: Path) -> str:
    """Return the text of a hostfile, which must be a regular file: a pipe may wait, and a device may never end."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ArgumentError(
                    f"the hostfile {path} is a pipe or a device, not a file", where="--hostfile", fix="name a file"
                )
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"the hostfile {_short(str(path))} cannot be read: {reason}", where="--hostfile",
                            fix="name a file with a line `HOST slots=N` for each host") from None  # fmt: skip
    if len(data) > MOST_BYTES:
        raise ArgumentError(f"the hostfile {path} has more than {MOST_BYTES >> 20} MiB", where="--hostfile",
                            fix="name a file with a line `HOST slots=N` for each host")  # fmt: skip
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ArgumentError(f"the hostfile {path} is not UTF-8 text", where=f"{path}:{line}",
                            fix="save it as UTF-8") from None  # fmt: skip


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _read_line(said: str, where: str, before: Sequence[Host], per_host: int | None) -> Host:
    def refused(what: str, fix: str) -> ArgumentError:
        return ArgumentError(what, where=where, fix=fix)

    match = LINE.fullmatch(said) if len(said) <= LONGEST_LINE else None
    if match is None or any(part.startswith("-") for part in match["name"].split("@")) or not said.isprintable():
        raise refused(f"{_short(repr(said))} is no line of a hostfile", "write `HOST slots=N`")
    name, digits = match["name"], match["slots"]
    check_host(name, where, user=True)
    if digits is None:
        raise refused(f"'{said}' does not say how many ranks", f"write `{said} slots=N`")
    slots = int(digits) if len(digits) <= 20 else MOST_SLOTS + 1
    host = Host(name, slots if per_host is None else per_host, where)
    if slots > MOST_SLOTS:
        most = f"write the number of its devices, at most {MOST_SLOTS:,}"
        raise refused(f"{name} has {_short(digits)} slots, which is more than any machine has", most)
    if slots < 1:
        raise refused(f"{name} has {'no' if slots == 0 else slots} slots", "give it at least 1, or take the line out")
    if host.slots > slots:
        raise refused(
            f"--nproc {per_host} is more than the {slots} slots of {name}",
            f"lower --nproc to {slots}, or raise the slots",
        )
    if any(other.address == host.address for other in before):
        raise refused(f"{name} is there twice", "write one line with all its slots")
    return host
