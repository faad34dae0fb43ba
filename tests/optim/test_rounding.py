"""bfloat16 weights that every optimizer of the table rounds stochastically: they move as float32 ones do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamtune.base.optimizer_table import OPTIMIZERS, PLAIN_STEP, state_bytes
from streamtune.ops.devices import simulate_device_type
from streamtune.optim import OptimChoice, build_optimizer, set_learning_rate, state_tensors
from streamtune.plan.simulate.memory import storage_bytes
from streamtune.train.slices import SliceReader, write_slices

from .test_optimizer_table import ARGS, ON_CPU, Net, backend_of, is_in_layer, ours, run_steps

QUICK = ("adamw", "lion", "muon")
SLOW = {"sgd": 1e-4, "adafactor": 1e-3, "came": 3e-6}
"""Learning rates at which a step is smaller than half of the distance between two bfloat16 numbers; 1e-5 of others."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def moved(model: Net, start: Net) -> Tensor:
    return torch.cat(
        [
            (a.detach().float() - b.detach().float()).flatten()
            for a, b in zip(model.parameters(), start.parameters(), strict=True)
        ]
    )


def trained(name: str, dtype: torch.dtype, steps: int, **more: str) -> Tensor:
    """Return how far weights went from bfloat16 ones, on the gradients of weights that stay."""
    fixed, model = Net(torch.bfloat16).float(), Net(torch.bfloat16).to(dtype)
    optimizer = ours(model, name, **more)
    for step in range(steps):
        fixed.zero_grad()
        fixed.loss(step).backward()
        for mine, other in zip(model.parameters(), fixed.parameters(), strict=True):
            mine.grad = other.grad.to(dtype).clone()
        set_learning_rate(optimizer, SLOW.get(name, 1e-5))
        optimizer.step()
    return moved(model, Net(torch.bfloat16))


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", ON_CPU)
def test_small_steps_add_up_as_in_float32(name: str) -> None:
    """The distance along float32's is its own, up to the noise of rounding; the nearest number loses it."""
    steps = 40
    want, got, nearest = (
        trained(name, dtype, steps, **more)
        for dtype, more in (
            (torch.float32, {}),
            (torch.bfloat16, {"rounding": "stochastic"}),
            (torch.bfloat16, {}),
        )
    )
    along = want / want.square().sum()
    assert float(got @ along) == pytest.approx(1.0, abs=0.1)
    assert float(nearest @ along) < 0.8 * float(got @ along)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", ON_CPU)
def test_steps_in_the_backward_on_the_host_and_after_a_resume_are_the_same(name: str, tmp_path: Path) -> None:
    def start() -> Net:
        return Net(torch.bfloat16)

    want = start()
    run_steps(want, backend_of(want, name, "after", rounding="stochastic", seed=3), range(4))
    for kind in ("backward", "host", "host, backward"):
        model = start()
        run_steps(model, backend_of(model, name, kind, rounding="stochastic", seed=3), range(4))
        assert all(map(torch.equal, model.parameters(), want.parameters())), kind
    for number, (before, after) in enumerate((("after", "after"), ("host, backward", "after"), ("after", "host"))):
        model, folder = start(), tmp_path / str(number)
        folder.mkdir()
        backend = backend_of(model, name, before, rounding="stochastic", seed=3)
        run_steps(model, backend, range(2))
        write_slices(folder, backend.optimizer_slices(), 0, has_whole_tensors=True)
        resumed = start()
        resumed.load_state_dict(model.state_dict())
        again = backend_of(resumed, name, after, rounding="stochastic", seed=3)
        again.load_optimizer_slices(SliceReader(folder))
        run_steps(resumed, again, range(2, 4))
        assert all(map(torch.equal, resumed.parameters(), want.parameters())), (before, after)
    other = start()
    run_steps(other, backend_of(other, name, "after", rounding="stochastic", seed=4), range(4))
    assert not all(map(torch.equal, other.parameters(), want.parameters())), "the seed decides the rounding"


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", ON_CPU)
def test_states_are_float32_and_planned_as_such(name: str) -> None:
    model = Net(torch.bfloat16)
    optimizer = ours(model, name, rounding="stochastic", **({"states": "float32"} if name == "adamw" else {}))
    for step in range(2):
        model.loss(step).backward()
        optimizer.step()
    planned = copy.deepcopy(Net(torch.bfloat16)).to("meta")
    simulated = ours(planned, name, rounding="stochastic", **({"states": "float32"} if name == "adamw" else {}))
    with simulate_device_type("cpu"):
        for parameter in planned.parameters():
            parameter.grad = torch.empty_like(parameter)
        for group in simulated.param_groups:
            group.update({key: False for key in ("foreach", "fused") if key in group})
        simulated.step()
    for (key, parameter), other in zip(model.named_parameters(), planned.parameters(), strict=True):
        want = state_bytes(name, tuple(parameter.shape), 4, ARGS.get(name, {}), in_layer=is_in_layer(key))
        got, meta = (
            storage_bytes(x for _, x in state_tensors(each.state.get(p, {})))
            for each, p in ((optimizer, parameter), (simulated, other))
        )
        assert got == want, key
        assert meta in (want, want - 4), "a count may be on the host"


def test_float32_weights_are_not_rounded_and_each_keeps_its_own_dtype() -> None:
    """Adapters are float32, beside modules that are trained whole in bfloat16."""
    model = Net(torch.bfloat16)
    model.norm.data = model.norm.data.float()
    model.embed.data = model.embed.data.float()
    want = copy.deepcopy(model)
    rounded = build_optimizer(OptimChoice("adamw", 1e-5, rounding="stochastic"), model.named_parameters())
    plain = build_optimizer(OptimChoice("adamw", 1e-5), want.named_parameters())
    for parameter, other in zip(model.parameters(), want.parameters(), strict=True):
        parameter.grad = torch.ones_like(parameter)
        other.grad = torch.ones_like(other)
    rounded.step()
    plain.step()
    assert torch.equal(model.embed, want.embed)
    assert torch.equal(model.norm, want.norm)
    assert not torch.equal(model.experts, want.experts)
    assert rounded.state[model.embed]["exp_avg"].dtype == torch.float32
    assert rounded.state[model.experts]["exp_avg"].dtype == torch.bfloat16


def test_blocks_keep_float32_and_losses_alone_are_left_out() -> None:
    """The table says that this option does not round the weights of these."""
    for name, entry in OPTIMIZERS.items():
        if entry.step != PLAIN_STEP:
            args = {"blocks": ["layer"]} if entry.step.gradients == "block" else {}
            made = build_optimizer(
                OptimChoice(name, 1.0, rounding="stochastic", args=args), Net(torch.bfloat16).named_parameters()
            )
            assert not any("rounding" in group for group in made.param_groups)
