"""What there is to plan with, where nobody says: what is free now."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

__all__ = ["device_name", "free_device_bytes", "free_disk_bytes"]


def free_device_bytes(device: torch.device) -> int:
    """What is free on an accelerator, and what torch's allocator holds of it and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def free_disk_bytes(directory: str | Path) -> int:
    """What is free where the directory is, or will be."""
    path = Path(directory).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return int(shutil.disk_usage(path).free)


def device_name(device: torch.device) -> str:
    """What people call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"
