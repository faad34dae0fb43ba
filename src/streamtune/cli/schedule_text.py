"""One-line descriptions of a schedule, and of its differences from another schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamtune.schedule import Schedule

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
"""Name of a torch dtype -> its short name on screens."""


def short_dtype(name: str) -> str:
    """Return the short name of a dtype, such as ``bf16`` for ``bfloat16``."""
    return DTYPES.get(name, name)


def describe_schedule(schedule: Schedule, num_layers: int) -> str:
    """Return a text such as ``1,024-token chunks, 256 in the head; keeps K/V and attention outputs``."""
    parts = [f"{schedule.chunk_size:,}-token chunks, {schedule.head_chunk_size:,} in the head"]
    if schedule.keep_layers >= num_layers:
        return f"{parts[0]}; keeps every layer's activations, recomputes nothing"
    by_chunk = schedule.order == "chunk"
    if by_chunk:
        parts.append("all layers of a chunk before the next chunk (order: chunk)")
    if schedule.offload != "device":
        what = "first layer's input" if by_chunk else "layer inputs"
        on_device = f", the last {schedule.device_layers} on the device" if schedule.device_layers else ""
        parts.append(f"{what} on {schedule.offload}{on_device}")
    if schedule.levels == 2:
        size = schedule.segment_size
        if by_chunk:
            parts.append(f"holds {_show_layers(size or 1)} of a chunk at a time (levels: 2)")
        else:
            parts.append(
                f"recomputes layer inputs{f' by segments of {_show_layers(size)}' if size else ''} (levels: 2)"
            )
    kept = [
        f"{name}{' on host' if tier == 'host' else ''}"
        for name, tier in (("K/V", schedule.keep_kv), ("attention outputs", schedule.keep_attention))
        if tier != "no"
    ]
    if schedule.keep_layers:
        last = "the last layer" if schedule.keep_layers == 1 else f"the last {schedule.keep_layers} layers"
        kept.append(f"all activations of {last}")
    if kept:
        parts.append(f"keeps {' and '.join(filter(None, (', '.join(kept[:-1]), kept[-1])))}")
    if schedule.stream_grads:
        parts.append("streams hidden-state gradients")
    if schedule.weights == "host":
        narrow = f", fetched in {short_dtype(schedule.fetch_dtype)}" if schedule.fetch_dtype == "bfloat16" else ""
        parts.append(f"weights on host{narrow}")
    return "; ".join(parts)


def describe_schedule_difference(
    chosen_fields: Mapping[str, Any], other_fields: Mapping[str, Any], num_layers: int
) -> str:
    """Return the differences of another schedule, such as ``attention outputs on host, two levels``."""
    if other_fields["keep_layers"] >= num_layers > chosen_fields["keep_layers"]:
        return "keep every layer's activations"
    texts: dict[str, str] = {
        "keep_layers": _describe_kept_layers(chosen_fields["keep_layers"], other_fields["keep_layers"]),
        "chunk_size": f"{other_fields['chunk_size']:,}-token chunks",
        "head_chunk_size": f"{other_fields['head_chunk_size']:,} tokens in the head",
        "order": f"order: {other_fields['order']}",
        "offload": f"layer inputs on {other_fields['offload']}",
        "device_layers": f"the last {other_fields['device_layers']} layer inputs on device",
        "levels": "two levels" if other_fields["levels"] == 2 else "one level",
        "segment_size": f"segments of {_show_layers(other_fields['segment_size'] or 0)}",
        "keep_kv": _describe_memory_tier("K/V", other_fields["keep_kv"]),
        "keep_attention": _describe_memory_tier("attention outputs", other_fields["keep_attention"]),
        "stream_grads": "hidden-state gradients streamed"
        if other_fields["stream_grads"]
        else "whole hidden-state gradients",
        "weights": f"weights on {other_fields['weights']}",
    }
    changed = [name for name in texts if chosen_fields[name] != other_fields[name]]
    if "levels" in changed or other_fields["segment_size"] is None:
        changed = [name for name in changed if name != "segment_size"]
    if not other_fields["device_layers"]:
        changed = [name for name in changed if name != "device_layers"]
    return ", ".join(texts[name] for name in changed) or "same schedule"


def _describe_kept_layers(chosen_count: int, other_count: int) -> str:
    count = other_count or chosen_count
    last = "last layer" if count == 1 else f"last {count} layers"
    return f"{last} kept whole" if other_count else f"{last} not kept whole"


def _describe_memory_tier(tensor_name: str, tier: str) -> str:
    return f"{tensor_name} not kept" if tier == "no" else f"{tensor_name} on {tier}"


def _show_layers(num_layers: int) -> str:
    return "1 layer" if num_layers == 1 else f"{num_layers} layers"
