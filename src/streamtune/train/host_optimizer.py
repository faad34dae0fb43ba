"""An optimizer on the host for weights on the device: its states are there, and it steps there.

    host   <- copies of the weight and of its gradient
    host   the optimizer's step
    device <- the weight

for one weight after another, so the host holds the states of all weights and two tensors of one weight. It is the step
of the optimizer inside, to the same bits where the device is a CPU; an accelerator's kernels may round in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.memory.host import HostPool, is_host_storage


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer over weights on the device whose states are on the host, where it steps.

    Args:
        optimizer: Over the weights, without states yet. One of its type is made, with the options of its groups, over
            stand-ins on the CPU, which hold a weight while it is stepped and nothing else.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = groups = [dict(group) for group in optimizer.param_groups]
        every = [parameter for group in groups for parameter in group["params"]]
        self._stand_ins = {
            parameter: nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu")) for parameter in every
        }
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = type(optimizer)
        self.inner = make([{**g, "params": [self._stand_ins[p] for p in g["params"]]} for g in groups])
        self.state = _States(self._stand_ins, self.inner)  # type: ignore[assignment]
        self.pool = HostPool()
        device = next((p.device for p in every if p.device.type == "cuda"), None)
        self.stream = None if device is None else torch.cuda.Stream(device)
        """The stream of copies for a caller that steps beside the computation."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the weights that have a gradient, and free it.

        Raises:
            OutOfMemoryError: The host does not have the memory.
        """
        whole = [group["params"] for group in self.inner.param_groups]
        try:
            for index, group in enumerate(self.param_groups):
                for inner in self.inner.param_groups:
                    inner["params"] = []
                own = self.inner.param_groups[index]
                own.update({key: value for key, value in group.items() if key != "params"})
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        own["params"] = [self._stand_ins[parameter]]
                        self._step_one(parameter)
        finally:
            for inner, parameters in zip(self.inner.param_groups, whole, strict=True):
                inner["params"] = parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or set them to zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of an optimizer on the device or of this one; it stays on the host.

        Args:
            state_dict: As ``state_dict`` returns it.
        """
        self.inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step one weight, whose stand-in alone is in the groups of the optimizer inside."""
        stand_in, grad = self._stand_ins[parameter], parameter.grad
        assert grad is not None
        stays = is_host_storage(parameter.untyped_storage())  # it waits there, and so does its gradient
        nothing = stand_in.data
        stand_in.data = parameter.data if stays else self._copied(parameter.data)
        stand_in.grad = grad if stays else self._copied(grad)
        parameter.grad = None
        try:
            self._wait(parameter)
            self.inner.step()
            if not stays:
                parameter.copy_(stand_in, non_blocking=True)
                self._wait(parameter)  # before the host's memory is used again
        finally:
            stand_in.data, stand_in.grad = nothing, None

    def _copied(self, x: Tensor) -> Tensor:
        """Begin to copy a tensor to the host."""
        return self.pool.take(x.shape, x.dtype, x.device).copy_(x, non_blocking=True)

    def _wait(self, parameter: Tensor) -> None:
        if parameter.device.type == "cuda":
            torch.cuda.current_stream(parameter.device).synchronize()


class _States(Mapping[Any, Any]):
    """The states of weights, which the optimizer inside has under their stand-ins."""

    def __init__(self, stand_ins: Mapping[nn.Parameter, nn.Parameter], inner: torch.optim.Optimizer) -> None:
        self._stand_ins, self._inner = stand_ins, inner

    def __getitem__(self, parameter: Any) -> Any:
        stand_in = self._stand_ins[parameter]
        if stand_in not in self._inner.state:
            raise KeyError(parameter)
        return self._inner.state[stand_in]

    def __iter__(self) -> Iterator[Any]:
        return (parameter for parameter, own in self._stand_ins.items() if own in self._inner.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        self._inner.state.clear()
