"""Host names, hostfiles, and the ports of rank 0.

A hostfile has DeepSpeed's format:

    # a comment
    node-a slots=8
    node-b slots=8    # another comment

Host names are checked before they are passed to ssh, which must not read them as options.
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

NUM_RANK_0_PORTS = 8


def free_port() -> int:
    """Return a free port, if possible outside the system's range of ephemeral ports."""
    for _ in range(100):  # random, so that two runs that start at the same time use different ports
        port = 25000 + secrets.randbelow(7000)
        if is_port_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens only at the address of ``host``.

    If that address is not one of this machine's (network address translation), the socket listens on all interfaces.

    Raises:
        OSError: The port is in use.
    """
    addresses: list[tuple[int, str]] = []
    with suppress(OSError), allow_rank_connections():
        addresses += [
            (int(family), str(address[0]))
            for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[:1]
        ]
    for family, address in [*addresses, (socket.AF_INET, "")]:
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
    raise AssertionError("unreachable: the last address gives a socket or raises an error")


def rank_0_ports(master_port: int) -> list[int]:
    """Return the ports that rank 0 tries for connections outside the process group, derived from ``MASTER_PORT``.

    Neighbouring values of ``MASTER_PORT`` have disjoint lists, so two runs on one machine rarely try the same ports.
    """
    first = master_port * NUM_RANK_0_PORTS % 10000
    return [15000 + (first + index) % 10000 for index in range(NUM_RANK_0_PORTS)]


LOOPBACK = ("localhost", "127.0.0.1", "::1")
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}"
IPV6_ADDRESS = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_][A-Za-z0-9._-]{0,30})?"
HOST = re.compile(f"{NAME}|{IPV6_ADDRESS}")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}")
MAX_SHOWN_CHARACTERS = 80


def check_host_name(name: str, where: str, *, user: bool = False) -> None:
    """Raise an ArgumentError unless ``name`` is a valid host name that ssh cannot read as an option.

    Args:
        name: Name to check.
        where: Source of the name, for the error: ``file:line`` or a variable.
        user: True to allow ``user@host``.
    """
    *users, host = name.split("@") if user else [name]
    if HOST.fullmatch(host) and all(USER.fullmatch(part) for part in users):
        return
    shown = ascii(name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}...")
    raise ArgumentError(
        f"{shown} is not a valid host name",
        where=where,
        fix="use letters, digits, dots, dashes and underscores, without a leading dash; "
        + ("USER@ may precede it; " if user else "")
        + "set ssh options in ~/.ssh/config",
    )


LINE = re.compile(r"(?P<name>\S+)(?:\s+slots=(?P<slots>-?[0-9]+))?")
MAX_SLOTS = 1024
"""Largest number of ranks on one machine: machines have up to 16 accelerators, and each CPU rank needs a core."""
MAX_LINE_CHARACTERS = 1000
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """A machine, and the number of ranks to start on it."""

    name: str
    """Name for ssh, such as ``node-a`` or ``user@10.0.0.1``."""
    slots: int
    where: str = ""
    """Line in the hostfile, as ``file:line``."""

    @property
    def address(self) -> str:
        """Host name or address, without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path, ranks_per_host: int | None = None) -> list[Host]:
    """Return the hosts in a hostfile.

    Args:
        path: Path of the hostfile.
        ranks_per_host: Number of ranks to start on each host; None: the host's slots.

    Raises:
        ArgumentError: The file cannot be read, a line is invalid, or a host has fewer slots than ``ranks_per_host``.
            The error names ``file:line``.
    """
    text = _read_hostfile_text(path)
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            hosts.append(_parse_hostfile_line(content, f"{path}:{number}", hosts, ranks_per_host))
    if not hosts:
        raise ArgumentError("the hostfile has no host", where=str(path), fix="write a line `HOST slots=N` per host")
    loopback_host = next((host for host in hosts if host.address in LOOPBACK), None)
    if loopback_host is not None and len(hosts) > 1:
        raise ArgumentError(
            f"'{loopback_host.address}' means a different machine on every host",
            where=loopback_host.where,
            fix="use the name or address by which other hosts reach it",
        )
    return hosts


def _read_hostfile_text(path: Path) -> str:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ArgumentError(
                    f"the hostfile {path} is a pipe or a device", where="--hostfile", fix="use a regular file"
                )
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"the hostfile {_shorten(str(path))} cannot be read: {reason}", where="--hostfile",
                            fix="use a file with a line `HOST slots=N` for each host") from None  # fmt: skip
    if len(data) > MAX_FILE_BYTES:
        raise ArgumentError(f"the hostfile {path} is larger than {MAX_FILE_BYTES >> 20} MiB", where="--hostfile",
                            fix="use a file with a line `HOST slots=N` for each host")  # fmt: skip
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ArgumentError(f"the hostfile {path} is not UTF-8 text", where=f"{path}:{line}",
                            fix="save it as UTF-8") from None  # fmt: skip


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _parse_hostfile_line(content: str, where: str, previous_hosts: Sequence[Host], ranks_per_host: int | None) -> Host:
    def line_error(what: str, fix: str) -> ArgumentError:
        return ArgumentError(what, where=where, fix=fix)

    match = LINE.fullmatch(content) if len(content) <= MAX_LINE_CHARACTERS else None
    if match is None or any(part.startswith("-") for part in match["name"].split("@")) or not content.isprintable():
        raise line_error(f"{_shorten(repr(content))} is not a valid hostfile line", "write `HOST slots=N`")
    name, digits = match["name"], match["slots"]
    check_host_name(name, where, user=True)
    if digits is None:
        raise line_error(f"'{content}' lacks the number of ranks", f"write `{content} slots=N`")
    slots = int(digits) if len(digits) <= 20 else MAX_SLOTS + 1
    host = Host(name, slots if ranks_per_host is None else ranks_per_host, where)
    if slots > MAX_SLOTS:
        fix = f"set slots to the number of devices of this host, at most {MAX_SLOTS:,}"
        raise line_error(f"{name} has {_shorten(digits)} slots; at most {MAX_SLOTS:,} are allowed", fix)
    if slots < 1:
        raise line_error(f"{name} has {slots} slots, expected at least 1", "set at least 1, or delete the line")
    if host.slots > slots:
        raise line_error(
            f"--nproc {ranks_per_host} exceeds the {slots} slots of {name}",
            f"lower --nproc to {slots}, or raise the slots",
        )
    if any(other.address == host.address for other in previous_hosts):
        raise line_error(f"{name} occurs twice", "write one line with all slots of this host")
    return host
