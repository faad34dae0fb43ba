"""Schedules in the order of chunks: a few forms, each sized to the memory by simulations of its own.

This order stores keys and values with their gradients in place of layer inputs. It does the same work with weights that
pass once for every chunk, so it can win only where the order of layers runs out of memory, computes layers again or
waits for copies. It is asked only there, or where it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any

from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.plan.budget import Limits
from streamtune.plan.choices import CHUNKS, HEAD_CHUNKS, Space
from streamtune.plan.estimate import Simulate
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.simulate import Simulation
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

LARGE = 8192
"""Tokens of a chunk with few borders."""

Found = tuple[Schedule, Simulation]


def may_order_chunks(written: Mapping[str, Any], cluster: Cluster) -> bool:
    """Return True if nothing that is given excludes the order of chunks."""
    return written.get("order") != "layer" and not cluster.gathers_layers and cluster.sequence_size == 1


def best_in_chunk_order(workload: Workload, space: Space, simulate: Simulate) -> Found | None:
    """Return the first form that fits, with the largest chunks that do, and its step; None if none fits."""
    sizes = space.options("chunk_size")
    for form in _forms(space.limits, space.fixed):
        steps: dict[int, Found] = {}

        def excess(size: int, form: Mapping[str, Any] = form, steps: dict[int, Found] = steps) -> float:
            found = _simulated(workload, {**form, "chunk_size": size, **space.fixed}, simulate)
            if found is None:
                return float("inf")
            steps[size] = found
            return _excess(found[1], space.limits)

        least = excess(sizes[0])
        if least > 0:
            continue
        most = excess(sizes[-1]) if len(sizes) > 1 else least
        if most > 0:
            largest = _largest_size(sizes[0], steps[sizes[0]], sizes[-1], steps.get(sizes[-1]), space.limits)
            for size in sorted((s for s in sizes[1:-1] if s <= largest), reverse=True):
                if excess(size) <= 0:
                    break
        return steps[max(size for size, found in steps.items() if _excess(found[1], space.limits) <= 0)]
    return None


def _largest_size(low: int, fits: Found, high: int, exceeds: Found | None, limits: Limits) -> float:
    """Return the largest size of a chunk that fits, if the bytes of each tier are linear in it between two steps.

    Args:
        low: A size that fits.
        fits: Its step.
        high: A larger one that does not.
        exceeds: Its step; None is a size that the model does not allow, which says nothing of those between.
        limits: The memory.
    """
    found = float(high)
    if exceeds is None:
        return found
    for (before, limit), (after, _) in zip(_tiers(fits, limits), _tiers(exceeds, limits), strict=True):
        if after > limit:
            found = min(found, low + (high - low) * (limit - before) / (after - before))
    return found


def smallest_in_chunk_order(
    workload: Workload, limits: Limits, written: Mapping[str, Any], simulate: Simulate
) -> Found | None:
    """Return the first form that fits, from the one with least on the device on, or that which exceeds it least.

    Large chunks come first: there are fewer states and windows at their borders. None where a layer's cache cannot be
    kept apart, or where what is given allows none.
    """
    found: Found | None = None
    forms = list(_forms(limits, written))[::-1]
    for form, size in product(forms, (LARGE, CHUNKS[0])):
        step = _simulated(workload, {**form, "chunk_size": size, **written}, simulate)
        if step is not None and (found is None or _excess(step[1], limits) < _excess(found[1], limits)):
            found = step
        if found is None or _excess(found[1], limits) <= 0:
            break
    return found


def _forms(limits: Limits, written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the forms to try, the fastest first."""
    base = {"order": "chunk", "head_chunk_size": HEAD_CHUNKS[0]}
    away = not limits.shared and limits.host_bytes > 0 and "offload" not in written
    least = {**base, "stream_grads": True, **({"offload": "host"} if away else {})}
    forms = [{**base, "levels": 1}, {**least, "levels": 1}]
    if not limits.shared and limits.host_bytes > 0:
        forms.append({**least, "levels": 1, "keep_kv": "host"})
    forms.append({**least, "levels": 2})
    if not limits.shared and limits.host_bytes > 0:
        forms.append({**least, "levels": 2, "keep_kv": "host"})
    seen: list[Schedule] = []
    for form in forms:
        with suppress(ArgumentError):  # what is written goes with another form
            schedule = Schedule(**{**form, **_of_a_schedule(written)})
            if schedule not in seen:
                seen.append(schedule)
                yield form


def _of_a_schedule(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are given, but a directory where nothing goes to disk."""
    disk = written.get("offload") == "disk"
    return {name: value for name, value in written.items() if disk or name != "offload_dir"}


def _simulated(workload: Workload, chosen: dict[str, Any], simulate: Simulate) -> Found | None:
    schedule = Schedule(**_of_a_schedule(chosen))
    with suppress(UnsupportedModelError):  # layers that share their keys
        return schedule, simulate(workload, schedule)
    return None


def _excess(step: Simulation, limits: Limits) -> float:
    return limits.excess(step.peak_bytes, step.host_bytes, step.disk_bytes)


def _tiers(found: Found, limits: Limits) -> tuple[tuple[float, int], ...]:
    return limits.tiers(found[1].peak_bytes, found[1].host_bytes, found[1].disk_bytes)
