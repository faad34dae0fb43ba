"""Checks before training that all ranks have equal versions, recipe and data, and that all machines can connect.

    1. Each rank sends its values, by name, to rank 0. The first rank of each machine also sends an address to test.
    2. Rank 0 compares the values and sends the result to all ranks.
    3. The first ranks connect to each other, as the process group will. Rank 0 sends the result to all ranks.

The checks do not use the process group, because different versions can break it without a clear error.
"""

from __future__ import annotations

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
from streamtune.distributed.wire import Admission, Channel, connect_to_rank_0, listen_for_ranks
from streamtune.errors import DistributedError

PURPOSE = "agree"
PACKAGES = ("torch", "transformers", "deepspeed", "peft")
SLOWEST_RANK_SECONDS = 300.0
"""Seconds to wait for the slowest rank, which may still read data."""
CONNECT_SECONDS = 10.0
MAX_SHOWN_CHARACTERS = 40


def package_versions() -> dict[str, str]:
    """Return name -> version of Python, StreamTune and packages that must have equal versions on all ranks.

    The packages are not imported. A missing package has the version ``not installed``.
    """
    versions_by_name = {"python": platform.python_version(), "streamtune": __version__}
    for package in PACKAGES:
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            versions_by_name[package] = "not installed"
    return versions_by_name


def check_ranks_agree(
    values: Mapping[str, str], environment: RankEnvironment | None = None, seconds: float = SLOWEST_RANK_SECONDS
) -> None:
    """Check that ``values`` and :func:`package_versions` are equal on all ranks, and that machines can connect.

    All ranks must call this function. With one rank nothing is checked.

    Args:
        values: Name -> value, such as the hash of the recipe.
        environment: Environment of this rank; None: read from the launcher's variables.
        seconds: Seconds to wait for the slowest rank.

    Raises:
        DistributedError: Values differ, a rank is late, or machines cannot connect. Every rank raises the same error.
    """
    env = read_environment() if environment is None else environment
    if env.world_size == 1:
        return
    message: dict[str, Any] = {"facts": {**package_versions(), **values}, "leads": env.local_rank == 0}
    outcome = _compare_on_rank_0(env, message, seconds) if env.is_main else _report_to_rank_0(env, message, seconds)
    if outcome is not None:
        raise Failure.from_dict(outcome).to_error(with_rank=False)


class _ReachablePort:
    """Context manager that listens at a port in the first rank of each machine, for connection tests by other
    machines."""

    def __init__(self, env: RankEnvironment, address: str) -> None:
        self._server: socket.socket | None = None
        self.port = 0
        if env.local_rank == 0 and not env.one_machine:
            self._server = listen_at(address, 0)
            self.port = self._server.getsockname()[1]

    def __enter__(self) -> _ReachablePort:
        if self._server is not None:
            threading.Thread(target=self._accept_connections, args=(self._server,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
            self._server.close()

    def _accept_connections(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                caller, _ = server.accept()
                caller.close()


def _report_to_rank_0(env: RankEnvironment, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """Send ``message`` to rank 0; return the failure that rank 0 found (:class:`Failure` as a dict), or None."""
    channel = connect_to_rank_0(env, PURPOSE, {}, seconds)
    try:
        address = channel.connection.getsockname()[0]
        with _ReachablePort(env, address) as reachable:
            channel.send({**message, "address": address, "port": reachable.port})
            answer = channel.receive(seconds + CONNECT_SECONDS)
            if answer["outcome"] is None:
                channel.send({"unreached": _find_unreachable_leaders(answer["leaders"], env.rank)})
                answer = channel.receive(2 * CONNECT_SECONDS + seconds)
        return answer["outcome"]
    except OSError as error:
        raise DistributedError(
            f"rank {env.rank} on {env.host} lost its connection to rank 0 ({env.master_addr}) before training: {error}",
            fix="see the error of rank 0",
        ) from None
    finally:
        channel.close()


def _compare_on_rank_0(env: RankEnvironment, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """Compare the messages of all ranks, send the result to all ranks, and return the failure as a dict, or None."""
    callers: dict[int, tuple[Channel, dict[str, Any]]] = {}
    hosts = {0: env.host}
    try:
        with _ReachablePort(env, env.master_addr) as reachable:
            outcome = _collect_messages(env, callers, hosts, seconds)
            messages = {0: message, **{rank: sent for rank, (_, sent) in callers.items()}}
            if outcome is None:
                outcome = find_differing_values({rank: sent["facts"] for rank, sent in messages.items()}, hosts)
            own = {**message, "address": env.master_addr, "port": reachable.port}
            leaders = [
                {"rank": rank, "host": hosts[rank], "address": sent["address"], "port": sent["port"]}
                for rank, sent in sorted({**messages, 0: own}.items())
                if sent["leads"]
            ]
            _send_outcome(callers, outcome, leaders)
            if outcome is None:
                outcome = _check_connections(env, callers, hosts, leaders)
                _send_outcome(callers, outcome, [])
    finally:
        for channel, _ in callers.values():
            channel.close()
    return asdict(outcome) if outcome is not None else None


def _collect_messages(
    env: RankEnvironment, callers: dict[int, tuple[Channel, dict[str, Any]]], hosts: dict[int, str], seconds: float
) -> Failure | None:
    """Add the messages of all ranks to ``callers`` and ``hosts``; return a failure if a rank sent none in time."""
    deadline = time.monotonic() + seconds
    with (
        selectors.DefaultSelector() as selector,
        closing(Admission(listen_for_ranks(env, PURPOSE), env, PURPOSE, {}, selector)) as admission,
    ):
        while len(callers) < env.world_size - 1:
            if time.monotonic() > deadline:
                missing = [rank for rank in range(1, env.world_size) if rank not in callers]
                have = "have" if len(missing) > 1 else "has"
                who = describe_ranks(missing)
                what = f"{who} of {env.world_size} {have} not connected to rank 0 on {env.host} within "
                fix = f"see their logs; their hosts must be able to connect to {env.master_addr}"
                return Failure(missing[0], "?", f"{what}{seconds:.0f} s", fix=fix)
            for key, _ in selector.select(max(0.01, min(1.0, deadline - time.monotonic()))):
                if (admitted := admission.process_ready_socket(key.fileobj)) is not None:
                    _receive_message(*admitted, callers, hosts)
            admission.close_overdue_callers()
    return None


def _receive_message(
    channel: Channel,
    greeting: dict[str, Any],
    callers: dict[int, tuple[Channel, dict[str, Any]]],
    hosts: dict[int, str],
) -> None:
    try:
        message = channel.receive(5.0)
        checked = {name: message[name] for name in ("facts", "leads", "address", "port")}
    except (OSError, KeyError):
        channel.close()
        return
    if (previous := callers.get(greeting["rank"])) is not None:
        previous[0].close()
    callers[greeting["rank"]], hosts[greeting["rank"]] = (channel, checked), greeting["host"]


def _send_outcome(callers: Mapping[int, tuple[Channel, Any]], outcome: Failure | None, leaders: Sequence[Any]) -> None:
    document = {"outcome": asdict(outcome) if outcome is not None else None, "leaders": list(leaders)}
    for channel, _ in callers.values():
        with suppress(OSError):
            channel.send(document)


def _find_unreachable_leaders(leaders: Sequence[dict[str, Any]], rank: int) -> list[str]:
    """Return a description of each leader (first rank of a machine) that cannot be reached from ``rank``.

    The list is empty if ``rank`` itself is not a leader.
    """
    if rank not in [leader["rank"] for leader in leaders]:
        return []
    unreached = []
    for leader in leaders:
        if leader["rank"] != rank:
            try:
                with allow_rank_connections():
                    socket.create_connection((leader["address"], leader["port"]), timeout=CONNECT_SECONDS / 2).close()
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                place = f"{leader['address']}:{leader['port']}"
                unreached.append(f"rank {leader['rank']} on {leader['host']} ({place}): {reason}")
    return unreached


def _check_connections(
    env: RankEnvironment,
    callers: Mapping[int, tuple[Channel, Any]],
    hosts: Mapping[int, str],
    leaders: Sequence[dict[str, Any]],
) -> Failure | None:
    unreached = {0: _find_unreachable_leaders(leaders, 0)}
    for rank, (channel, _) in callers.items():
        try:
            unreached[rank] = channel.receive(CONNECT_SECONDS * max(1, len(leaders)))["unreached"]
        except (OSError, KeyError):
            unreached[rank] = [f"rank 0 on {env.host}: no test result arrived"]
    lines = [
        f"rank {rank} on {hosts[rank]} cannot reach {place}" for rank in sorted(unreached) for place in unreached[rank]
    ]
    if not lines:
        return None
    fix = "allow connections between the hosts on all ports above 1024; gloo and NCCL connect every pair of ranks"
    return Failure(0, env.host, "\n- ".join(["ranks cannot reach each other", *lines[:8]]), fix=fix)


def find_differing_values(values_by_rank: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> Failure | None:
    """Return a failure that lists the values that differ between ranks; None if all are equal."""
    differences = []
    for name in dict.fromkeys(name for values in values_by_rank.values() for name in values):
        ranks_by_value: dict[str, list[int]] = {}
        for rank in sorted(values_by_rank):
            ranks_by_value.setdefault(values_by_rank[rank].get(name, "unknown"), []).append(rank)
        if len(ranks_by_value) > 1:
            shown = []
            for value, ranks in sorted(ranks_by_value.items(), key=lambda item: (-len(item[1]), item[1])):
                places = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
                shown.append(f"{value[:MAX_SHOWN_CHARACTERS]} on {describe_ranks(ranks)} ({places})")
            differences.append(f"{name}: {'; '.join(shown)}")
    if not differences:
        return None
    fix = "install the same versions on every host, and use the same recipe, settings and data files on every rank"
    what = "\n- ".join(["the ranks differ", *differences])
    return Failure(0, hosts[0], what, fix=fix)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return a text such as ``rank 3`` or ``ranks 0-6, 8``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    shown = ", ".join("-".join(str(edge) for edge in part) for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
