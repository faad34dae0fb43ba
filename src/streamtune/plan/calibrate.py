"""The rates of the local device, measured in a few seconds and cached on disk.

Each figure is the best of several runs of one kind of operator, on tensors of a chunk's size: other work on the machine
can only slow a run down. All are measured in two rounds, of which the better counts. Rates are measured again if they
are old, or if the rounds were far apart.

The steps of runs correct them: :func:`correct_rates` keeps a factor by which every prediction is multiplied.
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
from streamtune.plan.rates import DISK_BANDWIDTH, Rates
from streamtune.plan.simulate import Workload, simulate
from streamtune.schedule import Schedule

LONG_ENOUGH = 8e-3
"""Seconds of one run from which the clock and the launch no longer count."""
MOST_IN_A_ROW = 64
"""Runs that are measured together."""

HEAD_DIM = 128

FORM = "rates of a chunk, runs in a row, the better of two rounds"
"""Name of what is measured; it changes with that, so that figures saved before are not used."""

OLD, UNSURE = timedelta(days=30), timedelta(hours=1)
"""Ages from which rates are measured again: in general, and if their rounds were far apart."""

FAR_APART = 0.25
"""Difference between the rounds of a rate, relative to the better, from which the machine counts as busy."""

LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0
"""Bounds of a correction: beyond them something else is wrong than the rates."""


@dataclass(frozen=True)
class KeptRates:
    """Rates as they are cached on disk.

    Attributes:
        rates: Measured rates.
        measured: Date and time, in UTC.
        spread: Largest difference between two rounds of a rate, relative to the better one.
        factor: Measured step time divided by predicted step time; 1 before any run.
        corrected: Date and time of the correction; empty without one.
    """

    rates: Rates
    measured: str
    spread: float
    factor: float = 1.0
    corrected: str = ""

    @classmethod
    def read(cls, found: dict[str, Any]) -> KeptRates:
        """Return the rates in an entry of the file; TypeError, ValueError or KeyError for other versions' entries."""
        kept = cls(**{**found, "rates": Rates(**found["rates"])})
        datetime.fromisoformat(kept.measured)
        if not LEAST_FACTOR <= kept.factor <= MOST_FACTOR:
            raise ValueError(f"a factor of {kept.factor}")
        return kept

    @property
    def is_current(self) -> bool:
        """True unless the rates are old, or were measured on a busy machine more than an hour ago."""
        age = datetime.now(UTC) - datetime.fromisoformat(self.measured)
        return age < (UNSURE if self.spread > FAR_APART else OLD)

    def used(self) -> Rates:
        """Return the corrected rates, from which steps are predicted."""
        if self.factor == 1.0:
            return self.rates
        slower = {name: getattr(self.rates, name) / self.factor for name in _per_second(self.rates)}
        return replace(
            self.rates,
            **slower,
            launch_seconds=self.rates.launch_seconds * self.factor,
            source=f"{self.rates.source}; times {self.factor:.2f} by steps of {self.corrected[:10]}",
        )


def load_rates(device: torch.device, dtype: torch.dtype, *, notify: Callable[[str], None] = lambda text: None) -> Rates:
    """Return the rates of ``device`` in ``dtype``: cached, or measured now and cached.

    The key is device, machine, threads, torch version and dtype. If the file cannot be read or written, they are
    measured each time. ``notify`` is called with a message before a measurement.
    """
    kept = _kept(device, dtype, notify)
    if kept is None or not kept.is_current:
        again = " again" if kept is not None else ""
        notify(f"measuring{again} how fast {_name(device)} is")
        found = _measured(device, dtype)
        if kept is not None and kept.spread > FAR_APART:  # a busy moment then or now: the better of each counts
            found = replace(found, rates=_better(kept.rates, found.rates))
        kept = found
        _save(device, dtype, lambda _: found)
    return kept.used()


def correct_rates(device: torch.device, dtype: torch.dtype, ratio: float) -> None:
    """Record that steps took ``ratio`` times as long as predicted from the cached rates.

    Without cached rates, or if the file cannot be written, nothing is recorded.
    """

    def correct(kept: KeptRates | None) -> KeptRates | None:
        if kept is None:
            return None
        factor = min(MOST_FACTOR, max(LEAST_FACTOR, kept.factor * ratio))
        return replace(kept, factor=factor, corrected=_now())

    if _kept(device, dtype) is not None:
        _save(device, dtype, correct)


def _measured(device: torch.device, dtype: torch.dtype) -> KeptRates:
    first, second = measure_rates(device, dtype), measure_rates(device, dtype)
    pairs = [(getattr(first, name), getattr(second, name)) for name in _per_second(first)]
    spread = max(1 - min(pair) / max(pair) for pair in pairs)
    return KeptRates(_better(first, second), _now(), round(spread, 4))


def _better(one: Rates, other: Rates) -> Rates:
    best = {name: max(getattr(one, name), getattr(other, name)) for name in _per_second(one)}
    return replace(other, **best, launch_seconds=min(one.launch_seconds, other.launch_seconds))


def _per_second(rates: Rates) -> list[str]:
    """Return the names of the rates that are higher on a faster device."""
    return [f.name for f in fields(rates) if f.name.endswith(("_flops", "_bandwidth"))]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _kept(
    device: torch.device, dtype: torch.dtype, notify: Callable[[str], None] = lambda text: None
) -> KeptRates | None:
    return _rates_in(_saved().read_json(notify), _key(device, dtype))


def _rates_in(entries: dict[str, Any], key: str) -> KeptRates | None:
    with contextlib.suppress(TypeError, ValueError, KeyError):  # written by another version
        return KeptRates.read(entries[key])
    return None


def _save(device: torch.device, dtype: torch.dtype, change: Callable[[KeptRates | None], KeptRates | None]) -> None:
    """Write what ``change`` returns for the rates that are cached by now: another process may have written since."""
    key = _key(device, dtype)

    def changed(entries: dict[str, Any]) -> dict[str, Any]:
        kept = change(_rates_in(entries, key))
        return entries if kept is None else {**entries, key: asdict(kept)}

    with contextlib.suppress(OSError):
        _saved().update(changed)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure every rate but the disk's. Takes about 2 seconds on a CPU core and less on an accelerator."""
    clock = _Clock(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        forward, backward = _attention(clock, dtype)
        return Rates(
            source=f"measured on {_name(device)} in {str(dtype).removeprefix('torch.')}",
            matmul_flops=_matmul(clock, dtype),
            attention_flops=forward,
            attention_backward_flops=backward,
            touch_bandwidth=_touch(clock, dtype),
            copy_bandwidth=_copy(clock),
            disk_bandwidth=DISK_BANDWIDTH,
            launch_seconds=_launch(clock),
            overlaps=device.type != "cpu",
        )


def measure_disk(directory: Path, size: int = 64 << 20) -> float:
    """Measure the bytes/s of writing a file to the disk of ``directory``; reading is assumed not to be slower."""
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


def _saved() -> CacheFile:
    return CacheFile(cache_file(), "rates")


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this {platform.machine()} CPU with {torch.get_num_threads()} threads"


def _key(device: torch.device, dtype: torch.dtype) -> str:
    return " | ".join([_name(device), platform.node(), _processor(), f"torch {torch.__version__}", str(dtype), FORM])


def _processor() -> str:
    """Return the model of the processor: a container keeps its host name when it moves to another machine."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


# --- one rate each --------------------------------------------------------------------------------------------------


class _Clock:
    """Measures the seconds of one run: the best of several, after one that warms up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def best(self, run: Callable[[], object], *, budget: float = 0.15) -> float:
        """Return the seconds of the fastest of several runs: for about ``budget`` seconds, at least three.

        An accelerator gets the next operator while it computes, as in a step. Short runs are measured several in a row,
        so that the host's overhead for each is not counted.
        """
        self.once(run)
        row = 1 if self.device.type == "cpu" else min(MOST_IN_A_ROW, math.ceil(LONG_ENOUGH / self.once(run)))
        times: list[float] = []
        while len(times) < 3 or row * sum(times) < budget:
            times.append(self.once(run, row) / row)
        return min(times)

    def once(self, run: Callable[[], object], row: int = 1) -> float:
        """Return the seconds of ``row`` runs, until the device is done.

        On a CPU it is at most the processor time of this process: on a busy machine a run also waits for others.
        """
        self._wait()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(row):
            run()
        self._wait()
        passed = time.perf_counter() - start
        return min(passed, time.process_time() - used) if self.device.type == "cpu" else passed

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _matmul(clock: _Clock, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square product that is large enough to run for :data:`LONG_ENOUGH`."""
    for size in (512, 1024, 2048, 4096, 8192):
        x = torch.randn(size, size, device=clock.device).to(dtype)
        seconds = clock.best(partial(torch.matmul, x, x))
        if seconds > LONG_ENOUGH:
            break
    return 2 * size**3 / seconds


def _attention(clock: _Clock, dtype: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s of a chunk's attention, as the engine computes it, over its prefix and itself.

    Forward and backward: 4 D and 10 D for each pair of a query and a key that it sees.
    """
    heads, queries = ((4, 4), 512) if clock.device.type == "cpu" else ((32, 8), 2048)
    for keys in (512, 1024, 2048, 4096, 8192, 16384):
        if keys < queries:
            continue
        shapes = ((heads[0], queries), (heads[1], keys), (heads[1], keys))
        q, k, v = (torch.randn(1, *shape, HEAD_DIM, device=clock.device).to(dtype).requires_grad_() for shape in shapes)
        mask = LazyMask(1, queries, keys, q_offset=keys - queries, device=clock.device)
        forward = partial(prefix_attention, q, k, v, mask.rows(0, queries), scale=HEAD_DIM**-0.5)
        with torch.no_grad():
            seconds = clock.best(forward)
        if seconds > LONG_ENOUGH:
            break
    out = forward()
    grad = torch.ones_like(out)
    back = clock.best(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    pairs = heads[0] * queries * (keys - queries + (queries + 1) / 2)
    return 4 * HEAD_DIM * pairs / seconds, 10 * HEAD_DIM * pairs / back


def _touch(clock: _Clock, dtype: torch.dtype) -> float:
    """Return the bytes/s of operators between matrix products: sum, product, activation, change of dtype and copy."""
    elements = 1 << (20 if clock.device.type == "cpu" else 26)
    x = torch.randn(elements, device=clock.device).to(dtype)
    size, wide = x.element_size(), 4
    seconds = clock.best(lambda: (x + x, x * x, functional.silu(x), x.float(), x.clone()))
    return elements * (3 * size + 3 * size + 2 * size + (size + wide) + 2 * size) / seconds


def _copy(clock: _Clock) -> float:
    """Return the bytes/s between device and host, in the slower direction; on the CPU from memory to memory."""
    size = (16 << 20) if clock.device.type == "cpu" else (256 << 20)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=clock.device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    out = clock.best(lambda: host.copy_(there, non_blocking=True))
    back = clock.best(lambda: there.copy_(host, non_blocking=True))
    return size / max(out, back)


def _launch(clock: _Clock) -> float:
    """Return the engine's overhead for an operator, in seconds.

    It is the time of a step of a model so small that it takes nothing else, divided by the operators counted in it.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    schedule = Schedule(chunk_size=16, head_chunk_size=128)

    def make(device: torch.device | str) -> nn.Module:
        with torch.device(device):
            return LlamaForCausalLM(config).train()

    workload = Workload(partial(make, "meta"), 128, device_type=clock.device.type)
    operators = simulate(workload, schedule).work.operators
    model: Any = make(clock.device)
    ids = torch.zeros(1, workload.length, dtype=torch.long, device=clock.device)
    with stream(model, schedule=schedule):
        seconds = clock.best(lambda: model(input_ids=ids, labels=ids).loss.backward())
    return seconds / operators
