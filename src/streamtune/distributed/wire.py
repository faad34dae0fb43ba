"""Connections between rank 0 and the other ranks, apart from the process group's: JSON documents, one a line.

The process group's connections give no reason when they stand still, and those of a store block the thread that waits.

Rank 0 lets in those that prove to be ranks of its run (:class:`Admission`). Whoever else connects holds nobody up.

    caller                                   rank 0
    {"nonce": a}                    ->
                                    <-       {"nonce": b, "proof": HMAC(run's id, "rank 0", a, b)}
    {"proof": HMAC(..., "caller", a, b), "rank": 3, ...}  ->
                                    <-       {"welcome": true, ...}

The run's id itself never travels, so a program that has taken a port before rank 0 learns nothing it could use there.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from streamtune.base.privacy import allow_rank_connections
from streamtune.distributed.environment import RankEnvironment
from streamtune.distributed.hosts import listen_at, side_ports
from streamtune.errors import DistributedError

MOST_BYTES = 1 << 20
"""Most bytes of a document. Ours have hundreds; a stranger's connection is not read beyond it."""
ANSWER_SECONDS = 3.0
"""Time for the answer to a greeting; without one the other side is another program."""


class Line:
    """A connection that carries JSON documents in both directions, for one thread; calls block up to their time limit.

    ``most`` is the number of bytes read at most without the end of a document.
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
        """Send a document; OSError if it is not sent in time, or the connection is closed."""
        self.connection.settimeout(seconds)
        self.connection.sendall(json.dumps(document).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait at most ``seconds`` for the next document, and return it.

        TimeoutError if none came in time; OSError if the connection was closed, or the other side does not send
        documents.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._pending:
            self.connection.settimeout(max(0.001, until - time.monotonic()))
            self._read()
        return self.arrived(1)[0]

    def drain(self, most: int = -1) -> list[dict[str, Any]]:
        """Return the documents that have come, at most ``most`` if that is positive, without waiting.

        OSError as in :meth:`receive`; then :meth:`arrived` returns documents that came before the connection was
        closed.
        """
        self.connection.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                self._read()
        return self.arrived(most)

    def arrived(self, most: int = -1) -> list[dict[str, Any]]:
        """Return the documents that have been read already, at most ``most`` if that is positive."""
        *lines, self._pending = self._pending.split(b"\n", most)
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            raise ConnectionError("the other side is no rank of this run") from None

    def _read(self) -> None:
        data = self.connection.recv(65536)
        if not data:
            raise ConnectionError("the connection was closed")
        self._pending += data
        if len(self._pending) > self._most:
            raise ConnectionError("the other side is no rank of this run")

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()


def prove(environment: RankEnvironment, purpose: str, side: str, nonces: str) -> str:
    """Return an HMAC that only a rank of this run can compute.

    ``side`` proves itself: ``rank 0`` or ``caller``. ``nonces`` are random numbers of both sides, used once.
    """
    said = f"{purpose}/{environment.world_size}/{side}/{nonces}"
    return hmac.new(environment.run_id.encode(), said.encode(), "sha256").hexdigest()


def listen(environment: RankEnvironment, purpose: str) -> socket.socket:
    """Open rank 0's socket, which the others find with :func:`dial`."""
    ports = side_ports(environment.master_port)
    for port in ports:
        with suppress(OSError):
            return listen_at(environment.master_addr, port)
    raise DistributedError(
        f"rank 0 cannot listen for the others ({purpose}): ports {ports[0]} to {ports[-1]} are taken",
        fix="give another MASTER_PORT: they follow from it",
    )


def dial(environment: RankEnvironment, purpose: str, about: dict[str, Any], seconds: float) -> Line:
    """Connect this rank, which is not rank 0, to rank 0; retry until ``seconds`` have passed.

    ``about`` are entries of this rank's greeting besides rank and host.
    """
    until = time.monotonic() + seconds
    address, ports = environment.master_addr, side_ports(environment.master_port)
    greeting = {"rank": environment.rank, "host": environment.host, **about}
    reason = "nobody answers"
    while True:
        for port in ports:
            try:
                return _call(environment, purpose, greeting, port, max(0.2, min(3.0, until - time.monotonic())))
            except OSError as error:
                reason = str(error)
            if time.monotonic() > until:
                raise DistributedError(
                    f"rank {environment.rank} on {environment.host} cannot reach rank 0 at {address}: {reason}",
                    fix=f"ports {ports[0]} to {ports[-1]} of {address} must be open to the other hosts, "
                    "and rank 0 must have been started",
                )
        time.sleep(0.1)


def _call(env: RankEnvironment, purpose: str, greeting: dict[str, Any], port: int, seconds: float) -> Line:
    with allow_rank_connections():
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


MOST_WAITING = 128
"""Connections that have not proved anything yet; one more ends the oldest."""
MOST_GREETING = 8192
"""Bytes of a greeting."""


@dataclass
class _Caller:
    line: Line
    until: float
    nonces: str = ""
    """Random numbers of both sides, once rank 0 has sent its own."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))


class Admission:
    """Lets ranks of this run in, on rank 0, and nobody else, without waiting for any of them.

    ``server`` is closed with it. ``about`` are entries of rank 0's greeting. ``selector`` watches the sockets, with
    this object as their data.
    """

    def __init__(
        self,
        server: socket.socket,
        environment: RankEnvironment,
        purpose: str,
        about: dict[str, Any],
        selector: selectors.BaseSelector,
    ) -> None:
        self._server, self._env, self._purpose, self._about = server, environment, purpose, about
        self._selector = selector
        self._callers: dict[socket.socket, _Caller] = {}
        self.is_open = True
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ, self)

    @property
    def descriptors(self) -> Iterator[int]:
        """File descriptors of all its sockets."""
        if self.is_open:
            yield self._server.fileno()
        yield from (connection.fileno() for connection in self._callers)

    def take(self, ready: Any) -> tuple[Line, dict[str, Any]] | None:
        """Accept or read from a socket that has become readable.

        Return the line to a rank that has been let in and its greeting, with ``rank`` and ``host`` checked; else None.
        """
        if ready is self._server:
            self._accept()
            return None
        caller = self._callers.get(ready)
        if caller is None:
            return None
        try:
            for document in caller.line.drain(1):
                if caller.nonces:
                    return self._admit(caller, document)
                self._challenge(caller, document)
        except (OSError, KeyError, TypeError, ValueError):
            self._drop(caller)
        return None

    def tidy(self) -> None:
        """Close the connections that have proved nothing in time."""
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.until < now]:
            self._drop(caller)

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for caller in list(self._callers.values()):
            self._drop(caller)
        self._selector.unregister(self._server)
        self._server.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        if len(self._callers) >= MOST_WAITING:
            self._drop(next(iter(self._callers.values())))
        connection.setblocking(False)
        self._callers[connection] = _Caller(Line(connection, MOST_GREETING), time.monotonic() + ANSWER_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ, self)

    def _challenge(self, caller: _Caller, document: dict[str, Any]) -> None:
        caller.nonces = f"{str(document['nonce'])[:64]}/{caller.nonce}"
        proof = prove(self._env, self._purpose, "rank 0", caller.nonces)
        caller.line.send({"nonce": caller.nonce, "proof": proof}, seconds=0)

    def _admit(self, caller: _Caller, document: dict[str, Any]) -> tuple[Line, dict[str, Any]]:
        expected = prove(self._env, self._purpose, "caller", caller.nonces)
        if not hmac.compare_digest(str(document["proof"]).encode(), expected.encode()):
            raise ConnectionError("not of this run")
        document["rank"], document["host"] = int(document["rank"]), str(document["host"])
        if not 0 < document["rank"] < self._env.world_size:
            raise ConnectionError("no rank of this run")
        caller.line.send({"welcome": True, "host": self._env.host, **self._about}, seconds=0)
        caller.line.trust()
        self._forget(caller)
        return caller.line, document

    def _forget(self, caller: _Caller) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(caller.line.connection)
        self._callers.pop(caller.line.connection, None)

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.line.close()
