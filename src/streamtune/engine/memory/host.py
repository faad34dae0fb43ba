"""Host memory that is reused from step to step: an arena for saved tensors, a pool for weights and gradients.

A backward reads first what its forward stored last. So the arena allocates and frees blocks like a stack, and grows
little beyond the largest number of bytes stored at a time. Its regions are whole pages, mapped once and, for an
accelerator, pinned once, because pinning takes longer than a copy.

The pool holds weights, and gradients until an optimizer has used them. Each tensor of the pool has its own storage, so
that a saved model has separate tensors. The pages of a freed storage are reused for the next tensor of the same size.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from streamtune.errors import OutOfMemoryError
from streamtune.ops.devices import has_streams, repeat_work

PAGE = 4096
"""Alignment of blocks in bytes, required for direct reads and writes of a file."""

REGION = 64 << 20
"""Size of the smallest region in bytes."""

CGROUP_FILES = (
    ("memory.max", "memory.current"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)
"""Files with the memory limit of a control group and its usage: of a container, a job of a scheduler, or a service."""

CACHE_ENTRIES = ("inactive_file", "active_file")
"""Entries of ``memory.stat`` with the bytes of files in the page cache, which the kernel frees before it ends a
process.
"""

CGROUP_ROOT = Path("/sys/fs/cgroup")

OWN_GROUPS = Path("/proc/self/cgroup")
"""File with the control groups of this process."""

NO_LIMIT = 1 << 62
"""Limits from this number of bytes are none: version 1 writes a number near 2**63."""

RESERVE = 1 << 28
"""Smallest number of bytes of host memory that stay free."""

SHARE = 0.02
"""Fraction of host memory that stays free, if that is more than ``RESERVE``."""

GIB = 1 << 30

_host_storages: set[int] = set()
_excluded_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def mark_host_storage(storage: torch.UntypedStorage) -> None:
    """Record that a storage is from an :class:`Arena` or :class:`HostPool`, until the storage is freed."""
    _host_storages.add(storage._cdata)
    weakref.finalize(storage, _host_storages.discard, storage._cdata)


def is_host_storage(storage: torch.UntypedStorage) -> bool:
    """Return True if a storage is from an :class:`Arena` or :class:`HostPool`, pinned or not."""
    return storage._cdata in _host_storages


def free_host_bytes(root: Path = CGROUP_ROOT) -> int:
    """Return the number of bytes of host memory that can be allocated without swapping, within a container's limit.

    Args:
        root: Mount point of the control groups, which limit a container's memory.
    """
    free = int(psutil.virtual_memory().available)
    for limit, used_file in _memory_limits(root):
        if (used := _read_number(used_file)) is not None:
            free = min(free, max(0, limit - used + _cached_bytes(used_file.parent)))
    return free


def container_limit_bytes(root: Path = CGROUP_ROOT) -> int | None:
    """Return the smallest memory limit of this process's control groups; None if there is none."""
    return min((limit for limit, _ in _memory_limits(root)), default=None)


def total_host_bytes(root: Path = CGROUP_ROOT) -> int:
    """Return the size of host memory in bytes, or a container's limit if that is smaller."""
    limit = container_limit_bytes(root)
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def reserved_host_bytes(root: Path = CGROUP_ROOT) -> int:
    """Return the number of bytes of host memory that stay free, so that the system does not swap."""
    return max(RESERVE, int(SHARE * total_host_bytes(root)))


def usable_host_bytes() -> int:
    """Return the number of free bytes of host memory beyond :func:`reserved_host_bytes`."""
    return max(0, free_host_bytes() - reserved_host_bytes())


def _memory_limits(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (limit in bytes, file with the usage) of this process's control group and of the groups that contain it.

    In a container, ``root`` is the container's own group. A scheduler or service manager puts a process into a group
    below it, which ``/proc/self/cgroup`` names.
    """
    for (limit_name, used_name), group in zip(CGROUP_FILES, _own_groups(), strict=False):
        for folder in (group, *group.parents):
            limit = _read_number(root / Path(limit_name).parent / folder / Path(limit_name).name)
            if limit is not None and limit < NO_LIMIT:
                yield limit, root / Path(used_name).parent / folder / Path(used_name).name


def _own_groups() -> tuple[Path, Path]:
    """Return the paths of this process's control groups below their mount points, of version 2 and version 1."""
    groups = {"": Path(), "memory": Path()}
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            if name in groups and ".." not in path:
                groups[name] = Path(path.strip("/"))
    return groups[""], groups["memory"]


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such limit, or the word "max"
        return None


def _cached_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(numbers.get(f"total_{name}", numbers.get(name, "0"))) for name in CACHE_ENTRIES)


class Stack:
    """Allocates offsets in a memory region like a stack; space that is freed below the top is allocated again.

    A backward frees what was stored last, so the top sinks. If another forward comes before that, or a forward has no
    backward, a block is freed below the top.
    """

    def __init__(self) -> None:
        self.top = 0
        self._sizes: dict[int, int] = {}
        """Size of each allocated block, by offset."""
        self._gaps: dict[int, int] = {}
        """Size of each free range below the top, by offset; no two of them are adjacent."""
        self._gap_ends: dict[int, int] = {}
        """Offset of each free range, by its end."""
        self._freed: list[int] = []
        """Offsets of freed blocks that are still in ``_sizes``."""
        self._is_busy = False
        """True while the ranges change: Python's collector may free a block at any time."""

    def find_offset(self, nbytes: int) -> int:
        """Return the offset that :meth:`allocate` would return for ``nbytes``."""
        size = round_up_to_pages(nbytes)
        return min((offset for offset, room in list(self._gaps.items()) if room >= size), default=self.top)

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a new block of ``nbytes``; offsets are multiples of :data:`PAGE`."""
        with self._merging_after():
            size, offset = round_up_to_pages(nbytes), self.find_offset(nbytes)
            if offset == self.top:
                self.top += size
            else:
                end = offset + self._gaps.pop(offset)
                del self._gap_ends[end]
                if offset + size < end:
                    self._add_gap(offset + size, end)
            self._sizes[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Free the block at ``offset``, so that its space can be allocated again."""
        self._freed.append(offset)
        if not self._is_busy:
            with self._merging_after():
                pass

    @contextmanager
    def _merging_after(self) -> Iterator[None]:
        """Merge freed blocks with the ranges beside them, after the ``with`` block."""
        self._is_busy = True
        try:
            yield
            while self._freed:
                start = self._freed.pop()
                end = start + self._sizes.pop(start)
                if start in self._gap_ends:
                    start = self._gap_ends.pop(start)
                    del self._gaps[start]
                if end in self._gaps:
                    end += self._gaps.pop(end)
                    del self._gap_ends[end]
                if end == self.top:
                    self.top = start
                else:
                    self._add_gap(start, end)
        finally:
            self._is_busy = False

    def _add_gap(self, start: int, end: int) -> None:
        self._gaps[start], self._gap_ends[end] = end - start, start


def round_up_to_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages; at least one page, so that no two blocks have the same offset."""
    return max(1, math.ceil(nbytes / PAGE)) * PAGE


class _Region:
    """A region of host memory from which blocks are allocated, mapped once and, for an accelerator, pinned once."""

    def __init__(self, number: int, size: int, device: torch.device) -> None:
        self.number, self.size, self.stack = number, size, Stack()
        self.map: mmap.mmap | None = None
        if device.type == "meta":
            storage = torch.UntypedStorage(size, device="meta")
            mark_host_storage(storage)  # before the simulation sees a tensor of it
            with repeat_work(0):  # regions are mapped in the first step and cost later steps nothing
                self.bytes = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
        else:
            self.map = map_pages(size)
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
            mark_host_storage(self.bytes.untyped_storage())
        if has_streams(device):
            assert self.map is not None
            exclude_from_forks(self.map)
            touch_pages(self.bytes)
            pin_pages(self.bytes, owner=self.bytes.untyped_storage())

    def has_room_for(self, nbytes: int) -> bool:
        return self.stack.find_offset(nbytes) + round_up_to_pages(nbytes) <= self.size


def map_pages(nbytes: int) -> mmap.mmap:
    """Map anonymous zeroed pages; physical memory is allocated when a page is first written.

    On Linux they are huge pages if the kernel has them, with 512 times fewer page faults. A forked child gets its own
    copy of a page when one of the two processes writes to it.
    """
    if sys.platform != "linux":
        return mmap.mmap(-1, nbytes)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel may have no huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def exclude_from_forks(mapping: mmap.mmap) -> None:
    """On Linux, hide pages from forked children, which cannot use the accelerator.

    Otherwise a fork would copy all pinned pages, or move one process's data away from the pages that the accelerator
    reads and writes.
    """
    if sys.platform == "linux":
        mapping.madvise(mmap.MADV_DONTFORK)
        _excluded_mappings.add(mapping)


def _keep_mappings_in_child() -> None:
    """Keep the parent's mapping objects alive in a forked child: unmapping could unmap other memory of the child."""
    for mapped in _excluded_mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_mappings_in_child)


def touch_pages(region: Tensor) -> None:
    """Allocate the pages of a new mapping (uint8 ``[bytes]``) by a write to each page, with all threads.

    Pinning would allocate them with one thread.
    """
    region.view(-1, PAGE)[:, 0].zero_()


def pin_pages(region: Tensor, owner: object) -> None:
    """Pin pages until ``owner`` is freed, so that an accelerator copies from and to them asynchronously.

    Raises:
        OutOfMemoryError: The driver refuses to pin them.
    """
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(region.data_ptr(), region.nbytes, 0)
    if int(code) != 0:
        raise OutOfMemoryError(
            f"the driver refused to pin {region.nbytes / GIB:.1f} GiB of host memory (error {int(code)})",
            fix="raise the limit on locked memory (ulimit -l), or offload less: raise device_layers, or set levels: 2",
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, region.data_ptr())


class Span:
    """A block of host memory allocated by an :class:`Arena`."""

    def __init__(self, region: _Region, offset: int, nbytes: int) -> None:
        self.region, self.offset, self.nbytes = region, offset, nbytes

    def as_tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape and dtype on the block's memory."""
        return self.region.bytes[self.offset : self.offset + self.nbytes].view(dtype).view(shape)

    def as_memoryview(self) -> memoryview:
        """Return a view of the block's memory, rounded up to whole pages, for reads and writes of a file."""
        assert self.region.map is not None, "simulated memory has no bytes"
        return memoryview(self.region.map)[self.offset : self.offset + round_up_to_pages(self.nbytes)]


class Tally:
    """Counts the bytes stored in one kind of memory (now, and at most) and the bytes copied to and from it."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.moved_bytes = 0

    def add_bytes(self, nbytes: int) -> None:
        """Count ``nbytes`` more stored bytes."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def subtract_bytes(self, nbytes: int) -> None:
        """Count ``nbytes`` fewer stored bytes."""
        self.live_bytes -= nbytes


class Arena:
    """Allocates blocks of host memory for saved tensors; ``tally`` counts the allocated bytes."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.regions: list[_Region] = []
        self._first_region = 0
        """Index of the first region that may have a free page. It shortens the search, because a step allocates
        thousands of blocks.
        """

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Map host memory until the arena has ``nbytes`` in total, so that a training step maps none."""
        held = sum(region.size for region in self.regions)
        if nbytes > held:
            self._add_region(nbytes - held, device)

    def allocate(self, nbytes: int, device: torch.device) -> Span:
        """Return a new block of ``nbytes`` for a tensor of ``device``.

        Raises:
            OutOfMemoryError: Too little host memory is free.
        """
        while self._first_region < len(self.regions) and not self.regions[self._first_region].has_room_for(PAGE):
            self._first_region += 1
        candidates = (region for region in self.regions[self._first_region :] if region.has_room_for(nbytes))
        region = next(candidates, None) or self._add_region(nbytes, device)
        self.tally.add_bytes(nbytes)
        return Span(region, region.stack.allocate(nbytes), nbytes)

    def free(self, span: Span) -> None:
        """Free a block, so that its memory can be allocated again."""
        span.region.stack.free(span.offset)
        self._first_region = min(self._first_region, span.region.number)
        self.tally.subtract_bytes(span.nbytes)

    def _add_region(self, nbytes: int, device: torch.device) -> _Region:
        ahead = sum(region.size for region in self.regions) // 16
        if device.type != "meta":  # memory mapped in advance may shrink, the requested block may not
            ahead = min(ahead, usable_host_bytes() // PAGE * PAGE)
        size = round_up_to_pages(max(nbytes, REGION, ahead))
        if device.type != "meta":
            self._check_free_memory(size)
        self.regions.append(region := _Region(len(self.regions), size, device))
        return region

    def _check_free_memory(self, size: int) -> None:
        free = usable_host_bytes()
        if size > free:
            raise OutOfMemoryError(
                f"host memory is exhausted: {self.tally.live_bytes / GIB:.2f} GiB are offloaded, {size / GIB:.2f} GiB "
                f"more are needed, {free / GIB:.2f} GiB are free (besides {reserved_host_bytes() / GIB:.2f} GiB left "
                "to the system)",
                fix="use levels: 2, raise device_layers, offload to disk, or lower max_length",
            )


class _Pages:
    """Mapped pages that a tensor's storage or the pool's list of free pages holds; pinned until this object is freed.

    A forked child shares the pages, because it may read the weights.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.map = mmap.mmap(-1, size)
        if has_streams(device):
            flat = torch.frombuffer(self.map, dtype=torch.uint8)
            touch_pages(flat)
            pin_pages(flat, owner=self)


class HostPool:
    """Pool of host memory for weights and gradients; its pages are mapped once and reused."""

    def __init__(self) -> None:
        self._free: dict[int, list[_Pages]] = defaultdict(list)

    def allocate(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor in host memory; the memory is reused once the tensor is freed.

        Args:
            shape, dtype: Shape and dtype of the tensor.
            device: Device that the tensor is copied to and from; ``meta`` simulates the memory.

        Raises:
            OutOfMemoryError: Too little host memory is free.
        """
        size = round_up_to_pages(shape.numel() * dtype.itemsize)
        if device.type == "meta":
            storage = torch.UntypedStorage(size, device="meta")
            mark_host_storage(storage)
            flat = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
        else:
            mapped = self._free[size].pop() if self._free[size] else self._map_pages(size, device)
            flat = torch.frombuffer(mapped.map, dtype=torch.uint8)
            storage = flat.untyped_storage()
            mark_host_storage(storage)
            weakref.finalize(storage, self._free[size].append, mapped)
        return flat[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _map_pages(self, size: int, device: torch.device) -> _Pages:
        free = usable_host_bytes()
        if size > free:
            raise OutOfMemoryError(
                f"host memory is exhausted: {size / GIB:.2f} GiB are needed for weights or gradients, "
                f"{free / GIB:.2f} GiB are free",
                fix="use a machine with more memory, or train adapters (finetuning_type: lora)",
            )
        return _Pages(size, device)

    def __reduce__(self) -> tuple[type[HostPool], tuple[()]]:
        return HostPool, ()  # a copy maps its own pages
