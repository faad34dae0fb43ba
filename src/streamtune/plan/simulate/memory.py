"""Count the bytes of live tensor storages, on any device, including ``meta``.

A dispatch mode sees every tensor that an operator returns, and a weak reference reports when the tensor's storage is
freed. Scratch memory that a kernel frees before it returns is not counted.
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
from streamtune.engine.observe import with_observer

ACTIVATION, INPUT, GRADIENT = "activation", "layer input", "gradient"
KEYS, ATTENTION, HEAD, OPTIMIZER = "keys and values", "attention output", "head", "optimizer"
FETCHED = "fetched weights"
KINDS = (INPUT, KEYS, ATTENTION, ACTIVATION, HEAD, GRADIENT, OPTIMIZER, FETCHED)
TEMPORARY = (KEYS, ACTIVATION, HEAD)
"""Kinds of bytes that make up :attr:`LiveBytes.activation_peak`."""


class LiveBytes(TorchDispatchMode):
    """Context manager that counts, by kind, the bytes of storages that were allocated inside it and not yet freed.

    A new storage counts as an *activation* until its kind is set. Other kinds are *layer input* (hidden states passed
    to a decoder layer), *gradient* (``parameter.grad``), *optimizer* (optimizer state, by :meth:`set_kind`), and the
    kinds that the engine reports (:meth:`on_new_tensors`). Weights are not counted. Host memory is not counted if the
    model is on an accelerator. Older storages are counted only if an operator returns a view of them.

    Args:
        model: Model that runs.
        layers: Decoder layers of the model.
        count_cpu: True to count host memory; None: only if the model is on the CPU.
        other_model: Another model that runs but is not trained, and whose weights are not counted.

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
        other_model: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.live = dict.fromkeys(KINDS, 0)
        self.total = self.peak = self.activation_peak = 0
        self.at_peak = dict(self.live)
        self.new_kind = ACTIVATION
        """Kind of new storages."""
        self._model, self._layers = model, list(layers)
        self._storages: dict[int, tuple[str, int, Any]] = {}
        existing = [tensor for each in (model, other_model) if each is not None for tensor in model_tensors(each)]
        self._uncounted = {_storage_id(t) for t in existing}
        on_cpu = all(tensor.device.type == "cpu" for tensor in existing)
        self._count_cpu = on_cpu if count_cpu is None else count_cpu
        self._hooks = ExitStack()

    def __enter__(self) -> LiveBytes:
        for layer in self._layers:
            self._add_hook(layer.register_forward_pre_hook(self._on_layer_input))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._add_hook(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        self._hooks.enter_context(with_observer(self))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def _add_hook(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _on_layer_input(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self.set_kind(INPUT, args[0])

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.set_kind(GRADIENT, parameter.grad)

    def set_kind(self, kind: str, *tensors: Tensor) -> None:
        """Count the storages of ``tensors`` as ``kind`` from now on; a no-op for storages that are not counted."""
        for tensor in tensors:
            storage_id = _storage_id(tensor)
            if storage_id in self._storages:
                old, size, reference = self._storages[storage_id]
                self.live[old] -= size
                self.live[kind] += size
                self._storages[storage_id] = (kind, size, reference)

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None: ...

    def on_new_tensors(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors`` as ``kind``, unless ``kind`` is ``state`` (recurrent states)."""
        if kind != "state":
            self.set_kind(kind, *tensors)

    def on_resize(self, x: Tensor) -> None:
        storage_id = _storage_id(x)
        if storage_id in self._storages:
            kind, size, reference = self._storages[storage_id]
            now = x.untyped_storage().nbytes()
            self._storages[storage_id] = (kind, now, reference)
            self.live[kind] += now - size
            self.total += now - size
            if now > size:
                self._update_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count_results(out)
        return out

    def count_tensors(self, *tensors: Tensor) -> None:
        """Count the storages of tensors that no operator inside the context returned."""
        for tensor in tensors:
            self._count_tensor(tensor)

    def _count_results(self, out: Any) -> None:
        before = self.total
        if isinstance(out, Tensor):
            self._count_tensor(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self._count_tensor(item)
        if self.total > before:
            self._update_peak()

    def _update_peak(self) -> None:
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = dict(self.live)
        temporary = sum(self.live[kind] for kind in TEMPORARY)
        self.activation_peak = max(self.activation_peak, temporary)

    def _count_tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, models.PackedExperts):
            for part in tensor.packed_tensors():
                self._count_tensor(part)
            return
        if is_traceable_wrapper_subclass(tensor):  # quantised states of torchao: the wrapper has no bytes
            for name in tensor.__tensor_flatten__()[0]:
                self._count_tensor(getattr(tensor, name))
            return
        storage = tensor.untyped_storage()
        storage_id = storage._cdata
        if storage_id in self._storages or storage_id in self._uncounted:
            return
        size = storage.nbytes()
        if not size or (not self._count_cpu and tensor.device.type == "cpu") or is_host_storage(storage):
            return
        self._storages[storage_id] = (self.new_kind, size, weakref.KeyedRef(storage, self._subtract_freed, storage_id))
        self.live[self.new_kind] += size
        self.total += size

    def _subtract_freed(self, reference: Any) -> None:
        kind, size, _ = self._storages.pop(reference.key)
        self.live[kind] -= size
        self.total -= size


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model; for a quantised tensor, yield its components."""
    pending: list[Tensor] = [*model.parameters(), *model.buffers()]
    while pending:
        tensor = pending.pop()
        if isinstance(tensor, models.PackedExperts):
            yield from tensor.packed_tensors()
            continue
        if is_traceable_wrapper_subclass(tensor):  # torchao: int8 values and scales; the wrapper has no bytes
            pending += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            continue
        yield from _tensor_and_scales(tensor)


def _tensor_and_scales(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor and, if bitsandbytes packed it, the scales of its blocks, and the scales of these scales."""
    yield tensor
    state = getattr(tensor, "quant_state", None)
    while state is not None:  # as_dict would copy some tensors, and copies have other storages
        yield from (item for item in vars(state).values() if isinstance(item, Tensor))
        state = getattr(state, "state2", None)


def quantization_scale_bytes(model: nn.Module) -> int:
    """Return the bytes of quantisation scales, which are not sharded: every rank has all scales."""
    packed = [x for x in model.parameters() if getattr(x, "quant_state", None) is not None]
    packed_ids = {_storage_id(x) for x in packed}
    tensors = [x for p in packed for x in _tensor_and_scales(p) if _storage_id(x) not in packed_ids]
    experts = [x for x in model.parameters() if isinstance(x, models.PackedExperts)]
    return storage_bytes([*tensors, *(part for p in experts for part in p.packed_tensors()[1:])])


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters, buffers and quantisation scales, each storage counted once."""
    return storage_bytes(model_tensors(model))


def device_model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights and buffers that are not offloaded to the host."""
    return model_bytes(model) - host_model_bytes(model)


def host_model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights that are offloaded to the host (``engine.weights``)."""
    return storage_bytes(tensor for tensor in model_tensors(model) if is_host_storage(tensor.untyped_storage()))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage counted once."""
    storages = {_storage_id(tensor): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
