"""Names of hosts that are safe to hand to ssh and to look up: letters, digits, dots, dashes, and nothing that leads
another program to take them for something else."""

from __future__ import annotations

import re

from streamtune.errors import ArgumentError

__all__ = ["LOOPBACK", "check_host"]

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
