"""Bytes that a layer and chunk of 2,048 tokens moves beside its matrix products, of Qwen3-8B's shape, by simulation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from streamtune import Schedule
from streamtune.plan.simulate import Workload, simulate, trace
from tests.cuda_host.measure import make

LENGTH, CHUNK = 16384, 2048
BUDGET = {"bf16": 4.6e9, "autocast": 7.5e9}
"""Bytes read and written by elementwise operators, forward and backward; what is reached today, rounded up."""
AIM = 6e9
CASTS = 1.2e9
"""Bytes of casts of weights in a walk over all chunks, under autocast."""


def moved(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> tuple[float, dict[str, float]]:
    """Return the bytes of the middle one of three layers for each chunk, and those of casts of matrices by phase."""
    total, casts = 0.0, Counter[str]()
    own = trace.Trace.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal total
        before, place = self._cell.work[2], self._place
        out = own(self, func, types, args, kwargs)
        if place.layer == 1 and place.phase in ("forward", "backward"):
            touched = self._cell.work[2] - before
            total += touched
            if func._schema.name == "aten::_to_copy" and args[0].dim() == 2:
                casts[place.phase] += touched
        return out

    monkeypatch.setattr(trace.Trace, "__torch_dispatch__", dispatch)
    case = {"layers": 3, "dtype": "float32" if autocast else "bfloat16"}
    workload = Workload(lambda: make(case, "meta"), LENGTH, autocast="bfloat16" if autocast else None)
    simulate(workload, Schedule(chunk_size=CHUNK, head_chunk_size=1024), full=True)
    return total / (LENGTH // CHUNK), casts


@pytest.mark.parametrize("kind", [pytest.param("bf16"), pytest.param("autocast", marks=pytest.mark.full)])
def test_elementwise_bytes_of_a_layer_and_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    total, casts = moved(monkeypatch, kind == "autocast")
    print(f"{kind}: {total / 1e9:.2f} GB, casts { ({phase: f'{size / 1e9:.2f} GB' for phase, size in casts.items()}) }")
    assert 0 < total <= BUDGET[kind]
    if kind == "bf16":
        assert BUDGET[kind] <= AIM
        assert "forward" not in casts, "only the sums of gradients are cast, at the end"
    else:
        assert set(casts) == {"forward", "backward"}
        assert max(casts.values()) <= CASTS
