"""Rates of this machine are measured once, cached, and measured again if the cache cannot be read."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from streamtune.plan import calibrate
from streamtune.plan.calibrate import cache_file, correct_rates, load_rates, measure_disk, measure_rates
from streamtune.plan.rates import Rates, predict_seconds
from streamtune.plan.simulate.simulate import Work

CPU = torch.device("cpu")
RATES = Rates("somewhere", 1e12, 1e11, 1e11, 1e10, 1e9)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Replace the measurement by a fake; the list grows with each call."""
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
    assert measured == [torch.float32] * 2 + [torch.bfloat16] * 2  # two rounds
    assert len(told) == 2
    assert cache_file() == home / "streamtune" / "rates.json"
    assert len(calibrate._open_cache().read_json()) == 2
    assert sorted(path.name for path in cache_file().parent.iterdir()) == [".rates.json.lock", "rates.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"KEY": {"speed": 1}}', '{"KEY": 3}'])
def test_what_cannot_be_read_is_measured_again(home: Path, measured: list[torch.dtype], text: str):
    cache_file().parent.mkdir()
    cache_file().write_text(text.replace("KEY", calibrate._cache_key(CPU, torch.float32)))
    told: list[str] = []
    assert load_rates(CPU, torch.float32, notify=told.append) == RATES
    assert load_rates(CPU, torch.float32, notify=told.append) == RATES
    assert len(measured) == 2
    assert sum("is damaged and will be created again" in text for text in told) == 1


def test_a_cache_that_cannot_be_written(home: Path, measured: list[torch.dtype]):
    (home / "streamtune").write_text("a file where the folder would be")
    assert load_rates(CPU, torch.float32) == RATES


def test_a_relative_cache_home_is_no_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_file() == Path.home() / ".cache" / "streamtune" / "rates.json"


def change(**values: object) -> None:
    """Change the cached entry for the CPU in fp32."""
    key = calibrate._cache_key(CPU, torch.float32)
    calibrate._open_cache().update_json(lambda kept: {key: {**kept[key], **values}})


def ago(**span: float) -> str:
    return (datetime.now(UTC) - timedelta(**span)).isoformat(timespec="seconds")


def test_old_rates_are_measured_again(home: Path, measured: list[torch.dtype]):
    load_rates(CPU, torch.float32)
    change(measured=ago(days=29))
    load_rates(CPU, torch.float32)
    assert len(measured) == 2
    change(measured=ago(days=31))
    load_rates(CPU, torch.float32)
    assert len(measured) == 4


def test_rates_of_a_busy_moment_are_measured_again(home: Path, monkeypatch: pytest.MonkeyPatch):
    rounds = [replace(RATES, matmul_flops=speed) for speed in (1e12, 0.5e12, 0.8e12, 0.8e12)]
    monkeypatch.setattr(calibrate, "measure_rates", lambda device, dtype: rounds.pop(0))
    assert load_rates(CPU, torch.float32).matmul_flops == 1e12  # the better round
    (kept,) = calibrate._open_cache().read_json().values()
    assert kept["spread"] == 0.5
    assert load_rates(CPU, torch.float32).matmul_flops == 1e12
    assert len(rounds) == 2
    change(measured=ago(hours=2))
    assert load_rates(CPU, torch.float32).matmul_flops == 1e12  # the best of all four
    assert not rounds


def test_steps_of_a_run_correct_what_is_predicted(home: Path, measured: list[torch.dtype]):
    work = Work(10**12, 10**11, 10**9, 0, 10**10, 1000)
    before = predict_seconds(work, load_rates(CPU, torch.float32))
    correct_rates(CPU, torch.float32, 0.5)
    rates = load_rates(CPU, torch.float32)
    assert predict_seconds(work, rates) == pytest.approx(0.5 * before)
    assert "times 0.50 by steps of" in rates.source
    correct_rates(CPU, torch.float32, 1.5)
    assert predict_seconds(work, load_rates(CPU, torch.float32)) == pytest.approx(0.75 * before)
    correct_rates(CPU, torch.float32, 1e9)
    assert predict_seconds(work, load_rates(CPU, torch.float32)) == pytest.approx(10 * before)
    assert len(measured) == 2


def test_nothing_is_corrected_where_nothing_was_measured(home: Path):
    correct_rates(CPU, torch.float32, 2.0)
    assert not cache_file().exists()


def test_a_disk(tmp_path: Path):
    assert measure_disk(tmp_path, size=1 << 20) > 1e5
    assert list(tmp_path.iterdir()) == []


def test_what_the_host_takes_for_an_operator_is_not_the_devices(monkeypatch: pytest.MonkeyPatch):
    """A host that takes 1 ms to launch an operator of 2 ms, and 0.5 ms to wait for the device."""
    now = ready = 0.0

    def hand_over() -> None:
        nonlocal now, ready
        now += 1e-3
        ready = max(ready, now) + 2e-3

    def wait(self: calibrate._Clock) -> None:
        nonlocal now
        now = max(now, ready) + 0.5e-3

    monkeypatch.setattr(calibrate._Clock, "_synchronize", wait)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now))
    assert calibrate._Clock(torch.device("cpu")).time_fastest_run(hand_over) == pytest.approx(3.5e-3)
    assert calibrate._Clock(torch.device("cuda")).time_fastest_run(hand_over) == pytest.approx(2.5e-3, rel=0.01)
