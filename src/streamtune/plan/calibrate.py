"""Measure how fast the local device computes and copies, in a few seconds, and cache these rates on disk.

Each rate is the throughput of one kind of operator, on tensors with the size of a chunk of a sequence. The fastest of
several runs counts, because other work on the machine can only slow a run down. All rates are measured twice, and the
faster measurement counts. Rates are measured again if they are old, or if the two measurements differed much.

:func:`correct_rates` caches a factor that multiplies every predicted time; the factor is measured in real steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune.base.paths import cache_folder
from streamtune.base.result_cache import CacheFile
from streamtune.engine import stream
from streamtune.ops.attention.attention import prefix_attention
from streamtune.ops.attention.mask import LazyMask
from streamtune.ops.devices import device_name, has_streams, simulated_device_type, synchronize
from streamtune.plan.rates import DISK_BANDWIDTH, Rates
from streamtune.plan.simulate import Workload, simulate
from streamtune.schedule import Schedule

MIN_TIMED_SECONDS = 8e-3
"""Shortest time of a run, in seconds, for which clock resolution and launch overhead are negligible."""
MAX_RUNS_TIMED_TOGETHER = 64
"""Largest number of runs that are timed together."""

HEAD_DIM = 128

MEASUREMENT_VERSION = "rates of a chunk, runs in a row, the better of two rounds"
"""Version of the measurement, part of the cache key. Change it with the measurement, so that old rates are not used."""

MAX_AGE, MAX_AGE_IF_BUSY = timedelta(days=30), timedelta(hours=1)
"""Ages at which rates are measured again: in general, and if the machine was busy during the measurement."""

BUSY_SPREAD = 0.25
"""Relative difference between two measurements of a rate above which the machine counts as busy."""

MIN_FACTOR, MAX_FACTOR = 0.1, 10.0
"""Bounds of the correction factor; a larger deviation has another cause than wrong rates."""


@dataclass(frozen=True)
class CachedRates:
    """Measured rates of a device as an entry of the cache file.

    Attributes:
        rates: Measured rates.
        measured: Time of the measurement, in UTC (ISO 8601).
        spread: Largest relative difference between two measurements of the same rate.
        factor: Measured step time divided by predicted step time; 1 before any run.
        corrected: Time of the last change of ``factor``, in UTC (ISO 8601); empty if it never changed.
    """

    rates: Rates
    measured: str
    spread: float
    factor: float = 1.0
    corrected: str = ""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> CachedRates:
        """Return the rates in a JSON object of the cache file.

        Raises:
            TypeError, ValueError, KeyError: Another version wrote the object.
        """
        cached = cls(**{**entry, "rates": Rates(**entry["rates"])})
        datetime.fromisoformat(cached.measured)
        if not MIN_FACTOR <= cached.factor <= MAX_FACTOR:
            raise ValueError(f"factor {cached.factor} is not between {MIN_FACTOR} and {MAX_FACTOR}")
        return cached

    @property
    def is_current(self) -> bool:
        """True if the rates are less than 30 days old, or less than 1 hour if measured on a busy machine."""
        age = datetime.now(UTC) - datetime.fromisoformat(self.measured)
        return age < (MAX_AGE_IF_BUSY if self.spread > BUSY_SPREAD else MAX_AGE)

    def corrected_rates(self) -> Rates:
        """Return the rates with all times multiplied by ``factor``, so that predicted step times match real ones."""
        if self.factor == 1.0:
            return self.rates
        slower = {name: getattr(self.rates, name) / self.factor for name in _throughput_fields(self.rates)}
        return replace(
            self.rates,
            **slower,
            launch_seconds=self.rates.launch_seconds * self.factor,
            source=f"{self.rates.source}; times {self.factor:.2f} by steps of {self.corrected[:10]}",
        )


def load_rates(device: torch.device, dtype: torch.dtype, *, notify: Callable[[str], None] = lambda text: None) -> Rates:
    """Return the rates of ``device`` for computation in ``dtype``, from the cache or measured now and cached.

    If the cache file cannot be read or written, the rates are measured each time.

    Args:
        device: Device to measure.
        dtype: Dtype of matrix products and attention.
        notify: Function that takes a message: a measurement begins, or the cache file is damaged.
    """
    cached = _read_cached_rates(device, dtype, notify)
    if cached is None or not cached.is_current:
        again = " again" if cached is not None else ""
        notify(f"measuring{again} how fast {_describe_device(device)} is")
        measured = _measure_two_rounds(device, dtype)
        if cached is not None and cached.spread > BUSY_SPREAD:  # the machine was busy: the faster rates count
            measured = replace(measured, rates=_faster_rates(cached.rates, measured.rates))
        cached = measured
        _update_cache(device, dtype, lambda _: measured)
    return cached.corrected_rates()


def correct_rates(device: torch.device, dtype: torch.dtype, time_ratio: float) -> None:
    """Record in the cache that training steps took ``time_ratio`` times as long as predicted.

    Nothing is recorded if no rates are cached, or if the cache file cannot be written.
    """

    def with_correction(cached: CachedRates | None) -> CachedRates | None:
        if cached is None:
            return None
        factor = min(MAX_FACTOR, max(MIN_FACTOR, cached.factor * time_ratio))
        return replace(cached, factor=factor, corrected=_utc_timestamp())

    if _read_cached_rates(device, dtype) is not None:
        _update_cache(device, dtype, with_correction)


def _measure_two_rounds(device: torch.device, dtype: torch.dtype) -> CachedRates:
    first, second = measure_rates(device, dtype), measure_rates(device, dtype)
    pairs = [(getattr(first, name), getattr(second, name)) for name in _throughput_fields(first)]
    spread = max(1 - min(pair) / max(pair) for pair in pairs)
    return CachedRates(_faster_rates(first, second), _utc_timestamp(), round(spread, 4))


def _faster_rates(one: Rates, other: Rates) -> Rates:
    best = {name: max(getattr(one, name), getattr(other, name)) for name in _throughput_fields(one)}
    return replace(other, **best, launch_seconds=min(one.launch_seconds, other.launch_seconds))


def _throughput_fields(rates: Rates) -> list[str]:
    return [f.name for f in fields(rates) if f.name.endswith(("_flops", "_bandwidth"))]


def _utc_timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read_cached_rates(
    device: torch.device, dtype: torch.dtype, notify: Callable[[str], None] = lambda text: None
) -> CachedRates | None:
    return _read_entry(_open_cache().read_json(notify), _cache_key(device, dtype))


def _read_entry(entries: dict[str, Any], key: str) -> CachedRates | None:
    with contextlib.suppress(TypeError, ValueError, KeyError):  # written by another version
        return CachedRates.from_json(entries[key])
    return None


def _update_cache(
    device: torch.device, dtype: torch.dtype, make_entry: Callable[[CachedRates | None], CachedRates | None]
) -> None:
    """Replace the cache entry by the result of ``make_entry``, a function of the current entry (None: no entry).

    If the result is None, the cache is not changed. A failed write is ignored.
    """
    key = _cache_key(device, dtype)

    def apply_change(entries: dict[str, Any]) -> dict[str, Any]:
        entry = make_entry(_read_entry(entries, key))
        return entries if entry is None else {**entries, key: asdict(entry)}

    with contextlib.suppress(OSError):
        _open_cache().update_json(apply_change)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the measured rates of ``device``; the disk is not measured, and its bandwidth is :data:`DISK_BANDWIDTH`.

    A measurement needs about 2 seconds on a CPU core and less on an accelerator.
    """
    clock = _Clock(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        forward, backward = _measure_attention(clock, dtype)
        return Rates(
            source=f"measured on {_describe_device(device)} in {str(dtype).removeprefix('torch.')}",
            matmul_flops=_measure_matmul(clock, dtype),
            attention_flops=forward,
            attention_backward_flops=backward,
            touch_bandwidth=_measure_elementwise(clock, dtype),
            copy_bandwidth=_measure_copy(clock),
            disk_bandwidth=DISK_BANDWIDTH,
            launch_seconds=_measure_launch_overhead(clock),
            overlaps=device.type != "cpu",
        )


def measure_disk(directory: Path, size: int = 64 << 20) -> float:
    """Return the write bandwidth in bytes/s of the disk of ``directory``, measured with ``size`` bytes."""
    import tempfile

    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=directory) as file:
        start = time.perf_counter()
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - start)


def cache_file() -> Path:
    return cache_folder() / "rates.json"


def _open_cache() -> CacheFile:
    return CacheFile(cache_file(), "rates")


def _describe_device(device: torch.device) -> str:
    if device.type != "cpu":
        return device_name(device)
    return f"this {platform.machine()} CPU with {torch.get_num_threads()} threads"


def _cache_key(device: torch.device, dtype: torch.dtype) -> str:
    machine = (_describe_device(device), platform.node(), _processor_name())
    return " | ".join([*machine, f"torch {torch.__version__}", str(dtype), MEASUREMENT_VERSION])


def _processor_name() -> str:
    # The host name does not identify the CPU: a container keeps its host name when it moves to another machine.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


# --- one rate each --------------------------------------------------------------------------------------------------


class _Clock:
    """Measures the time of a function on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time_fastest_run(self, run: Callable[[], object], *, budget_seconds: float = 0.15) -> float:
        """Return the seconds of the fastest of several runs, after one warm-up run.

        Runs are repeated for about ``budget_seconds``, and at least three times. On an accelerator short runs are
        launched back to back and timed together, so that the time to launch a run is not counted.
        """
        self.time_runs(run)
        count = 1
        if self.device.type != "cpu":
            count = min(MAX_RUNS_TIMED_TOGETHER, math.ceil(MIN_TIMED_SECONDS / self.time_runs(run)))
        times: list[float] = []
        while len(times) < 3 or count * sum(times) < budget_seconds:
            times.append(self.time_runs(run, count) / count)
        return min(times)

    def time_runs(self, run: Callable[[], object], count: int = 1) -> float:
        """Return the total seconds of ``count`` runs, including the time until the device has finished.

        On a CPU the result is at most the CPU time of this process, because on a busy machine runs wait for a core.
        """
        self._synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(count):
            run()
        self._synchronize()
        elapsed = time.perf_counter() - start
        return min(elapsed, time.process_time() - cpu_start) if self.device.type == "cpu" else elapsed

    def _synchronize(self) -> None:
        synchronize(self.device)


def _measure_matmul(clock: _Clock, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the smallest square matrix product that takes over :data:`MIN_TIMED_SECONDS`."""
    for size in (512, 1024, 2048, 4096, 8192):
        x = torch.randn(size, size, device=clock.device).to(dtype)
        seconds = clock.time_fastest_run(partial(torch.matmul, x, x))
        if seconds > MIN_TIMED_SECONDS:
            break
    return 2 * size**3 / seconds


def _measure_attention(clock: _Clock, dtype: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s of causal attention, forward and backward, for a chunk of queries and the keys up to its end.

    For head dimension D, a query-key pair counts 4 D FLOPs forward and 10 D backward.
    """
    heads, queries = ((4, 4), 512) if clock.device.type == "cpu" else ((32, 8), 2048)
    for keys in (512, 1024, 2048, 4096, 8192, 16384):
        if keys < queries:
            continue
        shapes = ((heads[0], queries), (heads[1], keys), (heads[1], keys))
        q, k, v = (torch.randn(1, *shape, HEAD_DIM, device=clock.device).to(dtype).requires_grad_() for shape in shapes)
        mask = LazyMask(1, queries, keys, q_offset=keys - queries, device=clock.device)
        forward = partial(prefix_attention, q, k, v, mask.view_queries(0, queries), scale=HEAD_DIM**-0.5)
        with torch.no_grad():
            seconds = clock.time_fastest_run(forward)
        if seconds > MIN_TIMED_SECONDS:
            break
    out = forward()
    grad = torch.ones_like(out)
    back = clock.time_fastest_run(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    pairs = heads[0] * queries * (keys - queries + (queries + 1) / 2)
    return 4 * HEAD_DIM * pairs / seconds, 10 * HEAD_DIM * pairs / back


def _measure_elementwise(clock: _Clock, dtype: torch.dtype) -> float:
    """Return the bytes/s that element-wise operators (sum, product, SiLU, cast, copy) read and write."""
    elements = 1 << (20 if clock.device.type == "cpu" else 26)
    x = torch.randn(elements, device=clock.device).to(dtype)
    size, wide = x.element_size(), 4
    seconds = clock.time_fastest_run(lambda: (x + x, x * x, functional.silu(x), x.float(), x.clone()))
    return elements * (3 * size + 3 * size + 2 * size + (size + wide) + 2 * size) / seconds


def _measure_copy(clock: _Clock) -> float:
    """Return the bytes/s of copies between device and host, in the slower direction; on a CPU, within memory."""
    size = (16 << 20) if clock.device.type == "cpu" else (256 << 20)
    host_tensor = torch.empty(size, dtype=torch.uint8, pin_memory=has_streams(clock.device))
    device_tensor = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    to_host = clock.time_fastest_run(lambda: host_tensor.copy_(device_tensor, non_blocking=has_streams(clock.device)))
    to_device = clock.time_fastest_run(lambda: device_tensor.copy_(host_tensor, non_blocking=has_streams(clock.device)))
    return size / max(to_host, to_device)


def _measure_launch_overhead(clock: _Clock) -> float:
    """Return the seconds to launch one operator: the step time of a tiny model divided by its number of operators."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    schedule = Schedule(chunk_size=16, head_chunk_size=128)

    def make_tiny_model(device: torch.device | str) -> nn.Module:
        with torch.device(device):
            return LlamaForCausalLM(config).train()

    workload = Workload(partial(make_tiny_model, "meta"), 128, device_type=simulated_device_type(clock.device))
    operators = simulate(workload, schedule).work.operators
    model: Any = make_tiny_model(clock.device)
    ids = torch.zeros(1, workload.length, dtype=torch.long, device=clock.device)
    with stream(model, schedule=schedule):
        seconds = clock.time_fastest_run(lambda: model(input_ids=ids, labels=ids).loss.backward())
    return seconds / operators
