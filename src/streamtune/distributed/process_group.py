"""The process group of a run: joined once, before the model is made, and left before the process ends.

Numbers on the CPU travel over gloo and tensors of an accelerator over NCCL, in one group: what the training loop has to
say never waits behind a kernel.
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import torch
from torch import distributed

__all__ = ["join", "leave", "sequence_group"]

PATIENCE = timedelta(hours=2)
"""How long a collective may wait: a rank may compute that long. Ranks that are gone are noticed by the watchdog."""


def join(device: torch.device) -> None:
    """Join the default process group by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        device: This rank's.
    """
    if distributed.is_initialized():
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE, device_id=device if cuda else None
    )


def sequence_group(sequence_size: int) -> distributed.ProcessGroup | None:
    """The group of the ranks that share this rank's sequences; None where each has its own.

    Consecutive ranks share. Called by all ranks together.
    """
    if sequence_size == 1:
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    groups = [
        distributed.new_group(list(range(start, start + sequence_size))) for start in range(0, size, sequence_size)
    ]
    return groups[rank // sequence_size]


def leave() -> None:
    """Leave it, after all ranks are done: threads of a group that live longer than the process's objects abort it."""
    if not distributed.is_initialized():
        return
    gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()
