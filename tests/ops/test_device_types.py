"""Functions that differ between device types, on devices that are not there: no call of CUDA on another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamtune.errors import ArgumentError
from streamtune.ops import devices
from streamtune.ops.forward_state import Autocast, RandomState
from streamtune.run.device import choose_device, refuse_unsuitable_device
from streamtune.run.weight_choices import emulation_warning
from streamtune.train.process import capture_rng, restore_rng

MPS, XPU = torch.device("mps"), torch.device("xpu", 0)


class Backend:
    """Stands for ``torch.mps`` or ``torch.xpu``: has the functions that they have, and counts the calls."""

    def __init__(self, indexed: bool) -> None:
        self.state, self.calls = torch.arange(4), list[str]()
        self.indexed = indexed

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            assert len(args) == self.indexed + (name == "set_rng_state"), f"{name}{args}"
            if name == "set_rng_state":
                self.state = args[0].clone()
            return self.state.clone() if name == "get_rng_state" else 7

        return call

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True


class NoCuda:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name}")

    def device_count(self) -> int:
        return 0

    def is_available(self) -> bool:
        return False


@pytest.fixture(params=[MPS, XPU], ids=str)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that is there as its functions say."""
    found: torch.device = request.param
    monkeypatch.setattr(torch, "cuda", NoCuda())
    monkeypatch.setattr(torch, found.type, Backend(indexed=found.type == "xpu"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: found.type == "mps")
    return found


def test_no_call_of_cuda(device: torch.device) -> None:
    backend = getattr(torch, device.type)
    devices.synchronize(device)
    devices.empty_cache(device)
    devices.reset_peak_bytes(device)
    counted = devices.peak_bytes(device)
    assert counted == (7 if device.type == "xpu" else None)
    assert devices.device_name(device) == ("7" if device.type == "xpu" else "Apple GPU")
    assert {"synchronize", "empty_cache"} <= {*backend.calls}
    assert not devices.has_streams(device)
    assert devices.simulated_device_type(device) == "cpu"
    assert devices.shares_host_memory(device) is (device.type == "mps")


def test_random_numbers_are_replayed_and_saved(device: torch.device) -> None:
    """Dropout draws from the device's generator: without its state the backward would be another function's."""
    backend = getattr(torch, device.type)
    state, saved = RandomState.capture(device), capture_rng()
    backend.state = torch.zeros(4)
    with state.replayed():
        assert backend.state.tolist() == [0, 1, 2, 3]
    assert backend.state.tolist() == [0, 0, 0, 0]
    restore_rng(saved)
    assert backend.state.tolist() == [0, 1, 2, 3]
    assert Autocast.capture(device).device_type == device.type


def test_a_card_that_emulates_bfloat16_is_told_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(dtype=torch.bfloat16)
    for major, warned in ((7, True), (8, False)):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, major=major: SimpleNamespace(major=major)
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        recipe: Any = SimpleNamespace(autocast_dtype="bfloat16")
        text = emulation_warning(recipe, model, torch.device("cuda", 0))
        assert (text is not None and "fp16: true" in text) is warned


def test_float64_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not devices.has_float64(MPS)
    properties = SimpleNamespace(has_fp64=False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert not devices.has_float64(XPU)
    assert devices.to_float64(torch.ones(2)).dtype == torch.float64


def test_other_devices_are_used_if_they_are_named(device: torch.device) -> None:
    assert choose_device("auto").type == "cpu"
    assert choose_device(device.type).type == device.type
    with pytest.raises(ArgumentError, match="there is no CUDA device"):
        choose_device("cuda")
    with pytest.raises(ArgumentError, match="the run has 2 ranks"):
        refuse_unsuitable_device(device, "sft", 2)
    if device.type == "mps":
        with pytest.raises(ArgumentError, match="sums in float64"):
            refuse_unsuitable_device(device, "dpo", 1)
