"""The activity of a process, sampled by one of its threads: computing, files, network, and the main thread's place.

A sample costs the main thread no more than the interpreter's lock for some tens of microseconds.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

WINDOW_SECONDS = 4.0
"""Time over which the activity of a process is measured."""
CPU_SHARE = 0.1
"""Share of a core: below it only threads run that wait for the network or draw a progress line."""
STARVED = 4.0
"""Multiple of the computed time up to which waiting for a core counts. On a busy machine a thread that only polls waits
for a core each time, as one that computes does.
"""
FILE_BYTES = 1 << 16
NET_BYTES = 1 << 13
"""Bytes a second, as ``FILE_BYTES``: below them only these samples themselves are read."""
WAITING_SHARE = 0.2
"""Share of a core: a main thread below it in a collective waits there."""
TCP_INFO = 11
RETRANSMITS, BYTES_ACKED, BYTES_RECEIVED = 2, 120, 128
"""Offsets in Linux's ``struct tcp_info``."""
SENT_AGAIN = 4
"""Retransmissions in a row without an answer (3 s on Linux) after which data does not arrive."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
DDP = ("/torch/nn/parallel/distributed.py",)
"""File that sends where it is the innermost frame; it is also around every forward."""
WRAPPERS = ("c10d_logger.py", "_dynamo/")
BACKWARD = "_engine_run_backward"
"""The call in which hooks reduce gradients, without a visible frame of the collective."""


@dataclass(frozen=True)
class CodePlace:
    """The place of the main thread in the code."""

    text: str
    """Function and line: ``all_reduce (train/step.py:88)``."""
    frames: tuple[tuple[str, int], ...]
    """Files and lines of the innermost frames: a change is progress."""
    collective: bool
    """True in a call that waits for other ranks, or in a backward that may hold one."""


def computes(ran: float, waited: float, passed: float) -> bool:
    """Return True if a process has something to compute and does not only wait for others.

    Of ``passed`` seconds it had a core for ``ran``; its threads waited for a core for ``waited``.
    """
    return ran + min(waited, STARVED * ran) > CPU_SHARE * passed


def place_of_main() -> CodePlace:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return CodePlace("nowhere", (), False)
    frames = list(_outward(frame))
    inner = tuple((f.f_code.co_filename, f.f_lineno) for f in frames[:6])
    innermost = next((f for f in frames if _in(f, COLLECTIVES) and not _in(f, WRAPPERS)), None)
    if innermost is None and _in(frames[0], DDP):
        innermost = frames[0]
    in_backward = any(f.f_code.co_name == BACKWARD for f in frames)
    if innermost is not None:
        called = next((f for f in frames if not _in(f, (*COLLECTIVES, *WRAPPERS, "/torch/"))), frames[-1])
        return CodePlace(f"{innermost.f_code.co_name} ({_spot(called)})", inner, True)
    name = "backward" if in_backward else frames[0].f_code.co_name
    ours = next((f for f in frames if not _in(f, ("/torch/", "/lib/python"))), frames[0])
    return CodePlace(f"{name} ({_spot(ours)})", inner, in_backward)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in(frame: FrameType, parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in parts)


def _spot(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


@dataclass(frozen=True)
class _Sample:
    at: float
    ran: float
    """CPU seconds, children included."""
    waited: float
    """Seconds that threads waited for a core."""
    files: int
    net: int


class Vitals:
    """Activity of this process. One thread calls :meth:`sample` several times a second, and :meth:`look` about once.

    ``ours`` are the descriptors of connections that do not count: reports travel over them.
    """

    def __init__(self, ours: frozenset[int] = frozenset()) -> None:
        self.ours = ours
        self.place = place_of_main()
        self.busy = 0.0
        """Seconds the main thread did not wait for other ranks."""
        self.unanswered = ""
        """Address of a connection whose other end does not acknowledge; empty if there is none."""
        self._moved = self._placed = self._glanced = time.monotonic()
        self._main_cpu = self._main_seconds()
        self._samples: deque[_Sample] = deque()
        self._sockets: dict[str, int] = {}
        self._children: dict[int, float] = {}
        self._net = 0
        self._child_seconds = 0.0

    def sample(self) -> None:
        """Sample the place of the main thread, and the time in which it did not wait for other ranks."""
        now, cpu, place = time.monotonic(), self._main_seconds(), place_of_main()
        passed = now - self._glanced
        waits = place.collective and cpu - self._main_cpu < WAITING_SHARE * passed
        if not waits:
            self.busy += passed
        if place.frames != self.place.frames:
            self._placed = now
        self.place, self._glanced, self._main_cpu = place, now, cpu

    def look(self) -> None:
        """Sample the processor time, files and network of the whole process."""
        now = time.monotonic()
        self._samples.append(_Sample(now, *self._cpu_seconds(), self._file_bytes(), self._net_bytes()))
        while len(self._samples) > 2 and self._samples[1].at <= now - WINDOW_SECONDS:
            self._samples.popleft()
        first, last = self._samples[0], self._samples[-1]
        passed = last.at - first.at
        if passed <= 0 or (
            computes(last.ran - first.ran, last.waited - first.waited, passed)
            or last.files - first.files > FILE_BYTES * passed
            or last.net - first.net > NET_BYTES * passed
            or self._placed > first.at
        ):
            self._moved = now

    def forget(self) -> None:
        """Discard all samples, because the process was suspended."""
        self._samples.clear()
        self._moved = self._placed = time.monotonic()

    @property
    def still(self) -> float:
        """Seconds since the process last computed, read, wrote, sent or came to another place."""
        return time.monotonic() - max(self._moved, self._placed)

    def progress(self) -> None:
        """Note that the main thread came to another phase: earlier waiting does not count."""
        self._moved = self._placed = time.monotonic()

    @property
    def placed(self) -> float:
        """Seconds that the main thread has been at its place."""
        return time.monotonic() - self._placed

    @staticmethod
    def _main_seconds() -> float:
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
        except (AttributeError, OSError):
            return time.process_time()

    def _cpu_seconds(self) -> tuple[float, float]:
        """Return CPU seconds of the process and its children, and seconds that its threads waited for a core."""
        waited = 0
        children: list[int] = []
        with suppress(OSError):
            for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - strings are enough, once a second
                with suppress(OSError, ValueError, IndexError):
                    waited += int(_text(f"/proc/self/task/{task}/schedstat").split()[1])
                    children += map(int, _text(f"/proc/self/task/{task}/children").split())
        for child in children:
            self._add_child(child)
        return time.process_time() + self._child_seconds, waited * 1e-9

    def _add_child(self, pid: int, depth: int = 0) -> None:
        with suppress(OSError, ValueError, IndexError):
            fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
            self._child_seconds += max(0.0, seconds - self._children.get(pid, 0.0))
            self._children[pid] = seconds
            if depth < 3:
                for child in map(int, _text(f"/proc/{pid}/task/{pid}/children").split()):
                    self._add_child(child, depth + 1)

    @staticmethod
    def _file_bytes() -> int:
        with suppress(OSError, ValueError, IndexError):
            fields = _text("/proc/self/io").split()
            return int(fields[1]) + int(fields[3]) + int(fields[9])  # the last: pages of mapped files
        return 0

    def _net_bytes(self) -> int:
        """Return the bytes that the connections of this process have received, or sent and got acknowledged."""
        bytes_by_socket: dict[str, int] = {}
        self.unanswered = ""
        with suppress(OSError):
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
                with suppress(OSError, ValueError):
                    link = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
                    if link.startswith("socket:") and int(name) not in self.ours:
                        bytes_by_socket[link], unanswered = _carried(int(name))
                        self.unanswered = self.unanswered or unanswered
        self._net += sum(max(0, carried - self._sockets.get(link, 0)) for link, carried in bytes_by_socket.items())
        self._sockets = bytes_by_socket
        return self._net


def _carried(descriptor: int) -> tuple[int, str]:
    """Return the bytes of a TCP connection, and its other end if that does not answer; OSError for other sockets."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(descriptor)) as copy:
        info = copy.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 192)
        answers = info[RETRANSMITS] < SENT_AGAIN
        carried = sum(int.from_bytes(info[at : at + 8], sys.byteorder) for at in (BYTES_ACKED, BYTES_RECEIVED))
        return carried, "" if answers else _other_end(descriptor)


def _other_end(descriptor: int) -> str:
    """Return the address of the other end: ``10.0.0.2:41234``."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:  # keeps its address family
        host, port = copy.getpeername()[:2]
    return f"{host.removeprefix('::ffff:')}:{port}"


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:  # noqa: PTH123
        return file.read()
