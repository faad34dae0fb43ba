"""The surroundings of a forward besides its arguments: random state, autocast, attention of the configs, observers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Autocast", "Modes", "Observer", "RandomState", "attention_as", "hold", "observed", "tell_chunk"]


@dataclass(frozen=True)
class RandomState:
    """State of the CPU generator and, on an accelerator, of the device's: what dropout and router jitter draw from."""

    cpu: Tensor
    device: torch.device
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The state at this moment."""
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, accelerator)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers again inside, and leave the state outside as it was."""
        outer = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            outer.restore()

    def restore(self) -> None:
        """Make it the state again."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)


@dataclass(frozen=True)
class Autocast:
    """Autocast as it was in the forward; the backward of autograd runs outside of it."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """The settings at this moment."""
        kind = device.type if device.type in ("cpu", "cuda") else "cpu"
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[None]:
        """A context with these settings; without a cache of cast weights, which would outlive the chunk's graph."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class Modes:
    """Training mode of each module of a layer as it was in the forward: dropout and its like read it."""

    training: tuple[tuple[nn.Module, bool], ...]

    @classmethod
    def now(cls, layer: nn.Module) -> Modes:
        """The modes at this moment."""
        return cls(tuple((module, module.training) for module in layer.modules()))

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same modes inside, and outside those that a call of ``train()`` or ``eval()`` has set since."""
        changed = [module for module, was in self.training if module.training != was]
        for module in changed:
            module.training = not module.training
        try:
            yield
        finally:
            for module in changed:
                module.training = not module.training


@contextmanager
def attention_as(configs: list[Any], names: list[Any]) -> Iterator[None]:
    """The named attention implementations while inside."""
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config, name in zip(configs, names, strict=True):
            config._attn_implementation_internal = name
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


class Observer(Protocol):
    """Someone who counts what the engine does; it does nothing else because of that."""

    def on_chunk(self, layer: nn.Module, chunk: slice, walk: str) -> None:
        """A layer, or a norm outside of them, is about to run on a chunk, in a walk of its cache.

        Before the walks of a layer's backward there is an empty chunk: what comes next belongs to that layer.
        """

    def on_hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """These tensors were made for a purpose: ``keys and values``, ``attention output``, ``layer input``."""


_observers: list[Observer] = []  # no context variable: on an accelerator backward runs in a thread of autograd's


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` what happens inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell_chunk(layer: nn.Module, chunk: slice, walk: str) -> None:
    """Tell who looks on that a layer is about to run on a chunk."""
    for observer in _observers:
        observer.on_chunk(layer, chunk, walk)


def hold(kind: str, *tensors: Tensor) -> None:
    """Tell who looks on what tensors are for."""
    for observer in _observers:
        observer.on_hold(kind, tensors)
