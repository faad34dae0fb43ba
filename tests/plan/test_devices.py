"""Devices that are not there."""

from __future__ import annotations

import pytest

from streamtune.errors import ArgumentError
from streamtune.plan.rates import DEVICES, find_device, nearest_device

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "found"),
    [("h100-80gb", "h100-80gb"), ("H100", "h100-80gb"), ("RTX 4090", "rtx-4090-24gb"), ("a100-40gb", "a100-40gb")],
)
def test_by_name(name: str, found: str):
    assert find_device(name).name == found


def test_an_unknown_name_lists_them_all():
    with pytest.raises(ArgumentError) as caught:
        find_device("h10-80gb")
    assert caught.value.what == "no device is called 'h10-80gb'"
    assert caught.value.mend.startswith("did you mean 'h100-80gb'?")
    assert all(name in caught.value.mend for name in DEVICES)


def test_a_name_of_several():
    with pytest.raises(ArgumentError, match="could be a100-40gb or a100-80gb"):
        find_device("a100")


@pytest.mark.parametrize(("gib", "name"), [(80, "h100-80gb"), (139, "h200-141gb"), (24, "rtx-4090-24gb")])
def test_the_nearest_memory_and_of_those_the_fastest(gib: int, name: str):
    assert nearest_device(gib * GIB).name == name


def test_figures_make_sense():
    for device in DEVICES.values():
        assert 20 * GIB < device.memory_bytes < 256 * GIB
        assert 5e13 < device.matmul_flops < 5e15
        assert 1e11 < device.memory_bandwidth < 1e13
        assert device.host_bandwidth < device.memory_bandwidth
