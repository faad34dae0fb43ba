"""Calls of a streamed model that are the plain model's own: evaluation and generation with what streaming never builds.

Attention weights, router logits and caches of a fixed size belong to a whole layer. Where no gradient is computed a
layer may run whole, with the attention that its config named before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from streamtune.engine.hf_names import CACHES

OUTPUTS = ("output_attentions", "output_router_logits")
"""Arguments that ask for outputs of whole layers."""
GROWING = (None, "dynamic", "dynamic_full")
"""Values of ``cache_implementation`` that mean a cache which grows with the tokens."""


class PlainModel(Protocol):
    """The attributes of :class:`streamtune.engine.stream.StreamHandle` that plain calls use."""

    model: Any

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Make calls inside the context the plain model's own."""


def needs_whole_layers(arguments: dict[str, Any], cache: Any, with_labels: bool) -> bool:
    """Return True if a call without gradients asks for something that only whole layers give.

    With labels the balance loss of the routers is asked for by ``output_router_logits`` as well, and is streamed.

    Args:
        arguments: Arguments of the call.
        cache: The cache that was passed.
        with_labels: True if the call has labels.
    """
    asked = [name for name in OUTPUTS if arguments.get(name)]
    if with_labels and asked == ["output_router_logits"]:
        return False
    return bool(asked) or bool(getattr(cache, "is_compileable", False))


class Generation:
    """Replaces ``generate`` of a streamed model on its instance.

    Args:
        handle: The handle of the model.
    """

    def __init__(self, handle: PlainModel) -> None:
        self.handle = handle

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own())

    def _own(self) -> Callable[..., Any]:
        model = self.handle.model
        own: Callable[..., Any] = type(model).generate.__get__(model)
        return own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, by the plain model where that is asked for what streaming never builds."""
        if not self._asks_for_whole_layers(kwargs):
            return self._own()(*args, **kwargs)
        with torch.no_grad(), self.handle.plain():
            return self._own()(*args, **kwargs)

    def _asks_for_whole_layers(self, kwargs: dict[str, Any]) -> bool:
        configs = (kwargs.get("generation_config"), getattr(self.handle.model, "generation_config", None))
        given: dict[str, Any] = {}
        for config in reversed(configs):
            given |= {} if config is None else vars(config)
        given |= kwargs
        fixed = given.get("cache_implementation") not in GROWING
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        return fixed or needs_whole_layers(given, cache, with_labels=False)


def has_generate(model: nn.Module) -> bool:
    """Return True if a model's class generates and nobody replaced that on the instance."""
    return callable(getattr(type(model), "generate", None)) and "generate" not in vars(model)
