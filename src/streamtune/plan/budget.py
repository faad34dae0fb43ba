"""The default memory to plan with: the memory that is free now."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

__all__ = ["device_name", "free_device_bytes", "free_disk_bytes"]


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
