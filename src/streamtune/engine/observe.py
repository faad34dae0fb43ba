"""The state of a forward besides its arguments, observers of a forward, and hooks of modules that run on chunks.

The state is random numbers, autocast, training modes and attention; the backward restores it. A hook on the model, an
embedding, a decoder layer or the norm behind them is called once, with whole tensors. A module inside of a decoder
layer gets one chunk after the other; the head gets none, as its loss is one sweep of its weight. A hook there that
counts, averages or normalises would see something else than in the ordinary call. So it is refused by name, unless it
says that it treats every token by itself (:func:`chunkwise`).

Hooks of libraries that take part in the computation (gathering of ZeRO and FSDP2, weight norm) are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from streamtune.engine.hf_names import attention_of, set_attention
from streamtune.errors import UnsupportedModelError
from streamtune.ops.devices import DeviceFunctions


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's random generator and, on CUDA, of the device's; dropout and router jitter draw from them."""

    cpu: Tensor
    device: torch.device
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the state at this moment."""
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
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)


@dataclass(frozen=True)
class Autocast:
    """Autocast settings of a forward, for its backward: autograd runs that outside of autocast."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """Return the settings at this moment."""
        kind = device.type if device.type in ("cpu", "cuda") else "cpu"
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def restored(self) -> AbstractContextManager[None]:
        """Context with these settings, but without a cache of cast weights: it would outlive the chunk's graph."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class Modes:
    """Modes of a layer's forward, for its backward, which autograd may run outside of them.

    Attributes:
        training: Training mode of each module, on which dropout depends.
        functions: Modes that intercept torch's functions, outermost first.
    """

    training: tuple[tuple[nn.Module, bool], ...]
    functions: tuple[TorchFunctionMode, ...]

    @classmethod
    def now(cls, layer: nn.Module) -> Modes:
        """Return the modes at this moment."""
        return cls(tuple((module, module.training) for module in layer.modules()), function_modes())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set these modes inside the context, then restore those that ``train()`` or ``eval()`` has set since."""
        entered = function_modes()
        missing = [mode for mode in self.functions if not any(mode is each for each in entered)]
        changed = [module for module, was in self.training if module.training != was]
        for module in changed:
            module.training = not module.training
        try:
            with ExitStack() as stack:
                for mode in missing:
                    stack.enter_context(mode)
                yield
        finally:
            for module in changed:
                module.training = not module.training


def function_modes() -> tuple[TorchFunctionMode, ...]:
    """Return the modes that intercept torch's functions, except for a default or a simulated device."""
    ignored = (DeviceContext, DeviceFunctions)
    return tuple(mode for mode in _get_current_function_mode_stack() if not isinstance(mode, ignored))


@contextmanager
def attention_as(configs: list[Any], names: list[Any]) -> Iterator[None]:
    """Set the configs' attention implementations to ``names`` inside the context."""
    before = [attention_of(config) for config in configs]
    try:
        for config, name in zip(configs, names, strict=True):
            set_attention(config, name)
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            set_attention(config, name)


@contextmanager
def attribute_as(owner: object, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the context, then restore the value it had."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def restore_forward(module: nn.Module, before: Any) -> None:
    """Restore the ``forward`` that an instance had before; None is the ``forward`` of its class."""
    if before is None:
        del module.forward
    else:
        module.forward = before


class Observer(Protocol):
    """An observer of what the engine does; the engine computes the same with and without one."""

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        """Note that a layer, or a norm outside of them, is about to run on a chunk, in the pass named ``pass_name``.

        Before a layer's backward this is called with an empty chunk: the next calls belong to that layer.
        """

    def on_hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Note what tensors were made as: ``keys and values``, ``attention output``, ``layer input`` or ``state``."""

    def on_resize(self, x: Tensor) -> None:
        """Note that the storage of a tensor has another size than before."""


_observers: list[Observer] = []  # no context variable: on an accelerator backward runs in a thread of autograd's


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Notify ``observer`` of what the engine does inside the context."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def notify_chunk(layer: nn.Module, chunk: slice, pass_name: str) -> None:
    """Notify the observers that a layer is about to run on a chunk."""
    for observer in _observers:
        observer.on_chunk(layer, chunk, pass_name)


def notify_tensors(kind: str, *tensors: Tensor) -> None:
    """Notify the observers of the use of these tensors."""
    for observer in _observers:
        observer.on_hold(kind, tensors)


def notify_resized(x: Tensor) -> None:
    """Notify the observers that the memory of a tensor was freed, or given back to it."""
    for observer in _observers:
        observer.on_resize(x)


Hook = TypeVar("Hook", bound=Callable[..., Any])

TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
"""The hooks of a module, and what they are called."""
GLOBAL = {f"_global{name}": kind for name, kind in TABLES.items()}

LIBRARIES = ("streamtune", "torch", "transformers", "deepspeed", "accelerate", "bitsandbytes", "torchao")
"""Libraries whose hooks are part of the computation. Not peft: its hooks inside of layers count tokens from the end
(activated LoRA) or are there for the forward alone (``adapter_names``, Poly), and initialisers average over rows.
"""


def chunkwise(hook: Hook) -> Hook:
    """Allow a hook on a module inside of a decoder layer: it treats every token by itself.

    It is called for each chunk of the sequence, in the forward and once more in the backward; also as a decorator.

    Example:
        >>> layer.mlp.register_forward_hook(streamtune.chunkwise(lambda module, args, out: out + direction))
    """
    hook.__dict__["_streamtune_chunkwise"] = True
    return hook


def refuse_hooks(root: nn.Module, *, within: bool, why: str, fix: str) -> None:
    """Refuse hooks of the user's own on the modules of ``root``, a decoder layer or the head.

    Args:
        root: The module.
        within: True leaves out the hooks of ``root`` itself.
        why: Consequence of the hook, for the message.
        fix: Remedy, for the message.
    """
    for name, module in root.named_modules():
        if within and module is root:
            continue
        for kind, hook in _hooks(module.__dict__, TABLES):
            raise UnsupportedModelError(
                f"a {kind} ({_name(hook)}) is on {name or 'it'} ({type(module).__name__}), {why}",
                where=type(root).__name__,
                fix=fix,
            )
    for kind, hook in _hooks(vars(torch_module), GLOBAL):
        raise UnsupportedModelError(
            f"a {kind} of all modules ({_name(hook)}) is registered, {why}", where=type(root).__name__, fix=fix
        )


def foreign_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the forward hooks of a module that the engine did not register itself."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if _origin(hook) != "streamtune":
            yield hook


def watches_gradients(module: nn.Module) -> bool:
    """Return True if a backward hook of the user's own is on the module itself, or on all modules."""
    names = {table: kind for table, kind in TABLES.items() if "backward" in table}
    names_of_all = {table: kind for table, kind in GLOBAL.items() if "backward" in table}
    return any(_hooks(module.__dict__, names)) or any(_hooks(vars(torch_module), names_of_all))


def may_bring_leaves(root: nn.Module) -> bool:
    """Return True if a hook of the user's own is inside, which may use a tensor that is trained."""
    return any(
        hasattr(hook, "_streamtune_chunkwise")
        for module in root.modules()
        for table in TABLES
        for hook in (module.__dict__.get(table) or {}).values()
    )


def _hooks(tables: dict[str, Any], names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for table, kind in names.items():
        for hook in (tables.get(table) or {}).values():
            if not (_origin(hook) in LIBRARIES or getattr(hook, "_streamtune_chunkwise", False)):
                yield kind, hook


def _function(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _origin(hook: Any) -> str:
    function = _function(hook)
    return str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]


def _name(hook: Any) -> str:
    function = _function(hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
