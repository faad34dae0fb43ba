"""The weights of a layer as its forward used them: the backward computes the layer again, and must use the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from streamtune.engine.sharded import FlatParametersError, is_sharded
from streamtune.errors import ArgumentError

__all__ = ["Weights"]


@dataclass(frozen=True)
class Weights:
    """The parameters of one layer at one moment.

    Args:
        layer: The layer.
        held: Name, tensor, version counter, address of its numbers and ``requires_grad`` of each parameter and buffer.
            Empty where ranks share the weights, which are gathered anew for each call.
    """

    layer: nn.Module
    held: tuple[tuple[str, Tensor, int, int, bool], ...]

    @classmethod
    def now(cls, layer: nn.Module) -> Weights:
        """Return the weights at this moment."""
        if any(map(is_sharded, layer.modules())):
            return cls(layer, ())
        held: list[tuple[str, Tensor, int, int, bool]]
        held = [(name, p, p._version, _place(p), p.requires_grad) for name, p in layer.named_parameters()]
        held += [(name, buffer, buffer._version, 0, False) for name, buffer in layer.named_buffers()]
        return cls(layer, tuple(held))

    def check(self, between: str = "the forward and its backward") -> None:
        """Refuse, as autograd does, to compute with weights that are not those of the forward any more.

        Args:
            between: The two events between which the change came, for the message.

        Raises:
            ArgumentError: A weight was changed in place, given other numbers (``.data``) or frozen.
            FlatParametersError: A weight is no parameter of the layer any more.
        """
        for name, parameter, version, place, trained in self.held:
            table, key = _owner(self.layer, name)
            if key not in table:  # of a buffer, a new one was put in its place: the layer's own doing
                if not isinstance(parameter, nn.Parameter) and not trained:
                    continue
                raise FlatParametersError(type(self.layer).__name__)
            if trained and not parameter.requires_grad:
                raise ArgumentError(
                    f"{name} was frozen between {between}, which would lose its gradient",
                    where=type(self.layer).__name__,
                    mend="call loss.backward() first; disable_adapter() of peft freezes adapters as long as it is open",
                )
            if parameter._version != version or (place and _place(parameter) != place):
                raise ArgumentError(
                    f"{name} was changed in place between {between}, and both compute with it",
                    where=type(self.layer).__name__,
                    mend="change weights after loss.backward(), as an optimizer's step does",
                )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put these tensors into the layer while inside: ``torch.func.functional_call`` has restored its own by now."""
        places = [(*_owner(self.layer, name), tensor) for name, tensor, *_ in self.held]
        swapped = [(table, key, tensor) for table, key, tensor in places if table[key] is not tensor]
        before = [table[key] for table, key, _ in swapped]
        try:
            for table, key, tensor in swapped:
                table[key] = tensor
            yield
        finally:
            for (table, key, _), own in zip(swapped, before, strict=True):
                table[key] = own


def _place(parameter: Tensor) -> int:
    """Return the address of a tensor's numbers; 0 if it has none or may change it: quantised, other types, ranks."""
    says = type(parameter) in (Tensor, nn.Parameter) and not (dist.is_available() and dist.is_initialized())
    return parameter.data_ptr() if says else 0


def _owner(layer: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Return the module's table of parameters or of buffers that a name is in, and the name's key there."""
    path, _, key = name.rpartition(".")
    module = layer.get_submodule(path)
    return module._buffers if key in module._buffers else module._parameters, key  # type: ignore[return-value]
