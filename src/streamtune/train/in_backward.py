"""An optimizer that steps each weight in the backward, as soon as its gradient is whole, and frees the gradient.

Gradients then take the room of a layer, not that of a model. What concerns all gradients at once cannot be known before
the last one: with ``max_grad_norm`` a first backward measures the norm and keeps nothing, and a second one, with the
same random numbers, steps with gradients that are scaled by it. Without, there is one backward. Both are the ordinary
step to the same bits.

With ``lagged`` gradients are scaled by the norm of the step before, and there is one backward as well:

    g_t <- g_t * min(1, max_norm / (|g_(t-1)| + 1e-6))        |g_0| for the first step, by a first backward

That is another step than the ordinary one: a gradient that is suddenly large is not bounded until the step after it.

Over several micro-batches gradients add up as ever, and the backward of the last one steps.

What is stepped on the host is stepped by a thread of its own, while the device computes the gradients of the layer
before: weights that wait there, and those whose optimizer is there (:class:`HostOptimizer`).
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

from streamtune.errors import NonFiniteError, OutOfMemoryError
from streamtune.optim import set_learning_rate
from streamtune.train.backend import LocalBackend
from streamtune.train.host_optimizer import HostOptimizer


class InBackwardBackend(LocalBackend):
    """One device, whose optimizer steps in the backward.

    Args:
        module: The model.
        optimizer: Over its parameters; it treats each by itself, as AdamW does.
        max_norm: The norm that gradients are bounded to; 0 leaves them, and needs one backward a step.
        lagged: Scale by the norm of the step before, which needs one backward too.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, *, lagged: bool = False
    ) -> None:
        super().__init__(module, optimizer)
        self.max_norm, self.lagged = max_norm, lagged and max_norm > 0
        self._norm_before: float | None = None
        """The norm of the last step that was taken, where steps are scaled by it."""
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
        """See :class:`Backend`."""
        set_learning_rate(self.optimizer, learning_rate)
        self._norms, self._again, self._scale = {}, again, None
        self._measuring, self._stepping, self._stepped = True, self.max_norm == 0, False
        self._wrong = False
        self.clipped_by = self._norm_before
        if self._norm_before is not None:
            self._stepping, self._scale = True, self._scale_of(torch.tensor(self._norm_before))

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """See :class:`Backend`."""
        self._last = last
        try:
            yield
        finally:
            self._last = False

    def backward(self, loss: Tensor) -> None:
        """See :class:`Backend`. A loss that is not finite steps nothing: the loop sees it, and ends the run."""
        if self._stepping and not math.isfinite(loss.item()):
            self._wrong = True
        else:
            loss.backward()

    def clip_gradients(self, max_norm: float) -> float:
        """Return the norm of the gradients that went through the backward; they are scaled in the second one."""
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
                mend="go on from the last checkpoint (start the run again) with a lower learning_rate; max_grad_norm: "
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
        """Take the second backward, where the first has only measured; wait for the optimizer."""
        if not self._stepping:
            set_learning_rate(self.optimizer, learning_rate)
            self._stepping, self._measuring = True, False
            self._again()
        self._join()
        self._stepping = self._stepped = False
        if self.lagged:
            self._norm_before = self._norm_now

    def drop_gradients(self) -> None:
        """See :class:`Backend`.

        Raises:
            OutOfMemoryError: Some weights were stepped before memory ran out: the step cannot be repeated.
        """
        self._join()
        if self._stepping and self._stepped:
            raise OutOfMemoryError(
                "memory ran out in a backward whose optimizer had stepped some weights already",
                where="optim_in_backward",
                mend="start the run again: it goes on from its last checkpoint; write a smaller max_length or "
                "engine.device_memory before",
            )
        self.module.zero_grad(set_to_none=True)
        self._norms = {}

    def reset_optimizer(self) -> None:
        """See :class:`Backend`. What comes is clipped by norms of its own."""
        super().reset_optimizer()
        self._norm_before = None

    def state(self) -> dict[str, Any]:
        """See :class:`Backend`."""
        return {} if self._norm_before is None else {"norm_before": self._norm_before}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`Backend`."""
        if self.lagged:
            self._norm_before = state.get("norm_before")

    def close(self) -> None:
        """See :class:`Backend`."""
        self._join()
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown()

    def called_directly(self) -> AbstractContextManager[Any]:
        """See :class:`Backend`."""
        self._join()
        return super().called_directly()

    def _on_gradient(self, parameter: Tensor) -> None:
        """Measure or use the gradient of a weight, which is whole now, and free it."""
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
        """Return True for a weight that the thread steps: the processor has time for it while the device computes."""
        return parameter.device.type == "cpu" or isinstance(self.optimizer, HostOptimizer)

    def _step_beside(self, parameter: Tensor, grad: Tensor, event: torch.cuda.Event | None) -> None:
        """Step one weight in the thread; a gradient on the device is there once ``event`` is."""
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
        """Step one weight by the optimizer: all others are left out of its groups for as long."""
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
        """Wait until the thread has stepped what it was given."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.result()


MOST_WAITING = 16
"""Gradients that may wait for the thread: about two layers' worth."""
