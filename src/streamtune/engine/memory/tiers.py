"""Tiers that store tensors until the backward: the device, host memory, or a file.

A *tier* stores a tensor and returns a *block*, from which the tensor is read back. A :class:`StoredTensor` is stored as
one block per chunk of the sequence, so that only the current chunks are on the device.

On an accelerator, copies run on a separate stream. The computation waits for the oldest copy when more than
``IN_FLIGHT`` copies to the host are in flight. While the backward works on a chunk, the next chunk is copied to the
device, and the chunk after it is read from the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from streamtune.engine.memory.host import Arena
from streamtune.engine.observe import notify_tensors
from streamtune.ops.devices import has_streams

IN_FLIGHT = 2
"""Largest number of copies to the host in flight while the next chunk is computed."""


class Block(Protocol):
    """One tensor stored in a tier (device memory, host memory or a file)."""

    def prefetch_to_host(self) -> None:
        """Begin to read the tensor from its file to host memory; do nothing if the tier has no file."""

    def prefetch_to_device(self) -> None:
        """Begin to copy the tensor back to its device, after reading it from its file if it has one."""

    def get(self) -> Tensor:
        """Return the tensor, on its device."""

    def replace(self, x: Tensor) -> None:
        """Store another tensor of the same shape and dtype in the block, which must have been read before."""

    def free(self) -> None:
        """Free the block; may be called twice."""


class Tier(Protocol):
    """A memory in which tensors are stored until the backward."""

    def put(self, x: Tensor) -> Block:
        """Store a tensor; return the block from which the tensor is read back."""

    def wait_for_copies(self) -> None:
        """Make the current stream wait until all stored tensors are copied; drop the references to the originals."""


class DeviceTier:
    """Storage tier in device memory: it keeps the stored tensor itself."""

    def put(self, x: Tensor) -> Block:
        """Store the tensor itself, without a copy."""
        return _DeviceBlock(x)

    def wait_for_copies(self) -> None:
        """Do nothing, because this tier makes no copies."""


class _DeviceBlock:
    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x

    def prefetch_to_host(self) -> None:
        pass

    def prefetch_to_device(self) -> None:
        pass

    def get(self) -> Tensor:
        assert self.x is not None, "freed"
        return self.x

    def replace(self, x: Tensor) -> None:
        self.x = x

    def free(self) -> None:
        self.x = None


class Copies:
    """Copies tensors between a device and the host, on a separate stream if the device is CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if has_streams(device) else None
        self._in_flight: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def to_host(self, x: Tensor, host: Tensor) -> torch.cuda.Event | None:
        """Begin to copy ``x`` to ``host``; return the event that ends the copy, or None if the copy is done.

        A reference to ``x`` is kept until the copy is done.
        """
        if self.stream is None:
            host.copy_(x)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
            event = self.stream.record_event()
        self._in_flight.append((event, x))
        self.wait_for_copies(IN_FLIGHT)
        return event

    def to_device(
        self, host: Tensor, device: torch.device, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin to copy ``host`` to a new tensor on the device; return the tensor and the event that ends the copy.

        The event is None if the copy is done. If ``dtype`` is given, the tensor is cast to ``dtype`` on the device.
        """
        x = torch.empty(host.shape, dtype=dtype or host.dtype, device=device)  # allocated on the stream that reads it
        if self.stream is None:
            return x.copy_(host), None
        sent = x if x.dtype == host.dtype else torch.empty(host.shape, dtype=host.dtype, device=device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            sent.copy_(host, non_blocking=True)
            if sent is not x:
                x.copy_(sent)
            event = self.stream.record_event()
        for tensor in {x, sent}:  # their memory must not be reused before they are written, even if nobody waits
            tensor.record_stream(self.stream)
        return x, event

    def wait_for_copies(self, max_in_flight: int = 0) -> None:
        """Make the current stream wait until at most ``max_in_flight`` copies to the host are in flight.

        The current stream may then reuse the memory of the copied tensors.
        """
        while len(self._in_flight) > max_in_flight:
            event, x = self._in_flight.popleft()
            torch.cuda.current_stream(x.device).wait_event(event)


class HostTier:
    """Storage tier in host memory."""

    def __init__(self, device: torch.device, arena: Arena) -> None:
        self.device, self.arena = device, arena
        self.copies = Copies(device)

    def put(self, x: Tensor) -> Block:
        """Begin to copy a tensor to the host."""
        return _HostBlock(self, x)

    def wait_for_copies(self) -> None:
        """Make the current stream wait until all stored tensors are on the host; drop the
        references to the originals.
        """
        self.copies.wait_for_copies()


class _HostBlock:
    host: Tensor | None = None  # stays None if the arena has no memory: there is nothing to free

    def __init__(self, tier: HostTier, x: Tensor) -> None:
        self.tier, self.nbytes = tier, x.nbytes
        self.span = tier.arena.allocate(x.nbytes, x.device)
        self.host = self.span.as_tensor(x.shape, x.dtype)
        self.fetched: tuple[Tensor, torch.cuda.Event | None] | None = None
        tier.copies.to_host(x, self.host)
        tier.arena.tally.moved_bytes += self.nbytes

    def prefetch_to_host(self) -> None:
        pass

    def prefetch_to_device(self) -> None:
        if self.fetched is None:
            assert self.host is not None, "freed"
            self.tier.arena.tally.moved_bytes += self.nbytes
            self.fetched = self.tier.copies.to_device(self.host, self.tier.device)

    def get(self) -> Tensor:
        self.prefetch_to_device()
        assert self.fetched is not None
        (x, event), self.fetched = self.fetched, None
        if event is not None:
            torch.cuda.current_stream(x.device).wait_event(event)
        return x

    def replace(self, x: Tensor) -> None:
        assert self.host is not None, "freed"
        self.tier.copies.to_host(x, self.host)
        self.tier.arena.tally.moved_bytes += self.nbytes

    def free(self) -> None:
        if self.host is not None:
            self.host = None
            self.tier.arena.free(self.span)

    __del__ = free  # a forward whose backward never comes


class StoredTensor:
    """A tensor with the shape, dtype and device of ``like``, stored as one block per chunk of the sequence."""

    def __init__(self, tier: Tier, like: Tensor | StoredTensor, sequence_dim: int) -> None:
        self.tier, self.along = tier, sequence_dim
        self.shape: torch.Size = like.shape
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        self.blocks: dict[tuple[int, int], Block] = {}
        self._next: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, chunk: slice, x: Tensor) -> None:
        """Store the values ``x`` of one chunk."""
        notify_tensors("layer input", x)
        self.blocks[chunk.start, chunk.stop] = self.tier.put(x)

    def set_read_order(self, chunks: Sequence[slice]) -> None:
        """Set the order in which chunks will be read, so that the next two chunks are prefetched."""
        places = [(chunk.start, chunk.stop) for chunk in chunks]
        self._next = dict(pairwise(places))

    def read_chunk(self, chunk: slice) -> Tensor:
        """Return a chunk of the tensor, on the device."""
        place = (chunk.start, chunk.stop)
        if place not in self.blocks:  # stored by a layer with other chunks
            return self._assemble_chunk(chunk)
        x = self.blocks[place].get()
        following = self._next.get(place)
        after = None if following is None else self._next.get(following)
        if after in self.blocks:  # begin this read first: the prefetch may wait for its own read
            self.blocks[after].prefetch_to_host()
        if following in self.blocks:
            self.blocks[following].prefetch_to_device()
        return x

    def _assemble_chunk(self, chunk: slice) -> Tensor:
        parts = []
        for (start, stop), block in sorted(self.blocks.items()):
            first, last = max(start, chunk.start), min(stop, chunk.stop)
            if first < last:
                parts.append(block.get().narrow(self.along, first - start, last - first))
        return torch.cat(parts, self.along)

    def free(self) -> None:
        """Free all blocks."""
        for block in self.blocks.values():
            block.free()
        self.blocks.clear()


Source = Tensor | StoredTensor
"""A tensor on the device, or a tensor stored in a tier; chunks can be read from both."""
