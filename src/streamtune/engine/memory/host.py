"""Host memory, kept from step to step: an arena for what a backward reads, a pool for weights and gradients.

A backward needs first what its forward stored last. So the arena allocates and frees blocks as on a stack, and grows
little beyond the most that is held at a time. Its regions are whole pages, mapped once and, for an accelerator,
registered with it once: a pinned allocation of ``torch`` is rounded up to a power of two, and registering takes longer
than the copies it speeds up.

Weights stay, and gradients go when an optimizer has used them. A tensor of the pool has a storage of its own, so that
saving a model sees separate tensors; the pages of a freed storage are used for the next tensor of the same size.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from streamtune.errors import OutOfMemoryError
from streamtune.ops.devices import repeated

PAGE = 4096
"""Blocks begin at multiples of this, as direct reads and writes of a file require."""

REGION = 64 << 20
"""Bytes of the smallest region."""

LIMITS = (
    ("memory.max", "memory.current"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)
"""Files of a container's limit and of its use."""

RESERVE = 1 << 28
"""Least bytes that are left to the rest of the machine."""

SHARE = 0.02
"""Least part of the machine's memory that is left to the rest of it."""

GIB = 1 << 30

_host_storages: set[int] = set()
_kept_from_children: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def mark_host_storage(storage: torch.UntypedStorage) -> None:
    """Count a storage as host memory as long as it lives."""
    _host_storages.add(storage._cdata)
    weakref.finalize(storage, _host_storages.discard, storage._cdata)


def is_host_storage(storage: torch.UntypedStorage) -> bool:
    """Return True if a storage is the arena's or the pool's: host memory, also for a CPU or a simulated device."""
    return storage._cdata in _host_storages


def free_host_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes can be allocated without swapping, within the limit of a container.

    Args:
        root: Directory at which the control group of this process is mounted.
    """
    free = int(psutil.virtual_memory().available)
    for limit_name, used_name in LIMITS:
        limit, used = _number(root / limit_name), _number(root / used_name)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used + _reclaimable((root / used_name).parent)))
    return free


def total_host_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of the machine's memory, or of a container's limit if that is smaller."""
    limits = [limit for name, _ in LIMITS if (limit := _number(root / name)) is not None]
    return min([int(psutil.virtual_memory().total), *limits])


def reserved_host_bytes() -> int:
    """Return how many bytes of host memory to leave alone: a machine that swaps is too slow to train on."""
    return max(RESERVE, int(SHARE * psutil.virtual_memory().total))


def usable_host_bytes() -> int:
    """Return the free bytes less the bytes to leave alone: the most that an arena allocates."""
    return max(0, free_host_bytes() - reserved_host_bytes())


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such limit, or the word "max"
        return None


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached file pages that the system frees when memory is needed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(numbers.get("total_inactive_file", numbers.get("inactive_file", "0")))


class Stack:
    """A stack of blocks in an address space: new blocks go on top, and the top sinks past freed blocks."""

    def __init__(self) -> None:
        self.top = 0
        self._blocks: dict[int, bool] = {}  # offset: freed
        self._order: list[int] = []

    def take(self, nbytes: int) -> int:
        """Return the offset of a new block, a multiple of :data:`PAGE`."""
        offset, self.top = self.top, self.top + pages(nbytes)
        self._blocks[offset] = False
        self._order.append(offset)
        return offset

    def free(self, offset: int) -> None:
        """Free a block."""
        self._blocks[offset] = True
        while self._order and self._blocks[self._order[-1]]:
            self.top = self._order.pop()
            del self._blocks[self.top]


def pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages; at least one, so that no two blocks begin at the same place."""
    return max(1, math.ceil(nbytes / PAGE)) * PAGE


class _Region:
    """Pages of host memory that are mapped, and registered with the accelerator, once."""

    def __init__(self, number: int, size: int, device: torch.device) -> None:
        self.number, self.size, self.stack = number, size, Stack()
        self.map: mmap.mmap | None = None
        if device.type == "meta":
            storage = torch.UntypedStorage(size, device="meta")
            mark_host_storage(storage)  # before a tensor of it is seen
            with repeated(0):  # regions are mapped in the first step, and cost the others nothing
                self.bytes = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
        else:
            self.map = map_pages(size)
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
            mark_host_storage(self.bytes.untyped_storage())
        if device.type == "cuda":
            assert self.map is not None
            keep_from_children(self.map)
            touch_pages(self.bytes)
            register_pages(self.bytes, owner=self.bytes.untyped_storage())

    def fits(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` more fit into this region."""
        return self.stack.top + pages(nbytes) <= self.size


def map_pages(nbytes: int) -> mmap.mmap:
    """Map whole pages of zeros, which take memory once they are touched.

    On Linux they are huge pages where the kernel has them: 512 times fewer faults. A forked child has its own copy of
    a page once one of the two writes to it.
    """
    if sys.platform != "linux":
        return mmap.mmap(-1, nbytes)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def keep_from_children(mapped: mmap.mmap) -> None:
    """Leave pages out of a forked child, which cannot use the accelerator; on Linux.

    A fork would copy all locked pages, or give one of the two other pages than the accelerator copies to.
    """
    if sys.platform == "linux":
        mapped.madvise(mmap.MADV_DONTFORK)
        _kept_from_children.add(mapped)


def _never_unmap() -> None:
    """Keep the objects that a parent mapped: at their addresses this process may have mapped something else."""
    for mapped in _kept_from_children:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_never_unmap)


def touch_pages(region: Tensor) -> None:
    """Write to each page of a new mapping, uint8 ``[bytes]``, with all threads; locking touches them with one."""
    region.view(-1, PAGE)[:, 0].zero_()


def register_pages(region: Tensor, owner: object) -> None:
    """Lock pages as long as ``owner`` lives, so that an accelerator copies from and to them by itself."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(region.data_ptr(), region.nbytes, 0)
    if int(code) != 0:
        raise OutOfMemoryError(
            f"the driver would not lock {region.nbytes / GIB:.1f} GiB of host memory (error {int(code)})",
            fix="raise the limit on locked memory (ulimit -l), or offload less: device_layers, levels: 2",
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, region.data_ptr())


class Span:
    """A block of an arena."""

    def __init__(self, region: _Region, offset: int, nbytes: int) -> None:
        self.region, self.offset, self.nbytes = region, offset, nbytes

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the block as a tensor on the host."""
        return self.region.bytes[self.offset : self.offset + self.nbytes].view(dtype).view(shape)

    def memory(self) -> memoryview:
        """Return the block as whole pages, for a file."""
        assert self.region.map is not None, "simulated memory has no bytes"
        return memoryview(self.region.map)[self.offset : self.offset + pages(self.nbytes)]


class Tally:
    """Bytes held in one kind of memory, now and at their peak, and bytes copied there and back."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.moved_bytes = 0

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` that are stored."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def free(self, nbytes: int) -> None:
        """Count ``nbytes`` that are freed."""
        self.live_bytes -= nbytes


class Arena:
    """Blocks of host memory; ``tally`` counts their bytes."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.regions: list[_Region] = []
        self._at = 0
        """First region with a free page: a step takes thousands of blocks."""

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Map at least ``nbytes`` in all now, so that a step need not."""
        held = sum(region.size for region in self.regions)
        if nbytes > held:
            self._grow(nbytes - held, device)

    def take(self, nbytes: int, device: torch.device) -> Span:
        """Return a block for a tensor of ``device``; :class:`OutOfMemoryError` if the machine would have to swap."""
        while self._at < len(self.regions) and not self.regions[self._at].fits(PAGE):
            self._at += 1
        room = (region for region in self.regions[self._at :] if region.fits(nbytes))
        region = next(room, None) or self._grow(nbytes, device)
        self.tally.take(nbytes)
        return Span(region, region.stack.take(nbytes), nbytes)

    def free(self, span: Span) -> None:
        """Free a block."""
        span.region.stack.free(span.offset)
        self._at = min(self._at, span.region.number)
        self.tally.free(span.nbytes)

    def _grow(self, nbytes: int, device: torch.device) -> _Region:
        ahead = sum(region.size for region in self.regions) // 16
        if device.type != "meta":  # what is mapped ahead may be less, what is wanted may not
            ahead = min(ahead, usable_host_bytes() // PAGE * PAGE)
        size = pages(max(nbytes, REGION, ahead))
        if device.type != "meta":
            self._check_room(size)
        self.regions.append(region := _Region(len(self.regions), size, device))
        return region

    def _check_room(self, size: int) -> None:
        free = usable_host_bytes()
        if size > free:
            raise OutOfMemoryError(
                f"the host has no room for what is offloaded: {self.tally.live_bytes / GIB:.2f} GiB are held, "
                f"{size / GIB:.2f} more are wanted, and {free / GIB:.2f} are free beside the "
                f"{reserved_host_bytes() / GIB:.2f} GiB left alone",
                fix="use levels: 2, raise device_layers, offload to disk, or lower max_length",
            )


class _Pages:
    """Mapped pages, registered with an accelerator as long as this object lives: a storage holds it, or the free list.

    A child process shares them: it may read the weights.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.map = mmap.mmap(-1, size)
        if device.type == "cuda":
            flat = torch.frombuffer(self.map, dtype=torch.uint8)
            touch_pages(flat)
            register_pages(flat, owner=self)


class HostPool:
    """Pages of host memory for weights and gradients, mapped once and used again."""

    def __init__(self) -> None:
        self._free: dict[int, list[_Pages]] = defaultdict(list)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor on the host whose values are not set, or raise :class:`OutOfMemoryError` rather than swap.

        Args:
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
            device: Device that it is copied to and from; ``meta`` simulates the memory.
        """
        size = pages(shape.numel() * dtype.itemsize)
        if device.type == "meta":
            storage = torch.UntypedStorage(size, device="meta")
            mark_host_storage(storage)
            flat = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
        else:
            mapped = self._free[size].pop() if self._free[size] else self._mapped(size, device)
            flat = torch.frombuffer(mapped.map, dtype=torch.uint8)
            storage = flat.untyped_storage()
            mark_host_storage(storage)
            weakref.finalize(storage, self._free[size].append, mapped)
        return flat[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _mapped(self, size: int, device: torch.device) -> _Pages:
        free = usable_host_bytes()
        if size > free:
            raise OutOfMemoryError(
                f"the host has no room for weights or their gradients: {size / GIB:.2f} GiB are wanted, "
                f"{free / GIB:.2f} are free",
                fix="use a machine with more memory, or train adapters (finetuning_type: lora)",
            )
        return _Pages(size, device)

    def __reduce__(self) -> tuple[type[HostPool], tuple[()]]:
        return HostPool, ()  # a copy maps its own
