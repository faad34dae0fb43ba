"""The process group of a run: joined once, before the model is made, and left before the process ends.

Numbers on the CPU travel over gloo and tensors of an accelerator over NCCL, in one group: messages of the
training loop never wait for a kernel.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import os
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from streamtune.distributed.ports import LOOPBACK
from streamtune.errors import DistributedError

from .environment import RankEnvironment, read_environment
from .ports import listen_at

PATIENCE = timedelta(hours=2)
"""Timeout of a collective: a rank may compute that long. Ranks that are gone are noticed by the watchdog."""


def join(device: torch.device) -> None:
    """Join the default process group by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        device: This rank's.

    Raises:
        DistributedError: Another program has the port that rank 0 is to listen at.
    """
    if distributed.is_initialized():
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    environment = read_environment()
    if environment.world_size == 1 or environment.master_addr in LOOPBACK:
        environment.choose_interface()
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=PATIENCE,
        store=_store(environment),
        rank=environment.rank,
        world_size=environment.world_size,
        device_id=device if cuda else None,
    )


def _store(environment: RankEnvironment) -> Store:
    """Return the store of the ranks' addresses: a server in rank 0, at the address the others call and no other.

    PyTorch's own would listen on all interfaces. It authenticates nobody; keys begin with a hash that only the ranks
    of a run know, so that runs that call each other's address by mistake do not mix.
    """
    if environment.world_size == 1:
        return HashStore()
    host, port = environment.master_addr, environment.master_port
    # torchrun has started a server already, and its ranks only call it.
    serves = environment.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    descriptor = None
    if serves:
        try:
            descriptor = listen_at(host, port).detach()
        except OSError as error:
            why = "another program has it" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
            raise DistributedError(
                f"rank 0 on {environment.host} cannot listen at port {port} of {host}: {why}",
                where="MASTER_PORT",
                mend=f"unset it: a free one is chosen; or see who has it: `ss -ltnp 'sport = :{port}'`",
            ) from None
    server = TCPStore(
        host, port, is_master=serves, timeout=PATIENCE, wait_for_workers=False, master_listen_fd=descriptor
    )
    prefix = hashlib.sha256(f"{environment.run_id}/store".encode()).hexdigest()[:32]
    return PrefixStore(prefix, server)


def sequence_group(sequence_size: int) -> distributed.ProcessGroup | None:
    """Return the group of the ranks that share this rank's sequences; None if each rank has its own.

    Consecutive ranks share. All ranks must call it together.
    """
    if sequence_size == 1:
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    groups = [
        distributed.new_group(list(range(start, start + sequence_size))) for start in range(0, size, sequence_size)
    ]
    return groups[rank // sequence_size]


def leave() -> None:
    """Leave the process group after all ranks are done: its threads abort a process whose objects they outlive."""
    if not distributed.is_initialized():
        return
    gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()
