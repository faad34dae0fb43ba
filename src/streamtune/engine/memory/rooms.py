"""Host memory for weights and gradients: tensors with pages of their own, used again once nobody holds them.

The arena of ``memory.host`` is a stack for what a backward takes in the reverse order. Weights stay, and gradients go
when an optimizer has used them. A tensor of a room has a storage of its own, so that saving a model sees separate
tensors; the pages of a storage that is gone are used for the next tensor of the same size. For an accelerator they are
registered with it once.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict

import torch
from torch import Tensor

from streamtune.engine.memory.host import GIB, mark_host_storage, pages, register_pages, touch_pages, usable_host_bytes
from streamtune.errors import OutOfMemoryError


class _Room:
    """Mapped pages, registered with an accelerator as long as this object lives: by a storage, or the free list.

    A child process shares them: it may read the weights.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.map = mmap.mmap(-1, size)
        if device.type == "cuda":
            flat = torch.frombuffer(self.map, dtype=torch.uint8)
            touch_pages(flat)
            register_pages(flat, owner=self)


class HostRooms:
    """Pages of host memory, mapped once and used again."""

    def __init__(self) -> None:
        self._free: dict[int, list[_Room]] = defaultdict(list)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor on the host whose values are not set.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            device: The device that it is copied to and from; ``meta`` simulates the memory.

        Raises:
            OutOfMemoryError: The machine does not have that much memory left; it is not made to swap.
        """
        size = pages(shape.numel() * dtype.itemsize)
        if device.type == "meta":
            storage = torch.UntypedStorage(size, device="meta")
            mark_host_storage(storage)
            flat = torch.empty(0, dtype=torch.uint8, device="meta").set_(storage)
        else:
            room = self._free[size].pop() if self._free[size] else self._mapped(size, device)
            flat = torch.frombuffer(room.map, dtype=torch.uint8)
            storage = flat.untyped_storage()
            mark_host_storage(storage)
            weakref.finalize(storage, self._free[size].append, room)
        return flat[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _mapped(self, size: int, device: torch.device) -> _Room:
        free = usable_host_bytes()
        if size > free:
            raise OutOfMemoryError(
                f"the host has no room for weights or their gradients: {size / GIB:.2f} GiB are wanted, "
                f"{free / GIB:.2f} are free",
                mend="use a machine with more memory, or train adapters (finetuning_type: lora)",
            )
        return _Room(size, device)

    def __reduce__(self) -> tuple[type[HostRooms], tuple[()]]:
        return HostRooms, ()  # a copy maps its own
