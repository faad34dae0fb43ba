"""Weights offloaded to the host: copied to the device before a layer computes, and their gradients copied back.

An offloaded weight is an ordinary parameter on the CPU, so optimizers, checkpoints and hooks on parameters work as for
a model on the CPU. While a layer computes (forward, recompute, backward), its module holds copies on the device:

    W' = copy of W;  z = layer(x; W');  dL/dW' summed over the chunks on the device;  dL/dW = copy of dL/dW'

The next layer's weights are copied while a layer computes, so the weights of two layers are on the device at a time.
The gradients of a layer are copied to the host after its last chunk.

The weights of decoder layers, embedding and head are offloaded. Trained weights in a layer with adapters, quantised
weights, and the weights of other modules (the final norm) stay on the device. Embedding and head
are copied for each of their calls, and an autograd node returns their gradients to the host.

Copies may be narrower than the weights (``fetch_dtype``): W' = bf16(W). Then the whole model computes in that dtype,
except weights that the model always keeps in float32. The gradient is dL/dW' of the model with weights W'. It is summed
and returned in the dtype of W, so that an optimizer steps float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import model_device
from streamtune.engine.hf_names import fp32_weight_names
from streamtune.engine.inspect_model import base_model, decoder_layers, has_adapters
from streamtune.engine.lazy_logits import LazyForward
from streamtune.engine.memory.host import HostPool, is_host_storage, mark_host_storage
from streamtune.engine.memory.placement import Tiers
from streamtune.engine.memory.tiers import Copies
from streamtune.engine.observe import notify_tensors
from streamtune.errors import UnsupportedModelError

PLAIN_TYPES = (Tensor, nn.Parameter)
"""Tensor types that are offloaded. Quantised and sharded tensors have other types."""


def offloaded_parameters(model: Any, layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that ``weights="host"`` moves to the host, each once; ``model`` has no wrappers."""
    parameters = {id(p): p for layer in layers for _, _, p in _layer_weights(layer)}
    parameters |= {id(p): p for module in _embedding_and_head(model) for _, _, p in _plain_parameters(module)}
    return list(parameters.values())


def keep_on_host(model: Any, device: torch.device, pool: HostPool | None = None) -> None:
    """Move a model's offloaded weights to host memory, and its other weights and buffers to the device.

    Use this for a model that does not fit on the device: load it on the CPU, add its adapters, call this function, then
    ``stream(model, schedule=Schedule(weights="host"))``. For a model on the device, ``stream`` alone moves the weights
    of decoder layers, embedding and head.

    Args:
        model: Causal language model of ``transformers``, with or without peft adapters; changed in place.
        device: Device on which the model computes; ``meta`` simulates it.
        pool: Pool from which host memory is allocated; None creates a pool.

    Raises:
        OutOfMemoryError: Host memory is too small.
    """
    pool = HostPool() if pool is None else pool
    model = base_model(model)
    layers = decoder_layers(model)
    parameters = offloaded_parameters(model, layers)
    offloaded = {id(p) for p in parameters}
    with torch.no_grad():
        for parameter in parameters:
            if is_host_storage(parameter.untyped_storage()):
                continue
            if device.type == "meta":
                mark_host_storage(parameter.untyped_storage())
                continue
            host = pool.allocate(parameter.shape, parameter.dtype, device)
            parameter.data = host.copy_(parameter.data)
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is None or id(tensor) in offloaded:
                        continue
                    if isinstance(tensor, nn.Parameter):
                        tensor.data = tensor.data.to(device)
                    else:
                        table[key] = tensor.to(device)


def _layer_weights(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    entries = [entry for module in layer.modules() for entry in _plain_parameters(module)]
    if not has_adapters(layer):
        return entries
    return [entry for entry in entries if not entry[2].requires_grad] or entries


def _plain_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [(module, key, p) for key, p in module._parameters.items() if p is not None and type(p) in PLAIN_TYPES]


def _embedding_and_head(model: Any) -> list[nn.Module]:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    candidates: list[nn.Module] = []
    if isinstance(table, nn.Embedding) and not any(True for _ in table.children()):
        candidates.append(table)
    if type(head) is nn.Linear:
        candidates.append(head)
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), []).append(module)

    def used_elsewhere(parameter: nn.Parameter) -> bool:
        return not all(any(user is module for module in candidates) for user in users[id(parameter)])

    return [module for module in candidates if not any(used_elsewhere(p) for _, _, p in _plain_parameters(module))]


def _modules_outside_layers(model: Any, layers: Iterable[nn.Module]) -> list[nn.Module]:
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if id(module) not in inside and _plain_parameters(module)]


def _fp32_weight_ids(model: Any) -> set[int]:
    names = fp32_weight_names(model)
    return {id(p) for name, p in model.named_parameters() if any(each in name for each in names)}


@dataclass
class _Fetched:
    versions: list[tuple[int, int]]
    copies: list[tuple[Tensor, torch.cuda.Event | None]]

    def wait(self) -> list[Tensor]:
        for x, event in self.copies:
            if event is not None:
                torch.cuda.current_stream(x.device).wait_event(event)
        return [x for x, _ in self.copies]


@dataclass
class _WeightUnit:
    """The offloaded weights of one layer, embedding or head, each once, and the module attributes that hold them."""

    parameters: list[nn.Parameter]
    attributes: list[tuple[nn.Module, str, int]]
    """(module, name, index in ``parameters``) of each attribute."""
    next_layer: int | None = None
    """Index of the next layer; None for embedding, head and other modules."""
    leaves: list[Tensor] | None = None
    depth: int = 0
    replaced: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def from_entries(
        cls, entries: Sequence[tuple[nn.Module, str, nn.Parameter]], next_layer: int | None = None
    ) -> _WeightUnit:
        order = {id(p): p for _, _, p in entries}
        index = {key: place for place, key in enumerate(order)}
        return cls(list(order.values()), [(m, key, index[id(p)]) for m, key, p in entries], next_layer)

    def weight_versions(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self.parameters]


class OffloadedWeights:
    """Keeps a streamed model's weights on the host, and copies them to the device when a module computes.

    Args:
        model: Model of ``transformers``, without wrappers. Its weights are moved by :func:`keep_on_host`, and stay on
            the host when streaming is removed.
        layers: Decoder layers of the model.
        tiers: Storage tiers of the model; their counters include the copied bytes.
        dtype: Dtype of the copies; None is the dtype of each weight.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], tiers: Tiers, dtype: torch.dtype | None = None) -> None:
        self.device, self.tiers, self.pool, self.dtype = model_device(model), tiers, HostPool(), dtype
        self._fp32_ids = _fp32_weight_ids(model)
        self.copies = Copies(self.device)
        keep_on_host(model, self.device, self.pool)
        self._layers = [
            _WeightUnit.from_entries(_layer_weights(layer), place + 1) for place, layer in enumerate(layers)
        ]
        self._units = {id(layer): unit for layer, unit in zip(layers, self._layers, strict=True)}
        outside = _embedding_and_head(model) if dtype is None else _modules_outside_layers(model, layers)
        self._units |= {id(module): _WeightUnit.from_entries(_plain_parameters(module)) for module in outside}
        self._prefetched: tuple[_WeightUnit, _Fetched] | None = None
        self._hooks: list[Any] = []
        for module in outside:
            self._hooks.append(module.register_forward_pre_hook(self._before_call))
            self._hooks.append(module.register_forward_hook(self._after_call, always_call=True))

    def remove(self) -> None:
        """Remove the hooks from the modules; the weights stay on the host."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._prefetched = [], None

    @contextmanager
    def weights_on_device(self, layer: nn.Module, prefetch_offset: int = 0) -> Iterator[dict[int, Tensor]]:
        """Put device copies of a layer's weights in its modules, in the ``with`` block; yield them by parameter ``id``.

        Each copy is a leaf that requires a gradient if its parameter does. ``prefetch_offset`` 1 begins to copy the
        weights of the next layer, -1 the weights of the preceding layer, 0 none.
        """
        unit = self._units[id(layer)]
        if not unit.depth:
            unit.leaves = self._copies_as_leaves(unit)
            self._prefetch_neighbour(unit, prefetch_offset)
            self._install_copies(unit, unit.leaves)
        unit.depth += 1
        try:
            assert unit.leaves is not None
            yield {id(p): leaf for p, leaf in zip(unit.parameters, unit.leaves, strict=True)}
        finally:
            unit.depth -= 1
            if not unit.depth:
                self._restore_weights(unit)
                unit.leaves = None

    @contextmanager
    def weights_on_device_with_graph(self, module: nn.Module) -> Iterator[None]:
        """Put device copies of the weights in ``module`` (the head), in the ``with`` block.

        Autograd returns the gradients of the copies to the host.
        """
        unit = self._units.get(id(module))
        if unit is None or unit.depth:
            yield
            return
        self._install_device_copies(module)
        try:
            yield
        finally:
            self._restore_host_weights(module)

    def gradients_to_host(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients, copied to the host if the parameter is offloaded. The copies are complete."""
        on_host, events = list(grads), []
        for place, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            if grad is None or not is_host_storage(parameter.untyped_storage()):
                continue
            grad = grad.to(parameter.dtype)
            host = self.pool.allocate(grad.shape, grad.dtype, self.device)
            events.append(self.copies.to_host(grad, host))
            self.tiers.host.moved_bytes += grad.nbytes
            on_host[place] = host
        self.copies.wait_for_copies()
        for event in events:
            if event is not None:
                event.synchronize()
        return on_host

    # Copies to the device.

    def _copies_as_leaves(self, unit: _WeightUnit) -> list[Tensor]:
        ahead, self._prefetched = self._prefetched, None
        if ahead is None or ahead[0] is not unit or ahead[1].versions != unit.weight_versions():
            del ahead
            fetched = self._fetch(unit)
        else:
            fetched = ahead[1]
        return [
            nn.Parameter(x, requires_grad=p.requires_grad) for p, x in zip(unit.parameters, fetched.wait(), strict=True)
        ]

    def _fetch(self, unit: _WeightUnit) -> _Fetched:
        copies = []
        with torch.no_grad():
            for parameter in unit.parameters:
                copies.append(self._begin_copy(parameter))
        return _Fetched(unit.weight_versions(), copies)

    def _prefetch_neighbour(self, unit: _WeightUnit, offset: int) -> None:
        if not offset or unit.next_layer is None:
            return
        place = unit.next_layer if offset > 0 else unit.next_layer - 2
        if 0 <= place < len(self._layers):
            self._prefetched = self._layers[place], self._fetch(self._layers[place])

    def _install_copies(self, unit: _WeightUnit, tensors: Sequence[Tensor]) -> None:
        unit.replaced = []
        for module, key, index in unit.attributes:
            current = module._parameters.get(key)
            unit.replaced.append(current)
            if current is unit.parameters[index]:
                module._parameters[key] = tensors[index]  # type: ignore[assignment]

    def _restore_weights(self, unit: _WeightUnit) -> None:
        for (module, key, _), current in zip(unit.attributes, unit.replaced, strict=True):
            module._parameters[key] = current  # type: ignore[assignment]
        unit.replaced = []

    # Embedding and head.

    def _before_call(self, module: nn.Module, *_: Any) -> None:
        if not isinstance(module.__dict__.get("forward"), LazyForward):
            self._install_device_copies(module)

    def _after_call(self, module: nn.Module, *_: Any) -> None:
        if not isinstance(module.__dict__.get("forward"), LazyForward):
            self._restore_host_weights(module)

    def _install_device_copies(self, module: nn.Module) -> None:
        unit = self._units[id(module)]
        if not unit.depth:
            self._install_copies(unit, [self._copy_with_graph(p) for p in unit.parameters])
        unit.depth += 1

    def _copy_with_graph(self, parameter: nn.Parameter) -> Tensor:
        if is_host_storage(parameter.untyped_storage()):
            copied: Tensor = _OnDevice.apply(parameter, self)
            return copied
        narrow = parameter.is_floating_point() and id(parameter) not in self._fp32_ids
        return parameter.to(self.dtype) if narrow and self.dtype is not None else parameter

    def _restore_host_weights(self, module: nn.Module) -> None:
        unit = self._units[id(module)]
        if not unit.depth:  # torch runs this hook also if the call failed before its copies were installed
            return
        unit.depth -= 1
        if not unit.depth:
            self._restore_weights(unit)

    def _begin_copy(self, parameter: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        wide = self.dtype is None or not parameter.is_floating_point() or id(parameter) in self._fp32_ids
        x, event = self.copies.to_device(parameter.detach(), self.device, None if wide else self.dtype)
        notify_tensors("fetched weights", x)
        self.tiers.host.moved_bytes += parameter.nbytes
        return x, event

    def fetch_and_wait(self, parameter: Tensor) -> Tensor:
        """Return a copy of a weight on the device, ready to be read."""
        x, event = self._begin_copy(parameter)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return x

    def __reduce__(self) -> Any:
        raise UnsupportedModelError(
            "a streamed model with offloaded weights cannot be copied or pickled",
            fix="call handle.remove() first, or save the state_dict()",
        )


class _OnDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, weights: OffloadedWeights) -> Tensor:
        ctx.weights, ctx.parameter = weights, parameter
        return weights.fetch_and_wait(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.weights.gradients_to_host([ctx.parameter], [grad])[0], None
