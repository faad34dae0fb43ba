"""Bytes that are alive, followed storage by storage: exact on any device, a simulated one included.

A dispatch mode sees every tensor an operator returns and learns when its storage dies. What it counts is what the
program holds; what a kernel allocates and frees inside one operator is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from streamtune.engine.storage import is_host_storage

__all__ = ["LiveBytes", "held_tensors"]

ACTIVATION, INPUT, GRADIENT = "activation", "layer input", "gradient"


class LiveBytes(TorchDispatchMode):
    """Counts the storages made and still alive while it is entered, by what they are for.

    A new storage is an *activation* until it is known to be a *layer input* (the hidden states handed to a decoder
    layer) or a finished *gradient* (``parameter.grad``). Weights and whatever else existed before are not counted.

    Attributes:
        live: Bytes alive now, by kind.
        peak: Largest total of all kinds.
        at_peak: Bytes alive then, by kind.
        activation_peak: Largest number of activation bytes.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.live = {ACTIVATION: 0, INPUT: 0, GRADIENT: 0}
        self.peak = self.activation_peak = 0
        self.at_peak = dict(self.live)
        self._model, self._layers = model, list(layers)
        self._known: dict[int, tuple[str, int]] = {}
        self._before = {_address(t) for t in held_tensors(model)}
        self._hooks = ExitStack()

    def __enter__(self) -> LiveBytes:
        for layer in self._layers:
            self._hook(layer.register_forward_pre_hook(self._on_layer_input))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._hook(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def _hook(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _on_layer_input(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self._file_under(INPUT, args[0])

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._file_under(GRADIENT, parameter.grad)

    def _file_under(self, kind: str, tensor: Tensor) -> None:
        address = _address(tensor)
        if address in self._known:
            old, size = self._known[address]
            self.live[old] -= size
            self.live[kind] += size
            self._known[address] = (kind, size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in tree_iter(out):
            if isinstance(item, Tensor):
                self._meet(item)
        return out

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or address in self._before or not storage.nbytes() or is_host_storage(storage):
            return
        self._known[address] = (ACTIVATION, storage.nbytes())
        self.live[ACTIVATION] += storage.nbytes()
        weakref.finalize(storage, self._forget, address)
        if (total := sum(self.live.values())) > self.peak:
            self.peak, self.at_peak = total, dict(self.live)
        self.activation_peak = max(self.activation_peak, self.live[ACTIVATION])

    def _forget(self, address: int) -> None:
        kind, size = self._known.pop(address)
        self.live[kind] -= size


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The tensors whose storages are a model's weights: parameters and buffers, what a quantised one is made of in its
    place."""
    todo: list[Tensor] = [*model.parameters(), *model.buffers()]
    while todo:
        tensor = todo.pop()
        if is_traceable_wrapper_subclass(tensor):  # torchao: int8 values and scales; the wrapper has no bytes
            todo += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            continue
        yield tensor
        state = getattr(tensor, "quant_state", None)  # bitsandbytes: scales of blocks, and scales of those
        todo += [item for item in state.as_dict().values() if isinstance(item, Tensor)] if state is not None else []


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
