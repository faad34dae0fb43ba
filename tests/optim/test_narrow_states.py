"""AdamW with moments in a dtype of their own: unbiased rounding, torch's steps, a resume to the same bits.

For COAT's float8: the formula in float64, an error that the codes bound, and what a plain scale would lose.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from streamtune.optim import NarrowStatesAdamW, OptimChoice, build_optimizer
from streamtune.optim.narrow_states import LARGEST, RANGE, pack_moment, unpack_moment
from streamtune.optim.weight_step import SLICE_SIZES, random_bits, round_stochastically


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    round_stochastically(x.clone(), bits, out=out)
    return out.float()


def test_the_mean_of_many_draws_is_the_value() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, generator=generator) * torch.logspace(-30, 30, 64)
    draws = 20_000
    found = torch.stack(
        [rounded(x, random_bits(64, x.device, 7, step) >> shift) for step in range(draws // 2) for shift in (0, 16)]
    ).double()
    low = torch.tensor(x.view(torch.int32).numpy() & -0x10000).view(torch.float32).double()
    step = (x.double() - low).abs().clamp_min(1e-300) / (((x.view(torch.int32) & 0xFFFF).double()) / 65536).clamp_min(
        1e-9
    )
    assert ((found - x.double()).abs() <= step * (1 + 1e-9)).all()  # one of its two neighbours
    error = (found.mean(0) - x.double()) / step
    assert error.abs().max() < 5 * 0.5 / draws**0.5  # five deviations of a mean
    nearest = (x.to(torch.bfloat16).double() - x.double()) / step
    assert nearest.abs().max() > 10 * error.abs().max()


def test_every_lower_half_carries_as_often_as_it_is_large() -> None:
    """Exhaustive: of the 2^16 draws, as many round away from zero as the lower half says."""
    draws = torch.arange(1 << 16, dtype=torch.int32)
    for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        for sign in (1, -1):
            x = torch.full((1 << 16,), (0x3F80 << 16) + lower, dtype=torch.int32).view(torch.float32) * sign
            found = rounded(x, draws)
            assert (found != sign).sum() == lower
            assert torch.equal(found.double().mean(), x[0].double())


def test_what_bfloat16_holds_and_what_is_not_finite_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf"), float("nan")])
    for step in range(20):
        found = rounded(x, random_bits(len(x), x.device, step))
        assert torch.equal(found[:6], x[:6])
        assert found[6].isnan()


def problem(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    x = torch.randn(256, 40, generator=generator)
    y = torch.sin(x[:, :1] * 2) + x[:, 1:2]

    def loss() -> Tensor:
        return (model(x.to(dtype)) - y.to(dtype)).square().float().mean()

    return model, loss


def train(optimizer: torch.optim.Optimizer, loss: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.parametrize("fused", [True, False])
def test_moments_in_float32_are_torchs_steps_to_the_same_bits(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLICE_SIZES, "cpu", 64)  # several slices per weight
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": fused}
    model, loss = problem()
    other, other_loss = problem()
    want = train(torch.optim.AdamW(model.parameters(), foreach=False, **options), loss, 10)
    got = train(NarrowStatesAdamW(other.parameters(), states="float32", **options), other_loss, 10)
    assert got == want
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_bfloat16_moments_stay_near_those_of_float32_and_train_as_well() -> None:
    model, loss = problem()
    other, other_loss = problem()
    torchs = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    ours = NarrowStatesAdamW(other.parameters(), lr=3e-3)
    want, got = train(torchs, loss, 300), train(ours, other_loss, 300)
    assert got[0] == want[0]
    assert got[1] == want[1]  # a step is of the moments before they are rounded
    assert all(x[key].dtype == torch.bfloat16 for x in ours.state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert got[-1] == pytest.approx(want[-1], rel=0.05)
    assert want[-1] < 0.2 * want[0]


def test_a_square_that_changes_by_a_thousandth_moves_where_the_nearest_number_does_not() -> None:
    parameter = nn.Parameter(torch.zeros(4096))
    ours = NarrowStatesAdamW([parameter], lr=0.0, betas=(0.9, 0.999))
    square, nearest = torch.zeros(()), torch.zeros((), dtype=torch.bfloat16)
    for _ in range(2000):
        parameter.grad = torch.ones(4096)
        ours.step()
        square = 0.999 * square + 0.001
        nearest = (0.999 * nearest.float() + 0.001).to(torch.bfloat16)
    found = ours.state[parameter]["exp_avg_sq"].float().mean()
    assert found == pytest.approx(square.item(), rel=1e-3)
    assert nearest.item() < 0.5 * square.item()  # stuck


def test_a_state_of_another_dtype_is_cast_to_this_optimizers() -> None:
    model, loss = problem()
    optimizer = NarrowStatesAdamW(model.parameters(), lr=1e-2, states="float32", seed=5)
    train(optimizer, loss, 2)
    other, other_loss = problem()
    loaded = NarrowStatesAdamW(other.parameters(), lr=1e-2, states="bfloat16", seed=6)
    loaded.load_state_dict(optimizer.state_dict())
    train(loaded, other_loss, 1)
    assert all(group["states"] == "bfloat16" and group["seed"] == 6 for group in loaded.param_groups)
    assert all(x[key].dtype == torch.bfloat16 for x in loaded.state.values() for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["bfloat16", "float32"])
def test_a_state_that_is_loaded_goes_on_to_the_same_bits(
    dtype: torch.dtype, states: Literal["bfloat16", "float32"]
) -> None:
    model, loss = problem(dtype)
    optimizer = NarrowStatesAdamW(model.parameters(), lr=1e-2, states=states, seed=5)
    train(optimizer, loss, 4)
    other, other_loss = problem(dtype)
    other.load_state_dict(model.state_dict())
    loaded = NarrowStatesAdamW(other.parameters(), lr=1e-2, states=states, seed=5)
    loaded.load_state_dict(optimizer.state_dict())
    assert train(loaded, other_loss, 4) == train(optimizer, loss, 4)
    assert all(
        torch.equal(optimizer.state[a][key], loaded.state[b][key])
        and loaded.state[b][key].dtype == getattr(torch, states)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
        for key in ("exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize("fused", [True, False])
def test_threads_step_pieces_to_the_same_bits(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLICE_SIZES, "cpu", 64)
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    before = torch.get_num_threads()
    try:
        for threads, parameter in zip((1, 3), parameters, strict=True):
            torch.set_num_threads(threads)
            optimizer = NarrowStatesAdamW([parameter], lr=1e-2, fused=fused)
            for step in range(5):
                parameter.grad = torch.linspace(-1, 1 + step, 1000)
                optimizer.step()
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*parameters)


def test_bits_are_those_of_seed_step_and_weight() -> None:
    def draw(*of: int) -> Tensor:
        return random_bits(1000, torch.device("cpu"), *of)

    assert torch.equal(draw(1, 2, 3), draw(1, 2, 3))
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 2), (2, 1, 3)):
        assert (draw(1, 2, 3) == draw(*other)).sum() < 3


def test_the_name_of_a_dtype_chooses_the_optimizer() -> None:
    model, _ = problem()
    made = {
        states: type(build_optimizer(OptimChoice("adamw", 1.0, states=states), model.named_parameters()))
        for states in ("param", "float32", "bfloat16")
    }
    ours = NarrowStatesAdamW
    assert made == {"param": torch.optim.AdamW, "float32": torch.optim.AdamW, "bfloat16": ours}
    narrow, _ = problem(torch.bfloat16)
    assert type(build_optimizer(OptimChoice("adamw", 1.0, states="float32"), narrow.named_parameters())) is ours


# --- float8 -----------------------------------------------------------------------------------------------------------


def moments(spread: float) -> Tensor:
    """Values of both signs whose magnitudes are spread over so many powers of ten, and some zeros."""
    draw = torch.Generator().manual_seed(0)
    size = 10 ** (-spread * torch.rand(50, 100, generator=draw)) * 1e-4
    signs = torch.randint(0, 2, size.shape, generator=draw) * 2 - 1
    return torch.where(torch.rand(size.shape, generator=draw) < 0.01, torch.zeros(()), size * signs)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 4.0, 8.0])
def test_powers_and_values_are_those_of_the_formula(spread: float) -> None:
    x = moments(spread)
    codes, largest, power = pack_moment(x, 64)
    assert codes.dtype == torch.float8_e4m3fn
    got = unpack_moment(codes, largest, power, x.numel())
    for group, (values, found) in enumerate(zip(x.flatten().double().split(64), got.double().split(64), strict=True)):
        known = values.abs()[values != 0]
        assert float(largest[group]) == float(known.max())
        k = min(16.0, max(1 / 16, math.log(RANGE) / max(1e-6, math.log(known.max() / known.min()))))
        assert float(power[group]) == pytest.approx(k, rel=1e-5)
        part = LARGEST * (known / known.max()) ** k
        # Half of the distance between two neighbours: a sixteenth of a value, or of the smallest that is no subnormal.
        rounding = torch.maximum(part / 16, torch.tensor(2.0**-10, dtype=torch.float64)) * 1.0001
        low, high = ((part - rounding).clamp_min(0) / LARGEST) ** (1 / k), ((part + rounding) / LARGEST) ** (1 / k)
        back = found[values != 0].abs() / known.max()
        assert bool(((back >= 0.99999 * low) & (back <= 1.00001 * high)).all())
        assert torch.equal(found[values == 0], torch.zeros(int((values == 0).sum()), dtype=torch.float64))
        assert torch.equal(found[back_is_known(found)].sign(), values[back_is_known(found)].sign())


def back_is_known(found: Tensor) -> Tensor:
    return found != 0


def test_a_narrow_range_is_kept_better_than_by_a_scale_alone() -> None:
    x = moments(2.0)
    scaled = x / x.abs().max() * LARGEST
    plain = scaled.to(torch.float8_e4m3fn).float() / LARGEST * x.abs().max()
    got = unpack_moment(*pack_moment(x, 128), x.numel()).view_as(x)
    assert (got - x).norm() < 0.5 * (plain - x).norm()


def test_zeros_and_a_short_group_come_back() -> None:
    for x in (torch.zeros(10), torch.full((10,), -3.0), torch.tensor([0.0, 2.5])):
        assert torch.allclose(unpack_moment(*pack_moment(x, 8), x.numel()), x, rtol=1e-6)
