"""Step seconds from work and rates, and devices that are planned for by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamtune.errors import ArgumentError
from streamtune.plan.rates import (
    DEVICES,
    SHEET_EFFICIENCY,
    Rates,
    data_sheet_rates,
    find_device,
    nearest_device,
    predict_seconds,
)
from streamtune.plan.simulate.simulate import Work

NOTHING = Work(0, 0, 0, 0, 0)
RATES = Rates("here", 1e12, 5e11, 2.5e11, 1e10, 1e9, disk_bandwidth=1e8, launch_seconds=1e-6)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (NOTHING, 0.0),
        (replace(NOTHING, matmul_flops=3 * 10**12), 3.0),
        (replace(NOTHING, attention_flops=9 * 10**11), (4e11 / 5e11 + 5e11 / 2.5e11)),
        (replace(NOTHING, touched_bytes=2 * 10**10), 2.0),
        (replace(NOTHING, moved_bytes=4 * 10**9), 4.0),
        (replace(NOTHING, disk_moved_bytes=5 * 10**8), 5.0),
        (replace(NOTHING, operators=7 * 10**6), 7.0),
    ],
)
def test_each_kind_of_work(work: Work, seconds: float):
    assert predict_seconds(work, RATES) == pytest.approx(seconds)


def test_copies_run_beside_the_computation_of_an_accelerator():
    work = Work(matmul_flops=10**13, attention_flops=0, moved_bytes=4 * 10**9, disk_moved_bytes=10**8, touched_bytes=0)
    assert predict_seconds(work, RATES) == pytest.approx(10.0)
    assert predict_seconds(replace(work, moved_bytes=2 * 10**10), RATES) == pytest.approx(20.0)
    assert predict_seconds(work, replace(RATES, overlaps=False)) == pytest.approx(15.0)


def test_a_device_that_is_not_there():
    device = find_device("h100")
    rates = data_sheet_rates(device)
    assert rates.matmul_flops == SHEET_EFFICIENCY["matmul"] * 989e12
    assert rates.copy_bandwidth < device.host_bandwidth
    assert "data sheet of NVIDIA H100" in rates.source
    assert rates.overlaps


GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100-80gb", "h100-80gb"),
        ("H100", "h100-80gb"),
        ("RTX 4090", "rtx-4090-24gb"),
        ("4090", "rtx-4090-24gb"),
        ("a100-40gb", "a100-40gb"),
        ("t4", "t4-16gb"),
        ("RTX 3060", "rtx-3060-12gb"),
        ("RTX 4070 Ti Super", "rtx-4070-ti-super-16gb"),
    ],
)
def test_by_name(name: str, found: str):
    assert find_device(name).name == found


def test_an_unknown_name_lists_them_all():
    with pytest.raises(ArgumentError) as caught:
        find_device("h10-80gb")
    assert caught.value.what == "no device is called 'h10-80gb'"
    assert caught.value.fix.startswith("did you mean 'h100-80gb'?")
    assert all(name in caught.value.fix for name in DEVICES)


@pytest.mark.parametrize(("name", "meant"), [("v10", "v100"), ("a10", "a10"), ("rtx 5090 ti", "rtx-5090-32gb")])
def test_an_unknown_name_proposes_the_nearest(name: str, meant: str):
    with pytest.raises(ArgumentError) as caught:
        find_device(name)
    assert caught.value.fix.startswith(f"did you mean '{meant}")


def test_a_name_of_several():
    with pytest.raises(ArgumentError, match="could be a100-40gb or a100-80gb"):
        find_device("a100")


@pytest.mark.parametrize(("gib", "name"), [(80, "h100-80gb"), (139, "h200-141gb"), (24, "rtx-4090-24gb")])
def test_the_nearest_memory_and_of_those_the_fastest(gib: int, name: str):
    assert nearest_device(gib * GIB).name == name


def test_figures_make_sense():
    for device in DEVICES.values():
        assert 7 * GIB < device.memory_bytes < 400 * GIB
        assert 1e13 < device.matmul_flops < 5e15
        assert 1e11 < device.memory_bandwidth < 1e13
        assert device.host_bandwidth < device.memory_bandwidth or device.is_unified
        nominal = int(device.name.rpartition("-")[2].removesuffix("gb"))
        assert 0.7 * nominal < device.memory_bytes / GIB < nominal
    assert {name for name, device in DEVICES.items() if not device.has_bfloat16} == {
        "t4-16gb",
        "v100-16gb",
        "v100-32gb",
    }
    assert {name for name, device in DEVICES.items() if device.is_tested} == {"h100-80gb", "h200-141gb"}
