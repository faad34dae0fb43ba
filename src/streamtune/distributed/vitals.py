"""Sample the activity of this process from a thread: computing, files, network, and the main thread's place.

A sample costs the main thread only the GIL for some tens of microseconds.
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
"""Seconds over which the activity of a process is measured."""
CPU_SHARE = 0.1
"""Fraction of a core above which a process counts as computing; polling and drawing progress take less."""
MOST_WAIT_RATIO = 4.0
"""Largest multiple of a thread's CPU time up to which its waiting for a core counts as computing. On a busy machine a
thread that only polls also waits for a core each time.
"""
FILE_BYTES = 1 << 16
"""Bytes per second of file access above which a process is active; these samples themselves read less."""
NET_BYTES = 1 << 13
"""Bytes per second of network traffic above which a process is active."""
WAITING_SHARE = 0.2
"""Fraction of a core below which a main thread in a collective is waiting."""
TCP_INFO = 11
RETRANSMITS, BYTES_ACKED, BYTES_RECEIVED = 2, 120, 128
"""Offsets in Linux's ``struct tcp_info``."""
SENT_AGAIN = 4
"""Number of consecutive retransmissions (3 s on Linux) after which a connection counts as broken."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
DDP = ("/torch/nn/parallel/distributed.py",)
"""File of DDP, which communicates only if it is the innermost frame, because it also wraps every forward."""
WRAPPERS = ("c10d_logger.py", "_dynamo/")
BACKWARD = "_engine_run_backward"
"""Function in which hooks reduce gradients, without a Python frame of the collective."""


@dataclass(frozen=True)
class CodePlace:
    """The place of the main thread in the code."""

    text: str
    """Function and line, such as ``all_reduce (train/step.py:88)``."""
    frames: tuple[tuple[str, int], ...]
    """Files and lines of the innermost frames; a change means progress."""
    collective: bool
    """True in a call that may wait for other ranks, including a backward."""


def computes(ran: float, waited: float, passed: float) -> bool:
    """Return True if a process computes, and does not only wait for others.

    Args:
        ran: CPU seconds of the process.
        waited: Seconds that its threads waited for a core.
        passed: Seconds of the measurement.
    """
    return ran + min(waited, MOST_WAIT_RATIO * ran) > CPU_SHARE * passed


def place_of_main() -> CodePlace:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return CodePlace("nowhere", (), False)
    frames = list(_outward(frame))
    inner = tuple((f.f_code.co_filename, f.f_lineno) for f in frames[:6])
    innermost = next((f for f in frames if _is_in(f, COLLECTIVES) and not _is_in(f, WRAPPERS)), None)
    if innermost is None and _is_in(frames[0], DDP):
        innermost = frames[0]
    in_backward = any(f.f_code.co_name == BACKWARD for f in frames)
    if innermost is not None:
        called = next((f for f in frames if not _is_in(f, (*COLLECTIVES, *WRAPPERS, "/torch/"))), frames[-1])
        return CodePlace(f"{innermost.f_code.co_name} ({_file_and_line(called)})", inner, True)
    name = "backward" if in_backward else frames[0].f_code.co_name
    ours = next((f for f in frames if not _is_in(f, ("/torch/", "/lib/python"))), frames[0])
    return CodePlace(f"{name} ({_file_and_line(ours)})", inner, in_backward)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in parts)


def _file_and_line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


@dataclass(frozen=True)
class _Sample:
    at: float
    ran: float
    """CPU seconds, including child processes."""
    waited: float
    """Seconds that threads waited for a core."""
    files: int
    net: int


class Vitals:
    """Measures the activity of this process; a thread calls :meth:`sample` ten times and :meth:`look` once a second.

    Args:
        ours: File descriptors of the watchdog's own connections, whose traffic does not count.
    """

    def __init__(self, ours: frozenset[int] = frozenset()) -> None:
        self.ours = ours
        self.place = place_of_main()
        self.busy = 0.0
        """Seconds in which the main thread did not wait for other ranks."""
        self.unanswered = ""
        """Address of a connection whose other end does not acknowledge data; empty if there is none."""
        self._moved = self._placed = self._sampled_at = time.monotonic()
        self._main_cpu = self._main_seconds()
        self._samples: deque[_Sample] = deque()
        self._sockets: dict[str, int] = {}
        self._children: dict[int, float] = {}
        self._net = 0
        self._child_seconds = 0.0

    def sample(self) -> None:
        """Sample the place of the main thread, and the time in which it did not wait for other ranks."""
        now, cpu, place = time.monotonic(), self._main_seconds(), place_of_main()
        passed = now - self._sampled_at
        waits = place.collective and cpu - self._main_cpu < WAITING_SHARE * passed
        if not waits:
            self.busy += passed
        if place.frames != self.place.frames:
            self._placed = now
        self.place, self._sampled_at, self._main_cpu = place, now, cpu

    def look(self) -> None:
        """Sample the CPU time, file access and network traffic of the whole process."""
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
        """Seconds since the process last computed, read, wrote or sent, or its main thread moved."""
        return time.monotonic() - max(self._moved, self._placed)

    def progress(self) -> None:
        """Record that the main thread has started another phase, so that earlier waiting does not count."""
        self._moved = self._placed = time.monotonic()

    @property
    def placed(self) -> float:
        """Seconds since the main thread last moved to another place."""
        return time.monotonic() - self._placed

    @staticmethod
    def _main_seconds() -> float:
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
        except (AttributeError, OSError):
            return time.process_time()

    def _cpu_seconds(self) -> tuple[float, float]:
        """Return CPU seconds of the process and its children, and seconds that the process's threads waited."""
        waited = 0
        children: list[int] = []
        with suppress(OSError):
            for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - strings are enough, once a second
                with suppress(OSError, ValueError, IndexError):
                    waited += int(_read_text(f"/proc/self/task/{task}/schedstat").split()[1])
                    children += map(int, _read_text(f"/proc/self/task/{task}/children").split())
        for child in children:
            self._add_child(child)
        return time.process_time() + self._child_seconds, waited * 1e-9

    def _add_child(self, pid: int, depth: int = 0) -> None:
        with suppress(OSError, ValueError, IndexError):
            fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
            self._child_seconds += max(0.0, seconds - self._children.get(pid, 0.0))
            self._children[pid] = seconds
            if depth < 3:
                for child in map(int, _read_text(f"/proc/{pid}/task/{pid}/children").split()):
                    self._add_child(child, depth + 1)

    @staticmethod
    def _file_bytes() -> int:
        with suppress(OSError, ValueError, IndexError):
            fields = _read_text("/proc/self/io").split()
            return int(fields[1]) + int(fields[3]) + int(fields[9])  # the last: pages of mapped files
        return 0

    def _net_bytes(self) -> int:
        """Return the number of bytes that the process's connections received, or sent with acknowledgement."""
        bytes_by_socket: dict[str, int] = {}
        self.unanswered = ""
        with suppress(OSError):
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
                with suppress(OSError, ValueError):
                    link = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
                    if link.startswith("socket:") and int(name) not in self.ours:
                        bytes_by_socket[link], unanswered = _tcp_bytes(int(name))
                        self.unanswered = self.unanswered or unanswered
        self._net += sum(max(0, carried - self._sockets.get(link, 0)) for link, carried in bytes_by_socket.items())
        self._sockets = bytes_by_socket
        return self._net


def _tcp_bytes(descriptor: int) -> tuple[int, str]:
    """Return the bytes that a TCP connection carried, and the other end's address if it does not answer.

    Raises:
        OSError: The socket is not TCP.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(descriptor)) as copy:
        info = copy.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 192)
        answers = info[RETRANSMITS] < SENT_AGAIN
        carried = sum(int.from_bytes(info[at : at + 8], sys.byteorder) for at in (BYTES_ACKED, BYTES_RECEIVED))
        return carried, "" if answers else _other_end(descriptor)


def _other_end(descriptor: int) -> str:
    """Return the address of the other end, such as ``10.0.0.2:41234``."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:  # keeps its address family
        host, port = copy.getpeername()[:2]
    return f"{host.removeprefix('::ffff:')}:{port}"


def _read_text(path: str) -> str:
    with open(path, encoding="ascii") as file:  # noqa: PTH123
        return file.read()
