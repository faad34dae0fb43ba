"""Checks before training: all ranks run the same program, recipe and data, and every machine reaches the others.

    1. each rank sends rank 0 its facts, and the first rank of each machine the address at which it can be called
    2. rank 0 compares them and sends all of them the outcome
    3. the first ranks call each other, as the process group will, and rank 0 sends all of them the outcome

The checks use connections of their own: different versions can break the process group before it reports an error.
"""

from __future__ import annotations

import hashlib
import os
import platform
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from streamtune import __version__
from streamtune.base.privacy import allow_rank_connections
from streamtune.distributed.environment import RankEnvironment, read_environment
from streamtune.distributed.failure import Failure
from streamtune.distributed.hosts import listen_at
from streamtune.distributed.wire import Admission, Line, dial, listen
from streamtune.errors import DistributedError

PURPOSE = "agree"
PACKAGES = ("torch", "transformers", "deepspeed", "peft")
TOGETHER_SECONDS = 300.0
"""Wait for the slowest rank: reading data may take it longer."""
REACH_SECONDS = 10.0
SHOWN_LENGTH = 40


def versions() -> dict[str, str]:
    """Return the versions that ranks must share to compute the same, without importing any package."""
    versions_by_name = {"python": platform.python_version(), "streamtune": __version__}
    for package in PACKAGES:
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            versions_by_name[package] = "not installed"
    return versions_by_name


def fingerprint(text: str) -> str:
    """Return a short hash of a text that is too long to compare by eye."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree(
    facts: Mapping[str, str], environment: RankEnvironment | None = None, seconds: float = TOGETHER_SECONDS
) -> None:
    """Compare ``facts`` and :func:`versions` over all ranks, which all call this. With one rank nothing happens.

    Raises:
        DistributedError: Ranks differ, have not come in time or cannot reach others; the same error on every rank.
    """
    env = read_environment() if environment is None else environment
    if env.world_size == 1:
        return
    message: dict[str, Any] = {"facts": {**versions(), **facts}, "leads": env.local_rank == 0}
    outcome = _collect(env, message, seconds) if env.is_main else _report(env, message, seconds)
    if outcome is not None:
        raise Failure.from_dict(outcome).error(named=False)


class _ReachablePort:
    """A port of each machine's first rank that other machines can call, while inside; none on one machine."""

    def __init__(self, env: RankEnvironment, address: str) -> None:
        self._server: socket.socket | None = None
        self.port = 0
        if env.local_rank == 0 and not env.one_machine:
            self._server = listen_at(address, 0)
            self.port = self._server.getsockname()[1]

    def __enter__(self) -> _ReachablePort:
        if self._server is not None:
            threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
            self._server.close()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                caller, _ = server.accept()
                caller.close()


def _report(env: RankEnvironment, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """Send this rank's facts to rank 0, and return the outcome."""
    line = dial(env, PURPOSE, {}, seconds)
    try:
        address = line.connection.getsockname()[0]
        with _ReachablePort(env, address) as reachable:
            line.send({**message, "address": address, "port": reachable.port})
            answer = line.receive(seconds + REACH_SECONDS)
            if answer["outcome"] is None:
                line.send({"unreached": _call_leaders(answer["leaders"], env.rank)})
                answer = line.receive(2 * REACH_SECONDS + seconds)
        return answer["outcome"]
    except OSError as error:
        raise DistributedError(
            f"rank {env.rank} on {env.host} lost rank 0 at {env.master_addr} before the first step: {error}",
            fix="see what rank 0 says",
        ) from None
    finally:
        line.close()


def _collect(env: RankEnvironment, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """Collect the facts of all ranks on rank 0, send the outcome to the ranks that came, and return it."""
    callers: dict[int, tuple[Line, dict[str, Any]]] = {}
    hosts = {0: env.host}
    try:
        with _ReachablePort(env, env.master_addr) as reachable:
            outcome = _wait_for_facts(env, callers, hosts, seconds)
            everyone = {0: message, **{rank: said for rank, (_, said) in callers.items()}}
            if outcome is None:
                outcome = compare_facts({rank: said["facts"] for rank, said in everyone.items()}, hosts)
            own = {**message, "address": env.master_addr, "port": reachable.port}
            leaders = [
                {"rank": rank, "host": hosts[rank], "address": said["address"], "port": said["port"]}
                for rank, said in sorted({**everyone, 0: own}.items())
                if said["leads"]
            ]
            _send_outcome(callers, outcome, leaders)
            if outcome is None:
                outcome = _check_reach(env, callers, hosts, leaders)
                _send_outcome(callers, outcome, [])
    finally:
        for line, _ in callers.values():
            line.close()
    return asdict(outcome) if outcome is not None else None


def _wait_for_facts(
    env: RankEnvironment, callers: dict[int, tuple[Line, dict[str, Any]]], hosts: dict[int, str], seconds: float
) -> Failure | None:
    """Wait for every rank to call and send its facts; return a failure if some do not."""
    until = time.monotonic() + seconds
    with (
        selectors.DefaultSelector() as selector,
        closing(Admission(listen(env, PURPOSE), env, PURPOSE, {}, selector)) as admission,
    ):
        while len(callers) < env.world_size - 1:
            if time.monotonic() > until:
                missing = [rank for rank in range(1, env.world_size) if rank not in callers]
                are = "have" if len(missing) > 1 else "has"
                what = f"{describe_ranks(missing)} of {env.world_size} {are} not called rank 0 on {env.host} within "
                fix = f"see their logs; their hosts must reach ports of {env.master_addr}"
                return Failure(missing[0], "?", f"{what}{seconds:.0f} s", fix=fix)
            for key, _ in selector.select(max(0.01, min(1.0, until - time.monotonic()))):
                if (admitted := admission.take(key.fileobj)) is not None:
                    _hear_facts(*admitted, callers, hosts)
            admission.tidy()
    return None


def _hear_facts(
    line: Line, greeting: dict[str, Any], callers: dict[int, tuple[Line, dict[str, Any]]], hosts: dict[int, str]
) -> None:
    """Record the facts of an admitted rank; without them close the connection, and the rank calls again."""
    try:
        said = line.receive(5.0)
        ranks = {name: said[name] for name in ("facts", "leads", "address", "port")}
    except (OSError, KeyError):
        line.close()
        return
    if (before := callers.get(greeting["rank"])) is not None:
        before[0].close()
    callers[greeting["rank"]], hosts[greeting["rank"]] = (line, ranks), greeting["host"]


def _send_outcome(callers: Mapping[int, tuple[Line, Any]], outcome: Failure | None, leaders: Sequence[Any]) -> None:
    document = {"outcome": asdict(outcome) if outcome is not None else None, "leaders": list(leaders)}
    for line, _ in callers.values():
        with suppress(OSError):
            line.send(document)


def _call_leaders(leaders: Sequence[dict[str, Any]], rank: int) -> list[str]:
    """Call the first ranks of the other machines, if this rank is a first; return those not reached, and why."""
    if rank not in [leader["rank"] for leader in leaders]:
        return []
    unreached = []
    for leader in leaders:
        if leader["rank"] != rank:
            try:
                with allow_rank_connections():
                    socket.create_connection((leader["address"], leader["port"]), timeout=REACH_SECONDS / 2).close()
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                place = f"{leader['address']}:{leader['port']}"
                unreached.append(f"rank {leader['rank']} on {leader['host']} ({place}): {reason}")
    return unreached


def _check_reach(
    env: RankEnvironment,
    callers: Mapping[int, tuple[Line, Any]],
    hosts: Mapping[int, str],
    leaders: Sequence[dict[str, Any]],
) -> Failure | None:
    """Return a failure that names each machine that does not reach another; None if all do."""
    unreached = {0: _call_leaders(leaders, 0)}
    for rank, (line, _) in callers.items():
        try:
            unreached[rank] = line.receive(REACH_SECONDS * max(1, len(leaders)))["unreached"]
        except (OSError, KeyError):
            unreached[rank] = [f"rank 0 on {env.host}: it went silent"]
    lines = [
        f"rank {rank} on {hosts[rank]} cannot reach {place}" for rank in sorted(unreached) for place in unreached[rank]
    ]
    if not lines:
        return None
    fix = "the hosts must reach each other on every port above 1024, as gloo and NCCL connect each to each"
    return Failure(0, env.host, "\n- ".join(["ranks cannot reach each other", *lines[:8]]), fix=fix)


def compare_facts(facts: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> Failure | None:
    """Return a failure with a line for each fact that differs: its values, and the ranks of each; None if all agree."""
    differences = []
    for name in dict.fromkeys(name for said in facts.values() for name in said):
        who: dict[str, list[int]] = {}
        for rank in sorted(facts):
            who.setdefault(facts[rank].get(name, "unknown"), []).append(rank)
        if len(who) > 1:
            said = []
            for value, ranks in sorted(who.items(), key=lambda item: (-len(item[1]), item[1])):
                places = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
                said.append(f"{value[:SHOWN_LENGTH]} on {describe_ranks(ranks)} ({places})")
            differences.append(f"{name}: {'; '.join(said)}")
    if not differences:
        return None
    fix = "install the same versions on every host, and give every rank the same recipe, settings and data files"
    what = "\n- ".join(["the ranks are not alike", *differences])
    return Failure(0, hosts[0], what, fix=fix)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Describe ranks in short: ``rank 3``, ``ranks 0-6, 8``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    shown = ", ".join("-".join(str(edge) for edge in part) for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
