"""A decoder layer's call as a function of tensors, so that the preflight can repeat it, plain or in chunks.

Inputs are the tensor arguments that need a gradient, hidden states first, and the entries of a dictionary of keys and
values the model shares between its layers. Outputs are the tensors the layer returns, and the entries it fills there.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.call_parts import SharedKey

__all__ = ["Arguments", "Name", "RecordedCall", "bind", "hand_on", "inputs_of", "kind_of", "outputs_of", "replaced"]

Name = str | SharedKey
Arguments = inspect.BoundArguments


@dataclass
class RecordedCall:
    """A recorded call of a model's layer number ``index``, without gradients.

    ``wanted`` names the ``inputs`` that need a gradient; ``outputs`` are the plain layer's, the first ``[B, T, C]``.
    """

    index: int
    arguments: Arguments
    inputs: dict[Name, Tensor]
    wanted: list[Name]
    outputs: list[Tensor]

    @property
    def z_in(self) -> Tensor:
        """The hidden states."""
        return next(iter(self.inputs.values()))


def bind(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Bind a call of ``layer`` as Python does; the layer itself is the first argument."""
    return inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)


def inputs_of(arguments: Arguments) -> dict[Name, Tensor]:
    """Return the hidden states, other tensors with a gradient, and all shared keys and values, by name."""
    found: dict[Name, Tensor] = {}
    for position, (name, value) in enumerate(list(arguments.arguments.items())[1:]):
        if isinstance(value, Tensor) and (position == 0 or value.requires_grad):
            found[name] = value
        elif isinstance(value, UserDict):
            found |= {(name, entry, i): x for entry, pair in value.items() for i, x in enumerate(pair)}
    return found


def replaced(arguments: Arguments, tensors: dict[Name, Tensor], layer: nn.Module | None = None) -> Arguments:
    """Return the same call with other tensors, of another layer if one is given, and with its own shared dictionary."""
    new = inspect.BoundArguments(arguments.signature, arguments.arguments.copy())
    if layer is not None:
        new.arguments[next(iter(new.arguments))] = layer
    for name, value in arguments.arguments.items():
        if isinstance(value, UserDict):
            new.arguments[name] = type(value)(
                {
                    entry: tuple(tensors.get((name, entry, i), x) for i, x in enumerate(pair))
                    for entry, pair in value.items()
                }
            )
        elif name in tensors:
            new.arguments[name] = tensors[name]
    return new


def outputs_of(forward: Callable[..., Any], arguments: Arguments) -> tuple[Any, list[Tensor]]:
    """Call ``forward``; return its result, and as outputs its tensors, then the entries it adds to the dictionary."""
    sharing = _sharing(arguments)
    before = set(sharing or ())
    out = forward(*arguments.args, **arguments.kwargs)
    outputs = [item for place, item in enumerate(_items(out)) if _is_output(place, item)]
    if sharing is not None:
        outputs += [x for entry, pair in sharing.items() if entry not in before for x in pair]
    return out, outputs


def hand_on(arguments: Arguments, used: Arguments, out: Any, call: RecordedCall) -> Any:
    """Return the recorded outputs in the layer's own form, as new leaves: the graph of one layer lives at a time.

    Entries that the call ``used`` added to its shared dictionary are added to that of the model's own ``arguments``.
    """
    leaves = iter([x.clone().requires_grad_(torch.is_grad_enabled()) for x in call.outputs])
    items = [next(leaves) if _is_output(place, item) else item for place, item in enumerate(_items(out))]
    sharing, filled = _sharing(arguments), _sharing(used)
    if sharing is not None and filled is not None:
        for entry, pair in filled.items():
            if entry not in sharing:
                sharing[entry] = tuple(next(leaves) for _ in pair)
    return type(out)(items) if isinstance(out, tuple | list) else items[0]


def _items(out: Any) -> list[Any]:
    return list(out) if isinstance(out, tuple | list) else [out]


def _is_output(place: int, item: Any) -> bool:
    """Return True for hidden states and other floating tensors of up to 3 dims: not attention or choices of keys."""
    return place == 0 or (isinstance(item, Tensor) and item.is_floating_point() and item.dim() <= 3)


def _sharing(arguments: Arguments) -> Any:
    return next((value for value in arguments.arguments.values() if isinstance(value, UserDict)), None)


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return the classes inside of a layer and their settings, not its place: equal for two layers of one kind."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, str | bool | int) and "idx" not in key and not key.endswith("_id")
            ),
        )
        for name, module in layer.named_modules()
    )
