"""Weights on the host, on this CPU: steps beside weights on the device, optimizers of the CPU, pages of host memory.

    python -m benchmarks.host_weights steps [--lengths 512,2048,8192] [--pairs 5] [--kinds 'host, two levels;...']
    python -m benchmarks.host_weights optimizers [--millions 200] [--repeats 5] [--threads 2]
    python -m benchmarks.host_weights pages [--gib 4] [--repeats 5]

``steps`` compares whole steps with AdamW in processor time of one thread: each step of a kind stands between two steps
with weights on the device. On a CPU every copy to the "device" takes time of the computing cores; an accelerator copies
in parallel. ``optimizers`` compares torch's fused AdamW with DeepSpeedCPUAdam and with moments in bfloat16 on all
threads, on float32 weights. ``pages`` measures how fast the kernel provides host memory: the engine touches the pages
with all threads before they are locked; locking shared pages touches them with one thread.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import streamtune
from benchmarks.processor_time import interleaved, spread
from streamtune import Schedule
from streamtune.engine.memory.host import map_pages, touch_pages
from streamtune.optim import NarrowStatesAdamW
from streamtune.train import Backend, HostOptimizer, InBackwardBackend, LocalBackend

SHAPE = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({}, ""),
    "host": ({"weights": "host"}, ""),
    "host, optimizer in the backward": ({"weights": "host"}, "in the backward"),
    "host, two levels": ({"weights": "host", "levels": 2}, ""),
    "device, two levels": ({"levels": 2}, ""),
    "in the backward, clipped by its norm": ({}, "in the backward, exact norm"),
    "in the backward, clipped by the last norm": ({}, "in the backward, lagged norm"),
    "optimizer on host": ({}, "on host"),
    "optimizer on host, in the backward": ({}, "on host, in the backward"),
}
"""Fields of the schedule, and when and where the optimizer steps."""
GIB = 1024**3


def made(kind: str) -> tuple[Any, Backend]:
    fields, way = KINDS[kind]
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).train()
    streamtune.stream(model, schedule=Schedule(chunk_size=1024, **fields))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if "on host" in way:
        optimizer = HostOptimizer(optimizer)
    if "in the backward" in way:
        max_norm = 1.0 if "norm" in way else 0.0
        return model, InBackwardBackend(model, optimizer, max_norm, lagged="lagged" in way)
    return model, LocalBackend(model, optimizer)


def seconds(model: Any, backend: Backend, ids: torch.Tensor) -> float:
    def gradients() -> None:
        with backend.micro_batch_context(last=True):
            backend.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)

    start = time.process_time()
    backend.begin_step(1e-5, gradients)
    gradients()
    backend.clip_gradients(backend.max_norm if isinstance(backend, InBackwardBackend) else 0.0)
    backend.step(1e-5)
    return time.process_time() - start


def show_steps(lengths: list[int], pairs: int, kinds: list[str]) -> None:
    """Print the ratios to a step with weights on the device."""
    torch.set_num_threads(1)
    others = [kind for kind in kinds if kind != "device"]
    subjects = {kind: made(kind) for kind in ("device", *others)}
    print("| tokens | device, s | " + " | ".join(others) + f" |\n|{'---|' * (2 + len(others))}", flush=True)
    for length in lengths:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, length))
        for subject in subjects.values():
            seconds(*subject, ids)  # warms up
        steps = {kind: partial(seconds, *subject, ids) for kind, subject in subjects.items()}
        base, found = interleaved(steps.pop("device"), steps, pairs)
        ratios = (spread(each, 3, 3) for each in found.values())
        print(f"| {length:,} | {statistics.median(base):.2f} | " + " | ".join(ratios) + " |", flush=True)


def show_optimizers(millions: int, repeats: int) -> None:
    weights = [nn.Parameter(torch.randn(1_000_000)) for _ in range(millions)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    makers: dict[str, Callable[[], Any]] = {
        "torch AdamW, fused": lambda: torch.optim.AdamW(weights, fused=True),
        "ours, moments in bfloat16": lambda: NarrowStatesAdamW(weights),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        makers["DeepSpeedCPUAdam"] = lambda: DeepSpeedCPUAdam(weights, adamw_mode=True)
    except ImportError:
        print("DeepSpeed is not installed")
    print("| optimizer | s a step |\n|---|---:|")
    for name, make in makers.items():
        optimizer = make()
        optimizer.step()
        took = []
        for _ in range(repeats):
            start = time.perf_counter()
            optimizer.step()
            took.append(time.perf_counter() - start)
        print(f"| {name} | {statistics.median(took):.3f} |", flush=True)


def touch_rate(mapped: Callable[[int], mmap.mmap], nbytes: int, threads: int) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    region = torch.frombuffer(pages := mapped(nbytes), dtype=torch.uint8)
    touch_pages(region)
    seconds = time.perf_counter() - start
    del region
    pages.close()
    return nbytes / GIB / seconds


def show_pages(gib: int, threads: int, repeats: int) -> None:
    """Measure both ways in turns and print the medians."""
    ways = {
        "shared, one thread": lambda: touch_rate(lambda nbytes: mmap.mmap(-1, nbytes), gib * GIB, 1),
        f"an arena's, {threads} threads": lambda: touch_rate(map_pages, gib * GIB, threads),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(way())
    for name, rates in found.items():
        print(f"{name}: {statistics.median(rates):.1f} GiB/s ({min(rates):.1f} to {max(rates):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "optimizers", "pages"))
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kinds", default=";".join(KINDS), help="of steps, with a semicolon between them")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--millions", type=int, default=200, help="of weights")
    parser.add_argument("--gib", type=int, default=4, help="size of the pages")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if given.what == "pages":
        show_pages(given.gib, given.threads, given.repeats)
    elif given.what == "steps":
        show_steps([int(length) for length in given.lengths.split(",")], given.pairs, given.kinds.split(";"))
    else:
        torch.set_num_threads(given.threads)
        show_optimizers(given.millions, given.repeats)


if __name__ == "__main__":
    main()
