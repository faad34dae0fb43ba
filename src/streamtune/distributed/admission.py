"""Rank 0 lets in those that prove to be ranks of its run. Whoever else connects holds nobody up.

    caller                                   rank 0
    {"nonce": a}                    ->
                                    <-       {"nonce": b, "proof": HMAC(run's id, "rank 0", a, b)}
    {"proof": HMAC(..., "caller", a, b), "rank": 3, ...}  ->
                                    <-       {"welcome": true, ...}

The run's id itself never travels, so a program that has taken a port before rank 0 learns nothing it could use there.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .environment import RankEnvironment
from .wire import ANSWER_SECONDS, Line, prove

__all__ = ["Admission"]

MOST_WAITING = 128
"""Connections that have not proved anything yet; one more ends the oldest."""
MOST_GREETING = 8192
"""Bytes of a greeting."""


@dataclass
class _Caller:
    line: Line
    until: float
    nonces: str = ""
    """Both, once rank 0 has sent its own."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))


class Admission:
    """The calls that come to a socket of :func:`streamtune.distributed.wire.listen`; nothing here waits for a caller.

    Args:
        server: The socket. It is closed with this.
        environment: Of rank 0.
        purpose: As given to ``listen``.
        about: What rank 0 says of itself to those it lets in.
        selector: Where sockets are watched, with this object as their data.
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
        """Of all its sockets."""
        if self.is_open:
            yield self._server.fileno()
        yield from (connection.fileno() for connection in self._callers)

    def take(self, ready: Any) -> tuple[Line, dict[str, Any]] | None:
        """Do what there is to do about a socket that has become readable.

        Returns:
            The line to a rank that has been let in and what it says of itself, ``rank`` and ``host`` checked.
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
        """Take no more calls."""
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
