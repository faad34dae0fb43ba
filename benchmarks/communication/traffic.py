"""Collectives of this process, counted where every library's end up: at the operators of ``torch.distributed``.

DeepSpeed and DDP call ``c10d``, DTensor calls the functional collectives; both are operators, and a dispatch mode sees
operators whoever calls them, from Python or from C++. Nothing is patched, and nothing of it is in the product.

**Bytes** are those of the whole tensor a collective is about, as one rank has it: what is reduced, what is gathered
(all parts), what is sent. What a network carries for it depends on the algorithm; ``wire_bytes`` reads that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["KINDS", "Traffic", "wire_bytes"]

KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
}
"""Operator -> what it is called in the tables."""
SILENT = {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
"""Operators that carry nothing."""


class Traffic(TorchDispatchMode):
    """Counts while it is active, by the phase it is told.

    Attributes:
        phase: What the step is doing: ``forward``, ``backward`` or ``step``.
        found: Phase -> kind -> ``[calls, bytes]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.found: dict[str, dict[str, list[int]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count ``func`` if it is a collective, and run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: it becomes plain operators, collectives among them
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name not in SILENT:
                calls = self.found.setdefault(self.phase, {}).setdefault(KINDS[name], [0, 0])
                calls[0] += 1
                calls[1] += max(_bytes(value) for value in (*args, out))
        return out


def _bytes(value: Any) -> int:
    """Bytes of a tensor or of all in a nest of lists. A collective's whole is the largest of its arguments."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def wire_bytes() -> tuple[int, int]:
    """Bytes received and sent so far by the interfaces of this network namespace, loopback left out."""
    received = sent = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        if name.strip() != "lo":
            columns = figures.split()
            received += int(columns[0])
            sent += int(columns[8])
    return received, sent
