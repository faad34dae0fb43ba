"""Two nodes on one machine: network namespaces joined by a cable (a veth pair), with nothing else on it.

with two_nodes() as places:
    run_ranks(2, module, cases, places=places)      # rank 0 on one node, rank 1 on the other
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.distributed.rank_group import Place

__all__ = ["two_nodes", "why_not"]

ADDRESSES = ("10.77.9.1", "10.77.9.2")


def why_not() -> str | None:
    """Why this machine makes no namespaces for this user; None where it does."""
    if shutil.which("ip") is None:
        return "there is no command 'ip'; install iproute2"
    name = f"stcomm{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if made.returncode == 0:
        return None
    return f"'ip netns add' failed ({made.stderr.strip()}); it wants root, and a container with CAP_SYS_ADMIN"


@contextmanager
def two_nodes() -> Iterator[list[Place]]:
    """The places of two ranks, a node each; the nodes are gone afterwards.

    Raises:
        RuntimeError: Namespaces cannot be made; why is said.
    """
    if reason := why_not():
        raise RuntimeError(f"two nodes cannot be made on this machine: {reason}")
    names = [f"stcomm{os.getpid()}{side}" for side in "ab"]
    cables = [f"vc{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", cable, "up")
        yield [
            Place(("ip", "netns", "exec", name), {"GLOO_SOCKET_IFNAME": cable, "MASTER_ADDR": ADDRESSES[0]})
            for name, cable in zip(names, cables, strict=True)
        ]
    finally:
        subprocess.run(["ip", "link", "del", cables[0]], capture_output=True)  # where it had not moved yet
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"'ip {' '.join(words)}' failed: {done.stderr.strip()}")
