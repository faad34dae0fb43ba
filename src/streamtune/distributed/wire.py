"""Connections between rank 0 and other ranks outside the process group, which exchange JSON documents, one per line.

Rank 0 accepts only connections that prove to be from ranks of its run (:class:`Admission`)::

    other rank                               rank 0
    {"nonce": a}                    ->
                                    <-       {"nonce": b, "proof": HMAC(run's id, "rank 0", a, b)}
    {"proof": HMAC(..., "caller", a, b), "rank": 3, ...}  ->
                                    <-       {"welcome": true, ...}

The run's id itself is never sent, so another program that listens at rank 0's port cannot learn it.
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
from streamtune.distributed.hosts import listen_at, rank_0_ports
from streamtune.errors import DistributedError

MAX_DOCUMENT_BYTES = 1 << 20
"""Largest document that is read, in bytes; usual documents have a few hundred bytes."""
ANSWER_SECONDS = 3.0
"""Seconds to wait for the answer to a greeting; without an answer the other side is another program."""


class Channel:
    """A socket that sends and receives JSON documents; not thread-safe.

    Args:
        connection: The connected socket.
        max_bytes: Size of the largest document that is read.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_DOCUMENT_BYTES) -> None:
        self.connection = connection
        self._max_bytes = max_bytes
        self.greeting: dict[str, Any] = {}
        """Description that rank 0 sent when it admitted this rank; empty on rank 0."""
        self._pending = b""

    def allow_large_documents(self) -> None:
        """Accept documents of up to :data:`MAX_DOCUMENT_BYTES`; called after the other side has proved to be a rank."""
        self._max_bytes = MAX_DOCUMENT_BYTES

    def send(self, document: dict[str, Any], seconds: float = 2.0) -> None:
        """Send a document.

        Raises:
            OSError: Sending takes more than ``seconds``, or the connection is closed.
        """
        self.connection.settimeout(seconds)
        self.connection.sendall(json.dumps(document).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next document, after waiting up to ``seconds``.

        Raises:
            TimeoutError: No document arrived in time.
            OSError: The connection is closed, or the other side does not send JSON documents.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            self._read()
        return self.pop_received(1)[0]

    def receive_all(self, max_count: int = -1) -> list[dict[str, Any]]:
        """Return up to ``max_count`` documents that have arrived (-1: all), without waiting.

        Raises:
            OSError: The connection is closed or invalid. :meth:`pop_received` then returns documents that arrived
                before.
        """
        self.connection.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                self._read()
        return self.pop_received(max_count)

    def pop_received(self, max_count: int = -1) -> list[dict[str, Any]]:
        """Return up to ``max_count`` documents that were read from the socket but not returned yet (-1: all)."""
        *lines, self._pending = self._pending.split(b"\n", max_count)
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            raise ConnectionError("the other side is not a rank of this run") from None

    def _read(self) -> None:
        data = self.connection.recv(65536)
        if not data:
            raise ConnectionError("the connection was closed")
        self._pending += data
        if len(self._pending) > self._max_bytes:
            raise ConnectionError("the other side is not a rank of this run")

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()


def make_proof(environment: RankEnvironment, purpose: str, side: str, nonces: str) -> str:
    """Return an HMAC, keyed with the run's id, by which one side proves that it belongs to the run.

    Args:
        environment: Environment of this rank, with the run's id.
        purpose: Purpose of the connection, part of the signed text.
        side: Side that proves itself: ``rank 0`` or ``caller``.
        nonces: Nonces of both sides.
    """
    signed_text = f"{purpose}/{environment.world_size}/{side}/{nonces}"
    return hmac.new(environment.run_id.encode(), signed_text.encode(), "sha256").hexdigest()


def listen_for_ranks(environment: RankEnvironment, purpose: str) -> socket.socket:
    """Return a listening socket of rank 0, to which other ranks connect with :func:`connect_to_rank_0`.

    Raises:
        DistributedError: All ports of :func:`rank_0_ports` are in use.
    """
    ports = rank_0_ports(environment.master_port)
    for port in ports:
        with suppress(OSError):
            return listen_at(environment.master_addr, port)
    raise DistributedError(
        f"rank 0 cannot listen for other ranks ({purpose}): ports {ports[0]} to {ports[-1]} are in use",
        fix="set another MASTER_PORT, from which these ports are derived",
    )


def connect_to_rank_0(environment: RankEnvironment, purpose: str, entries: dict[str, Any], seconds: float) -> Channel:
    """Connect to rank 0, prove that this rank belongs to the run, and return the connection.

    Args:
        environment: Environment of this rank.
        purpose: Purpose of the connection.
        entries: Entries to send to rank 0, in addition to this rank and its host.
        seconds: Time limit of the attempts.

    Raises:
        DistributedError: Rank 0 cannot be reached.
    """
    deadline = time.monotonic() + seconds
    address, ports = environment.master_addr, rank_0_ports(environment.master_port)
    greeting = {"rank": environment.rank, "host": environment.host, **entries}
    reason = "no answer"
    while True:
        for port in ports:
            try:
                return _connect(environment, purpose, greeting, port, max(0.2, min(3.0, deadline - time.monotonic())))
            except OSError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"rank {environment.rank} on {environment.host} cannot reach rank 0 at {address}: {reason}",
                    fix=f"start rank 0, and open ports {ports[0]} to {ports[-1]} of {address} to the other hosts",
                )
        time.sleep(0.1)


def _connect(env: RankEnvironment, purpose: str, greeting: dict[str, Any], port: int, seconds: float) -> Channel:
    with allow_rank_connections():
        channel = Channel(socket.create_connection((env.master_addr, port), timeout=seconds))
    nonce = secrets.token_hex(16)
    try:
        channel.send({"nonce": nonce})
        challenge = channel.receive(ANSWER_SECONDS)
        nonces = f"{nonce}/{challenge.get('nonce')}"
        if not hmac.compare_digest(
            str(challenge.get("proof")).encode(), make_proof(env, purpose, "rank 0", nonces).encode()
        ):
            raise ConnectionError(f"another program answers at port {port}")
        channel.send({**greeting, "proof": make_proof(env, purpose, "caller", nonces)})
        answer = channel.receive(ANSWER_SECONDS)
        if answer.get("welcome") is not True:
            raise ConnectionError(f"another program answers at port {port}")
        channel.greeting = answer
    except OSError:
        channel.close()
        raise
    channel.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return channel


MAX_CALLERS = 128
"""Largest number of connections without a proof; one more closes the oldest connection."""
MAX_GREETING_BYTES = 8192
"""Largest greeting, in bytes."""


@dataclass
class _Caller:
    channel: Channel
    deadline: float
    nonces: str = ""
    """Nonces of both sides; empty until rank 0 has sent its nonce."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))


class Admission:
    """Accepts connections that prove to be from ranks of this run, and closes all others; never blocks.

    Args:
        server: Listening socket.
        environment: Environment of rank 0.
        purpose: Purpose of the connections.
        answer_entries: Additional entries of the answer to an accepted rank.
        selector: Selector in which the sockets are registered, with this object as their ``data``.
    """

    def __init__(
        self,
        server: socket.socket,
        environment: RankEnvironment,
        purpose: str,
        answer_entries: dict[str, Any],
        selector: selectors.BaseSelector,
    ) -> None:
        self._server, self._env, self._purpose, self._answer_entries = server, environment, purpose, answer_entries
        self._selector = selector
        self._callers: dict[socket.socket, _Caller] = {}
        self.is_open = True
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ, self)

    @property
    def socket_descriptors(self) -> Iterator[int]:
        """File descriptors of the listening socket and of connections that are not accepted yet."""
        if self.is_open:
            yield self._server.fileno()
        yield from (connection.fileno() for connection in self._callers)

    def process_ready_socket(self, ready_socket: Any) -> tuple[Channel, dict[str, Any]] | None:
        """Accept a connection from ``ready_socket`` or read from it, after the selector has found it readable.

        Returns:
            The connection of a rank that has proved to belong to the run, and its first message; None if there is none.
        """
        if ready_socket is self._server:
            self._accept_caller()
            return None
        caller = self._callers.get(ready_socket)
        if caller is None:
            return None
        try:
            for document in caller.channel.receive_all(1):
                if caller.nonces:
                    return self._check_proof(caller, document)
                self._send_challenge(caller, document)
        except (OSError, KeyError, TypeError, ValueError):
            self._close_caller(caller)
        return None

    def close_overdue_callers(self) -> None:
        """Close connections that have not sent a valid proof in time."""
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.deadline < now]:
            self._close_caller(caller)

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for caller in list(self._callers.values()):
            self._close_caller(caller)
        self._selector.unregister(self._server)
        self._server.close()

    def _accept_caller(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        if len(self._callers) >= MAX_CALLERS:
            self._close_caller(next(iter(self._callers.values())))
        connection.setblocking(False)
        self._callers[connection] = _Caller(Channel(connection, MAX_GREETING_BYTES), time.monotonic() + ANSWER_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ, self)

    def _send_challenge(self, caller: _Caller, document: dict[str, Any]) -> None:
        caller.nonces = f"{str(document['nonce'])[:64]}/{caller.nonce}"
        proof = make_proof(self._env, self._purpose, "rank 0", caller.nonces)
        caller.channel.send({"nonce": caller.nonce, "proof": proof}, seconds=0)

    def _check_proof(self, caller: _Caller, document: dict[str, Any]) -> tuple[Channel, dict[str, Any]]:
        expected = make_proof(self._env, self._purpose, "caller", caller.nonces)
        if not hmac.compare_digest(str(document["proof"]).encode(), expected.encode()):
            raise ConnectionError("the proof is not from this run")
        document["rank"], document["host"] = int(document["rank"]), str(document["host"])
        if not 0 < document["rank"] < self._env.world_size:
            raise ConnectionError("the rank is not in this run")
        caller.channel.send({"welcome": True, "host": self._env.host, **self._answer_entries}, seconds=0)
        caller.channel.allow_large_documents()
        self._unregister_caller(caller)
        return caller.channel, document

    def _unregister_caller(self, caller: _Caller) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(caller.channel.connection)
        self._callers.pop(caller.channel.connection, None)

    def _close_caller(self, caller: _Caller) -> None:
        self._unregister_caller(caller)
        caller.channel.close()
