"""``--nproc`` and ``--hostfile``: start the ranks of a command, wait for them, and report one error for all.

The launcher is the process that the user started. It loads no torch. Rank 0 writes to its terminal, the other ranks to
log files.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from streamtune.base import interrupts
from streamtune.base.privacy import allow_rank_connections
from streamtune.base.safe_path import safe_environment
from streamtune.base.streams import reader_is_gone
from streamtune.distributed.environment import read_environment
from streamtune.distributed.failure import RankEnd, first_failure
from streamtune.distributed.hosts import MOST_SLOTS, Host, check_host, free_port, is_free, read_hostfile
from streamtune.distributed.local_ranks import LocalRanks, count_devices
from streamtune.distributed.remote import HELLO_SECONDS, RemoteRanks, exported_variables
from streamtune.errors import ArgumentError

LAUNCH_OPTIONS = ("--nproc", "--hostfile")
TOGETHER_SECONDS = 3.0
"""Seconds after the first failure in which other ranks may notice it and write what they observed."""
GRACE_SECONDS = 4.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_SECONDS = 0.03


class RankGroup(Protocol):
    """The ranks of one machine."""

    host: str

    @property
    def running(self) -> list[int]: ...
    def poll(self) -> list[RankEnd]: ...
    def send(self, signum: int) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> list[RankEnd]: ...


def launch(arguments: Sequence[str], *, nproc: int | None, hostfile: Path | None, device: str = "auto") -> int:
    """Run ``streamtune ARGUMENTS`` in several ranks, and return the exit code.

    Args:
        arguments: Arguments of the command; ``--nproc`` and ``--hostfile`` are removed from them.
        nproc: Number of ranks on each host; None: as many as the hostfile says.
        hostfile: Path of the hostfile; None: only this machine.
        device: ``cpu``, ``cuda`` or ``auto``, as in the recipe.

    Raises:
        ArgumentError: The number of ranks or a host is not valid, or this process is already a rank.
        DistributedError: A host cannot be reached, or a rank ended without reporting an error.
        StreamTuneError: Error of the rank that failed first.
    """
    environment = read_environment()
    if environment.launcher != "none":
        raise ArgumentError(
            f"this process is already rank {environment.rank} of {environment.world_size}, started by "
            f"{environment.launcher}",
            where="--nproc" if nproc is not None else "--hostfile",
            fix=f"omit the option, because {environment.launcher} starts the ranks",
        )
    if nproc is not None and nproc < 1:
        raise ArgumentError(f"--nproc must be 1 or more, found {nproc}", where="--nproc", fix="set 1 or more")
    if nproc is not None and nproc > MOST_SLOTS:
        raise ArgumentError(
            f"--nproc must be at most {MOST_SLOTS:,}, found {str(nproc)[:40]}",
            where="--nproc",
            fix="set the number of devices of a machine",
        )
    hosts = read_hostfile(hostfile, nproc) if hostfile is not None else [Host("localhost", nproc or 1)]
    ranks = without_launch_options(arguments)
    groups: list[RankGroup] = []
    with _Signals() as signals:
        try:
            _start_ranks(hosts, ranks, device, groups, alone=hostfile is None)
            signals.started = True
            ends = _wait_for_ends(groups, signals)
        finally:
            for group in groups:
                group.close()
    if signals.first is not None:
        ends = _drop_echoes(ends)
    if (failed := first_failure(ends)) is not None:
        error, code = failed
        error.exit_code = code
        raise error
    codes = {end.rank: end.exit_code for end in ends}
    if signals.first is not None and any(codes.values()):
        return 128 + signals.first
    return codes.get(0, 0) or next((code for code in codes.values() if code), 0)


def _drop_echoes(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Return the ends of ranks; if some were stopped on request, errors that this caused in others count as stops."""
    if not any(end.stopped for end in ends):
        return list(ends)
    kinds = ("DistributedError", "StreamTuneError")
    return [
        replace(end, code=128 + signal.SIGTERM, failure=None)
        if end.code == 1 and (end.failure is None or not end.failure.own or end.failure.kind in kinds)
        else end
        for end in ends
    ]


def without_launch_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without ``--nproc`` and ``--hostfile``."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in LAUNCH_OPTIONS:
            skip = True
        elif not argument.startswith(tuple(f"{option}=" for option in LAUNCH_OPTIONS)):
            kept.append(argument)
    return kept


def _start_ranks(
    hosts: Sequence[Host], arguments: Sequence[str], device: str, groups: list[Any], *, alone: bool
) -> None:
    """Start all ranks of all hosts and append them to ``groups``.

    Ranks are started after all remote hosts have answered.
    """
    remotes: dict[str, RemoteRanks] = {}
    is_here = [alone or _is_this_machine(host) for host in hosts]
    for host, here in zip(hosts, is_here, strict=True):
        if here:
            _check_devices(host, count_devices() if device != "cpu" else 0)
        else:
            remotes[host.name] = RemoteRanks(host)
            groups.append(remotes[host.name])
    until = time.monotonic() + HELLO_SECONDS
    hellos = {host.name: remotes[host.name].hello(until) for host in hosts if host.name in remotes}
    for host in hosts:
        if host.name in hellos:
            _check_devices(host, hellos[host.name]["devices"] if device != "cpu" else 0)
    master = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if len(hosts) == 1 else hosts[0].address)
    check_host(master, "MASTER_ADDR")
    environment = {
        "WORLD_SIZE": str(sum(host.slots for host in hosts)),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(_choose_port(here=is_here[0], free_there=hellos.get(hosts[0].name, {}).get("port"))),
        "STREAMTUNE_RUN_ID": secrets.token_hex(16),
    }
    first_rank = 0
    for host, here in zip(hosts, is_here, strict=True):
        if here:
            command = [sys.executable, "-P", "-m", "streamtune", *arguments]
            name = socket.gethostname() if alone else host.address
            with interrupts.block_signals():  # until they are in `groups` and can be ended
                groups.append(LocalRanks(command, first_rank, host.slots, {**safe_environment(), **environment}, name))
        else:
            remotes[host.name].start(arguments, first_rank, host.slots, {**exported_variables(), **environment})
        first_rank += host.slots


def _is_this_machine(host: Host) -> bool:
    """Return True if the host's address belongs to this machine, so that a socket can be bound to it."""
    if "@" in host.name:
        return False
    try:
        with allow_rank_connections():
            addresses = socket.getaddrinfo(host.address, 0, type=socket.SOCK_DGRAM)
        for family, kind, _, _, address in addresses:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    except OSError:
        pass
    return False


def _check_devices(host: Host, devices: int) -> None:
    """Raise an ArgumentError if the host has fewer devices than ranks; without devices the ranks run on the CPU."""
    if 0 < devices < host.slots:
        raise ArgumentError(
            f"{host.slots} ranks need {host.slots} devices, but {host.address} has {devices}",
            where=host.where or "--nproc",
            fix=f"use {devices} or fewer, or train on the CPU with `--set device=cpu`",
        )


def _choose_port(*, here: bool, free_there: int | None) -> int:
    """Return rank 0's port: ``MASTER_PORT``, or a free one."""
    asked = os.environ.get("MASTER_PORT")
    if not asked:
        return free_port() if here or free_there is None else free_there
    if not asked.isdecimal() or not 0 < int(asked) < 65536:
        raise ArgumentError(f"'{asked}' is not a port", where="MASTER_PORT", fix="unset it to use a free port")
    if here and not is_free(int(asked)):
        raise ArgumentError(
            f"port {asked} is in use by another program",
            where="MASTER_PORT",
            fix=f"unset it to use a free port, or find the program: `ss -ltnp 'sport = :{asked}'`",
        )
    return int(asked)


def _wait_for_ends(groups: Sequence[RankGroup], signals: _Signals) -> list[RankEnd]:
    """Wait until all ranks have ended, and return their ends; after a failure, end the remaining ranks."""
    ends: list[RankEnd] = []
    num_passed = 0
    terminate_at = kill_at = None
    while True:
        for group in groups:
            ends += group.poll()
        if not any(group.running for group in groups):
            return ends
        now = time.monotonic()
        if reader_is_gone() and signals.first is None:  # a remote rank 0 does not notice it; its output comes here
            signals.ask(signal.SIGTERM)
        for signum in signals.take():
            _send(groups, signum)
            num_passed += 1
            if num_passed == 2:  # a second signal makes the ranks quit at once
                kill_at = now + 1.0
        if kill_at is None and num_passed and any(end.stopped for end in ends):
            # All ranks stop at the same step, but one that waits in a library does not notice that others have ended.
            kill_at = now + TOGETHER_SECONDS
        if terminate_at is None and any(end.code != 0 and not end.stopped for end in ends):
            terminate_at = now + TOGETHER_SECONDS
            kill_at = kill_at or terminate_at + GRACE_SECONDS
        if terminate_at is not None and now >= terminate_at:
            terminate_at = float("inf")
            _send(groups, signal.SIGTERM)
        if kill_at is not None and now >= kill_at:
            kill_at = now + GRACE_SECONDS
            for group in groups:
                group.kill()
        time.sleep(POLL_SECONDS)


def _send(groups: Sequence[RankGroup], signum: int) -> None:
    for group in groups:
        group.send(signum)


class _Signals:
    """Context manager that records signals for :func:`_wait_for_ends`, which passes them on to every rank."""

    def __init__(self) -> None:
        self.started = False
        """True if ranks have been started; before, a signal interrupts the start."""
        self.first: int | None = None
        """First signal that was passed on, SIGINT or SIGTERM; None if there was none."""
        self._pending: list[int] = []
        self._previous: dict[int, Any] = {}
        self._entered = ExitStack()

    def __enter__(self) -> _Signals:
        self._entered.enter_context(interrupts.use_other_handlers())
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if not interrupts.is_ignored(signum):
                self._previous[signum] = signal.signal(signum, self._record)
        # Ctrl-Z would suspend only the launcher: local ranks would continue, and remote ranks would end.
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._entered.close()

    def take(self) -> list[int]:
        return [self._pending.pop(0) for _ in range(len(self._pending))]

    def ask(self, signum: int) -> None:
        self.first = self.first or signum
        self._pending.append(signum)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        if not self.started:
            before = self._previous[signum]
            if callable(before):
                before(signum, frame)
            raise KeyboardInterrupt
        interrupts.record_handled()
        if signum != signal.SIGHUP:
            self.ask(signum)
        elif self.first is None:  # a closing terminal sends it several times, so it never counts as the second signal
            self.ask(signal.SIGTERM)
