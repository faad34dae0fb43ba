"""Two nodes on one machine: network namespaces joined by a cable (a veth pair), with nothing else on it.

with two_places() as places:
    run_ranks(2, module, cases, places=places)      # rank 0 on one node, rank 1 on the other
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.rank_group import Place
from tests.distributed.two_nodes import TwoNodes, why_not

__all__ = ["two_places", "why_no_nodes"]


def why_no_nodes() -> str | None:
    """Why this machine makes no namespaces for this user, and what to do; None where it does."""
    if (reason := why_not()) == "":
        return None
    return f"{reason}; it takes iproute2 and root, in a container CAP_SYS_ADMIN as well"


@contextmanager
def two_places() -> Iterator[list[Place]]:
    """Make the places of two ranks, a node each; remove the nodes afterwards.

    Raises:
        RuntimeError: Namespaces cannot be made, with the reason.
    """
    if reason := why_no_nodes():
        raise RuntimeError(f"two nodes cannot be made on this machine: {reason}")
    with tempfile.TemporaryDirectory() as folder, TwoNodes(Path(folder)) as nodes:
        yield [
            Place(("ip", "netns", "exec", name), {"GLOO_SOCKET_IFNAME": link, "MASTER_ADDR": nodes.addresses[0]})
            for name, link in zip(nodes.names, nodes.links, strict=True)
        ]
