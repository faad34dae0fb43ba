"""A tier in a file: raw pages, written and read by a few threads, past the page cache where the system allows.

The file has no name. Where the system cannot make such a file it is unlinked as soon as it is open; either way it is
gone with the process, however that ends, and nothing is left to clean up. Blocks lie in it as on a stack, so it is as
long as the most that was held at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from streamtune.engine.arena import Arena, Span, Stack, Tally, pages
from streamtune.engine.storage import Block, Copies
from streamtune.errors import StorageError

__all__ = ["DiskTier"]

THREADS = 4
"""Writes and reads at a time; one alone does not fill the queue of a solid-state disk."""

IN_FLIGHT = 4
"""Writes that may be under way, each with its block in host memory."""

GIB = 1 << 30


class DiskTier:
    """A file in ``directory``.

    Args:
        device: Where the tensors live that are put there.
        directory: A directory on a local disk.
        arena: Host memory for what is on its way.
        tally: Counts.

    Raises:
        StorageError: No file can be made there.
    """

    def __init__(self, device: torch.device, directory: str, arena: Arena, tally: Tally) -> None:
        self.device, self.directory, self.arena, self.tally = device, directory, arena, tally
        self.copies, self.space, self.allocated = Copies(device), Stack(), 0
        self.simulated = device.type == "meta"
        self.writing: deque[tuple[Span, Future[None] | None]] = deque()
        if not self.simulated:
            self.file, self.direct = _open(directory)
            self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="streamtune-disk")
            weakref.finalize(self, _close, self.file, self.threads)

    def put(self, x: Tensor) -> Block:
        """Begin to write it."""
        return _OnDisk(self, x)

    def settle(self) -> None:
        """Let go of what was put; writes go on."""
        self.copies.settle()

    def extend(self, end: int) -> None:
        """Make sure that the file may grow to ``end`` bytes, now, rather than find the disk full in mid-step.

        Raises:
            StorageError: The disk has no room.
        """
        if self.simulated or end <= self.allocated:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file, self.allocated, end - self.allocated)
            else:
                os.ftruncate(self.file, end)
        except OSError as error:
            raise self.failed(error, end) from error
        self.allocated = end

    def failed(self, error: OSError, wanted: int) -> StorageError:
        """What to tell the user."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self.directory).free
            what = (
                f"the disk is full: {wanted / GIB:.2f} GiB of layer inputs are to be there, {free / GIB:.2f} are free"
            )
        else:
            what = f"layer inputs cannot be written or read: {error.strerror or error}"
        return StorageError(
            what,
            where=self.directory,
            mend="free space, name another offload_dir, or use levels: 2 or a shorter max_length; the file leaves "
            "nothing behind, no weight was changed, and the run resumes from its last checkpoint",
        )

    def begin_write(self, span: Span, offset: int, copied: torch.cuda.Event | None) -> Future[None] | None:
        """Write a block and free it; wait for the oldest write where there are too many. None where simulated."""
        job = None if self.simulated else self.threads.submit(self.write, span, offset, copied)
        self.writing.append((span, job))
        while len(self.writing) > IN_FLIGHT:
            oldest, done = self.writing.popleft()
            try:
                if done is not None:
                    done.result()
            finally:
                self.arena.free(oldest)
        return job

    def write(self, span: Span, offset: int, copied: torch.cuda.Event | None) -> None:
        """Body of a thread's work: the block to the file, once it has come from the device."""
        if copied is not None:
            copied.synchronize()
        data, done = span.memory(), 0
        try:
            while done < len(data):
                done += os.pwrite(self.file, data[done:], offset + done)
        except OSError as error:
            raise self.failed(error, self.allocated) from error

    def read(self, span: Span, offset: int) -> None:
        """Body of a thread's work: the block from the file."""
        data, done = span.memory(), 0
        try:
            while done < len(data):
                count = os.preadv(self.file, [data[done:]], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                done += count
        except OSError as error:
            raise self.failed(error, self.allocated) from error


class _OnDisk:
    def __init__(self, tier: DiskTier, x: Tensor) -> None:
        self.tier, self.shape, self.dtype, self.nbytes = tier, x.shape, x.dtype, x.nbytes
        self.reading: tuple[Span, Future[None] | None] | None = None
        self.written: Future[None] | None = None
        self.offset, self.freed = tier.space.take(self.nbytes), False
        tier.tally.take(self.nbytes)
        tier.tally.moved_bytes += self.nbytes
        tier.extend(self.offset + pages(self.nbytes))
        span = tier.arena.take(self.nbytes, x.device)
        copied = tier.copies.to_host(x, span.tensor(self.shape, self.dtype))
        self.written = tier.begin_write(span, self.offset, copied)

    def prefetch(self) -> None:
        if self.reading is not None:
            return
        tier = self.tier
        tier.tally.moved_bytes += self.nbytes
        span = tier.arena.take(self.nbytes, tier.device)
        if self.written is None:
            self.reading = span, None
            return
        self.written.result()
        self.reading = span, tier.threads.submit(tier.read, span, self.offset)

    def get(self) -> Tensor:
        self.prefetch()
        assert self.reading is not None
        (span, job), self.reading = self.reading, None
        try:
            if job is not None:
                job.result()
            x, event = self.tier.copies.to_device(span.tensor(self.shape, self.dtype), self.tier.device)
            if event is not None:
                event.synchronize()  # the block is reused at once
        finally:
            self.tier.arena.free(span)
        return x

    def free(self) -> None:
        if self.freed:
            return
        self.freed = True
        for job in (self.written, None if self.reading is None else self.reading[1]):
            if job is not None and not job.done():
                job.exception()  # its place is reused at once
        if self.reading is not None:
            self.tier.arena.free(self.reading[0])
            self.reading = None
        self.tier.space.free(self.offset)
        self.tier.tally.free(self.nbytes)

    __del__ = free  # a forward whose backward never comes


def _open(directory: str) -> tuple[int, bool]:
    """A file without a name in ``directory``, and whether it goes past the page cache."""
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
            f"no file can be made for layer inputs: {error.strerror}",
            where=directory,
            mend="name a directory you may write to as offload_dir",
        ) from error


def _close(file: int, threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    os.close(file)
