"""Exchanges between ranks that share a sequence; all except :func:`passed_on` are differentiable.

Each rank holds a shard of every chunk, with all heads. It exchanges them for some heads of whole chunks with
:func:`to_heads`; the inverse is :func:`to_shards` (DeepSpeed Ulysses, Jacobs et al., arXiv 2309.14509). Each is the
backward of the other, so gradients are exchanged in the same way.

Shape suffixes: B batch, H heads, S ranks, h = H / S heads of a rank, c tokens of a shard, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamtune.ops.first_order import first_order


def to_heads(x_BHcD: Tensor, group: Any, lengths: Sequence[int]) -> Tensor:
    """Return ``[B, h, cS, D]``: this rank's heads of all shards, in the order of the sequence.

    Rank r gets heads ``[r h, (r + 1) h)``.

    Args:
        x_BHcD: All heads of this rank's shards, concatenated.
        group: Process group of the ranks, in the order of their shards; S divides H.
        lengths: Number of tokens of each shard: one shard per chunk, so several if several chunks are exchanged.
    """
    out: Tensor = _AllToAll.apply(x_BHcD, group, tuple(lengths), True)
    return out


def to_shards(x_BhTD: Tensor, group: Any, lengths: Sequence[int]) -> Tensor:
    """Return ``[B, H, c, D]``: the inverse of :func:`to_heads`."""
    out: Tensor = _AllToAll.apply(x_BhTD, group, tuple(lengths), False)
    return out


def summed(x: Tensor, group: Any) -> Tensor:
    """Return the sum over the group, which is equal on every rank.

    The backward passes the gradient unchanged to this rank's term; summed over ranks, gradients are then complete.
    """
    out: Tensor = _Summed.apply(x, group)
    return out


def collected(x: Tensor, group: Any, places: Sequence[Tensor], length: int) -> Tensor:
    """Return ``[B, length]``, gathered from every rank's ``[B, c]``; a rank gets the gradient of its own columns only.

    ``places`` has, for each rank, the positions of its columns in the result. Columns from ``length`` on are dropped.
    """
    out: Tensor = _Collected.apply(x, group, tuple(places), length)
    return out


def passed_on(tensors: Sequence[Tensor], group: Any) -> tuple[list[Tensor], list[Any]]:
    """Start to send tensors to the next rank of the ring and to receive the previous rank's, of equal shapes.

    Returns:
        The tensors to be received, and the works to wait for before they are read or the sent tensors are written to.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, size - 1))
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    calls = [dist.P2POp(dist.isend, x, to, group, tag) for tag, x in enumerate(sent)]
    calls += [dist.P2POp(dist.irecv, x, source, group, tag) for tag, x in enumerate(received)]
    return received, [*dist.batch_isend_irecv(calls), _SentTensors(sent)]


class _SentTensors:
    """Keeps the tensors that are being sent alive until ``wait``."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        self.tensors = []


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, lengths: tuple[int, ...], forth: bool) -> Tensor:
        ctx.group, ctx.lengths, ctx.forth = group, lengths, forth
        return _forth(x, group, lengths) if forth else _back(x, group, lengths)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_back if ctx.forth else _forth)(grad, ctx.group, ctx.lengths), None, None, None


def _forth(x_BHcD: Tensor, group: Any, lengths: tuple[int, ...]) -> Tensor:
    size = dist.get_world_size(group)
    x_BhScD = _traded(x_BHcD.unflatten(1, (size, -1)).movedim(1, 0), group).movedim(0, 2)
    return torch.cat([part.flatten(2, 3) for part in x_BhScD.split(lengths, 3)], 2)


def _back(x_BhTD: Tensor, group: Any, lengths: tuple[int, ...]) -> Tensor:
    size = dist.get_world_size(group)
    parts = x_BhTD.split([length * size for length in lengths], 2)
    x_BhScD = torch.cat([part.unflatten(2, (size, -1)) for part in parts], 3)
    return _traded(x_BhScD.movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _traded(x: Tensor, group: Any) -> Tensor:
    """Send slice s of the first dimension to rank s, and return what each rank sent here, in rank order."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, places: tuple[Tensor, ...], length: int) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in places]
        dist.all_gather(parts, x, group=group)
        total = sum(place.numel() for place in places)
        whole = x.new_empty(x.shape[0], total)
        for part, place in zip(parts, places, strict=True):
            whole[:, place] = part
        ctx.own, ctx.total = places[dist.get_rank(group)], total
        return whole[:, :length].contiguous()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded = torch.nn.functional.pad(grad, (0, ctx.total - grad.shape[1]))
        return padded.index_select(1, ctx.own), None, None, None
