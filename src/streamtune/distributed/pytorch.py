"""PyTorch's part of several ranks: the process group, the weights of a model on ``meta``, DDP and FSDP2.

Numbers on the CPU travel over gloo and tensors of an accelerator over NCCL, in one group: messages of the training
loop never wait for a kernel. The group is joined before the model is made, and left before the process ends.

DDP keeps a whole model and optimizer on every rank and averages gradients once a step. FSDP2 shards weights, gradients
and optimizer, a decoder layer at a time: ``fully_shard`` puts hooks around a decoder layer's call, and the engine's
autograd node runs inside that call. So a layer is gathered once for the forward and once for the backward, and its
gradient is reduced once, for any number of chunks.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from streamtune.distributed.environment import RankEnvironment, read_environment
from streamtune.distributed.hosts import LOOPBACK, listen_at
from streamtune.errors import DistributedError
from streamtune.optim import pack_number, unpack_number
from streamtune.train.backend import TorchBackend
from streamtune.train.slices import MASTER, Slice, SliceReader, share_out_whole

PATIENCE = timedelta(hours=2)
"""Timeout of a collective: a rank may compute for so long. The watchdog notices ranks that are gone."""


def join(device: torch.device) -> None:
    """Join the default process group by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``."""
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
    """Return the store of the ranks' addresses: a server in rank 0, only at the address that the others call.

    PyTorch's own server would listen on all interfaces. It authenticates nobody: keys begin with a hash that only the
    ranks of a run know, so that runs that call each other's address by mistake do not mix.
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
                fix=f"unset it: a free one is chosen; or see who has it: `ss -ltnp 'sport = :{port}'`",
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


class LayerSource(Protocol):
    """Weights that are not loaded yet: ``streamtune.models.Deferred``."""

    def names_in(self, module: nn.Module, recurse: bool = True) -> list[str]:
        """Return the names of a module's parameters that this source has loaded or is to load."""
        ...

    def awaits(self, name: str) -> bool:
        """Return True if a parameter is still to be loaded. One that is used in several places is loaded once."""
        ...

    def parameter(self, name: str) -> nn.Parameter:
        """Return a parameter with its shape and dtype."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of parameters, on the CPU."""
        ...

    def place(self, name: str, values: Tensor) -> None:
        """Set the values of a parameter wherever it is used."""
        ...

    def close(self) -> None:
        """Finish loading: all values are placed."""
        ...


def fill(
    model: nn.Module,
    layers: Iterable[nn.Module],
    source: LayerSource,
    *,
    device: torch.device,
    main: Callable[[Callable[[], Any]], Any],
    share: Callable[[nn.Module], None],
) -> None:
    """Load the weights of ``model``, on ``meta`` with buffers on the CPU, shared among the ranks.

    For each decoder layer, and each other module with weights of its own: rank 0 reads or draws them, the others
    allocate tensors for them, and the engine distributes them and keeps each rank's part. So a rank holds its part of
    the layers before, and one whole layer, on ``device``.

    ``main`` calls a function on rank 0, and raises its error on all ranks. All ranks call ``share`` with a module that
    has weights on rank 0, uninitialised tensors on the others.
    """
    layers = list(layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    # From the last to the first: a module comes after those below it.
    others = [module for module in reversed(list(model.modules())) if id(module) not in inside]
    for module, names in (
        *((layer, source.names_in(layer)) for layer in layers),
        *((module, source.names_in(module, recurse=False)) for module in others),
    ):
        _place(source, [name for name in names if source.awaits(name)], device, main)
        if names:
            _move(module, device)
            share(module)
    source.close()
    _move(model, device)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                moved = module._buffers[key] = buffer.to(device)
                distributed.broadcast(moved, 0)


def _place(
    source: LayerSource, names: list[str], device: torch.device, main: Callable[[Callable[[], Any]], Any]
) -> None:
    """Place the values on rank 0, and uninitialised tensors for them on the others."""
    values_by_name: dict[str, Tensor] = {}
    main(lambda: values_by_name.update(source.read(names)))
    for name in names:
        like = source.parameter(name)
        values = (
            values_by_name.pop(name).to(like.dtype)
            if distributed.get_rank() == 0
            else torch.empty_like(like, device="cpu")
        )
        source.place(name, values.detach().to(device))


def _move(module: nn.Module, device: torch.device) -> None:
    """Move parameters that came with the model and are not shared yet, such as adapters, to ``device``."""
    for parameter in module.parameters():
        shared = hasattr(parameter, "ds_id") or isinstance(parameter, DTensor)
        if not shared and parameter.device.type not in (device.type, "meta"):
            parameter.data = parameter.data.to(device)


class DdpBackend(TorchBackend):
    """PyTorch's ``DistributedDataParallel`` of a streamed module, the same on every rank."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        device = next(module.parameters()).device
        # Packed on each rank from the same weights; they cannot be sent.
        packed = [name for name, p in module.named_parameters() if type(p).__name__ == "PackedExperts"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, packed)
        self.engine = DistributedDataParallel(
            module, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
        self.size = distributed.get_world_size()

    @property
    def model(self) -> Any:
        return self.engine

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients with the last micro-batch only."""
        return nullcontext() if last else self.engine.no_sync()

    def backward(self, loss: Tensor) -> None:
        (loss * self.size).backward()

    def slices(self) -> Iterator[Slice]:
        """Yield the optimizer state: every rank has all of it, and parameters are shared out for writing."""
        return share_out_whole(self.optimizer_tensors(), distributed.get_rank(), self.size)


def _offset(parameter: Tensor) -> int:
    """Return the offset of this rank's rows in the flattened parameter."""
    assert isinstance(parameter, DTensor)
    _, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(first[0]) * math.prod(parameter.shape[1:])


def share_layer(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Broadcast rank 0's weights of a module; of a decoder layer each rank keeps its part.

    Modules outside the layers are one group, which :class:`FsdpBackend` shares when all of it is loaded.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            distributed.broadcast(parameter.data, 0)
    if any(module is layer for layer in layers):
        fully_shard(module)


def whole_weights(model: Any, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the parameters one by one: each whole on rank 0, None on the other ranks, which must iterate too.

    ``names`` selects some of them.
    """
    model.reshard()  # weights stay gathered after a forward without backward
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            values: Any = parameter.detach()
            whole = values.full_tensor() if isinstance(values, DTensor) else values
            yield name, whole.cpu() if distributed.get_rank() == 0 else None


class FsdpBackend(TorchBackend):
    """FSDP2 over all ranks of a module that is streamed already, the same on every rank.

    ``make_optimizer`` makes the optimizer over the parameters of a model, once they are shared.
    """

    module: Any  # fully_shard makes an FSDPModule of it

    def __init__(
        self, module: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer], layers: Iterable[nn.Module]
    ) -> None:
        for layer in layers:
            if not isinstance(layer, FSDPModule):  # its weights may be shared already
                fully_shard(layer)
        fully_shard(module)
        super().__init__(module, make_optimizer(module))
        self.size = distributed.get_world_size()

    def backward(self, loss: Tensor) -> None:
        """Reduce every micro-batch: a whole gradient would not fit."""
        (loss * self.size).backward()

    def _number(self, norm: Tensor) -> float:
        return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    def stepped(self) -> Iterator[Tensor]:
        return (p.to_local() if isinstance(p, DTensor) else p for p in super().stepped())

    def slices(self) -> Iterator[Slice]:
        self.module.reshard()  # after a forward without backward weights stay gathered
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    yield Slice(name, key, tuple(value.shape), _offset(parameter), value.to_local().reshape(-1))
                elif distributed.get_rank() == 0 and value is not None:  # a count of steps
                    count = value if isinstance(value, Tensor) else pack_number(value)
                    yield Slice(name, key, (), 0, count.reshape(1))

    def load_slices(self, saved: SliceReader) -> None:
        trained = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        saved.check_parameters([name for name, _ in trained])
        for name, parameter in trained:
            state: dict[str, Any] = {}
            for key in saved.keys(name):
                if saved.shape(name, key) == ():
                    fused = self.optimizer.defaults.get("fused")
                    count = unpack_number(saved.read(name, key, 0, 1).reshape(()))
                    state[key] = count.to(parameter.device if fused else "cpu") if isinstance(count, Tensor) else count
                elif key != MASTER:  # weights are float32 here, or have no master copy
                    state[key] = torch.zeros_like(parameter, requires_grad=False)
                    local = state[key].to_local()
                    if local.numel():
                        values = saved.read(name, key, _offset(parameter), local.numel())
                        local.copy_(values.reshape(local.shape))
            self.optimizer.state[parameter] = state

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        return whole_weights(self.module, names)

    @contextmanager
    def called_directly(self) -> Iterator[None]:
        """Gather weights outside the layers while inside, as a call of the model does."""
        self.module.unshard()
        try:
            yield
        finally:
            self.module.reshard()
