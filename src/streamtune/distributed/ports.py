"""Free ports, and those on which the ranks of a run find each other besides the process group's own."""

from __future__ import annotations

import secrets
import socket

__all__ = ["free_port", "is_free", "side_ports"]

SIDE_PORTS = 8


def free_port() -> int:
    """A port of this machine nobody listens on, from those the system gives no connection of its own accord."""
    for _ in range(100):  # by chance: two runs that start at once are not to find the same
        port = 25000 + secrets.randbelow(7000)
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether this machine can listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def side_ports(master_port: int) -> list[int]:
    """Ports that follow from that of the process group, of which rank 0 takes the first free one.

    Those of neighbouring ports differ: two runs on one machine seldom meet, and where they do they notice.
    """
    first = master_port * SIDE_PORTS % 10000
    return [15000 + (first + index) % 10000 for index in range(SIDE_PORTS)]
