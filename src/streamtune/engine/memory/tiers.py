"""Storage of tensors for the backward: on the device, in the machine's memory, or in a file.

A *tier* takes a tensor and gives a *block*; the block gives the tensor back. :class:`StoredTensor` is a tensor that
follows the sequence, in one block for each chunk, so that the backward holds only the chunks it works on.

On an accelerator copies run on a separate stream, a few in flight: the computation waits for the oldest copy when more
than ``IN_FLIGHT`` are under way. The backward copies its next chunk to the device while it works on a chunk, and reads
the chunk after that from its file. A caller may drop a tensor that it has given to a tier: it is held until its copy is
done.
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

IN_FLIGHT = 2
"""Copies to the host that may be under way while the next chunk is computed."""


class Block(Protocol):
    """One tensor in a tier."""

    def read_ahead(self) -> None:
        """Begin what comes before the copy to the device: a tier may have to read the tensor from a file."""

    def prefetch(self) -> None:
        """Begin to bring the tensor back to its device."""

    def get(self) -> Tensor:
        """Return the tensor, on its device."""

    def replace(self, x: Tensor) -> None:
        """Store another tensor of the same form in the block's place, once :meth:`get` has returned the old tensor."""

    def free(self) -> None:
        """Free the block; harmless when called twice."""


class Tier(Protocol):
    """A memory that stores tensors."""

    def put(self, x: Tensor) -> Block:
        """Store a tensor."""

    def settle(self) -> None:
        """Let the computation wait until what was put is there, and drop it."""


class DeviceTier:
    """The device's memory: a block is the tensor itself."""

    def put(self, x: Tensor) -> Block:
        """Keep the tensor as it is."""
        return _HeldTensor(x)

    def settle(self) -> None:
        """Do nothing: there is no copy to wait for."""


class _HeldTensor:
    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x

    def read_ahead(self) -> None:
        pass

    def prefetch(self) -> None:
        pass

    def get(self) -> Tensor:
        assert self.x is not None, "freed"
        return self.x

    def replace(self, x: Tensor) -> None:
        self.x = x

    def free(self) -> None:
        self.x = None


class Copies:
    """Copies between a device and the host: on a separate stream if the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def to_host(self, x: Tensor, host: Tensor) -> torch.cuda.Event | None:
        """Begin to copy ``x``, and hold it until the copy is done; return its event, None if it is done already."""
        if self.stream is None:
            host.copy_(x)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
            event = self.stream.record_event()
        self._in_flight.append((event, x))
        self.settle(IN_FLIGHT)
        return event

    def to_device(
        self, host: Tensor, device: torch.device, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin to copy to a new tensor on the device; return it, and the event to wait for, None if it is ready.

        The device casts to ``dtype``, if given.
        """
        x = torch.empty(host.shape, dtype=dtype or host.dtype, device=device)  # of the stream that will read it
        if self.stream is None:
            return x.copy_(host), None
        sent = x if x.dtype == host.dtype else torch.empty(host.shape, dtype=host.dtype, device=device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            sent.copy_(host, non_blocking=True)
            if sent is not x:
                x.copy_(sent)
            event = self.stream.record_event()
        for each in {x, sent}:  # should nobody wait, their memory is still not reused before they are written
            each.record_stream(self.stream)
        return x, event

    def settle(self, most: int = 0) -> None:
        """Let the computation wait until at most ``most`` copies to the host are under way.

        The memory of the others may then be reused by the computation's own stream.
        """
        while len(self._in_flight) > most:
            event, x = self._in_flight.popleft()
            torch.cuda.current_stream(x.device).wait_event(event)


class HostTier:
    """The machine's memory."""

    def __init__(self, device: torch.device, arena: Arena) -> None:
        self.device, self.arena = device, arena
        self.copies = Copies(device)

    def put(self, x: Tensor) -> Block:
        """Begin to copy a tensor to the host."""
        return _OnHost(self, x)

    def settle(self) -> None:
        """Let the computation wait until what was put is on the host, and drop it."""
        self.copies.settle()


class _OnHost:
    host: Tensor | None = None  # where the arena has no room there is nothing to free

    def __init__(self, tier: HostTier, x: Tensor) -> None:
        self.tier, self.nbytes = tier, x.nbytes
        self.span = tier.arena.take(x.nbytes, x.device)
        self.host = self.span.tensor(x.shape, x.dtype)
        self.fetched: tuple[Tensor, torch.cuda.Event | None] | None = None
        tier.copies.to_host(x, self.host)
        tier.arena.tally.moved_bytes += self.nbytes

    def read_ahead(self) -> None:
        pass

    def prefetch(self) -> None:
        if self.fetched is None:
            assert self.host is not None, "freed"
            self.tier.arena.tally.moved_bytes += self.nbytes
            self.fetched = self.tier.copies.to_device(self.host, self.tier.device)

    def get(self) -> Tensor:
        self.prefetch()
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
    """A tensor in the form of ``like`` that follows the sequence, stored in one block for each chunk."""

    def __init__(self, tier: Tier, like: Tensor | StoredTensor, along: int) -> None:
        self.tier, self.along = tier, along
        self.shape: torch.Size = like.shape
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        self.blocks: dict[tuple[int, int], Block] = {}
        self._next: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, chunk: slice, x: Tensor) -> None:
        """Store a chunk."""
        notify_tensors("layer input", x)
        self.blocks[chunk.start, chunk.stop] = self.tier.put(x)

    def expect(self, chunks: Sequence[slice]) -> None:
        """Set the order in which chunks will be read: while a chunk is worked on, the next two are on their way."""
        places = [(chunk.start, chunk.stop) for chunk in chunks]
        self._next = dict(pairwise(places))

    def cut(self, chunk: slice) -> Tensor:
        """Return a chunk, on the device."""
        place = (chunk.start, chunk.stop)
        if place not in self.blocks:  # stored by a layer that cuts the sequence elsewhere
            return self._assembled(chunk)
        x = self.blocks[place].get()
        following = self._next.get(place)
        after = None if following is None else self._next.get(following)
        if after in self.blocks:  # first: the other may wait for its own
            self.blocks[after].read_ahead()
        if following in self.blocks:
            self.blocks[following].prefetch()
        return x

    def _assembled(self, chunk: slice) -> Tensor:
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
"""A tensor from which chunks are cut, wherever it is stored."""
