"""COAT's moments: the formula in float64, an error that the codes bound, and what a plain scale would lose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from streamtune.optim.narrow_states import LARGEST, RANGE, expand, pack_expanded


def moments(spread: float) -> Tensor:
    """Values of both signs whose magnitudes are spread over so many powers of ten, and some zeros."""
    draw = torch.Generator().manual_seed(0)
    size = 10 ** (-spread * torch.rand(50, 100, generator=draw)) * 1e-4
    signs = torch.randint(0, 2, size.shape, generator=draw) * 2 - 1
    return torch.where(torch.rand(size.shape, generator=draw) < 0.01, torch.zeros(()), size * signs)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 4.0, 8.0])
def test_powers_and_values_are_those_of_the_formula(spread: float) -> None:
    x = moments(spread)
    codes, largest, power = pack_expanded(x, 64)
    assert codes.dtype == torch.float8_e4m3fn
    got = expand(codes, largest, power, x.numel())
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
    got = expand(*pack_expanded(x, 128), x.numel()).view_as(x)
    assert (got - x).norm() < 0.5 * (plain - x).norm()


def test_zeros_and_a_short_group_come_back() -> None:
    for x in (torch.zeros(10), torch.full((10,), -3.0), torch.tensor([0.0, 2.5])):
        assert torch.allclose(expand(*pack_expanded(x, 8), x.numel()), x, rtol=1e-6)
