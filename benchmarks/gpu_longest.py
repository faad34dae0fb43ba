"""The longest row of each mode, forward and backward: ``python -m benchmarks.gpu_longest --seconds 180 --json FILE``.

The model is that of ``benchmarks.gpu_step``. Each mode tries rows twice as long as the one before until one does not
fit, then one of three quarters of that. All modes run in one process and share its time: a row that is expected to take
longer than what is left is not tried, and the figures say so. They are written after every row.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.gpu_step import VOCABULARY, complete_gradients, make_model, take_step
from streamtune import Schedule
from streamtune.plan.simulate import Mode
from streamtune.programs.bench.modes import WAYS, Ready, absent

MODES = "stream,checkpoint,liger,deepspeed-tiled,trl,checkpoint-offload,plain"
SCHEDULE = Schedule(chunk_size=8192, head_chunk_size=2048, offload="host")
FIRST, MOST = 16384, 262_144
"""Tokens of the first row and of the longest that is tried."""
GROWTH = 4.0
"""Seconds of a row over those of one half as long, at most: attention's."""


def search(step: Callable[[int], str], left: Callable[[], float]) -> dict[str, Any]:
    """Find the longest row of a mode.

    Args:
        step: Takes a step of so many tokens; returns why it failed, or nothing.
        left: Returns the seconds that are left.

    Returns:
        The longest that fits (``fits``) and why it is that (``stopped``).
    """
    fits, length, seconds = 0, FIRST, 0.0
    while length <= MOST:
        if fits and GROWTH * seconds > left():
            return {"fits": fits, "stopped": f"{length:,} was not tried: too little time"}
        start = time.monotonic()
        if why := step(length):
            between = length * 3 // 4
            if fits and not (2 * seconds > left()) and not step(between):
                fits = between
            return {"fits": fits, "stopped": f"{length:,}: {why}"}
        seconds = time.monotonic() - start
        fits, length = length, 2 * length
    return {"fits": fits, "stopped": f"none above {MOST:,} was tried"}


def longest(model: Any, mode: Mode, left: Callable[[], float]) -> dict[str, Any]:
    """Return the longest row of a mode, the peak of its step, and the seconds of each (``step_seconds``)."""
    try:
        with WAYS[mode].entered(model, SCHEDULE) as ready:  # once: what is kept from step to step stays
            return {"mode": mode, **_longest(model, ready, left)}
    except Exception as error:  # of a peer that does not know this model or these versions
        return {"mode": mode, "fits": 0, "stopped": _said(error), "peak_bytes": None, "step_seconds": {}}


def _longest(model: Any, ready: Ready, left: Callable[[], float]) -> dict[str, Any]:
    peaks: dict[int, int] = {}
    seconds: dict[int, float] = {}

    def step(length: int) -> str:
        gc.collect()
        complete_gradients(model)
        torch.cuda.empty_cache()
        ids = torch.randint(0, VOCABULARY, (1, length), device="cuda")
        try:
            for _ in range(2):  # the first tries kernels, and makes the memory that is kept
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                start = time.monotonic()
                ready.loss({"input_ids": ids}).backward()
                torch.cuda.synchronize()
                seconds[length] = time.monotonic() - start
                if GROWTH * seconds[length] > left():
                    break
        except torch.OutOfMemoryError:
            seconds.pop(length, None)
            return "out of memory"
        except Exception as error:
            return _said(error)
        peaks[length] = torch.cuda.max_memory_allocated()
        return ""

    found = search(step, left)
    return {**found, "peak_bytes": peaks.get(found["fits"]), "step_seconds": seconds}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def measure(model: Any, modes: Sequence[Mode], seconds: float, path: Path) -> None:
    """Measure the modes one after the other; each may take an equal part of the time that is left."""
    end = time.monotonic() + seconds
    missing = absent(modes, "cuda")
    here = [mode for mode in modes if mode not in missing]
    document: dict[str, Any] = {"absent": missing, "rows": []}
    for number, mode in enumerate(here):
        share = time.monotonic() + (end - time.monotonic()) / (len(here) - number)
        document["rows"].append(longest(model, mode, lambda share=share: share - time.monotonic()))  # type: ignore[misc]
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_longest")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers; Qwen3-8B has 36")
    parser.add_argument("--modes", default=MODES, help="modes of streamtune bench")
    parser.add_argument("--seconds", type=float, default=180, help="of all modes together")
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    model = make_model(options.layers)
    take_step(model, torch.zeros(1, 128, dtype=torch.long, device="cuda"))
    measure(model, cast(Any, options.modes.split(",")), options.seconds, options.json)


if __name__ == "__main__":
    main()
