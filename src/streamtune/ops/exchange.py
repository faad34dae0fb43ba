"""Communication between ranks that share a sequence; all except :func:`start_ring_exchange` is differentiable.

Each rank has some tokens (a shard) of every chunk, with all attention heads. After :func:`shards_to_heads`, each rank
has all tokens with some of the heads (DeepSpeed Ulysses, Jacobs et al., arXiv 2309.14509). Its inverse is
:func:`heads_to_shards`. Each of these functions is the backward of the other.

Shape suffixes: B batch, H heads, S ranks, h = H / S heads of a rank, c tokens of a rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamtune.ops.first_order import first_order


def shards_to_heads(x_BHcD: Tensor, group: Any, shard_lengths: Sequence[int]) -> Tensor:
    """Return ``[B, h, cS, D]``: this rank's heads of the tokens of all ranks, in the order of the sequence.

    Rank r gets the heads from ``r h`` to ``(r + 1) h - 1`` of all tokens. It sends the other heads of its own tokens.

    Args:
        x_BHcD: All heads of this rank's tokens.
        group: Process group of the ranks, in the order of their shards. Its size S must divide H.
        shard_lengths: Number of this rank's tokens in each chunk; their sum is c.
    """
    out: Tensor = _AllToAll.apply(x_BHcD, group, tuple(shard_lengths), True)
    return out


def heads_to_shards(x_BhTD: Tensor, group: Any, shard_lengths: Sequence[int]) -> Tensor:
    """Return ``[B, H, c, D]``: all heads of this rank's tokens. This is the inverse of :func:`shards_to_heads`."""
    out: Tensor = _AllToAll.apply(x_BhTD, group, tuple(shard_lengths), False)
    return out


def sum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the sum of ``x`` over the ranks of ``group``, on every rank.

    The backward returns the gradient unchanged, so gradients of parameters must be summed over the ranks afterwards.
    """
    out: Tensor = _SumOverRanks.apply(x, group)
    return out


def gather_columns(x: Tensor, group: Any, column_positions: Sequence[Tensor], length: int) -> Tensor:
    """Return ``[B, length]`` with the columns ``[B, c]`` of all ranks; the backward returns this rank's columns.

    ``column_positions`` has the positions of each rank's columns in the result. Columns from ``length`` on are dropped.
    """
    out: Tensor = _GatherColumns.apply(x, group, tuple(column_positions), length)
    return out


def start_ring_exchange(tensors: Sequence[Tensor], group: Any) -> tuple[list[Tensor], list[Any]]:
    """Begin to send tensors to the next rank, and to receive tensors of the same shapes from the previous rank.

    Returns:
        Buffers for the received tensors, and handles. Call ``wait()`` on every handle before you read the buffers.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, size - 1))
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    calls = [dist.P2POp(dist.isend, x, to, group, tag) for tag, x in enumerate(sent)]
    calls += [dist.P2POp(dist.irecv, x, source, group, tag) for tag, x in enumerate(received)]
    return received, [*dist.batch_isend_irecv(calls), _SentTensors(sent)]


class _SentTensors:
    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        self.tensors = []


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, shard_lengths: tuple[int, ...], is_to_heads: bool) -> Tensor:
        ctx.group, ctx.shard_lengths, ctx.is_to_heads = group, shard_lengths, is_to_heads
        return (_exchange_to_heads if is_to_heads else _exchange_to_shards)(x, group, shard_lengths)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange = _exchange_to_shards if ctx.is_to_heads else _exchange_to_heads
        return exchange(grad, ctx.group, ctx.shard_lengths), None, None, None


def _exchange_to_heads(x_BHcD: Tensor, group: Any, shard_lengths: tuple[int, ...]) -> Tensor:
    size = dist.get_world_size(group)
    x_BhScD = _all_to_all(x_BHcD.unflatten(1, (size, -1)).movedim(1, 0), group).movedim(0, 2)
    return torch.cat([part.flatten(2, 3) for part in x_BhScD.split(shard_lengths, 3)], 2)


def _exchange_to_shards(x_BhTD: Tensor, group: Any, shard_lengths: tuple[int, ...]) -> Tensor:
    size = dist.get_world_size(group)
    parts = x_BhTD.split([length * size for length in shard_lengths], 2)
    x_BhScD = torch.cat([part.unflatten(2, (size, -1)) for part in parts], 3)
    return _all_to_all(x_BhScD.movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, column_positions: tuple[Tensor, ...], length: int) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in column_positions]
        dist.all_gather(parts, x, group=group)
        total = sum(positions.numel() for positions in column_positions)
        whole = x.new_empty(x.shape[0], total)
        for part, positions in zip(parts, column_positions, strict=True):
            whole[:, positions] = part
        ctx.own, ctx.total = column_positions[dist.get_rank(group)], total
        return whole[:, :length].contiguous()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded = torch.nn.functional.pad(grad, (0, ctx.total - grad.shape[1]))
        return padded.index_select(1, ctx.own), None, None, None
