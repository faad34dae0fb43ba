"""The rows of each table: what is measured, by which name, and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from streamtune.engine.memory.placement import best_segment_size
from streamtune.plan.simulate.workload import LABELS, Mode
from streamtune.programs.bench.subject import SHARING, Case, Layout
from streamtune.programs.bench.tables import DEFAULT, Entry
from streamtune.schedule import Schedule


def ablation_entries(schedule: Schedule, length: int, layers: int, folder: str) -> list[Entry]:
    """Return the entries of an ablation: schedules that differ in a single choice, and a few that combine them.

    The baselines come first. Each choice is there on its own, the ends of its range included.

    Args:
        schedule: The schedule that all are compared with.
        length: Tokens of a row.
        layers: Decoder layers of the model.
        folder: Directory for the file of a schedule that offloads to disk.
    """
    entries = [
        Entry(Case("plain", length), LABELS["plain"], "compared with"),
        Entry(Case("checkpoint", length), LABELS["checkpoint"], "compared with", to_checkpoint=True),
        Entry(Case("stream", length, schedule), DEFAULT, "compared with", to_default=True),
    ]
    seen = {schedule}
    for section, label, changes in _changes(schedule, length, layers, folder):
        changed = replace(schedule, **changes)
        if changed not in seen:
            entries.append(Entry(Case("stream", length, changed), label, section))
            seen.add(changed)
    return entries


def _changes(schedule: Schedule, length: int, layers: int, folder: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the section, the label and the changed fields of each entry."""
    disk = {"offload": "disk", "offload_dir": folder}
    half = max(1, layers // 2)
    for size in _around(schedule.chunk_size, length):
        yield "chunk of a layer", f"{size:,} tokens", {"chunk_size": size}
    for size in _around(schedule.head_chunk_size, length):
        yield "chunk of the head", f"{size:,} tokens of the head", {"head_chunk_size": size}
    yield "layer inputs", "on host", {"offload": "host"}
    yield "layer inputs", "on disk", disk
    yield "layer inputs", f"on host, the last {half} on the device", {"offload": "host", "device_layers": half}
    yield "layer inputs", "on host, gradients streamed with them", {"offload": "host", "stream_grads": True}
    yield "layer inputs", "gradients streamed in their place", {"stream_grads": True}
    yield "two levels", f"segments of {best_segment_size(layers)}, the best size", {"levels": 2}
    for size in sorted({2, half} - {1, best_segment_size(layers)}):
        yield "two levels", f"segments of {size}", {"levels": 2, "segment_size": size}
    yield "two levels", "inputs of segments on host", {"levels": 2, "offload": "host"}
    yield "kept", "keys and values on device", {"keep_kv": "device"}
    yield "kept", "keys and values on host", {"keep_kv": "host"}
    yield "kept", "attention outputs on device", {"keep_attention": "device"}
    yield "kept", "attention outputs on host", {"keep_attention": "host"}
    for count in sorted({1, half, layers}):
        yield "kept", f"the last {count} layers whole" if count > 1 else "the last layer whole", {"keep_layers": count}
    fastest = {"keep_attention": "device", "keep_kv": "device", "keep_layers": half}
    yield "together", "keys, values, attention and half the layers kept", fastest
    far = {"offload": "host", "keep_attention": "host", "keep_kv": "host", "stream_grads": True}
    yield "together", "layer inputs, keys, values, attention on host", far
    small = max(1, schedule.chunk_size // 4)
    least = {"levels": 2, "stream_grads": True, "chunk_size": small, "head_chunk_size": min(small, 128), **disk}
    yield "together", "least memory: two levels, disk, small chunks", least


def _around(size: int, length: int) -> list[int]:
    """Return a quarter, a half, twice and four times a size, within the sequence."""
    return sorted({min(length, max(1, s)) for s in (size // 4, size // 2, 2 * size, 4 * size)} - {size})


def length_entries(schedule: Schedule, folder: str) -> list[Entry]:
    """Return entries of plain autograd, gradient checkpointing, and streaming by several schedules.

    Args:
        schedule: The schedule that the others differ from in the fields that their labels name.
        folder: Directory for the file of a schedule that offloads to disk.
    """
    host, disk = {"offload": "host"}, {"offload": "disk", "offload_dir": folder}
    least = {"levels": 2, "stream_grads": True}
    changes: dict[str, dict[str, Any]] = {
        DEFAULT: {},
        "attention outputs kept": {"keep_attention": "device"},
        "two levels": {"levels": 2},
        "layer inputs on host": host,
        "layer inputs and gradients on host": {**host, "stream_grads": True},
        "two levels, on host": {**host, **least},
        "layer inputs and gradients on disk": {**disk, "stream_grads": True},
        "two levels, on disk": {**disk, **least},
    }
    entries = [Entry(Case(mode, 0, schedule), LABELS[mode]) for mode in ("plain", "checkpoint")]
    for label, changed in changes.items():
        entries.append(Entry(Case("stream", 0, replace(schedule, **changed)), label))
    return entries


def mode_entries(modes: Sequence[Mode], length: int, schedule: Schedule) -> list[Entry]:
    """Return an entry for each mode at a length."""
    return [
        Entry(
            Case(mode, length, schedule),
            LABELS[mode],
            to_checkpoint=mode == "checkpoint",
            to_default=mode == "stream",
        )
        for mode in modes
    ]


def sharing_entries(prompt: int, schedule: Schedule) -> list[Entry]:
    """Return the entries of a shared prompt: each layout streamed, and checkpointing of the rows one after another."""
    layouts: tuple[Layout, ...] = ("batch", "turns", "shared")
    rows = [
        Entry(Case("stream", prompt, schedule, layout), SHARING[layout], "StreamTune", to_default=layout == "batch")
        for layout in layouts
    ]
    last = Case("checkpoint", prompt, layout="turns")
    return [*rows, Entry(last, SHARING["turns"], LABELS["checkpoint"], to_checkpoint=True)]
