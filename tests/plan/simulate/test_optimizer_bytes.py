"""Bytes of an optimizer step by the allocator, which also counts scratch memory inside operators."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from streamtune.base.optimizer_table import OPTIMIZERS, PLAIN_STEP
from streamtune.optim import OptimChoice, build_optimizer
from streamtune.plan.simulate.partition import ResidentMemory
from tests.plan.simulate.test_simulate import allocated, build, workload

VOCABULARY = 8000
"""An embedding that is the largest weight by far, as in real models, and is no multiple of a block of 256."""
OPTIONS: dict[str, dict[str, Any]] = {"galore": {"rank": 8}, "natural_galore": {"rank": 8}, "apollo": {"rank": 8}}
NAMES = [
    name for name, entry in OPTIMIZERS.items() if entry.is_installed and not entry.only_on and entry.step == PLAIN_STEP
]


def optimizer_of(name: str, model: Any) -> torch.optim.Optimizer:
    return build_optimizer(
        OptimChoice(name, 1e-3, args=OPTIONS.get(name, {})),
        model.named_parameters(),
        is_in_layer=lambda own: ".layers." in own,
    )


@pytest.mark.quick("adamw_8bit-bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_allocator_gives_what_is_simulated(name: str, dtype: torch.dtype) -> None:
    """For a whole step, and for the step of one weight, as in an optimizer in the backward."""
    make = partial(build, "qwen3", vocab_size=VOCABULARY, dtype=dtype)
    steps = {
        in_backward: ResidentMemory.from_model(
            make("meta"), workload(make, make_optimizer=partial(optimizer_of, name), step=kind)
        ).temporary
        for in_backward, kind in ((False, PLAIN_STEP), (True, PLAIN_STEP.with_step_in_backward()))
    }
    model: Any = make("cpu")
    optimizer = optimizer_of(name, model)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    gc.collect()
    allocated(optimizer.step)  # what this frees was allocated before: it is not seen
    assert allocated(optimizer.step) == pytest.approx(steps[False], rel=0.03, abs=SMALL)
    largest = max(parameters, key=torch.numel)
    for parameter in parameters:
        if parameter is not largest:
            parameter.grad = None
    alone = allocated(optimizer.step)
    assert alone <= steps[True] + SMALL
    if alone > SMALL:
        assert alone == pytest.approx(steps[True], rel=0.03, abs=SMALL)


SMALL = 1 << 17
"""Bytes: buffers of a BLAS for products of narrow numbers, and counts of steps."""


@pytest.mark.quick("galore", "adamw_torch_8bit")
@pytest.mark.parametrize("name", NAMES)
def test_states_of_weights_that_wait_are_on_the_host(name: str) -> None:
    """For every optimizer; those that project gradients find no matrix among the weights on the device."""
    make = partial(build, "qwen3", vocab_size=VOCABULARY)
    step = workload(make, make_optimizer=partial(optimizer_of, name))
    there, away = ResidentMemory.from_model(make("meta"), step), ResidentMemory.from_model(make("meta"), step, "host")
    assert away.state + away.host["optimizer"] == pytest.approx(there.state, abs=4)  # torchao's rate is a tensor
    assert away.state < 0.01 * there.state or not there.state
