"""The memory that a step may take: given, or what is free now."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Budget:
    """Bytes that a step may take; None is all there is, or no limit if the step is simulated.

    Attributes:
        device_bytes: Bytes on the device.
        host_bytes, disk_bytes: Bytes that the engine keeps there.
        margin: Part of an accelerator's memory that is left alone where ``device_bytes`` is None.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    margin: float = 0.05

    def __str__(self) -> str:
        sizes = {"": self.device_bytes, " of the host": self.host_bytes, " of disk": self.disk_bytes}
        words = [f"{_rounded(size)}{name}" for name, size in sizes.items() if size is not None]
        return " and ".join(words) or "the device"

    def share_of(self, device: int | None, host: int | None, disk: int | None, *, usable: float = 1.0) -> float | None:
        """Return the largest part of the ``usable`` budget that a step takes, of any tier; None if it is not known."""
        pairs = ((device, self.device_bytes), (host, self.host_bytes), (disk, self.disk_bytes))
        return max((used / (usable * limit) for used, limit in pairs if used is not None and limit), default=None)


@dataclass(frozen=True)
class Limits(Budget):
    """A budget of which every size is known: the memory to plan with.

    Attributes:
        device_bytes: Bytes that the step may hold on the device in all, weights included.
        host_bytes: Bytes of the machine's memory for offloading.
        disk_bytes: Bytes of the directory for offloading.
        margin: Part of each that stays free.
        shared: True if the device's memory is the machine's: a step on the CPU.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    margin: float = 0.05
    shared: bool = False

    @property
    def device(self) -> int:
        """Bytes of the device that are planned with."""
        return int((1 - self.margin) * self.device_bytes)

    @property
    def host(self) -> int:
        """Bytes of the machine that are planned with."""
        return int((1 - self.margin) * self.host_bytes)

    @property
    def disk(self) -> int:
        """Bytes of the disk that are planned with."""
        return int((1 - self.margin) * self.disk_bytes)

    def tiers(self, device: float, host: float, disk: float) -> tuple[tuple[float, int], ...]:
        """Return what a step takes of each tier, with the bytes that are planned with."""
        memory = ((device + host, self.device),) if self.shared else ((device, self.device), (host, self.host))
        return *memory, (disk, self.disk)

    def excess(self, device: float, host: float, disk: float) -> float:
        """Return by how many bytes a step exceeds its memory, in the worst tier; negative is what is left."""
        return max(used - limit for used, limit in self.tiers(device, host, disk))

    def filled(self, device: float, host: float, disk: float) -> float | None:
        """Return the part that a step takes of the tier it fills most; None if it needs a tier without memory.

        Tiers that the step does not use are left out. In :meth:`excess` a tier without memory has nothing left, so that
        the excess of every step that fits is 0.
        """
        wanted = [(used, limit) for used, limit in self.tiers(device, host, disk) if used > 0]
        return None if any(limit == 0 for _, limit in wanted) else max((u / limit for u, limit in wanted), default=0.0)


def _rounded(size: int) -> str:
    """Return a size as text, in at most four digits of GiB or MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:,} B"


def free_device_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator, those that torch's allocator holds and does not use included."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def free_disk_bytes(directory: str | Path) -> int:
    """Return the free bytes of the disk on which the directory is, or will be."""
    path = Path(directory).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return int(shutil.disk_usage(path).free)


def device_name(device: torch.device) -> str:
    """Return the readable name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"
