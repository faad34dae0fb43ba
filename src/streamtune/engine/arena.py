"""Memory of the host, handed out as a stack and kept from step to step.

What a forward stores last its backward wants first, so blocks come and go as on a stack, and the arena grows to the
most that is held at a time and no further. Its regions are whole pages, mapped once and, for an accelerator, registered
with it once: a pinned allocation of ``torch`` is rounded up to a power of two, and registering takes longer than the
copies it speeds up.
"""

from __future__ import annotations

import math
import mmap
import weakref
from pathlib import Path

import psutil
import torch
from torch import Tensor

from streamtune.errors import OutOfMemoryError

__all__ = ["PAGE", "Arena", "Span", "Stack", "Tally", "free_host_bytes", "is_host_storage"]

PAGE = 4096
"""Blocks begin at multiples of this: what direct reads and writes of a file need."""

REGION = 64 << 20
"""Bytes of the smallest region."""

RESERVE = 1 << 30
"""Bytes of the machine's memory that are left alone: a machine that swaps is lost."""

GIB = 1 << 30

_host_storages: set[int] = set()


def is_host_storage(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is an arena's: memory of the host, also where the device is the CPU or simulated."""
    return storage._cdata in _host_storages


def free_host_bytes() -> int:
    """Bytes the process may still take: what the machine has free, or its control group if that is less."""
    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path("/sys/fs/cgroup", limit_file).read_text())
            used = int(Path("/sys/fs/cgroup", used_file).read_text())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        free = min(free, limit - used)
    return max(0, free)


class Stack:
    """Offsets in a space: blocks are put on top, and the top sinks past blocks that were freed."""

    def __init__(self) -> None:
        self.top = 0
        self._blocks: dict[int, bool] = {}  # offset: freed
        self._order: list[int] = []

    def take(self, nbytes: int) -> int:
        """The offset of a new block, a multiple of :data:`PAGE`."""
        offset, self.top = self.top, self.top + pages(nbytes)
        self._blocks[offset] = False
        self._order.append(offset)
        return offset

    def free(self, offset: int) -> None:
        """Give a block back."""
        self._blocks[offset] = True
        while self._order and self._blocks[self._order[-1]]:
            self.top = self._order.pop()
            del self._blocks[self.top]


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages; at least one, so that no two blocks begin at the same place."""
    return max(1, math.ceil(nbytes / PAGE)) * PAGE


class _Region:
    """Pages that were mapped, and registered, once."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.stack = size, Stack()
        self.map: mmap.mmap | None = None
        if device.type == "meta":
            storage = torch.UntypedStorage(size, device="meta")
            _host_storages.add(storage._cdata)  # before a tensor of it is seen
            self.bytes = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
        else:
            self.map = mmap.mmap(-1, size)
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        if device.type == "cuda":
            _register(self.bytes)
        storage = self.bytes.untyped_storage()
        _host_storages.add(storage._cdata)
        weakref.finalize(storage, _host_storages.discard, storage._cdata)


def _register(region: Tensor) -> None:
    """Lock a region's pages, so that an accelerator copies from and to them by itself."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(region.data_ptr(), region.nbytes, 0)
    if int(code) != 0:
        raise OutOfMemoryError(
            f"the driver would not lock {region.nbytes / GIB:.1f} GiB of host memory (error {int(code)})",
            mend="raise the limit on locked memory (ulimit -l), or offload less: device_layers, levels: 2",
        )
    weakref.finalize(region.untyped_storage(), runtime.cudaHostUnregister, region.data_ptr())


class Span:
    """A block of an arena."""

    def __init__(self, region: _Region, offset: int, nbytes: int) -> None:
        self.region, self.offset, self.nbytes = region, offset, nbytes

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The block as a tensor on the host."""
        return self.region.bytes[self.offset : self.offset + self.nbytes].view(dtype).view(shape)

    def memory(self) -> memoryview:
        """The block as whole pages, for a file."""
        assert self.region.map is not None, "simulated memory has no bytes"
        return memoryview(self.region.map)[self.offset : self.offset + pages(self.nbytes)]


class Tally:
    """Bytes held somewhere now, the most that were at a time, and those copied there and back."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.moved_bytes = 0

    def take(self, nbytes: int) -> None:
        """Something is put there."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def free(self, nbytes: int) -> None:
        """Something is gone."""
        self.live_bytes -= nbytes


class Arena:
    """Blocks of host memory.

    Args:
        tally: Counts what is handed out.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.regions: list[_Region] = []

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Map at least so much at once, so that a step need not.

        Raises:
            OutOfMemoryError: The machine does not have it.
        """
        held = sum(region.size for region in self.regions)
        if nbytes > held:
            self._grow(nbytes - held, device)

    def take(self, nbytes: int, device: torch.device) -> Span:
        """A block for a tensor of ``device``.

        Raises:
            OutOfMemoryError: The machine does not have that much memory left; it is not made to swap.
        """
        room = (region for region in self.regions if region.stack.top + pages(nbytes) <= region.size)
        region = next(room, None) or self._grow(nbytes, device)
        self.tally.take(nbytes)
        return Span(region, region.stack.take(nbytes), nbytes)

    def free(self, span: Span) -> None:
        """Give a block back."""
        span.region.stack.free(span.offset)
        self.tally.free(span.nbytes)

    def _grow(self, nbytes: int, device: torch.device) -> _Region:
        size = pages(max(nbytes, REGION))
        if device.type != "meta" and size > (free := free_host_bytes() - RESERVE):
            raise OutOfMemoryError(
                f"the host has no room for what is offloaded: {self.tally.live_bytes / GIB:.2f} GiB are held, "
                f"{size / GIB:.2f} more are wanted, and {max(0, free) / GIB:.2f} are free beside the "
                f"{RESERVE / GIB:.0f} GiB left alone",
                mend="use levels: 2, raise device_layers, offload to disk, or lower max_length",
            )
        self.regions.append(region := _Region(size, device))
        return region
