"""Optimizers that step each weight in the backward, or on the host.

In the backward a weight is stepped as soon as its gradient is complete, and the gradient is freed. Gradients then take
the memory of one layer. With ``max_grad_norm`` a first backward measures the norm and keeps nothing; a second one, with
the same random numbers, steps with gradients scaled by it. Without it there is one backward. Both equal the ordinary
step to the bit.

With ``lagged`` gradients are scaled by the norm of the step before, in one backward:

    g_t <- g_t * min(1, max_norm / (|g_(t-1)| + 1e-6))        |g_0| for the first step, by a first backward

This differs from the ordinary step: a gradient that is suddenly large is not bounded until the next step. Over several
micro-batches gradients accumulate as usual, and the backward of the last micro-batch steps.

A thread steps the weights that wait on the host, and those whose optimizer is there (:class:`HostOptimizer`), while the
device computes the gradients of the layer before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.memory.host import HostPool, is_host_storage
from streamtune.errors import NonFiniteError, OutOfMemoryError
from streamtune.optim import set_learning_rate
from streamtune.train.backend import LocalBackend


class InBackwardBackend(LocalBackend):
    """One device, whose optimizer steps in the backward.

    Args:
        module: The model.
        optimizer: Optimizer over its parameters, which steps each weight by itself, as AdamW does.
        max_norm: Norm that gradients are bounded to; 0 leaves them, and needs one backward a step.
        lagged: Scale by the norm of the step before, which needs one backward too.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, *, lagged: bool = False
    ) -> None:
        super().__init__(module, optimizer)
        self.max_norm, self.lagged = max_norm, lagged and max_norm > 0
        self._norm_before: float | None = None
        """Norm of the last step that was taken, where steps are scaled by it."""
        self._norm_now = math.nan
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._trained]
        # By index: an optimizer that loads a state puts new groups in the place of its own.
        self._group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._last = self._stepping = self._stepped = False
        self._measuring, self._wrong = True, False
        self._scale: Tensor | None = None
        self._norms: dict[int, Tensor] = {}
        self._again: Callable[[], object] = lambda: None
        accelerated = any(p.device.type != "cpu" for p in module.parameters())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer") if accelerated else None
        self._waiting: list[Future[None]] = []
        self._stepping_one = Lock()
        """Held while the optimizer's groups have one weight: weights on the device are stepped beside the thread."""

    def begin_step(self, learning_rate: float, again: Callable[[], object]) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        self._norms, self._again, self._scale = {}, again, None
        self._measuring, self._stepping, self._stepped = True, self.max_norm == 0, False
        self._wrong = False
        self.clipped_by = self._norm_before
        if self._norm_before is not None:
            self._stepping, self._scale = True, self._scale_of(torch.tensor(self._norm_before))

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        self._last = last
        try:
            yield
        finally:
            self._last = False

    def backward(self, loss: Tensor) -> None:
        """Run the backward; a loss that is not finite steps nothing: the loop sees it, and ends the run."""
        if self._stepping and not math.isfinite(loss.item()):
            self._wrong = True
        else:
            loss.backward()

    def clip_gradients(self, max_norm: float) -> float:
        """Return the norm of the gradients of this step; they are scaled by it in the second backward."""
        self._join()
        if not self._norms:
            return math.nan
        device = self._norms[next(iter(self._norms))].device
        norms = [self._norms[id(p)].to(device) for p in self._trained if id(p) in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        value = norm.item()
        if self._stepping and not math.isfinite(value):
            raise NonFiniteError(
                f"the norm of the gradient is {value}, and the optimizer has stepped with it in the backward",
                where="optim_in_backward",
                fix="go on from the last checkpoint (start the run again) with a lower learning_rate; max_grad_norm: "
                "1.0 measures the norm before anything is stepped",
            )
        if not self._stepping:
            self._scale = self._scale_of(norm)
            self.clipped_by = value if self.lagged else None
        self._norm_now = value
        return value

    def _scale_of(self, norm: Tensor) -> Tensor:
        """Return the factor of a gradient of this norm, as torch clips."""
        return torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)

    def step(self, learning_rate: float) -> None:
        """Run the second backward, if the first one only measured; wait for the optimizer."""
        if not self._stepping:
            set_learning_rate(self.optimizer, learning_rate)
            self._stepping, self._measuring = True, False
            self._again()
        self._join()
        self._stepping = self._stepped = False
        if self.lagged:
            self._norm_before = self._norm_now

    def drop_gradients(self) -> None:
        """Drop the gradients; OutOfMemoryError if some weights were stepped: the step cannot be repeated."""
        self._join()
        if self._stepping and self._stepped:
            raise OutOfMemoryError(
                "memory ran out in a backward whose optimizer had stepped some weights already",
                where="optim_in_backward",
                fix="start the run again: it goes on from its last checkpoint; write a smaller max_length or "
                "engine.device_memory before",
            )
        self.module.zero_grad(set_to_none=True)
        self._norms = {}

    def reset_optimizer(self) -> None:
        super().reset_optimizer()
        self._norm_before = None  # the gradients that come are clipped by norms of their own

    def state(self) -> dict[str, Any]:
        return {} if self._norm_before is None else {"norm_before": self._norm_before}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.lagged:
            self._norm_before = state.get("norm_before")

    def close(self) -> None:
        self._join()
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown()

    def called_directly(self) -> AbstractContextManager[Any]:
        self._join()
        return super().called_directly()

    def _on_gradient(self, parameter: Tensor) -> None:
        """Measure or use the complete gradient of a weight, and free it."""
        if not self._last:  # more of it comes with the next micro-batch
            return
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if self._measuring:
            self._norms[id(parameter)] = torch.linalg.vector_norm(grad)
        if not self._stepping or self._wrong:  # a loss of this step was not finite
            return
        self._stepped = True
        if self._thread is None or not self._is_beside(parameter):
            self._step(parameter, grad)
        else:
            event = torch.cuda.current_stream(grad.device).record_event() if grad.device.type == "cuda" else None
            self._waiting.append(self._thread.submit(self._step_beside, parameter, grad, event))
            while len(self._waiting) > MOST_WAITING:
                self._waiting.pop(0).result()

    def _is_beside(self, parameter: Tensor) -> bool:
        """Return True if the thread steps a weight: the processor has time for it while the device computes."""
        return parameter.device.type == "cpu" or isinstance(self.optimizer, HostOptimizer)

    def _step_beside(self, parameter: Tensor, grad: Tensor, event: torch.cuda.Event | None) -> None:
        """Step one weight in the thread, once ``event`` says that its gradient on the device is complete."""
        stream = self.optimizer.stream if isinstance(self.optimizer, HostOptimizer) else None
        if stream is None or event is None:
            self._step(parameter, grad)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            self._step(parameter, grad)
            stream.synchronize()

    @torch.no_grad()
    def _step(self, parameter: Tensor, grad: Tensor) -> None:
        """Step one weight: the others are taken out of the optimizer's groups meanwhile."""
        if self._scale is not None:
            grad.mul_(self._scale.to(grad.device))
        own = self._group_of[id(parameter)]
        with self._stepping_one:
            before = [(group, group["params"]) for group in self.optimizer.param_groups]
            parameter.grad = grad
            try:
                for index, (group, _) in enumerate(before):
                    group["params"] = [parameter] if index == own else []
                self.optimizer.step()
            finally:
                for group, parameters in before:
                    group["params"] = parameters
                parameter.grad = None

    def _join(self) -> None:
        """Wait for the thread."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.result()


MOST_WAITING = 16
"""Gradients that may wait for the thread: about two layers' worth."""


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer over weights on the device whose states are on the host, where it steps.

    For one weight after another, weight and gradient are copied to the host, stepped there, and the weight is copied
    back. So the host holds the states of all weights and two tensors of one weight. The step is bit-identical to the
    wrapped optimizer's if the device is a CPU; an accelerator's kernels may round differently.

    Args:
        optimizer: Optimizer over the weights, without states yet. It is made anew, with the options of its groups, over
            stand-ins on the CPU, each of which holds a weight only while it is stepped.
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
        """Stream of the copies, for a caller that steps beside the computation."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the weights that have a gradient, and free it."""
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
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of an optimizer on the device or of this one; it stays on the host."""
        self.inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step one weight; the groups of the inner optimizer hold its stand-in alone."""
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
        return self.pool.take(x.shape, x.dtype, x.device).copy_(x, non_blocking=True)

    def _wait(self, parameter: Tensor) -> None:
        if parameter.device.type == "cuda":
            torch.cuda.current_stream(parameter.device).synchronize()


class _States(Mapping[Any, Any]):
    """States by weight; the inner optimizer has them by stand-in."""

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
