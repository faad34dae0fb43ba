"""Count live bytes, storage by storage: exact on any device, including ``meta``.

A dispatch mode sees every tensor that an operator returns, and a weak reference reports when its storage is freed. Only
storages that the program holds are counted, not the scratch memory that a kernel frees before it returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from streamtune import models
from streamtune.engine.memory.host import is_host_storage
from streamtune.engine.observe import observed

ACTIVATION, INPUT, GRADIENT = "activation", "layer input", "gradient"
KEYS, ATTENTION, HEAD, OPTIMIZER = "keys and values", "attention output", "head", "optimizer"
FETCHED = "fetched weights"
KINDS = (INPUT, KEYS, ATTENTION, ACTIVATION, HEAD, GRADIENT, OPTIMIZER, FETCHED)
TEMPORARY = (KEYS, ACTIVATION, HEAD)
"""Kinds that make up :attr:`LiveBytes.activation_peak`."""


class LiveBytes(TorchDispatchMode):
    """Context manager that counts live bytes by kind: storages made inside it that are still alive.

    A new storage counts as an *activation* until its kind is known. Other kinds are a *layer input* (hidden states
    passed to a decoder layer), a finished *gradient* (``parameter.grad``), state of the *optimizer* (:meth:`file`), and
    the kinds that the engine reports (:meth:`on_hold`). Weights are not counted, nor is host memory if the model is on
    an accelerator. Older storages are counted only if an operator returns a view of them.

    Args:
        model: Model that runs.
        layers: Decoder layers of the model.
        count_cpu: True to count host memory; None: only if the model is on the CPU.
        beside: Another model that runs but is not trained; its weights are not counted either.

    Attributes:
        live: Live bytes now, by kind.
        total: Live bytes now, of all kinds.
        peak: Largest total so far.
        at_peak: Live bytes at the peak, by kind.
        activation_peak: Largest sum of activations, keys and values, and head so far, in bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        *,
        count_cpu: bool | None = None,
        beside: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.live = dict.fromkeys(KINDS, 0)
        self.total = self.peak = self.activation_peak = 0
        self.at_peak = dict(self.live)
        self.new_kind = ACTIVATION
        """Kind as which a new storage is counted."""
        self._model, self._layers = model, list(layers)
        self._known: dict[int, tuple[str, int, Any]] = {}
        held = [tensor for each in (model, beside) if each is not None for tensor in held_tensors(each)]
        self._before = {_address(t) for t in held}
        on_cpu = all(tensor.device.type == "cpu" for tensor in held)
        self._count_cpu = on_cpu if count_cpu is None else count_cpu
        self._hooks = ExitStack()

    def __enter__(self) -> LiveBytes:
        for layer in self._layers:
            self._hook(layer.register_forward_pre_hook(self._on_layer_input))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._hook(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        self._hooks.enter_context(observed(self))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def _hook(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _on_layer_input(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self.file(INPUT, args[0])

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.file(GRADIENT, parameter.grad)

    def file(self, kind: str, *tensors: Tensor) -> None:
        """Count the storages of these tensors as ``kind`` from now on, if they are counted."""
        for tensor in tensors:
            address = _address(tensor)
            if address in self._known:
                old, size, reference = self._known[address]
                self.live[old] -= size
                self.live[kind] += size
                self._known[address] = (kind, size, reference)

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        """Do nothing: live bytes do not depend on the chunk."""

    def on_hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors as the kind that the engine reports; recurrent states keep the kind they have."""
        if kind != "state":
            self.file(kind, *tensors)

    def on_resize(self, x: Tensor) -> None:
        """Count the storage of a tensor with its new size."""
        address = _address(x)
        if address in self._known:
            kind, size, reference = self._known[address]
            now = x.untyped_storage().nbytes()
            self._known[address] = (kind, now, reference)
            self.live[kind] += now - size
            self.total += now - size
            if now > size:
                self._grown()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(out)
        return out

    def meet(self, *tensors: Tensor) -> None:
        """Count tensors that existed before or that no operator returned."""
        for tensor in tensors:
            self._meet(tensor)

    def _see(self, out: Any) -> None:
        before = self.total
        if isinstance(out, Tensor):
            self._meet(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self._meet(item)
        if self.total > before:
            self._grown()

    def _grown(self) -> None:
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = dict(self.live)
        temporary = sum(self.live[kind] for kind in TEMPORARY)
        self.activation_peak = max(self.activation_peak, temporary)

    def _meet(self, tensor: Tensor) -> None:
        if isinstance(tensor, models.PackedExperts):
            for part in tensor.parts():
                self._meet(part)
            return
        if is_traceable_wrapper_subclass(tensor):  # quantised states of torchao: the wrapper has no bytes
            for name in tensor.__tensor_flatten__()[0]:
                self._meet(getattr(tensor, name))
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or address in self._before:
            return
        size = storage.nbytes()
        if not size or (not self._count_cpu and tensor.device.type == "cpu") or is_host_storage(storage):
            return
        self._known[address] = (self.new_kind, size, weakref.KeyedRef(storage, self._forget, address))
        self.live[self.new_kind] += size
        self.total += size

    def _forget(self, reference: Any) -> None:
        kind, size, _ = self._known.pop(reference.key)
        self.live[kind] -= size
        self.total -= size


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model; for a quantised tensor, yield its components."""
    todo: list[Tensor] = [*model.parameters(), *model.buffers()]
    while todo:
        tensor = todo.pop()
        if isinstance(tensor, models.PackedExperts):
            yield from tensor.parts()
            continue
        if is_traceable_wrapper_subclass(tensor):  # torchao: int8 values and scales; the wrapper has no bytes
            todo += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            continue
        yield from _with_scales(tensor)


def _with_scales(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor and, if bitsandbytes packed it, the scales of its blocks, and the scales of these scales."""
    yield tensor
    state = getattr(tensor, "quant_state", None)
    while state is not None:  # not by as_dict: it copies some tensors, and copies have other storages
        yield from (item for item in vars(state).values() if isinstance(item, Tensor))
        state = getattr(state, "state2", None)


def scales_bytes(model: nn.Module) -> int:
    """Return the bytes of quantisation scales. They are not sharded: every rank holds all of them."""
    packed = [x for x in model.parameters() if getattr(x, "quant_state", None) is not None]
    own = {_address(x) for x in packed}
    tensors = [x for p in packed for x in _with_scales(p) if _address(x) not in own]
    experts = [x for x in model.parameters() if isinstance(x, models.PackedExperts)]
    return distinct_bytes([*tensors, *(part for p in experts for part in p.parts()[1:])])


def held_bytes(model: nn.Module) -> int:
    return distinct_bytes(held_tensors(model))


def device_held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights and buffers on the device."""
    return held_bytes(model) - host_held_bytes(model)


def host_held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights that are offloaded to the host (``engine.weights``)."""
    return distinct_bytes(tensor for tensor in held_tensors(model) if is_host_storage(tensor.untyped_storage()))


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage counted once."""
    held = {_address(tensor): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in held.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
