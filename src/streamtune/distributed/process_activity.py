"""Measurement of this process's activity from a thread: CPU time, file access, network, line of the main thread.

Taking a sample stops the main thread (holds the GIL) for only some tens of microseconds.
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
"""Fraction of a core above which a process counts as computing; polling and drawing progress need less."""
MAX_WAIT_RATIO = 4.0
"""Multiple of a thread's CPU time up to which waiting for a core counts as computing. The limit exists because a thread
that only polls also waits for a core on a busy machine.
"""
FILE_BYTES = 1 << 16
"""Bytes per second of file access above which a process is active; sampling itself reads less."""
NET_BYTES = 1 << 13
"""Bytes per second of network traffic above which a process is active."""
WAITING_SHARE = 0.2
"""Fraction of a core below which a main thread in a collective is waiting."""
TCP_INFO = 11
RETRANSMITS, BYTES_ACKED, BYTES_RECEIVED = 2, 120, 128
"""Offsets in Linux's ``struct tcp_info``."""
MAX_RETRANSMITS = 4
"""Number of consecutive TCP retransmissions (3 s on Linux) from which on a connection counts as broken."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
DDP = ("/torch/nn/parallel/distributed.py",)
"""File of DDP. DDP communicates only if its file has the innermost frame, because DDP also wraps every forward."""
WRAPPERS = ("c10d_logger.py", "_dynamo/")
BACKWARD_FUNCTION = "_engine_run_backward"
"""Function in which hooks reduce gradients, without a Python frame of the collective."""


@dataclass(frozen=True)
class CodeLine:
    """Line of code that the main thread executes."""

    text: str
    """Function and line, such as ``all_reduce (train/step.py:88)``."""
    frames: tuple[tuple[str, int], ...]
    """File and line number of each of the six innermost frames."""
    in_collective: bool
    """True in a call that may wait for other ranks, such as a collective or a backward pass."""


def is_computing(cpu_seconds: float, core_wait_seconds: float, elapsed_seconds: float) -> bool:
    """Return True if a process uses more than :data:`CPU_SHARE` of a CPU core.

    Args:
        cpu_seconds: CPU time of the process.
        core_wait_seconds: Time that the process's threads waited for a core, which also counts on a busy machine.
        elapsed_seconds: Duration of the measurement.
    """
    return cpu_seconds + min(core_wait_seconds, MAX_WAIT_RATIO * cpu_seconds) > CPU_SHARE * elapsed_seconds


def main_thread_line() -> CodeLine:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return CodeLine("nowhere", (), False)
    frames = list(_caller_frames(frame))
    inner = tuple((f.f_code.co_filename, f.f_lineno) for f in frames[:6])
    innermost = next((f for f in frames if _is_in_file(f, COLLECTIVES) and not _is_in_file(f, WRAPPERS)), None)
    if innermost is None and _is_in_file(frames[0], DDP):
        innermost = frames[0]
    in_backward = any(f.f_code.co_name == BACKWARD_FUNCTION for f in frames)
    if innermost is not None:
        called = next((f for f in frames if not _is_in_file(f, (*COLLECTIVES, *WRAPPERS, "/torch/"))), frames[-1])
        return CodeLine(f"{innermost.f_code.co_name} ({_file_and_line(called)})", inner, True)
    name = "backward" if in_backward else frames[0].f_code.co_name
    ours = next((f for f in frames if not _is_in_file(f, ("/torch/", "/lib/python"))), frames[0])
    return CodeLine(f"{name} ({_file_and_line(ours)})", inner, in_backward)


def _caller_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in_file(frame: FrameType, path_parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in path_parts)


def _file_and_line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


@dataclass(frozen=True)
class _Sample:
    time: float
    cpu_seconds: float
    """CPU time, including child processes."""
    wait_seconds: float
    """Time that threads waited for a CPU core."""
    file_bytes: int
    net_bytes: int


class ProcessActivity:
    """Activity of this process, measured by a thread that calls :meth:`sample_main_thread` and :meth:`sample_process`.

    Args:
        ignored_descriptors: File descriptors of sockets whose traffic does not count as activity.
    """

    def __init__(self, ignored_descriptors: frozenset[int] = frozenset()) -> None:
        self.ignored_descriptors = ignored_descriptors
        self.place = main_thread_line()
        self.busy_seconds = 0.0
        """Seconds in which the main thread did not wait for other ranks."""
        self.broken_connection = ""
        """Remote address of a connection that does not acknowledge data; empty if all connections do."""
        self._active_at = self._moved_at = self._sampled_at = time.monotonic()
        self._main_thread_cpu_seconds = self._read_main_thread_cpu_seconds()
        self._samples: deque[_Sample] = deque()
        self._bytes_by_socket: dict[str, int] = {}
        self._seconds_by_child: dict[int, float] = {}
        self._net_bytes = 0
        self._child_seconds = 0.0

    def sample_main_thread(self) -> None:
        """Record the line of the main thread, and the time in which it did not wait for other ranks."""
        now, cpu, place = time.monotonic(), self._read_main_thread_cpu_seconds(), main_thread_line()
        elapsed = now - self._sampled_at
        waits = place.in_collective and cpu - self._main_thread_cpu_seconds < WAITING_SHARE * elapsed
        if not waits:
            self.busy_seconds += elapsed
        if place.frames != self.place.frames:
            self._moved_at = now
        self.place, self._sampled_at, self._main_thread_cpu_seconds = place, now, cpu

    def sample_process(self) -> None:
        """Record the CPU time, file access and network traffic of the process."""
        now = time.monotonic()
        self._samples.append(_Sample(now, *self._read_cpu_seconds(), self._read_file_bytes(), self._read_net_bytes()))
        while len(self._samples) > 2 and self._samples[1].time <= now - WINDOW_SECONDS:
            self._samples.popleft()
        first, last = self._samples[0], self._samples[-1]
        elapsed = last.time - first.time
        if elapsed <= 0 or (
            is_computing(last.cpu_seconds - first.cpu_seconds, last.wait_seconds - first.wait_seconds, elapsed)
            or last.file_bytes - first.file_bytes > FILE_BYTES * elapsed
            or last.net_bytes - first.net_bytes > NET_BYTES * elapsed
            or self._moved_at > first.time
        ):
            self._active_at = now

    def discard_samples(self) -> None:
        """Discard all samples, after the process was suspended."""
        self._samples.clear()
        self._active_at = self._moved_at = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the process last used the CPU, files or network, or its main thread moved to another line."""
        return time.monotonic() - max(self._active_at, self._moved_at)

    def record_progress(self) -> None:
        """Reset ``idle_seconds`` and ``same_place_seconds`` to 0, when the main thread starts another phase."""
        self._active_at = self._moved_at = time.monotonic()

    @property
    def same_place_seconds(self) -> float:
        """Seconds since the main thread last moved to another line of code."""
        return time.monotonic() - self._moved_at

    @staticmethod
    def _read_main_thread_cpu_seconds() -> float:
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
        except (AttributeError, OSError):
            return time.process_time()

    def _read_cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU seconds of the process and its children, and the seconds that its threads waited for a
        core."""
        waited = 0
        children: list[int] = []
        with suppress(OSError):
            for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - strings are enough, once a second
                with suppress(OSError, ValueError, IndexError):
                    waited += int(_read_text(f"/proc/self/task/{task}/schedstat").split()[1])
                    children += map(int, _read_text(f"/proc/self/task/{task}/children").split())
        for child in children:
            self._add_child_cpu_seconds(child)
        return time.process_time() + self._child_seconds, waited * 1e-9

    def _add_child_cpu_seconds(self, pid: int, depth: int = 0) -> None:
        with suppress(OSError, ValueError, IndexError):
            fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
            self._child_seconds += max(0.0, seconds - self._seconds_by_child.get(pid, 0.0))
            self._seconds_by_child[pid] = seconds
            if depth < 3:
                for child in map(int, _read_text(f"/proc/{pid}/task/{pid}/children").split()):
                    self._add_child_cpu_seconds(child, depth + 1)

    @staticmethod
    def _read_file_bytes() -> int:
        with suppress(OSError, ValueError, IndexError):
            fields = _read_text("/proc/self/io").split()
            return int(fields[1]) + int(fields[3]) + int(fields[9])  # rchar, wchar, and read_bytes (mapped files)
        return 0

    def _read_net_bytes(self) -> int:
        """Return the total bytes that TCP connections of the process have received, or sent with acknowledgement."""
        bytes_by_socket: dict[str, int] = {}
        self.broken_connection = ""
        with suppress(OSError):
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
                with suppress(OSError, ValueError):
                    link = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
                    if link.startswith("socket:") and int(name) not in self.ignored_descriptors:
                        bytes_by_socket[link], broken_connection = _read_tcp_bytes(int(name))
                        self.broken_connection = self.broken_connection or broken_connection
        self._net_bytes += sum(
            max(0, size - self._bytes_by_socket.get(link, 0)) for link, size in bytes_by_socket.items()
        )
        self._bytes_by_socket = bytes_by_socket
        return self._net_bytes


def _read_tcp_bytes(descriptor: int) -> tuple[int, str]:
    """Return the bytes that a TCP connection carried, and its remote address if the connection is broken.

    Raises:
        OSError: The socket is not TCP.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(descriptor)) as copy:
        info = copy.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 192)
        answers = info[RETRANSMITS] < MAX_RETRANSMITS
        carried = sum(int.from_bytes(info[at : at + 8], sys.byteorder) for at in (BYTES_ACKED, BYTES_RECEIVED))
        return carried, "" if answers else _remote_address(descriptor)


def _remote_address(descriptor: int) -> str:
    with socket.socket(fileno=os.dup(descriptor)) as copy:  # has the same address family
        host, port = copy.getpeername()[:2]
    return f"{host.removeprefix('::ffff:')}:{port}"


def _read_text(path: str) -> str:
    with open(path, encoding="ascii") as file:  # noqa: PTH123
        return file.read()
