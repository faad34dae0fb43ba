"""Hooks of modules that run on chunks: they would be called for each chunk, in the forward and again in the backward.

A hook on the model, an embedding, a decoder layer or the norm behind them is called once, with whole tensors. Inside of
a decoder layer a module is given one chunk after the other; the head is given none, its loss is one sweep of its
weight. A hook there that counts, averages or normalises would see something else than in the ordinary call. So it is
refused by name, unless it says that it treats every token by itself (:func:`chunkwise`).

Hooks of libraries that take part in the computation (gathering of ZeRO and FSDP2, weight norm) belong there and are
called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as torch_module

from streamtune.errors import UnsupportedModelError

__all__ = ["chunkwise", "may_bring_leaves", "refuse_hooks"]

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
"""Libraries whose hooks are part of what is computed. Not peft: its hooks inside of layers count tokens from the end
(activated LoRA) or are there for the forward alone (``adapter_names``, Poly), and initialisers average over rows."""


def chunkwise(hook: Hook) -> Hook:
    """Allow a hook on a module inside of a decoder layer: it treats every token by itself.

    It is called for each chunk of the sequence, in the forward and once more in the backward; also as a decorator.

    Example:
        >>> layer.mlp.register_forward_hook(streamtune.chunkwise(lambda module, args, out: out + direction))
    """
    hook.__dict__["_streamtune_chunkwise"] = True
    return hook


def refuse_hooks(root: nn.Module, *, within: bool, why: str, mend: str) -> None:
    """Refuse hooks of the user's own on the modules of ``root``.

    Args:
        root: A decoder layer, or the head.
        within: Not those of ``root`` itself.
        why: What would go wrong.
        mend: What to do instead.

    Raises:
        UnsupportedModelError: There is one; names it and its module.
    """
    for name, module in root.named_modules():
        if within and module is root:
            continue
        for kind, hook in _hooks(module.__dict__, TABLES):
            raise UnsupportedModelError(
                f"a {kind} ({_name(hook)}) is on {name or 'it'} ({type(module).__name__}), {why}",
                where=type(root).__name__,
                mend=mend,
            )
    for kind, hook in _hooks(vars(torch_module), GLOBAL):
        raise UnsupportedModelError(
            f"a {kind} of all modules ({_name(hook)}) is registered, {why}", where=type(root).__name__, mend=mend
        )


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
