"""Steps of an optimizer on the host under torch's CUDA sanitizer.

    python -m tests.cuda_host.optimizer_races [beside]

Weights are on the device, which has no values here. With ``beside`` the optimizer's stream does not wait for
gradients, which the sanitizer has to find. Prints one JSON document: for each kind of step the race, or null.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda._sanitizer

import streamtune
from streamtune import Schedule
from streamtune.optim import OptimChoice, StatesDtype, build_optimizer
from streamtune.train import HostOptimizer, InBackwardBackend, LocalBackend, in_backward
from tests.cuda_host.measure import decide_without_values, make
from tests.cuda_host.races import BASE, LENGTH, SMALL

STATES: tuple[StatesDtype, ...] = ("param", "bfloat16")
STEPS = ("after the backward", "in the backward", "two backwards", "lagged")


def step_beside_at_once(self: Any, parameter: Any, grad: torch.Tensor, event: Any) -> None:
    """Step a weight whose gradient may not be computed yet."""
    with torch.cuda.stream(self.optimizer.stream):
        self._update_weight(parameter, grad)
        self.optimizer.stream.synchronize()


class HereAndNow:
    """Runs what is submitted at once, in this thread: the sanitizer sees the operators of no other."""

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        """Call a function; its result is there."""
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self, **_: Any) -> None:
        """Do nothing: there is no thread."""


def backend_of(model: Any, optimizer: torch.optim.Optimizer, kind: str) -> LocalBackend:
    """Return the backend of a kind of step."""
    if kind == "after the backward":
        return LocalBackend(model, optimizer)
    max_norm = 0.0 if kind == "in the backward" else 1.0
    backend = InBackwardBackend(model, optimizer, max_norm, lagged=kind == "lagged")
    backend._thread = HereAndNow()  # type: ignore[assignment]
    return backend


def race_of(kind: str, states: StatesDtype) -> str | None:
    """Return what the sanitizer says of three steps."""
    model = make({"layers": 4, "config": SMALL, "dtype": "float32"}, "cuda")
    optimizer = HostOptimizer(build_optimizer(OptimChoice("adamw", 1e-3, states=states), model.named_parameters()))
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="cuda")
    backend = backend_of(model, optimizer, kind)

    def gradients() -> None:
        with backend.micro_batch_context(last=True):
            backend.backward(model(input_ids=ids, labels=ids).loss)

    try:
        with streamtune.stream(model, schedule=Schedule(**BASE, offload="host")):
            for _ in range(3):
                backend.begin_step(1e-3, gradients)
                gradients()
                backend.clip_gradients(1.0)
                backend.step(1e-3)
    except torch.cuda._sanitizer.CUDASanitizerErrors as error:
        return str(error)[:400]
    finally:
        backend.close()
    on = {value.device.type for state in optimizer.state.values() for value in state.values()}
    assert on == {"cpu"}, on
    return None


def main(mutants: list[str]) -> None:
    """Run every kind of step."""
    warnings.simplefilter("ignore")
    decide_without_values()
    in_backward.math = SimpleNamespace(isfinite=lambda _: True, nan=math.nan)  # type: ignore[assignment]
    if "beside" in mutants:
        InBackwardBackend._update_in_thread = step_beside_at_once  # type: ignore[method-assign]
    torch.cuda._sanitizer.enable_cuda_sanitizer()
    print(json.dumps({f"{kind}, {states}": race_of(kind, states) for kind in STEPS for states in STATES}))


if __name__ == "__main__":
    main(sys.argv[1:])
