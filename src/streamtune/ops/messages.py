"""Point-to-point messages between two ranks, in rounds of several tensors, each with a key.

All rounds of a pass have the same tensors in the same order. In the first round a header with key, shape and dtype
precedes each tensor, and an empty header ends the round. Later rounds consist of the tensors only. So a rank can
receive tensors that it did not know, and headers are sent only once per pass. A tensor is sent as soon as it exists.
Rounds are numbered, and both ranks know their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamtune.errors import UnsupportedModelError

Key = tuple[int, ...]
"""Three integers that identify a tensor of a round."""

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
"""Length of a header: 1 if a tensor follows, else 0; its key; the index of its dtype in ``DTYPES``; its number of
dimensions; their sizes."""

Form = tuple[tuple[int, ...], torch.dtype]


class Outgoing:
    """Sends rounds of tensors to one rank; ``rank`` is the receiver's index in the group."""

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self.group, self.device, self.to = group, device, dist.get_global_rank(group, rank)
        self.forms: dict[Key, Form] = {}
        self._announced = False
        self._sent = 0
        self._early: dict[Key, Tensor] = {}
        self._works: list[tuple[Any, Tensor]] = []

    def put(self, key: Key, x: Tensor) -> None:
        """Send a tensor of the current round. A tensor ahead of its order is sent after the tensors before it.

        The tensor must not be written to before :meth:`wait`.

        Raises:
            UnsupportedModelError: Its shape or dtype differs from the first round, or it was not in that round.
        """
        form = (tuple(x.shape), x.dtype)
        if not self._announced:
            self.forms[key] = form
            self._send(_header(key, x))
            self._send(x)
            return
        if self.forms.get(key) != form:
            raise _changed(f"tensor {key} was {self.forms.get(key)} in the first round, now it is {form}")
        self._early[key] = x
        order = list(self.forms)
        while self._sent < len(order) and order[self._sent] in self._early:
            self._send(self._early.pop(order[self._sent]))
            self._sent += 1

    def close(self) -> None:
        """End a round.

        Raises:
            UnsupportedModelError: A tensor of the first round is missing in this round.
        """
        if not self._announced:
            self._send(torch.zeros(HEADER, dtype=torch.int64, device=self.device))
            self._announced = True
        else:
            missing = list(self.forms)[self._sent :]
            if missing:
                raise _changed(f"tensor {missing[0]} was in the first round, but is missing in this round")
        self._sent = 0
        self._works = [each for each in self._works if not each[0].is_completed()]

    def wait(self) -> None:
        """Wait until all sent tensors may be written to."""
        for work, _ in self._works:
            work.wait()
        self._works.clear()

    def _send(self, x: Tensor) -> None:
        x = x.detach().contiguous()
        self._works.append((dist.isend(x, self.to, group=self.group, tag=TAG), x))


class Incoming:
    """Receives rounds of tensors from one rank; the module says what a round is.

    Args:
        group: Process group of both ranks.
        rank: Index of the sender in the group.
        rounds: Numbers of the rounds, in the order in which they are sent.
        device: Device of the tensors.
    """

    def __init__(self, group: Any, rank: int, rounds: Sequence[int], device: torch.device) -> None:
        self.group, self.source, self.device = group, dist.get_global_rank(group, rank), device
        self.forms: dict[Key, Form] = {}
        self._to_come = list(rounds)
        self._announced = False
        self._current: dict[Key, Tensor] = {}
        self._received: dict[int, dict[Key, Tensor]] = {}

    def get(self, number: int, key: Key) -> Tensor | None:
        """Wait for a tensor of a round and return it; None if the round does not contain it."""
        while number not in self._received:
            if number == self._to_come[0] and key in self._current:
                return self._current[key]
            self._next()
        return self._received[number].get(key)

    def all(self, number: int) -> dict[Key, Tensor]:
        """Wait for all tensors of a round and return them by key; this object then forgets them."""
        while number not in self._received:
            self._next()
        return self._received.pop(number)

    def _next(self) -> None:
        """Receive the next tensor, or the end of the current round."""
        if not self._announced:
            header = self._receive((HEADER,), torch.int64).tolist()
            if header[0]:
                key = tuple(header[1 : 1 + PARTS])
                dtype, dims, *sizes = header[1 + PARTS :]
                self.forms[key] = (tuple(sizes[:dims]), DTYPES[dtype])
                self._current[key] = self._receive(*self.forms[key])
                return
            self._announced = True
        else:
            awaited = next((key for key in self.forms if key not in self._current), None)
            if awaited is not None:
                self._current[awaited] = self._receive(*self.forms[awaited])
            if len(self._current) < len(self.forms):
                return
        self._received[self._to_come.pop(0)] = self._current
        self._current = {}

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(x, self.source, group=self.group, tag=TAG)
        assert work is not None, "this rank belongs to the group"
        work.wait()
        return x


def _changed(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"ranks cannot exchange a recurrent state that changes shape or dtype between chunks: {what}",
        fix="set sequence_parallel_size: 1",
    )


def _header(key: Key, x: Tensor) -> Tensor:
    if x.dim() > MAX_DIMS or len(key) != PARTS:
        raise ValueError(f"no header for a tensor of {x.dim()} dimensions with the key {key}")
    numbers = [1, *key, DTYPES.index(x.dtype), x.dim(), *x.shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device=x.device)
