"""Parameters by name: those that a pattern matches, and those of a layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from streamtune.errors import ArgumentError, did_you_mean

MOST_SHOWN = 12


class NameGroups:
    """The first pattern that matches each parameter.

    A pattern matches whole parts of a name: ``mlp`` matches ``layers.0.mlp.up_proj.weight``, and not ``mlp_norm``.

    Args:
        patterns: As ``fnmatch`` has them.
        names: Names of the parameters that are trained.

    Raises:
        ArgumentError: A pattern matches none of them.
    """

    def __init__(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        self._patterns = patterns
        for number, pattern in enumerate(patterns):
            if not any(_matches(pattern, name) for name in names):
                raise _no_match(pattern, number, names)

    def of(self, name: str) -> int | None:
        """Return the number of the first pattern that matches a name, or None."""
        return next((number for number, pattern in enumerate(self._patterns) if _matches(pattern, name)), None)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def _no_match(pattern: str, number: int, names: Sequence[str]) -> ArgumentError:
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    shown = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    rest = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    nearest = did_you_mean(pattern, parts)
    return ArgumentError(
        f"'{pattern}' matches no trained parameter; there are {', '.join(shown[:MOST_SHOWN])}{rest}",
        where=f"lr_groups.{number}.match",
        mend=nearest or "write a part of such a name",
    )


class LayerPlaces:
    """The decoder layer of each parameter.

    Args:
        model: The model, whose parameters have the names that are asked for.
        layers: Its decoder layers, in order.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        numbers = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
        self._count = len(layers)
        self._of = {name: numbers.get(id(parameter)) for name, parameter in model.named_parameters()}
        embeddings = {id(p) for p in _embeddings(model)}
        self._embedded = {name for name, parameter in model.named_parameters() if id(parameter) in embeddings}

    def is_in_layer(self, name: str) -> bool:
        """Return True for a parameter of a decoder layer."""
        return self._of[name] is not None

    def layers_above(self, name: str) -> int:
        """Return the number of steps from the head down: 0 for the head and norms before it, 1 for the last layer."""
        number = self._of[name]
        if number is not None:
            return self._count - number
        return self._count + 1 if name in self._embedded else 0


def _embeddings(model: nn.Module) -> list[nn.Parameter]:
    get = getattr(model, "get_input_embeddings", None)
    return [] if get is None else list(get().parameters())
