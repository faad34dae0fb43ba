"""Functions over nested containers of arguments that leave nothing for Python's collector.

``torch.utils._pytree.tree_map`` makes closures that refer to themselves. They stay in memory until the collector runs,
a hundred and more in each step where a tensor of a type of our own stands for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each item in nested dicts, lists and tuples, named ones too."""
    if isinstance(value, dict):
        return {key: map_nested(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [map_nested(function, item) for item in value]
    if isinstance(value, tuple):
        items = [map_nested(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return function(value)
