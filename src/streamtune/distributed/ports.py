"""Names of hosts, free ports, and the ports on which ranks find each other besides the process group's own.

Names of hosts are safe to hand to ssh and to look up: letters, digits, dots, dashes, and nothing that leads
another program to take them for something else.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
from contextlib import suppress

from streamtune.base.privacy import among_ranks
from streamtune.errors import ArgumentError

SIDE_PORTS = 8


def free_port() -> int:
    """Return a port nobody listens on, if possible outside the range that the system gives to connections."""
    for _ in range(100):  # by chance: two runs that start at once are not to find the same
        port = 25000 + secrets.randbelow(7000)
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return True if this machine can listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at the one address at which other ranks call rank 0: on one machine, the loopback.

    Only if the address is none of this machine's (others reach it through address translation), listen on all of its
    interfaces: it is not known on which of them the calls arrive.

    Args:
        host: The name or address of rank 0.
        port: The port.

    Raises:
        OSError: The port is taken.
    """
    places: list[tuple[int, str]] = []
    with suppress(OSError), among_ranks():
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
    """Return ports derived from that of the process group, of which rank 0 takes the first free one.

    Those of neighbouring ports differ: two runs on one machine seldom collide, and notice if they do.
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
    """Refuse what is no name of a host, and what ssh would read as an option (``-oProxyCommand=...``).

    Args:
        name: A host name or address.
        where: Of the error: ``file:line`` or a variable.
        user: Users may stand before it: ``user@host``.

    Raises:
        ArgumentError: It is none.
    """
    *users, host = name.split("@") if user else [name]
    if HOST.fullmatch(host) and all(USER.fullmatch(part) for part in users):
        return
    shown = ascii(name if len(name) <= SHOWN_LENGTH else f"{name[:SHOWN_LENGTH]}...")
    raise ArgumentError(
        f"{shown} is no name of a host",
        where=where,
        mend="a name has letters, digits, dots, dashes and underscores, and does not begin with a dash; "
        + ("USER@ may stand before it; " if user else "")
        + "give other options of ssh in ~/.ssh/config",
    )
