"""``--nproc`` and ``--hostfile``: start the ranks of a command, wait for them, and report one error for all.

The launcher is the process that the user started. It does not import torch. Rank 0 writes to the launcher's terminal,
the other ranks to log files.
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
from streamtune.distributed.failure import RankEnd, error_of_first_failed_rank
from streamtune.distributed.hosts import MAX_SLOTS, Host, check_host_name, free_port, is_port_free, read_hostfile
from streamtune.distributed.local_ranks import LocalRanks, count_devices
from streamtune.distributed.remote_ranks import HELLO_SECONDS, RemoteRanks, exported_variables
from streamtune.errors import ArgumentError

LAUNCH_OPTIONS = ("--nproc", "--hostfile")
NOTICE_SECONDS = 3.0
"""Seconds after the first failure in which other ranks may notice the failure and report it."""
GRACE_SECONDS = 4.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_SECONDS = 0.03


class RankGroup(Protocol):
    """Ranks of one machine, started by the launcher."""

    host: str

    @property
    def running_ranks(self) -> list[int]: ...
    def poll(self) -> list[RankEnd]: ...
    def send_signal(self, signum: int) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> list[RankEnd]: ...


def launch(arguments: Sequence[str], *, nproc: int | None, hostfile: Path | None, device: str = "auto") -> int:
    """Run ``streamtune ARGUMENTS`` in several ranks, and return the exit code.

    Args:
        arguments: Arguments of the command; ``--nproc`` and ``--hostfile`` are removed from them.
        nproc: Number of ranks per host; None: the slots in the hostfile, or 1 without a hostfile.
        hostfile: Path of the hostfile; None: only this machine.
        device: Recipe key ``device``: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        ArgumentError: The number of ranks or a host is invalid, or this process is already a rank.
        DistributedError: A host cannot be reached, or a rank ended without reporting an error.
        StreamTuneError: Error of the rank that failed first.
    """
    environment = read_environment()
    if environment.launcher != "none":
        raise ArgumentError(
            f"this process is already rank {environment.rank} of {environment.world_size}, started by "
            f"{environment.launcher}",
            where="--nproc" if nproc is not None else "--hostfile",
            fix=f"omit --nproc and --hostfile, because {environment.launcher} starts the ranks",
        )
    if nproc is not None and nproc < 1:
        raise ArgumentError(f"--nproc must be 1 or more, found {nproc}", where="--nproc", fix="set 1 or more")
    if nproc is not None and nproc > MAX_SLOTS:
        raise ArgumentError(
            f"--nproc must be at most {MAX_SLOTS:,}, found {str(nproc)[:40]}",
            where="--nproc",
            fix="set --nproc to the number of devices per machine",
        )
    hosts = read_hostfile(hostfile, nproc) if hostfile is not None else [Host("localhost", nproc or 1)]
    ranks = without_launch_options(arguments)
    groups: list[RankGroup] = []
    with _Signals() as signals:
        try:
            _start_ranks(hosts, ranks, device, groups, single_machine=hostfile is None)
            signals.started = True
            ends = _wait_for_ends(groups, signals)
        finally:
            for group in groups:
                group.close()
    if signals.first is not None:
        ends = _mark_caused_errors_as_stops(ends)
    if (failed := error_of_first_failed_rank(ends)) is not None:
        error, code = failed
        error.exit_code = code
        raise error
    codes = {end.rank: end.exit_code for end in ends}
    if signals.first is not None and any(codes.values()):
        return 128 + signals.first
    return codes.get(0, 0) or next((code for code in codes.values() if code), 0)


def _mark_caused_errors_as_stops(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Return ``ends``; if a rank was stopped on request, errors of other ranks caused by this stop count as stops
    too."""
    if not any(end.was_stopped for end in ends):
        return list(ends)
    kinds = ("DistributedError", "StreamTuneError")
    return [
        replace(end, code=128 + signal.SIGTERM, failure=None)
        if end.code == 1 and (end.failure is None or not end.failure.own or end.failure.kind in kinds)
        else end
        for end in ends
    ]


def without_launch_options(arguments: Sequence[str]) -> list[str]:
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in LAUNCH_OPTIONS:
            skip = True
        elif not argument.startswith(tuple(f"{option}=" for option in LAUNCH_OPTIONS)):
            remaining.append(argument)
    return remaining


def _start_ranks(
    hosts: Sequence[Host], arguments: Sequence[str], device: str, groups: list[Any], *, single_machine: bool
) -> None:
    """Start all ranks and append them to ``groups``; all remote hosts must answer before the first rank is started."""
    remotes: dict[str, RemoteRanks] = {}
    is_local = [single_machine or _is_this_machine(host) for host in hosts]
    for host, local in zip(hosts, is_local, strict=True):
        if local:
            _check_devices(host, count_devices() if device != "cpu" else 0)
        else:
            remotes[host.name] = RemoteRanks(host)
            groups.append(remotes[host.name])
    deadline = time.monotonic() + HELLO_SECONDS
    hellos = {host.name: remotes[host.name].wait_for_hello(deadline) for host in hosts if host.name in remotes}
    for host in hosts:
        if host.name in hellos:
            _check_devices(host, hellos[host.name]["devices"] if device != "cpu" else 0)
    master = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if len(hosts) == 1 else hosts[0].address)
    check_host_name(master, "MASTER_ADDR")
    environment = {
        "WORLD_SIZE": str(sum(host.slots for host in hosts)),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(_choose_port(is_local=is_local[0], remote_port=hellos.get(hosts[0].name, {}).get("port"))),
        "STREAMTUNE_RUN_ID": secrets.token_hex(16),
    }
    first_rank = 0
    for host, local in zip(hosts, is_local, strict=True):
        if local:
            command = [sys.executable, "-P", "-m", "streamtune", *arguments]
            name = socket.gethostname() if single_machine else host.address
            with interrupts.block_signals():  # until the ranks are in `groups` and can be ended
                groups.append(LocalRanks(command, first_rank, host.slots, {**safe_environment(), **environment}, name))
        else:
            remotes[host.name].start(arguments, first_rank, host.slots, {**exported_variables(), **environment})
        first_rank += host.slots


def _is_this_machine(host: Host) -> bool:
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
    if 0 < devices < host.slots:
        raise ArgumentError(
            f"{host.slots} ranks need {host.slots} devices, but {host.address} has {devices}",
            where=host.where or "--nproc",
            fix=f"use {devices} or fewer, or train on the CPU with `--set device=cpu`",
        )


def _choose_port(*, is_local: bool, remote_port: int | None) -> int:
    """Return the port of the process group: ``MASTER_PORT``, or a free port on rank 0's machine."""
    requested_port = os.environ.get("MASTER_PORT")
    if not requested_port:
        return free_port() if is_local or remote_port is None else remote_port
    if not requested_port.isdecimal() or not 0 < int(requested_port) < 65536:
        raise ArgumentError(f"'{requested_port}' is not a port", where="MASTER_PORT", fix="unset it to use a free port")
    if is_local and not is_port_free(int(requested_port)):
        raise ArgumentError(
            f"port {requested_port} is in use by another program",
            where="MASTER_PORT",
            fix=f"unset it to use a free port, or find the program: `ss -ltnp 'sport = :{requested_port}'`",
        )
    return int(requested_port)


def _wait_for_ends(groups: Sequence[RankGroup], signals: _Signals) -> list[RankEnd]:
    """Wait until all ranks have ended, and return how each ended; after a failure, end the remaining ranks."""
    ends: list[RankEnd] = []
    num_forwarded = 0
    terminate_at = kill_at = None
    while True:
        for group in groups:
            ends += group.poll()
        if not any(group.running_ranks for group in groups):
            return ends
        now = time.monotonic()
        if reader_is_gone() and signals.first is None:  # a remote rank 0 does not notice that the reader is gone
            signals.record_signal(signal.SIGTERM)
        for signum in signals.pop_signals():
            _send_signal_to_all(groups, signum)
            num_forwarded += 1
            if num_forwarded == 2:  # a second signal makes the ranks quit at once
                kill_at = now + 1.0
        if kill_at is None and num_forwarded and any(end.was_stopped for end in ends):
            # All ranks stop at the same step, but a rank that waits in a library does not notice that others ended.
            kill_at = now + NOTICE_SECONDS
        if terminate_at is None and any(end.code != 0 and not end.was_stopped for end in ends):
            terminate_at = now + NOTICE_SECONDS
            kill_at = kill_at or terminate_at + GRACE_SECONDS
        if terminate_at is not None and now >= terminate_at:
            terminate_at = float("inf")
            _send_signal_to_all(groups, signal.SIGTERM)
        if kill_at is not None and now >= kill_at:
            kill_at = now + GRACE_SECONDS
            for group in groups:
                group.kill()
        time.sleep(POLL_SECONDS)


def _send_signal_to_all(groups: Sequence[RankGroup], signum: int) -> None:
    for group in groups:
        group.send_signal(signum)


class _Signals:
    """Context manager that records signals, which :func:`_wait_for_ends` sends to every rank."""

    def __init__(self) -> None:
        self.started = False
        """True if all ranks have been started; until then a signal interrupts the start."""
        self.first: int | None = None
        """First signal that is sent to the ranks, SIGINT or SIGTERM; None without a signal."""
        self._pending: list[int] = []
        self._previous: dict[int, Any] = {}
        self._entered = ExitStack()

    def __enter__(self) -> _Signals:
        self._entered.enter_context(interrupts.use_other_handlers())
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if not interrupts.is_ignored(signum):
                self._previous[signum] = signal.signal(signum, self._handle_signal)
        # Ctrl-Z would suspend only the launcher: local ranks would continue, and remote ranks would end.
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._entered.close()

    def pop_signals(self) -> list[int]:
        return [self._pending.pop(0) for _ in range(len(self._pending))]

    def record_signal(self, signum: int) -> None:
        self.first = self.first or signum
        self._pending.append(signum)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self.started:
            previous = self._previous[signum]
            if callable(previous):
                previous(signum, frame)
            raise KeyboardInterrupt
        interrupts.record_handled_signal()
        if signum != signal.SIGHUP:
            self.record_signal(signum)
        elif self.first is None:  # a closing terminal sends it several times, so it never counts as the second signal
            self.record_signal(signal.SIGTERM)
