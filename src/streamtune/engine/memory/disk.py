"""Storage tier in a file: raw pages, written and read by a few threads, without the page cache if the system allows.

The file has no name; if the system cannot create such a file, a named file is unlinked once it is open. Either way the
file disappears with the process. Blocks in the file are allocated like a stack, so the file is about as long as the
largest number of bytes stored at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from streamtune.engine.memory.host import GIB, Arena, Span, Stack, Tally, round_up_to_pages
from streamtune.engine.memory.tiers import Block, Copies
from streamtune.errors import StorageError

THREADS = 4
"""Number of threads that write and read; a single thread would not fill the queue of a solid-state disk."""

IN_FLIGHT = 4
"""Largest number of writes in flight; each holds a block of host memory."""

DEVICE_COPIES_IN_FLIGHT = 2
"""Largest number of copies to the device in flight; each holds a block of host memory."""


class DiskTier:
    """Storage tier that keeps tensors in a file until the backward.

    Args:
        device: Device of the stored tensors.
        directory: Directory of the file, on a local disk.
        arena: Arena for tensors on their way to or from the file. No other tier may use it. Threads write to a block as
            soon as it is allocated, and a copy of another tier might still read it.
        tally: Counter of the bytes in the file.
    """

    def __init__(self, device: torch.device, directory: str, arena: Arena, tally: Tally) -> None:
        self.device, self.arena, self.tally = device, arena, tally
        self.copies, self.space = Copies(device), Stack()
        self.writing: deque[tuple[Span, Future[None] | None]] = deque()
        self.copied: deque[tuple[Span, torch.cuda.Event]] = deque()
        self.file: _File | None = None  # None if tensors are simulated
        if device.type != "meta":
            self.file = _File(directory)
            self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="streamtune-disk")
            # The last reference to a tier may be in one of its own threads, which cannot wait for itself.
            weakref.finalize(self, self.threads.shutdown, wait=False)

    def put(self, x: Tensor) -> Block:
        """Begin to write a tensor to the file."""
        return _DiskBlock(self, x)

    def wait_for_copies(self) -> None:
        """Make the current stream wait until all stored tensors are on the host; drop the references to the originals.

        Writes to the file continue.
        """
        self.copies.wait_for_copies()

    def begin_write(self, span: Span, offset: int, copy_event: torch.cuda.Event | None) -> Future[None] | None:
        """Begin to write a host block to the file at ``offset``, in a thread, once the copy ``copy_event`` is done.

        If too many writes are in flight, wait for the oldest and free its host memory. Return the write's future, or
        None in a simulation. A write error is raised when the block is read, because the block may belong to an
        abandoned step.
        """
        job = None if self.file is None else self.threads.submit(self.file.write, span, offset, copy_event)
        self.writing.append((span, job))
        while len(self.writing) > IN_FLIGHT:
            oldest, done = self.writing.popleft()
            if done is not None:
                done.exception()
            self.arena.free(oldest)
        return job

    def free_after_copy(self, span: Span, copy_event: torch.cuda.Event | None) -> None:
        """Free a block of host memory once ``copy_event`` (its copy to the device) is done; usually without waiting."""
        if copy_event is None:
            self.arena.free(span)
            return
        self.copied.append((span, copy_event))
        if len(self.copied) > DEVICE_COPIES_IN_FLIGHT:
            self.copied[0][1].synchronize()
        while self.copied and self.copied[0][1].query():
            self.arena.free(self.copied.popleft()[0])


class _DiskBlock:
    def __init__(self, tier: DiskTier, x: Tensor) -> None:
        self.tier, self.shape, self.dtype, self.nbytes = tier, x.shape, x.dtype, x.nbytes
        self.reading: tuple[Span, Future[None] | None] | None = None
        self.written: Future[None] | None = None
        self.fetched: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.offset, self.freed = tier.space.allocate(self.nbytes), False
        tier.tally.add_bytes(self.nbytes)
        if tier.file is not None:
            tier.file.extend_to(self.offset + round_up_to_pages(self.nbytes))
        self._write(x)

    def _write(self, x: Tensor) -> None:
        tier = self.tier
        tier.tally.moved_bytes += self.nbytes
        span = tier.arena.allocate(self.nbytes, x.device)
        copied = tier.copies.to_host(x, span.as_tensor(self.shape, self.dtype))
        self.written = tier.begin_write(span, self.offset, copied)

    def prefetch_to_host(self) -> None:
        if self.reading is not None or self.fetched is not None:
            return
        tier = self.tier
        if self.written is not None:
            _wait_for_job(self.written)
        tier.tally.moved_bytes += self.nbytes
        span = tier.arena.allocate(self.nbytes, tier.device)
        job = None if tier.file is None else tier.threads.submit(tier.file.read, span, self.offset)
        self.reading = span, job

    def prefetch_to_device(self) -> None:
        self.prefetch_to_host()
        if self.fetched is not None:
            return
        assert self.reading is not None
        (span, job), self.reading = self.reading, None
        copied = None
        try:
            if job is not None:
                _wait_for_job(job)
            self.fetched = self.tier.copies.to_device(span.as_tensor(self.shape, self.dtype), self.tier.device)
            copied = self.fetched[1]
        finally:
            self.tier.free_after_copy(span, copied)

    def get(self) -> Tensor:
        self.prefetch_to_device()
        assert self.fetched is not None
        (x, event), self.fetched = self.fetched, None
        if event is not None:
            torch.cuda.current_stream(x.device).wait_event(event)
        return x

    def replace(self, x: Tensor) -> None:
        if self.written is not None:
            _wait_for_job(self.written)
        self._write(x)

    def free(self) -> None:
        if self.freed:
            return
        self.freed = True
        for job in (self.written, None if self.reading is None else self.reading[1]):
            if job is not None and not job.done():
                job.exception()  # wait, because its place in the file is reused at once
        if self.reading is not None:
            self.tier.arena.free(self.reading[0])
            self.reading = None
        self.tier.space.free(self.offset)
        self.tier.tally.subtract_bytes(self.nbytes)

    __del__ = free  # a forward whose backward never comes


def _wait_for_job(job: Future[None]) -> None:
    """Wait for a thread's job; raise a copy of its error, because the job would keep the raising frames alive."""
    error = job.exception()
    if error is not None:
        raise copy(error) from error


class _File:
    def __init__(self, directory: str) -> None:
        self.directory, self.length = directory, 0
        self.number, self.direct = _open_unnamed_file(directory)
        weakref.finalize(self, os.close, self.number)

    def extend_to(self, end: int) -> None:
        if end <= self.length:
            return
        try:
            self._reserve_space(end)
        except OSError as error:
            raise self.make_storage_error(error, end) from error
        self.length = end

    def _reserve_space(self, end: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.number, self.length, end - self.length)
                return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        os.ftruncate(self.number, end)  # this file system cannot reserve space: a write may find the disk full

    def write(self, span: Span, offset: int, copy_event: torch.cuda.Event | None) -> None:
        if copy_event is not None:
            copy_event.synchronize()
        self._transfer_bytes(span, offset, os.pwrite)

    def read(self, span: Span, offset: int) -> None:
        self._transfer_bytes(span, offset, lambda number, data, at: os.preadv(number, [data], at))

    def _transfer_bytes(self, span: Span, offset: int, read_or_write: Callable[[int, memoryview, int], int]) -> None:
        data, done = span.as_memoryview(), 0
        try:
            while done < len(data):
                count = read_or_write(self.number, data[done:], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                done += count
        except OSError as error:
            raise self.make_storage_error(error, self.length) from error

    def make_storage_error(self, error: OSError, wanted_bytes: int) -> StorageError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self.directory).free
            full = "the file size limit is reached (ulimit -f)" if error.errno == errno.EFBIG else "the disk is full"
            what = f"{full}: {wanted_bytes / GIB:.2f} GiB are needed for layer inputs, {free / GIB:.2f} GiB are free"
        else:
            what = f"layer inputs cannot be written or read: {error.strerror or error}"
        return StorageError(
            what,
            where=self.directory,
            fix="free space, set another offload_dir, or use levels: 2 or a shorter max_length; a run resumes from its "
            "last checkpoint",
        )


def _open_unnamed_file(directory: str) -> tuple[int, bool]:
    """Open an unnamed file in ``directory``; return its descriptor, and True if it bypasses the page cache.

    Raises:
        StorageError: The file cannot be created.
    """
    direct = getattr(os, "O_DIRECT", 0)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for more in dict.fromkeys((direct, 0)):
            if hasattr(os, "O_TMPFILE"):
                try:
                    return os.open(directory, os.O_TMPFILE | os.O_RDWR | more, 0o600), bool(more)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                        raise
        file, name = tempfile.mkstemp(prefix="streamtune-", dir=directory)
        Path(name).unlink()
        return file, False
    except OSError as error:
        raise StorageError(
            f"the file for layer inputs cannot be created: {error.strerror}",
            where=directory,
            fix="set offload_dir to a directory you may write to",
        ) from error
