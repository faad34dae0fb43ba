"""The search for the largest number that fits, on invented memory: it finds the number in few attempts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from streamtune.plan.budget import Attempt, Bracket, Range, search_largest

LENGTHS = Range(first=2048, least=256, most=1 << 27, step=256, grain=64)


class Device:
    """A device on which ``number`` takes ``need(number)`` of the memory."""

    def __init__(self, need: Callable[[int], float], *, tells: str = "what fits") -> None:
        self.need, self.tells = need, tells
        self.tried: list[int] = []

    def __call__(self, number: int) -> Attempt:
        self.tried.append(number)
        filled = self.need(number)
        told = self.tells == "everything" or (self.tells == "what fits" and filled <= 1)
        return Attempt(filled <= 1, filled if told else None)


NEEDS: dict[str, Callable[[int], float]] = {
    "a line": lambda n: 0.2 + n / 200_000,
    "a line, small": lambda n: 0.01 + n / 3_000,
    "a square": lambda n: (n / 30_000) ** 2,
    "a saw": lambda n: 0.3 + n / 90_000 + 0.02 * (n % 2048) / 2048,
    "a step": lambda n: 0.2 if n < 77_777 else 5.0,
    "a root": lambda n: math.sqrt(n / 150_000),
}


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("tells", ["nothing", "what fits", "everything"])
def test_the_bracket_is_as_narrow_as_asked(need: str, tells: str) -> None:
    device = Device(NEEDS[need], tells=tells)
    found = search_largest(device, LENGTHS)
    assert found.fails is not None
    assert device.need(found.fits) <= 1 < device.need(found.fails)
    assert found.fails - found.fits <= max(256, 0.01 * found.fits)
    assert len(device.tried) == len(set(device.tried))
    bisection = math.ceil(math.log2(found.fits / 2048 + 1)) + math.ceil(math.log2(found.fits / 256))
    assert len(device.tried) <= 2 * bisection


def test_a_line_takes_two_attempts_beyond_the_doublings() -> None:
    device = Device(NEEDS["a line"])
    found = search_largest(device, LENGTHS)
    assert device.tried[:7] == [2048, 4096, 8192, 16384, 32768, 65536, 131072]
    assert len(device.tried) == 9
    assert 160_000 - found.fits < 1600


def test_teeth_do_not_hide_the_line() -> None:
    """A slightly longer row may take slightly less memory, because it has one more, shorter chunk."""
    device = Device(lambda n: 0.9 + n / 100_000 - 0.04 * (n > 5000))
    found = search_largest(device, LENGTHS)
    assert found.fails is not None
    assert found.fails - found.fits <= 256
    assert max(device.tried) < 20_000
    assert len(device.tried) <= 9


def test_where_the_first_does_not_fit_shorter_ones_are_tried() -> None:
    device = Device(lambda n: n / 700)
    assert search_largest(device, LENGTHS) == Bracket(512, 768)
    assert device.tried == [2048, 1024, 512, 768]


def test_nothing_fits() -> None:
    device = Device(lambda n: 2.0)
    assert search_largest(device, LENGTHS) == Bracket(0, 256)
    assert device.tried == [2048, 1024, 512, 256]


def test_everything_fits() -> None:
    device = Device(lambda n: n / 1e9)
    assert search_largest(device, Range(first=2048, least=256, most=5000, step=256)) == Bracket(5000, None)
    assert device.tried == [2048, 4096, 5000]
    assert search_largest(device, Range(first=300, least=300, most=300, step=256)) == Bracket(300, None)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 41, 1000])
def test_rows_of_a_batch_are_counted_one_by_one(largest: int) -> None:
    device = Device(lambda n: n / (largest + 0.5))
    found = search_largest(device, Range(first=1, least=1, most=1 << 20, step=1))
    assert found.fits >= largest - largest // 100
    assert found.fits <= largest


def test_attempts_are_multiples_of_the_grain() -> None:
    device = Device(NEEDS["a saw"])
    search_largest(device, LENGTHS)
    assert all(number % 64 == 0 for number in device.tried)
