"""``--nproc`` and ``--hostfile``: start the ranks of a command, wait for them, and report one error for all.

The launcher is the process the user started. It loads no torch. Rank 0 has its terminal, the others write to files.
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
from streamtune.distributed.remote import HELLO_SECONDS, RemoteRanks, passed_on
from streamtune.errors import ArgumentError

LAUNCH_OPTIONS = ("--nproc", "--hostfile")
TOGETHER_SECONDS = 3.0
"""Time after the first failure, in which the other ranks notice it and write down what they saw."""
GRACE_SECONDS = 4.0
"""Time between SIGTERM and SIGKILL."""
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
    """Run ``streamtune ARGUMENTS`` in several ranks, ``nproc`` on each host, and return the exit code for all.

    The hosts are those of ``hostfile``; None is this machine. Options for the number of ranks are removed from the
    arguments. ``device`` is ``cpu``, ``cuda`` or ``auto``, as in the recipe.

    Raises:
        DistributedError: A host cannot be reached, or a rank failed without an error of its own.
        StreamTuneError: The error of the rank that failed first.
    """
    environment = read_environment()
    if environment.launcher != "none":
        raise ArgumentError(
            f"this is rank {environment.rank} of {environment.world_size} already, started by {environment.launcher}",
            where="--nproc" if nproc is not None else "--hostfile",
            fix=f"leave the option out: {environment.launcher} starts the ranks",
        )
    if nproc is not None and nproc < 1:
        raise ArgumentError(f"{nproc} ranks cannot train", where="--nproc", fix="give 1 or more")
    if nproc is not None and nproc > MOST_SLOTS:
        raise ArgumentError(
            f"{str(nproc)[:40]} ranks are more than a machine takes",
            where="--nproc",
            fix=f"give the number of its devices, at most {MOST_SLOTS:,}",
        )
    hosts = read_hostfile(hostfile, nproc) if hostfile is not None else [Host("localhost", nproc or 1)]
    ranks = without_launch_options(arguments)
    groups: list[RankGroup] = []
    with _Signals() as signals:
        try:
            _start(hosts, ranks, device, groups, alone=hostfile is None)
            signals.started = True
            ends = _wait(groups, signals)
        finally:
            for group in groups:
                group.close()
    if signals.first is not None:
        ends = _without_echoes(ends)
    if (failed := first_failure(ends)) is not None:
        error, code = failed
        error.exit_code = code
        raise error
    codes = {end.rank: end.exit_code for end in ends}
    if signals.first is not None and any(codes.values()):
        return 128 + signals.first
    return codes.get(0, 0) or next((code for code in codes.values() if code), 0)


def _without_echoes(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Return the ends of ranks. After a request to stop, errors that it caused in other ranks count as stops."""
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
    """Return the arguments of a command without the options for the number of its ranks."""
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


def _start(hosts: Sequence[Host], arguments: Sequence[str], device: str, groups: list[Any], *, alone: bool) -> None:
    """Start every rank of every host into ``groups``; ranks of other machines once all these have answered."""
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
            with interrupts.block_signals():  # until they can be ended
                groups.append(LocalRanks(command, first_rank, host.slots, {**safe_environment(), **environment}, name))
        else:
            remotes[host.name].start(arguments, first_rank, host.slots, {**passed_on(), **environment})
        first_rank += host.slots


def _is_this_machine(host: Host) -> bool:
    """Return True if the host's address belongs to this machine: only then can a socket be bound to it."""
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
    """Refuse more ranks than devices; without devices the ranks compute on the CPU."""
    if 0 < devices < host.slots:
        raise ArgumentError(
            f"{host.slots} ranks need as many devices, and {host.address} has {devices}",
            where=host.where or "--nproc",
            fix=f"give {devices} or fewer, or train on the CPU with `--set device=cpu`",
        )


def _choose_port(*, here: bool, free_there: int | None) -> int:
    """Return rank 0's port: ``MASTER_PORT``, or a free one."""
    asked = os.environ.get("MASTER_PORT")
    if not asked:
        return free_port() if here or free_there is None else free_there
    if not asked.isdecimal() or not 0 < int(asked) < 65536:
        raise ArgumentError(f"'{asked}' is no port", where="MASTER_PORT", fix="unset it: a free one is chosen")
    if here and not is_free(int(asked)):
        raise ArgumentError(
            f"port {asked} is taken by another program",
            where="MASTER_PORT",
            fix=f"unset it: a free one is chosen; or see who has it: `ss -ltnp 'sport = :{asked}'`",
        )
    return int(asked)


def _wait(groups: Sequence[RankGroup], signals: _Signals) -> list[RankEnd]:
    """Wait until every rank has ended, and return the ends; after a failure, end the ranks that remain."""
    ends: list[RankEnd] = []
    passed_on = 0
    terminate_at = kill_at = None
    while True:
        for group in groups:
            ends += group.poll()
        if not any(group.running for group in groups):
            return ends
        now = time.monotonic()
        if reader_is_gone() and signals.first is None:  # rank 0 is on another machine, and its output comes here
            signals.ask(signal.SIGTERM)
        for signum in signals.take():
            _send(groups, signum)
            passed_on += 1
            if passed_on == 2:  # the ranks leave at once by themselves
                kill_at = now + 1.0
        if kill_at is None and passed_on and any(end.stopped for end in ends):
            # All stop at the same step; a rank that waits for another in a library does not notice that it is gone.
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
    """Keeps arriving signals, while inside, for :func:`_wait`, which passes them on to every rank."""

    def __init__(self) -> None:
        self.started = False
        """True once there are ranks to pass them on to; before, a signal interrupts the start."""
        self.first: int | None = None
        """SIGINT or SIGTERM, as the first of them is passed on."""
        self._came: list[int] = []
        self._previous: dict[int, Any] = {}
        self._entered = ExitStack()

    def __enter__(self) -> _Signals:
        self._entered.enter_context(interrupts.handled_elsewhere())
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if not interrupts.is_ignored(signum):
                self._previous[signum] = signal.signal(signum, self._keep)
        # Ranks would go on without the launcher, and ranks of other machines end when it is silent.
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._entered.close()

    def take(self) -> list[int]:
        return [self._came.pop(0) for _ in range(len(self._came))]

    def ask(self, signum: int) -> None:
        self.first = self.first or signum
        self._came.append(signum)

    def _keep(self, signum: int, frame: FrameType | None) -> None:
        if not self.started:
            before = self._previous[signum]
            if callable(before):
                before(signum, frame)
            raise KeyboardInterrupt
        interrupts.record_handled()
        if signum != signal.SIGHUP:
            self.ask(signum)
        elif self.first is None:  # a closed terminal sends it several times: it never counts as the second signal
            self.ask(signal.SIGTERM)
