"""Rates of this machine: measured once, kept, and measured again where what is kept cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamtune.plan import calibrate
from streamtune.plan.calibrate import cache_file, load_rates, measure_disk, measure_rates
from streamtune.plan.rates import Rates

CPU = torch.device("cpu")
RATES = Rates("somewhere", 1e12, 1e11, 1e11, 1e10, 1e9)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Stands for a measurement; the list grows with each."""
    calls: list[torch.dtype] = []

    def measure(device: torch.device, dtype: torch.dtype) -> Rates:
        calls.append(dtype)
        return RATES

    monkeypatch.setattr(calibrate, "measure_rates", measure)
    return calls


def test_a_real_measurement_of_a_cpu():
    state = torch.random.get_rng_state()
    rates = measure_rates(CPU, torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert 1e8 < rates.attention_flops < 1e15
    assert 1e8 < rates.attention_backward_flops < 1e15
    assert 1e8 < rates.matmul_flops < 1e15
    assert 1e7 < rates.touch_bandwidth < 1e13
    assert 1e-8 < rates.launch_seconds < 1e-3
    assert not rates.overlaps
    assert "float32" in rates.source


def test_measured_once(home: Path, measured: list[torch.dtype]):
    told: list[str] = []
    assert load_rates(CPU, torch.float32, notify=told.append) == RATES
    assert load_rates(CPU, torch.float32, notify=told.append) == RATES
    assert load_rates(CPU, torch.bfloat16, notify=told.append) == RATES
    assert measured == [torch.float32, torch.bfloat16]
    assert len(told) == 2
    assert cache_file() == home / "streamtune" / "rates.json"
    assert len(json.loads(cache_file().read_text())) == 2
    assert [path.name for path in cache_file().parent.iterdir()] == ["rates.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"KEY": {"speed": 1}}', '{"KEY": 3}'])
def test_what_cannot_be_read_is_measured_again(home: Path, measured: list[torch.dtype], text: str):
    cache_file().parent.mkdir()
    cache_file().write_text(text.replace("KEY", calibrate._key(CPU, torch.float32)))
    assert load_rates(CPU, torch.float32) == RATES
    assert load_rates(CPU, torch.float32) == RATES
    assert len(measured) == 1


def test_a_cache_that_cannot_be_written(home: Path, measured: list[torch.dtype]):
    (home / "streamtune").write_text("a file where the folder would be")
    assert load_rates(CPU, torch.float32) == RATES


def test_a_relative_cache_home_is_no_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_file() == Path.home() / ".cache" / "streamtune" / "rates.json"


def test_a_disk(tmp_path: Path):
    assert measure_disk(tmp_path, size=1 << 20) > 1e5
    assert list(tmp_path.iterdir()) == []
