"""Weight updates during the backward pass, or in host memory.

A weight is updated as soon as its gradient is complete, and the gradient is freed. So only the gradients of one layer
exist at a time, and up to :data:`MAX_PENDING_UPDATES` gradients that wait for the worker thread.

With ``max_grad_norm`` there are two backward passes with the same random numbers. The first measures the gradient norm.
The second clips the gradients by this norm and updates the weights. Without ``max_grad_norm`` there is one backward
pass. Results equal an ordinary step bit for bit.

With ``lagged`` there is one backward pass, and gradients are clipped by the norm of the previous step:

    g_t <- g_t * min(1, max_norm / (|g_(t-1)| + 1e-6))

So a sudden large gradient is not clipped. The first step still has two passes. With several micro-batches, weights are
updated in the backward pass of the last micro-batch.

A worker thread updates weights in host memory, and weights whose optimizer states are there (:class:`HostOptimizer`),
while the device continues the backward pass.
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
from streamtune.ops.devices import has_streams
from streamtune.optim import set_learning_rate
from streamtune.train.backend import LocalBackend, gradient_norm


class InBackwardBackend(LocalBackend):
    """Backend for one device that updates weights during the backward pass.

    Args:
        module: Model changed by ``streamtune.stream``.
        optimizer: Optimizer that updates each weight independently of other weights, as AdamW does.
        max_norm: Norm to which gradients are clipped; 0: no clipping, and one backward pass per step.
        lagged: True to clip by the norm of the previous step, with one backward pass per step.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, *, lagged: bool = False
    ) -> None:
        super().__init__(module, optimizer)
        self.max_norm, self.lagged = max_norm, lagged and max_norm > 0
        self._previous_norm: float | None = None
        """Norm of the previous step if ``lagged``; else None."""
        self._current_norm = math.nan
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._trained]
        # By index, because an optimizer replaces its groups when it loads a state.
        self._group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._is_last_micro_batch = self._updates_weights = self._has_updated_weights = False
        self._measures_norms, self._is_non_finite = True, False
        self._gradient_scale: Tensor | None = None
        self._norms: dict[int, Tensor] = {}
        self._recompute: Callable[[], object] = lambda: None
        is_accelerated = any(has_streams(p.device) for p in module.parameters())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer") if is_accelerated else None
        self._pending_updates: list[Future[None]] = []
        self._groups_lock = Lock()
        """Locked while the optimizer's groups have one weight, because two threads update weights."""

    def begin_step(self, learning_rate: float, recompute: Callable[[], object]) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        self._norms, self._recompute, self._gradient_scale = {}, recompute, None
        self._measures_norms, self._updates_weights, self._has_updated_weights = True, self.max_norm == 0, False
        self._is_non_finite = False
        self.clip_norm = self._previous_norm
        if self._previous_norm is not None:
            self._updates_weights, self._gradient_scale = True, self._clip_factor(torch.tensor(self._previous_norm))

    @contextmanager
    def micro_batch_context(self, *, last: bool) -> Iterator[None]:
        self._is_last_micro_batch = last
        try:
            yield
        finally:
            self._is_last_micro_batch = False

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``; nothing is computed if weights would be updated and the loss is not
        finite."""
        if self._updates_weights and not math.isfinite(loss.item()):
            self._is_non_finite = True
        else:
            self.scaled_loss(loss).backward()

    def clip_gradients(self, max_norm: float) -> float:
        """Return the gradient norm of this step; gradients are clipped in the backward pass that updates the weights.

        Raises:
            NonFiniteError: The norm is not finite, and weights have already been updated.
        """
        self._wait_for_thread()
        if not self._norms:
            return math.nan
        device = self._norms[next(iter(self._norms))].device
        norms = [self._norms[id(p)].to(device) for p in self._trained if id(p) in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.value
        value = norm.item()
        if self._updates_weights and not math.isfinite(value):
            raise NonFiniteError(
                f"the gradient norm is {value}, and weights were already updated in the backward",
                where="optim_in_backward",
                fix="lower learning_rate and start the run again with --allow-change learning_rate: it resumes from "
                "its last checkpoint; max_grad_norm: 1.0 with clip_norm: exact checks the norm before any update",
            )
        if not self._updates_weights:
            self._gradient_scale = self._clip_factor(norm)
            self.clip_norm = value if self.lagged else None
        self._current_norm = value
        return value

    def _clip_factor(self, norm: Tensor) -> Tensor:
        return torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)

    def step(self, learning_rate: float) -> None:
        """Run the second backward pass if the first only measured the norm, and wait until all weights are updated."""
        if not self._updates_weights:
            set_learning_rate(self.optimizer, learning_rate)
            self._updates_weights, self._measures_norms = True, False
            self._recompute()
        self._wait_for_thread()
        self._updates_weights = self._has_updated_weights = False
        if self.lagged:
            self._previous_norm = self._current_norm

    def drop_gradients(self) -> None:
        """Free the gradients.

        Raises:
            OutOfMemoryError: Some weights have already been updated, so the step cannot be repeated.
        """
        self._wait_for_thread()
        if self._updates_weights and self._has_updated_weights:
            raise OutOfMemoryError(
                "memory ran out in a backward that had already updated some weights",
                where="optim_in_backward",
                fix="lower engine.device_memory and start the run again: it resumes from its last checkpoint; "
                "or start a new run with a smaller max_length",
            )
        self.module.zero_grad(set_to_none=True)
        self._norms = {}

    def reset_optimizer(self) -> None:
        super().reset_optimizer()
        self._previous_norm = None  # the next gradients are clipped by their own norm

    def state(self) -> dict[str, Any]:
        return {} if self._previous_norm is None else {"norm_before": self._previous_norm}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.lagged:
            self._previous_norm = state.get("norm_before")

    def close(self) -> None:
        self._wait_for_thread()
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown()

    def allow_direct_calls(self) -> AbstractContextManager[Any]:
        self._wait_for_thread()
        return super().allow_direct_calls()

    def _on_gradient(self, parameter: Tensor) -> None:
        """Measure the norm of a complete gradient or update its weight, and free the gradient."""
        if not self._is_last_micro_batch:  # gradients of later micro-batches are still missing
            return
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if self._measures_norms:
            self._norms[id(parameter)] = gradient_norm(grad)
        if not self._updates_weights or self._is_non_finite:  # a loss of this step was not finite
            return
        self._has_updated_weights = True
        if self._thread is None or not self._is_updated_in_thread(parameter):
            self._update_weight(parameter, grad)
        else:
            event = torch.cuda.current_stream(grad.device).record_event() if has_streams(grad.device) else None
            self._pending_updates.append(self._thread.submit(self._update_in_thread, parameter, grad, event))
            while len(self._pending_updates) > MAX_PENDING_UPDATES:
                self._pending_updates.pop(0).result()

    def _is_updated_in_thread(self, parameter: Tensor) -> bool:
        return parameter.device.type == "cpu" or isinstance(self.optimizer, HostOptimizer)

    def _update_in_thread(self, parameter: Tensor, grad: Tensor, event: torch.cuda.Event | None) -> None:
        stream = self.optimizer.stream if isinstance(self.optimizer, HostOptimizer) else None
        if stream is None or event is None:
            self._update_weight(parameter, grad)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            self._update_weight(parameter, grad)
            stream.synchronize()

    @torch.no_grad()
    def _update_weight(self, parameter: Tensor, grad: Tensor) -> None:
        """Update one weight by an optimizer step whose parameter groups contain only this weight."""
        if self.loss_scale is not None:
            grad.mul_(1 / self.loss_scale.value)
        if self._gradient_scale is not None:
            grad.mul_(self._gradient_scale.to(grad.device))
        own_group_index = self._group_of[id(parameter)]
        with self._groups_lock:
            groups_and_parameters = [(group, group["params"]) for group in self.optimizer.param_groups]
            parameter.grad = grad
            try:
                for index, (group, _) in enumerate(groups_and_parameters):
                    group["params"] = [parameter] if index == own_group_index else []
                self.optimizer.step()
            finally:
                for group, parameters in groups_and_parameters:
                    group["params"] = parameters
                parameter.grad = None

    def _wait_for_thread(self) -> None:
        updates, self._pending_updates = self._pending_updates, []
        for update in updates:
            update.result()


MAX_PENDING_UPDATES = 16
"""Largest number of gradients that wait for the worker thread; about two layers have as many."""


class HostOptimizer(torch.optim.Optimizer):
    """Optimizer with states in host memory that updates weights of a device on the CPU.

    Weights are updated one after another: weight and gradient are copied to the host, and the updated weight is copied
    back. For weights on the CPU, results equal the wrapped optimizer's bit for bit; an accelerator may round
    differently.

    Args:
        optimizer: Optimizer of the weights, without states yet; an equal optimizer of CPU copies replaces it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = groups = [dict(group) for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._cpu_parameters = {
            parameter: nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu")) for parameter in parameters
        }
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = type(optimizer)
        self.inner = make_optimizer([{**g, "params": [self._cpu_parameters[p] for p in g["params"]]} for g in groups])
        self.state = _StatesByWeight(self._cpu_parameters, self.inner)  # type: ignore[assignment]
        self.pool = HostPool()
        device = next((p.device for p in parameters if has_streams(p.device)), None)
        self.stream = None if device is None else torch.cuda.Stream(device)
        """CUDA stream for the copies, for a caller that updates weights while the device computes."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the weights that have a gradient, and free their gradients."""
        all_parameters = [group["params"] for group in self.inner.param_groups]
        try:
            for index, group in enumerate(self.param_groups):
                for inner in self.inner.param_groups:
                    inner["params"] = []
                own_group = self.inner.param_groups[index]
                own_group.update({key: value for key, value in group.items() if key != "params"})
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        own_group["params"] = [self._cpu_parameters[parameter]]
                        self._update_on_host(parameter)
        finally:
            for inner, parameters in zip(self.inner.param_groups, all_parameters, strict=True):
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
        """Load the state of a ``HostOptimizer``, or of the wrapped optimizer on a device, into host memory."""
        self.inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def _update_on_host(self, parameter: nn.Parameter) -> None:
        """Update one weight on the CPU; the optimizer's parameter groups must contain only its CPU copy."""
        cpu_parameter, grad = self._cpu_parameters[parameter], parameter.grad
        assert grad is not None
        is_on_host = is_host_storage(parameter.untyped_storage())  # weight and gradient are already on the host
        empty_data = cpu_parameter.data
        cpu_parameter.data = parameter.data if is_on_host else self._copy_to_host(parameter.data)
        cpu_parameter.grad = grad if is_on_host else self._copy_to_host(grad)
        parameter.grad = None
        try:
            self._synchronize(parameter)
            self.inner.step()
            if not is_on_host:
                parameter.copy_(cpu_parameter, non_blocking=has_streams(parameter.device))
                self._synchronize(parameter)  # before the pinned memory is reused
        finally:
            cpu_parameter.data, cpu_parameter.grad = empty_data, None

    def _copy_to_host(self, x: Tensor) -> Tensor:
        return self.pool.allocate(x.shape, x.dtype, x.device).copy_(x, non_blocking=has_streams(x.device))

    def _synchronize(self, parameter: Tensor) -> None:
        if has_streams(parameter.device):
            torch.cuda.current_stream(parameter.device).synchronize()


class _StatesByWeight(Mapping[Any, Any]):
    """Mapping from a weight on the device to the optimizer state of its CPU copy."""

    def __init__(self, cpu_parameters: Mapping[nn.Parameter, nn.Parameter], inner: torch.optim.Optimizer) -> None:
        self._cpu_parameters, self._inner = cpu_parameters, inner

    def __getitem__(self, parameter: Any) -> Any:
        cpu_parameter = self._cpu_parameters[parameter]
        if cpu_parameter not in self._inner.state:
            raise KeyError(parameter)
        return self._inner.state[cpu_parameter]

    def __iter__(self) -> Iterator[Any]:
        return (
            parameter for parameter, cpu_parameter in self._cpu_parameters.items() if cpu_parameter in self._inner.state
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        self._inner.state.clear()
