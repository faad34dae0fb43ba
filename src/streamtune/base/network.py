"""Connections out of this machine: no telemetry, no kernels from a hub, and with ``--offline`` none at all.

The libraries read their environment when they are imported, so these functions are called before. This module imports
none of them.
"""

from __future__ import annotations

import ipaddress
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamtune.errors import RunError

OFFLINE = "STREAMTUNE_OFFLINE"
"""Environment variable that ``--offline`` sets, so that processes started by this one are offline too."""

_PRIVATE = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "ACCELERATE_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # transformers asks a service of the hub to convert checkpoints that have no safetensors; it need not know.
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    "USE_HUB_KERNELS": "0",
}
_OFF_THE_HUB = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_guarded = False
_talking = threading.local()


class OfflineError(RunError):
    """Something tried to connect, and ``--offline`` forbids it."""


def keep_private() -> None:
    """Switch telemetry and the kernels of the hub off, in this process and those it starts.

    A variable that the user has set stays: ``USE_HUB_KERNELS=1`` asks for the kernels by name.
    """
    for name, value in _PRIVATE.items():
        os.environ.setdefault(name, value)
    if os.environ["USE_HUB_KERNELS"].upper() not in ("1", "ON", "YES", "TRUE"):
        # A model's configuration may name a kernel of the hub, which is code: without this package none is loaded.
        sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]


def stay_off_the_hub() -> None:
    """Let the hub's libraries read their caches only. Other connections stay possible.

    For a recipe that names nothing on a hub.
    """
    os.environ.update(_OFF_THE_HUB)


def go_offline() -> None:
    """Refuse every connection but those within this machine, in this process and those it starts.

    Connections made by Python code raise :class:`OfflineError`. Those of compiled libraries, as between ranks, are not
    seen; no compiled library is used here to fetch anything.
    """
    global _guarded
    stay_off_the_hub()
    os.environ[OFFLINE] = "1"
    if not _guarded:
        sys.addaudithook(_refuse)
        _guarded = True


def is_offline() -> bool:
    """Return True if this process is to stay offline."""
    return os.environ.get(OFFLINE) == "1"


@contextmanager
def among_ranks() -> Iterator[None]:
    """Allow connections of this thread while inside: they are those of a run's ranks to each other."""
    before = getattr(_talking, "to_ranks", False)
    _talking.to_ranks = True
    try:
        yield
    finally:
        _talking.to_ranks = before


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse connections to other machines, as an audit hook. Hooks cannot be removed, so it tests if it applies."""
    if not event.startswith("socket.") or not is_offline() or getattr(_talking, "to_ranks", False):
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        if address is not None and not _is_here(address):
            raise _offline_error(address[0] if isinstance(address, tuple) else address)
    elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not _is_here((arguments[0],)):
        raise _offline_error(arguments[0])


def _is_here(address: Any) -> bool:
    """Return True if an address is of this machine: a Unix socket, the loopback, or no host."""
    if not isinstance(address, tuple):
        return True  # a path, or a family that names no host
    host = address[0]
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost") or not isinstance(host, str):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _offline_error(host: Any) -> OfflineError:
    shown = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    return OfflineError(
        f"--offline: a connection to {shown} was refused",
        mend="run it once without --offline, which fills the caches, or name local folders and files in the recipe",
    )
