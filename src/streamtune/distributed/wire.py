"""Connections between rank 0 and the other ranks, apart from the process group's: JSON documents, one a line.

The process group's connections give no reason when they stand still, and those of a store block the thread that waits.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from streamtune.errors import DistributedError
from streamtune.network import among_ranks

from .environment import RankEnvironment
from .ports import listen_at, side_ports

__all__ = ["ANSWER_SECONDS", "Line", "dial", "listen", "prove"]

MOST_BYTES = 1 << 20
"""Of one document. Ours have hundreds; a stranger's connection is not read beyond it."""
ANSWER_SECONDS = 3.0
"""For the answer to a greeting: what does not give it is another program."""


class Line:
    """A connection that carries JSON documents in both directions, for one thread; calls block up to their time limit.

    Args:
        connection: The connection.
        most: Most bytes that are read without the end of a document.
    """

    def __init__(self, connection: socket.socket, most: int = MOST_BYTES) -> None:
        self.connection = connection
        self._most = most
        self.greeting: dict[str, Any] = {}
        """The answer in which the other side described itself when it was called."""
        self._pending = b""

    def trust(self) -> None:
        """Accept documents of up to ``MOST_BYTES``: the other side is known to be a rank."""
        self._most = MOST_BYTES

    def send(self, document: dict[str, Any], seconds: float = 2.0) -> None:
        """Send a document.

        Raises:
            OSError: It was not sent in time, or the connection is closed.
        """
        self.connection.settimeout(seconds)
        self.connection.sendall(json.dumps(document).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait at most ``seconds`` for the next document, and return it.

        Raises:
            TimeoutError: None came in time.
            OSError: The connection was closed, or the other side sends something else than documents.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._pending:
            self.connection.settimeout(max(0.001, until - time.monotonic()))
            self._read()
        return self.arrived(1)[0]

    def drain(self, most: int = -1) -> list[dict[str, Any]]:
        """Return the documents that have come, without waiting; at most ``most`` of them if that is positive.

        Raises:
            OSError: The connection was closed, or the other side sends something else than documents. Those that came
                before the connection was closed are returned by :meth:`arrived`.
        """
        self.connection.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                self._read()
        return self.arrived(most)

    def arrived(self, most: int = -1) -> list[dict[str, Any]]:
        """Return the documents that have been read already; at most ``most`` of them if that is positive."""
        *lines, self._pending = self._pending.split(b"\n", most)
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            raise ConnectionError("a stranger speaks") from None

    def _read(self) -> None:
        data = self.connection.recv(65536)
        if not data:
            raise ConnectionError("the connection was closed")
        self._pending += data
        if len(self._pending) > self._most:
            raise ConnectionError("a stranger speaks")

    def close(self) -> None:
        """Close the connection; harmless when called twice."""
        with suppress(OSError):
            self.connection.close()


def prove(environment: RankEnvironment, purpose: str, side: str, nonces: str) -> str:
    """Return an HMAC of the arguments, which only a rank of this run can compute.

    Args:
        environment: The environment of this rank.
        purpose: As given to :func:`listen`.
        side: The side that proves itself: ``rank 0`` or ``caller``.
        nonces: The random numbers of both sides, used once.
    """
    said = f"{purpose}/{environment.world_size}/{side}/{nonces}"
    return hmac.new(environment.run_id.encode(), said.encode(), "sha256").hexdigest()


def listen(environment: RankEnvironment, purpose: str) -> socket.socket:
    """Open rank 0's socket, which the others find with :func:`dial`, at the address they call (``ports.listen_at``).

    Raises:
        DistributedError: All ports that it may use are taken.
    """
    for port in side_ports(environment.master_port):
        with suppress(OSError):
            return listen_at(environment.master_addr, port)
    ports = side_ports(environment.master_port)
    raise DistributedError(
        f"rank 0 cannot listen for the others ({purpose}): ports {ports[0]} to {ports[-1]} are taken",
        mend="give another MASTER_PORT: they follow from it",
    )


def dial(environment: RankEnvironment, purpose: str, about: dict[str, Any], seconds: float) -> Line:
    """Connect this rank, which is not rank 0, to rank 0; try until it answers.

    Args:
        environment: The environment of this rank.
        purpose: As given to :func:`listen`.
        about: Entries of this rank's greeting besides rank and host.
        seconds: Time limit.

    Raises:
        DistributedError: It did not answer in time.
    """
    until = time.monotonic() + seconds
    greeting = {"rank": environment.rank, "host": environment.host, **about}
    reason = "nobody answers"
    while True:
        for port in side_ports(environment.master_port):
            try:
                return _call(environment, purpose, greeting, port, max(0.2, min(3.0, until - time.monotonic())))
            except OSError as error:
                reason = str(error)
            if time.monotonic() > until:
                address, ports = environment.master_addr, side_ports(environment.master_port)
                raise DistributedError(
                    f"rank {environment.rank} on {environment.host} cannot reach rank 0 at {address}: {reason}",
                    mend=f"ports {ports[0]} to {ports[-1]} of {address} must be open to the other hosts, "
                    "and rank 0 must have been started",
                )
        time.sleep(0.1)


def _call(env: RankEnvironment, purpose: str, greeting: dict[str, Any], port: int, seconds: float) -> Line:
    with among_ranks():
        line = Line(socket.create_connection((env.master_addr, port), timeout=seconds))
    nonce = secrets.token_hex(16)
    try:
        line.send({"nonce": nonce})
        challenge = line.receive(ANSWER_SECONDS)
        nonces = f"{nonce}/{challenge.get('nonce')}"
        if not hmac.compare_digest(
            str(challenge.get("proof")).encode(), prove(env, purpose, "rank 0", nonces).encode()
        ):
            raise ConnectionError(f"another program answers at port {port}")
        line.send({**greeting, "proof": prove(env, purpose, "caller", nonces)})
        answer = line.receive(ANSWER_SECONDS)
        if answer.get("welcome") is not True:
            raise ConnectionError(f"another program answers at port {port}")
        line.greeting = answer
    except OSError:
        line.close()
        raise
    line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line
