"""Training of several ranks with PyTorch: process group, sharded loading of weights, DDP and FSDP2.

The process group uses gloo for CPU tensors and NCCL for CUDA tensors, so small messages of the training loop do not
wait for GPU kernels.

DDP keeps the whole model and optimizer on every rank. FSDP2 shards weights, gradients and optimizer states by decoder
layer: ``fully_shard`` puts hooks around a layer's call, and all chunks of a sequence are computed inside this call. So
the weights of a layer are gathered once in the forward pass and once in the backward pass, and its gradient is reduced
once.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamtune.distributed.environment import RankEnvironment, read_environment
from streamtune.distributed.hosts import LOOPBACK, listen_at
from streamtune.engine.image_tower import trained_tower_parameters
from streamtune.engine.sharded import require_output_gradient
from streamtune.errors import DistributedError
from streamtune.optim import pack_number, unpack_number
from streamtune.train.backend import TorchBackend
from streamtune.train.slices import MASTER, Slice, SliceReader, slices_of_replicated_state

TIMEOUT = timedelta(hours=2)
"""Timeout of a collective: the longest time that a rank may compute. The watchdog notices dead ranks earlier."""


def join_process_group(device: torch.device) -> None:
    """Initialise the default process group from the launcher's environment variables, unless it is initialised.

    Raises:
        DistributedError: Rank 0 cannot listen at ``MASTER_PORT``.
    """
    if distributed.is_initialized():
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    environment = read_environment()
    if environment.world_size == 1 or environment.master_addr in LOOPBACK:
        environment.choose_network_interface()
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=TIMEOUT,
        store=_make_store(environment),
        rank=environment.rank,
        world_size=environment.world_size,
        device_id=device if cuda else None,
    )


def _make_store(environment: RankEnvironment) -> Store:
    """Return the key-value store of the process group; its server, in rank 0, listens only at the address of rank 0.

    By default PyTorch's server would listen on all interfaces. The store has no authentication, so its keys begin with
    a hash of the run's id. Runs that connect to each other by mistake do not read each other's keys.

    Raises:
        DistributedError: The port is in use, or listening fails.
    """
    if environment.world_size == 1:
        return HashStore()
    host, port = environment.master_addr, environment.master_port
    # torchrun has already started a server, to which its ranks connect.
    is_server = environment.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    descriptor = None
    if is_server:
        try:
            descriptor = listen_at(host, port).detach()
        except OSError as error:
            reason = "another program uses it" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
            raise DistributedError(
                f"rank 0 on {environment.host} cannot listen at port {port} of {host}: {reason}",
                where="MASTER_PORT",
                fix=f"unset it to use a free port, or find the program: `ss -ltnp 'sport = :{port}'`",
            ) from None
    server = TCPStore(
        host,
        port,
        is_master=is_server,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    prefix = hashlib.sha256(f"{environment.run_id}/store".encode()).hexdigest()[:32]
    return PrefixStore(prefix, server)


def sequence_group(sequence_size: int) -> distributed.ProcessGroup | None:
    """Return the process group of the ``sequence_size`` consecutive ranks that share a sequence; None for size 1.

    All ranks must call this function.
    """
    if sequence_size == 1:
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    groups = [
        distributed.new_group(list(range(start, start + sequence_size))) for start in range(0, size, sequence_size)
    ]
    return groups[rank // sequence_size]


def leave_process_group() -> None:
    """Wait for all ranks and destroy the process group, whose threads could otherwise abort a process that exits."""
    if not distributed.is_initialized():
        return
    gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()


class LayerSource(Protocol):
    """Loads the weights of a model that was created on the ``meta`` device, such as
    ``streamtune.models.DeferredWeights``."""

    def parameter_names_in(self, module: nn.Module, recurse: bool = True) -> list[str]:
        """Return the names of a module's parameters that this source loads."""
        ...

    def is_deferred(self, name: str) -> bool:
        """Return True if a parameter is not loaded yet; tied parameters are loaded once."""
        ...

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter ``name``, which is on ``meta`` until its values are set."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of parameters as CPU tensors, by name."""
        ...

    def set_values(self, name: str, values: Tensor) -> None:
        """Set the values of a parameter in all places where it is used."""
        ...

    def close(self) -> None:
        """Finish loading, after all values have been set."""
        ...


def load_sharded_weights(
    model: nn.Module,
    layers: Iterable[nn.Module],
    source: LayerSource,
    *,
    device: torch.device,
    run_on_rank_0: Callable[[Callable[[], Any]], Any],
    shard: Callable[[nn.Module], None],
) -> None:
    """Load the weights of ``model`` layer by layer, sharded over the ranks.

    For each decoder layer, rank 0 reads or initialises the weights, the other ranks allocate tensors, and ``shard``
    distributes the weights. So ``device`` never contains more than one whole layer. The other modules follow.

    Args:
        model: Model on the ``meta`` device, with buffers on the CPU.
        layers: Decoder layers of the model.
        source: Source of the weights.
        device: Device of this rank.
        run_on_rank_0: Function that calls another function on rank 0, and raises its error on all ranks.
        shard: Function that shards a module, called by all ranks; the module has weights on rank 0 and uninitialised
            tensors on other ranks.
    """
    layers = list(layers)
    module_ids_in_layers = {id(module) for layer in layers for module in layer.modules()}
    # In reverse order, so that a module comes after its children.
    other_modules = [module for module in reversed(list(model.modules())) if id(module) not in module_ids_in_layers]
    for module, names in (
        *((layer, source.parameter_names_in(layer)) for layer in layers),
        *((module, source.parameter_names_in(module, recurse=False)) for module in other_modules),
    ):
        _load_parameters(source, [name for name in names if source.is_deferred(name)], device, run_on_rank_0)
        if names:
            _move_unsharded(module, device)
            shard(module)
    source.close()
    _move_unsharded(model, device)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                moved = module._buffers[key] = buffer.to(device)
                distributed.broadcast(moved, 0)


def _load_parameters(
    source: LayerSource, names: list[str], device: torch.device, run_on_rank_0: Callable[[Callable[[], Any]], Any]
) -> None:
    """Set parameters to their values on rank 0, and to uninitialised tensors on other ranks."""
    values_by_name: dict[str, Tensor] = {}
    run_on_rank_0(lambda: values_by_name.update(source.read(names)))
    for name in names:
        parameter = source.parameter(name)
        values = (
            values_by_name.pop(name).to(parameter.dtype)
            if distributed.get_rank() == 0
            else torch.empty_like(parameter, device="cpu")
        )
        source.set_values(name, values.detach().to(device))


def _move_unsharded(module: nn.Module, device: torch.device) -> None:
    for parameter in module.parameters():
        sharded = hasattr(parameter, "ds_id") or isinstance(parameter, DTensor)
        if not sharded and parameter.device.type not in (device.type, "meta"):
            parameter.data = parameter.data.to(device)


class DdpBackend(TorchBackend):
    """Training backend with PyTorch's ``DistributedDataParallel``."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        device = next(module.parameters()).device
        # Each rank packs or quantises these parameters from the same weights; DDP cannot broadcast them.
        packed = [
            name
            for name, p in module.named_parameters()
            if not p.requires_grad and (type(p).__name__ == "PackedExperts" or is_traceable_wrapper_subclass(p))
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, packed)
        for buffer in module.buffers():
            values = buffer.data.contiguous()
            distributed.broadcast(values, 0)
            buffer.data = values
        # DDP would broadcast them in every forward, but rotary frequencies may depend on the lengths of a rank's rows.
        self.engine = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        self.size = distributed.get_world_size()

    @property
    def model(self) -> Any:
        return self.engine

    def micro_batch_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which gradients are reduced only if this is the last micro-batch."""
        return nullcontext() if last else self.engine.no_sync()

    def backward(self, loss: Tensor) -> None:
        (self.scaled_loss(loss) * self.size).backward()

    def optimizer_slices(self) -> Iterator[Slice]:
        """Yield this rank's share of the optimizer state; every rank has the whole state."""
        return slices_of_replicated_state(self.optimizer_tensors(), distributed.get_rank(), self.size)


def _shard_offset(parameter: Tensor) -> int:
    assert isinstance(parameter, DTensor)
    _, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(first[0]) * math.prod(parameter.shape[1:])


def shard_layer(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Broadcast rank 0's weights of a module; if the module is a decoder layer, also shard it with FSDP2.

    Modules outside the decoder layers are sharded together, by :class:`FsdpBackend`.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            distributed.broadcast(parameter.data, 0)
    if any(module is layer for layer in layers):
        fully_shard(module)


def gather_weights(model: Any, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, full tensor on the CPU) of each parameter; the tensor is None on ranks other than 0.

    All ranks must iterate to the end, because each tensor is gathered.
    """
    model.reshard()  # weights stay gathered after a forward without backward
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            values: Any = parameter.detach()
            full_weight = values.full_tensor() if isinstance(values, DTensor) else values
            yield name, full_weight.cpu() if distributed.get_rank() == 0 else None


class FsdpBackend(TorchBackend):
    """Training backend with FSDP2 over all ranks.

    Args:
        module: Model changed by ``streamtune.stream``, equal on every rank.
        make_optimizer: Function that creates the optimizer, called after the parameters are sharded.
        layers: Decoder layers, each sharded as one FSDP group.
    """

    module: Any  # fully_shard changes its class to FSDPModule

    def __init__(
        self, module: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer], layers: Iterable[nn.Module]
    ) -> None:
        for layer in layers:
            if not isinstance(layer, FSDPModule):  # sharded layer by layer, if the weights were loaded by layer
                fully_shard(layer)
        if trained_tower_parameters(module):
            # With images, the backward goes through all layers to the vision tower. FSDP2 gathers and reduces a layer
            # in its backward, so the backward of ranks without images has to go through all layers too.
            embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
            embedding.register_forward_hook(require_output_gradient)
        fully_shard(module)
        super().__init__(module, make_optimizer(module))
        self.size = distributed.get_world_size()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; gradients are reduced in every micro-batch, because whole gradients may not fit in
        memory."""
        (self.scaled_loss(loss) * self.size).backward()

    def _to_float(self, norm: Tensor) -> float:
        return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    def updated_weights(self) -> Iterator[Tensor]:
        return (p.to_local() if isinstance(p, DTensor) else p for p in super().updated_weights())

    def optimizer_slices(self) -> Iterator[Slice]:
        self.module.reshard()  # weights stay gathered after a forward without backward
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    yield Slice(name, key, tuple(value.shape), _shard_offset(parameter), value.to_local().reshape(-1))
                elif distributed.get_rank() == 0 and value is not None:  # a step count
                    count = value if isinstance(value, Tensor) else pack_number(value)
                    yield Slice(name, key, (), 0, count.reshape(1))

    def load_optimizer_slices(self, saved: SliceReader) -> None:
        trained = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        saved.check_parameters([name for name, _ in trained])
        for name, parameter in trained:
            state: dict[str, Any] = {}
            for key in saved.state_keys(name):
                if saved.shape(name, key) == ():
                    fused = self.optimizer.defaults.get("fused")
                    count = unpack_number(saved.read(name, key, 0, 1).reshape(()))
                    state[key] = count.to(parameter.device if fused else "cpu") if isinstance(count, Tensor) else count
                elif key != MASTER:  # with FSDP2, weights are fp32 or have no master weights
                    state[key] = torch.zeros_like(parameter, requires_grad=False)
                    local = state[key].to_local()
                    if local.numel():
                        values = saved.read(name, key, _shard_offset(parameter), local.numel())
                        local.copy_(values.reshape(local.shape))
            self.optimizer.state[parameter] = state

    def full_weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        return gather_weights(self.module, names)

    @contextmanager
    def allow_direct_calls(self) -> Iterator[None]:
        """Context manager that gathers the weights outside the decoder layers, so that submodules can be called."""
        self.module.unshard()
        try:
            yield
        finally:
            self.module.reshard()
