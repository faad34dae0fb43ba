"""Send tensors from one rank to another in rounds: all rounds have tensors with the same keys, shapes and dtypes.

In the first round, a header with key, shape and dtype precedes each tensor, and an empty header ends the round. Later
rounds have only the tensors, in the same order. A tensor is sent as soon as it exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamtune.errors import UnsupportedModelError

Key = tuple[int, ...]
"""Three integers that identify a tensor within a round."""

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
PARTS, MAX_DIMS, TAG = 3, 8, 4096
HEADER = 3 + PARTS + MAX_DIMS
"""Number of integers in a header: 1 if a tensor follows, else 0; the key; the dtype's index in ``DTYPES``; the number
of dimensions; their sizes."""

TensorSpec = tuple[tuple[int, ...], torch.dtype]


class RoundSender:
    """Sends tensors to rank ``rank`` of ``group`` in rounds, which must all have the same keys, shapes and dtypes."""

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self.group, self.device, self.to = group, device, dist.get_global_rank(group, rank)
        self.specs: dict[Key, TensorSpec] = {}
        self._announced = False
        self._sent = 0
        self._out_of_order: dict[Key, Tensor] = {}
        self._works: list[tuple[Any, Tensor]] = []

    def send(self, key: Key, x: Tensor) -> None:
        """Send a tensor of the current round.

        Tensors are sent in the order of the first round, so a tensor may have to wait for others. Do not write to ``x``
        before :meth:`wait_until_sent`.

        Raises:
            UnsupportedModelError: The first round had no tensor with this key, or one with another shape or dtype.
        """
        form = (tuple(x.shape), x.dtype)
        if not self._announced:
            self.specs[key] = form
            self._send(_make_header(key, x))
            self._send(x)
            return
        if self.specs.get(key) != form:
            raise _changed_state_error(f"tensor {key} was {self.specs.get(key)} in the first round, now it is {form}")
        self._out_of_order[key] = x
        order = list(self.specs)
        while self._sent < len(order) and order[self._sent] in self._out_of_order:
            self._send(self._out_of_order.pop(order[self._sent]))
            self._sent += 1

    def end_round(self) -> None:
        """End the current round.

        Raises:
            UnsupportedModelError: A tensor of the first round is missing in this round.
        """
        if not self._announced:
            self._send(torch.zeros(HEADER, dtype=torch.int64, device=self.device))
            self._announced = True
        else:
            missing = list(self.specs)[self._sent :]
            if missing:
                raise _changed_state_error(f"tensor {missing[0]} was in the first round, but is missing in this round")
        self._sent = 0
        self._works = [each for each in self._works if not each[0].is_completed()]

    def wait_until_sent(self) -> None:
        """Wait until all tensors are sent; they may then be written to."""
        for work, _ in self._works:
            work.wait()
        self._works.clear()

    def _send(self, x: Tensor) -> None:
        x = x.detach().contiguous()
        self._works.append((dist.isend(x, self.to, group=self.group, tag=TAG), x))


class RoundReceiver:
    """Receives the tensors that a :class:`RoundSender` on another rank sends.

    Args:
        group: Process group of both ranks.
        rank: Rank of the sender within ``group``.
        rounds: Numbers of the rounds, in the order in which they are sent.
        device: Device of the tensors.
    """

    def __init__(self, group: Any, rank: int, rounds: Sequence[int], device: torch.device) -> None:
        self.group, self.source, self.device = group, dist.get_global_rank(group, rank), device
        self.specs: dict[Key, TensorSpec] = {}
        self._pending_rounds = list(rounds)
        self._announced = False
        self._current: dict[Key, Tensor] = {}
        self._received: dict[int, dict[Key, Tensor]] = {}

    def receive(self, round_number: int, key: Key) -> Tensor | None:
        """Return the tensor ``key`` of a round, after waiting for it; None if the round does not have this tensor."""
        while round_number not in self._received:
            if round_number == self._pending_rounds[0] and key in self._current:
                return self._current[key]
            self._receive_next()
        return self._received[round_number].get(key)

    def receive_round(self, round_number: int) -> dict[Key, Tensor]:
        """Return all tensors of a round by key, after waiting for them. Call it once per round."""
        while round_number not in self._received:
            self._receive_next()
        return self._received.pop(round_number)

    def _receive_next(self) -> None:
        if not self._announced:
            header = self._receive((HEADER,), torch.int64).tolist()
            if header[0]:
                key = tuple(header[1 : 1 + PARTS])
                dtype, dims, *sizes = header[1 + PARTS :]
                self.specs[key] = (tuple(sizes[:dims]), DTYPES[dtype])
                self._current[key] = self._receive(*self.specs[key])
                return
            self._announced = True
        else:
            awaited = next((key for key in self.specs if key not in self._current), None)
            if awaited is not None:
                self._current[awaited] = self._receive(*self.specs[awaited])
            if len(self._current) < len(self.specs):
                return
        self._received[self._pending_rounds.pop(0)] = self._current
        self._current = {}

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(x, self.source, group=self.group, tag=TAG)
        assert work is not None, "this rank is not in the process group"
        work.wait()
        return x


def _changed_state_error(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"ranks cannot exchange a recurrent state that changes shape or dtype between chunks: {what}",
        fix="set sequence_parallel_size: 1",
    )


def _make_header(key: Key, x: Tensor) -> Tensor:
    if x.dim() > MAX_DIMS or len(key) != PARTS:
        raise ValueError(f"no header for a tensor of {x.dim()} dimensions with the key {key}")
    numbers = [1, *key, DTYPES.index(x.dtype), x.dim(), *x.shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device=x.device)
