"""The rates of the device at hand, measured in a few seconds and kept on disk.

Each figure is the best of several runs of one kind of operator, on tensors of the size a chunk has: other work on the
machine can only make a run slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune.engine import stream
from streamtune.ops.attention.attention import prefix_attention
from streamtune.ops.attention.mask import LazyMask
from streamtune.paths import cache_folder
from streamtune.plan.rates import DISK_BANDWIDTH, Rates
from streamtune.schedule import Schedule
from streamtune.simulate import Workload, simulate

__all__ = ["cache_file", "load_rates", "measure_disk", "measure_rates"]

LONG_ENOUGH = 8e-3
"""Seconds of one run from which the clock and the launch no longer count."""

HEAD_DIM = 128

FORM = "rates of a chunk, by processor time"
"""What is measured. Another name where that changes, so that figures saved before are not taken for it."""


def load_rates(device: torch.device, dtype: torch.dtype, *, notify: Callable[[str], None] = lambda text: None) -> Rates:
    """Return the rates of ``device`` in ``dtype``: those saved before, or measured now and saved.

    They are saved by device, machine, threads, version of torch and dtype. If the file cannot be read or written, they
    are measured each time.

    Args:
        device: The device that the step runs on.
        dtype: The dtype that it computes in.
        notify: Called with a message before a measurement.
    """
    key, path = _key(device, dtype), cache_file()
    kept = _read(path)
    if key in kept:
        with contextlib.suppress(TypeError, ValueError):  # written by another version
            return Rates(**kept[key])
    notify(f"measuring how fast {_name(device)} is, once")
    rates = measure_rates(device, dtype)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({**_read(path), key: asdict(rates)}, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
    return rates


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
    """Measure the bytes/s of writing a file in ``directory``, to the disk itself; reading is taken to be no slower.

    Raises:
        OSError: No such file can be written in the directory.
    """
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
    """Return the path of the file of saved rates."""
    return cache_folder() / "rates.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this {platform.machine()} CPU with {torch.get_num_threads()} threads"


def _key(device: torch.device, dtype: torch.dtype) -> str:
    return " | ".join([_name(device), platform.node(), f"torch {torch.__version__}", str(dtype), FORM])


# --- one rate each --------------------------------------------------------------------------------------------------


class _Clock:
    """Measures the seconds of one run: the best of several, after one that warms up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def best(self, run: Callable[[], object], *, budget: float = 0.15) -> float:
        """Return the seconds of the fastest of several runs: for about ``budget`` seconds, three at least."""
        self.once(run)
        times: list[float] = []
        while len(times) < 3 or sum(times) < budget:
            times.append(self.once(run))
        return min(times)

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run, until the device is done.

        On a CPU not more than the processor time of this process: on a busy machine a run waits for others as well.
        """
        self._wait()
        start, used = time.perf_counter(), time.process_time()
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

    Forward and backward, 4 D and 10 D for each query and key that it sees.
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
    """Return the seconds that the engine takes for an operator besides the operator's work.

    They are those of a step of a model so small that it takes nothing else, for each operator that is counted in it.
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
