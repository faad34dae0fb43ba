"""State of a forward that its backward restores, observers of the engine, and hooks of modules.

The state is training modes and the attention implementation; ``ops.forward_state`` has random state and autocast.

A hook on the model, an embedding, a decoder layer or the final norm is called once, with whole tensors. A module inside
a decoder layer is called once per chunk. The head is not called for its logits: the loss reads its weight directly. So
a hook inside a layer or on the head raises an error, unless it is marked as a hook that treats each token independently
(:func:`chunkwise`). Hooks of libraries that take part in the computation (ZeRO, FSDP2, weight norm) are called
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from streamtune.engine.hf_names import attention_name, set_attention_name
from streamtune.errors import UnsupportedModelError
from streamtune.ops.devices import SimulatedDeviceMode


@dataclass(frozen=True)
class Modes:
    """Modes of a layer's forward. The backward restores them, because autograd may run it with other modes.

    Attributes:
        training: Training flag of each module; dropout depends on it.
        functions: Active ``TorchFunctionMode`` contexts, outermost first.
    """

    training: tuple[tuple[nn.Module, bool], ...]
    functions: tuple[TorchFunctionMode, ...]

    @classmethod
    def capture(cls, layer: nn.Module) -> Modes:
        """Return the training flags of ``layer``'s modules and the active function modes."""
        return cls(tuple((module, module.training) for module in layer.modules()), function_modes())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply these modes in the ``with`` block; on exit, restore the previous training flags."""
        entered = function_modes()
        missing = [mode for mode in self.functions if not any(mode is other for other in entered)]
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
    """Return the active ``TorchFunctionMode`` contexts, except those for a default or a simulated device."""
    ignored = (DeviceContext, SimulatedDeviceMode)
    return tuple(mode for mode in _get_current_function_mode_stack() if not isinstance(mode, ignored))


@contextmanager
def temporary_attention_names(configs: list[Any], names: list[Any]) -> Iterator[None]:
    """Set the attention implementations ``names`` in the model configs in the ``with`` block."""
    before = [attention_name(config) for config in configs]
    try:
        for config, name in zip(configs, names, strict=True):
            set_attention_name(config, name)
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            set_attention_name(config, name)


@contextmanager
def temporary_attribute(owner: object, name: str, value: Any) -> Iterator[None]:
    """Set the attribute ``name`` of ``owner`` to ``value`` in the ``with`` block, then restore its old value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def restore_forward(module: nn.Module, original_forward: Any) -> None:
    """Restore the ``forward`` that a module instance had before; None restores the ``forward`` of its class."""
    if original_forward is None:
        del module.forward
    else:
        module.forward = original_forward


class Observer(Protocol):
    """Receives events of the engine, such as the start of a chunk, without a change of the engine's results."""

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        """Handle the start of a decoder layer, or of a norm outside the layers, on a chunk.

        ``pass_name`` is the purpose of the run, such as ``store`` in the forward. An empty chunk marks the start of a
        layer's backward; the events that follow belong to that layer.
        """

    def on_new_tensors(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Handle new tensors; ``kind`` is ``keys and values``, ``attention output``, ``layer
        input`` or another kind.
        """

    def on_resize(self, x: Tensor) -> None:
        """Handle a change of the size of ``x``'s storage."""


_observers: list[Observer] = []  # not a context variable: on an accelerator, backward runs in a thread of autograd


@contextmanager
def with_observer(observer: Observer) -> Iterator[None]:
    """Send the engine's events to ``observer`` in the ``with`` block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def notify_chunk(layer: nn.Module, chunk: slice, pass_name: str) -> None:
    """Notify the observers that ``layer`` is about to run on ``chunk``; ``pass_name`` is the purpose, such as
    ``store``.
    """
    for observer in _observers:
        observer.on_chunk(layer, chunk, pass_name)


def notify_tensors(kind: str, *tensors: Tensor) -> None:
    """Notify the observers of new tensors; ``kind`` says what they are, such as ``layer input``."""
    for observer in _observers:
        observer.on_new_tensors(kind, tensors)


def notify_resized(x: Tensor) -> None:
    """Notify the observers that the storage of tensor ``x`` was resized."""
    for observer in _observers:
        observer.on_resize(x)


Hook = TypeVar("Hook", bound=Callable[..., Any])

HOOK_TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
"""Attributes of a module that hold hooks, each with the name of the kind of hook for error messages."""
GLOBAL_HOOK_TABLES = {f"_global{name}": kind for name, kind in HOOK_TABLES.items()}
"""Attributes of ``torch.nn.modules.module`` that hold hooks of all modules."""

COMPUTING_LIBRARIES = ("streamtune", "torch", "transformers", "deepspeed", "accelerate", "bitsandbytes", "torchao")
"""Libraries whose hooks are part of the computation. peft is not among them. Its hooks inside layers count tokens from
the end (activated LoRA), exist for the forward only (``adapter_names``, Poly), or average over rows (initialisers).
"""


def chunkwise(hook: Hook) -> Hook:
    """Mark a hook that treats each token independently, so that it may be registered inside a decoder layer.

    The hook is called for each chunk of the sequence, in the forward and again in the backward. This function can be
    used as a decorator.

    Example:
        >>> mlp, direction = model.model.layers[0].mlp, torch.ones(32)
        >>> handle = mlp.register_forward_hook(chunkwise(lambda module, args, output: output + direction))
    """
    hook.__dict__["_streamtune_chunkwise"] = True
    return hook


def refuse_hooks(root: nn.Module, *, within: bool, why: str, fix: str) -> None:
    """Raise an error if the user registered a hook on ``root`` or on a module inside it, or for all modules.

    Args:
        root: Decoder layer or head.
        within: True allows hooks on ``root`` itself.
        why: Reason why such a hook is refused, for the message.
        fix: Fix, for the message.

    Raises:
        UnsupportedModelError: Such a hook is registered.
    """
    for name, module in root.named_modules():
        if within and module is root:
            continue
        for kind, hook in _user_hooks(module.__dict__, HOOK_TABLES):
            raise UnsupportedModelError(
                f"a {kind} ({_hook_name(hook)}) is on {name or 'the module'} ({type(module).__name__}), {why}",
                where=type(root).__name__,
                fix=fix,
            )
    for kind, hook in _user_hooks(vars(torch_module), GLOBAL_HOOK_TABLES):
        raise UnsupportedModelError(
            f"a global {kind} ({_hook_name(hook)}) is registered, {why}", where=type(root).__name__, fix=fix
        )


def foreign_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the forward hooks and pre-hooks of a module that StreamTune did not register."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if _hook_package(hook) != "streamtune":
            yield hook


def has_user_backward_hooks(module: nn.Module) -> bool:
    """Return True if the user registered a backward hook on the module itself, or globally."""
    names = {table: kind for table, kind in HOOK_TABLES.items() if "backward" in table}
    global_names = {table: kind for table, kind in GLOBAL_HOOK_TABLES.items() if "backward" in table}
    return any(_user_hooks(module.__dict__, names)) or any(_user_hooks(vars(torch_module), global_names))


def has_chunkwise_hooks(root: nn.Module) -> bool:
    """Return True if a module in ``root`` has a hook with the mark :func:`chunkwise`.

    Such a hook may read a trainable tensor.
    """
    return any(
        hasattr(hook, "_streamtune_chunkwise")
        for module in root.modules()
        for table in HOOK_TABLES
        for hook in (module.__dict__.get(table) or {}).values()
    )


def _user_hooks(attributes: dict[str, Any], hook_kinds: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for table, kind in hook_kinds.items():
        for hook in (attributes.get(table) or {}).values():
            if not (_hook_package(hook) in COMPUTING_LIBRARIES or getattr(hook, "_streamtune_chunkwise", False)):
                yield kind, hook


def _unwrap_hook(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _hook_package(hook: Any) -> str:
    function = _unwrap_hook(hook)
    return str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]


def _hook_name(hook: Any) -> str:
    function = _unwrap_hook(hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
