"""The choice among implementations of flash attention, with torch's own registry and stand-ins for the packages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.attention as attention

from streamtune.ops.attention import kernels
from streamtune.ops.attention.kernel_trial import AttentionHeadCounts
from streamtune.ops.attention.kernels import CPU, CUDNN, active_flash_name, use_fastest_flash

HEADS, DEVICE = AttentionHeadCounts(4, 2, 16), torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not hasattr(attention, "register_flash_attention_impl"), reason="an older torch")


class Handle:
    def remove(self) -> None:
        pass


def fails() -> Handle:
    raise RuntimeError("its kernels do not load")


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float | None]]:
    """Seconds by implementation, None for one that is wrong; both are installed, and FA4 does not load."""
    seconds: dict[str, float | None] = {"FA2": 2.0, "FA3": 1.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "_installed_flash_names", lambda device: ["FA3", "FA4"])
    monkeypatch.setattr(kernels, "agrees_with_formula", lambda *_: seconds[active_flash_name()] is not None)
    monkeypatch.setattr(kernels, "median_seconds", lambda *_: seconds[active_flash_name()])
    known = dict(attention._registry._FLASH_ATTENTION_IMPLS)
    attention.register_flash_attention_impl("FA3", register_fn=Handle)
    attention.register_flash_attention_impl("FA4", register_fn=fails)
    use_fastest_flash.cache_clear()
    yield seconds
    use_fastest_flash.cache_clear()
    attention.restore_flash_attention_impl(_raise_warn=False)
    attention._registry._FLASH_ATTENTION_IMPLS.update(known)


@pytest.mark.parametrize(("found", "want"), [(1.0, "FA3"), (1.95, "FA2"), (3.0, "FA2"), (None, "FA2")])
def test_a_right_and_faster_one_is_active_afterwards(
    trial: dict[str, float | None], found: float | None, want: str
) -> None:
    trial["FA3"] = found
    assert use_fastest_flash(DEVICE, CPU, HEADS) == want
    assert active_flash_name() == want


def test_what_the_user_activated_stays(trial: dict[str, float | None]) -> None:
    attention.activate_flash_attention_impl("FA3")
    trial["FA3"] = None
    assert use_fastest_flash(DEVICE, CPU, HEADS) == "FA3"
    assert active_flash_name() == "FA3"


def test_a_device_without_flash_attention_is_left_alone(
    trial: dict[str, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use_fastest_flash(torch.device("cpu"), CPU, HEADS) == "FA2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert use_fastest_flash(torch.device("cuda"), CPU, HEADS) == "FA2", "a device that is simulated"


def test_packages_are_looked_for_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "PACKAGES", {"FA3": ("json", (9,)), "FA4": ("json.tool", (10,))})
    assert kernels._installed_flash_names(DEVICE) == ["FA3"]
    monkeypatch.setattr(kernels, "PACKAGES", {"FA3": ("nothing.of.it", (9,)), "FA4": ("json.tool", (9,))})
    assert kernels._installed_flash_names(DEVICE) == ["FA4"]


def test_a_kernel_that_prepares_for_each_shape_is_given_few() -> None:
    shapes = [(2048, 14336), (2048, 2048), (1821, 2048), (2048, 1000)]
    assert [CUDNN.accepts_lengths(*shape) for shape in shapes] == [True, True, False, False]
    assert all(replace(CPU, grain=1).accepts_lengths(*shape) for shape in shapes)
