"""The names by which the engine knows the inside of ``transformers``, and since which version each is called that.

``transformers`` renames arguments, outputs and functions between minor versions. All names of its inside that this
package relies on stand here; other modules ask for the thing. A name that the installed version lacks is an error that
names the version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

__all__ = ["CACHE", "CACHES", "STATE", "cache_argument", "cache_by_name", "parameters_of", "renamed_cache"]

STATE = "state"
"""The argument by which xLSTM and RWKV hand a layer its state, in place of a cache."""

CACHES = {
    "past_key_values": "all until 5.23; goes in 5.40",
    "cache_params": "Mamba and its like until 5.23; goes in 5.40",
    "layer_past": "layers of bloom, falcon, gpt_bigcode, gpt_neox, imagegpt and mpt",
    "past_key_value": "until 4.56; code of repositories",
    "cache": "since 5.24",
}
"""Names of the cache: arguments of models and layers, items of outputs. Who still has an old one means the cache by it,
so these are first: before 5.24 a few models called something else ``cache``."""
CACHE = "past_key_values"
"""The name in messages: the one that people know, and that a model of any version takes."""
OTHER_KEYS = "kv"
"""The argument of attentions (xlm, flaubert) whose ``cache`` is a table of their own."""


@lru_cache(maxsize=512)
def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; of one that takes old names too, those of the function inside."""
    return inspect.signature(forward).parameters


def cache_argument(forward: Callable[..., Any], state: bool = True) -> str | None:
    """Return the name by which a forward takes its cache, or with ``state`` the state in its place; None if neither."""
    parameters = parameters_of(forward)
    found = next((name for name in CACHES if name in parameters), STATE if state and STATE in parameters else None)
    return None if OTHER_KEYS in parameters else found


def cache_names(given: Mapping[str, Any]) -> list[str]:
    """Return the names in a call's arguments, or of an output's items, that mean its cache."""
    return [name for name in CACHES if given.get(name) is not None]


def renamed_cache(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of a call with the cache, under whichever name it was given, under ``name``."""
    found = cache_names(given)
    if len(found) != 1 or found == [name]:
        return dict(given)
    return {name if key == found[0] else key: value for key, value in given.items() if key != name}


def cache_by_name(forward: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return the argument that gives a cache to a model's forward or to a function of ``transformers``."""
    return {cache_argument(forward, state=False) or CACHE: cache}
