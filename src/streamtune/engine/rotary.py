"""Rotary embeddings whose frequencies depend on the longest position: ``dynamic`` NTK scaling and ``longrope``.

LongRoPE (Ding et al., arXiv 2402.13753) takes other factors for rows longer than the pretraining; dynamic NTK scaling
takes another base for each length. ``transformers`` reads the length from the positions of a call. Three calls need
another length, which this module gives:

    packed rows, shared beginnings    each row has the frequencies of its own length, as alone
    ranks that share a sequence       every rank has the whole sequence's frequencies
    a call after a longer one         has its own length's frequencies (``dynamic``: of the longest call so far)

A batch of padded rows has the frequencies of its longest row, as without streaming.

Shape suffixes: B batch, T tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.rows import Branches, PackedRows
from streamtune.errors import UnsupportedModelError

KINDS = ("dynamic", "longrope")


@dataclass(frozen=True)
class RowLengths:
    """Length of each token's row, ``[B, T]`` int64; a token of several rows has the shortest and the longest."""

    shortest_BT: Tensor  # noqa: N815
    longest_BT: Tensor  # noqa: N815

    @classmethod
    def of(cls, rows: PackedRows) -> RowLengths:
        """Return the lengths of packed rows, or of rows that share their beginnings."""
        if isinstance(rows, Branches):
            return cls._of_branches(rows)
        positions_BT = rows.positions_BT
        row_BT = rows.begins.long().cumsum(-1) - 1
        lengths = torch.zeros_like(positions_BT).scatter_reduce(-1, row_BT, positions_BT + 1, "amax")
        each_BT = lengths.gather(-1, row_BT)
        return cls(each_BT, each_BT)

    @classmethod
    def of_batch(cls, positions: Tensor) -> RowLengths:
        """Return the length of the longest row for every token, given positions ``[B, T]``."""
        if positions.dim() != 2:
            raise UnsupportedModelError(
                "rotary embeddings that depend on the longest position are known for positions [B, T], not "
                f"{list(positions.shape)}",
                fix="set sequence_parallel_size: 1",
            )
        each_BT = (positions.amax() + 1).expand_as(positions)
        return cls(each_BT, each_BT)

    @classmethod
    def _of_branches(cls, rows: Branches) -> RowLengths:
        longest_1T = torch.zeros_like(rows.positions_BT)
        shortest_1T = torch.full_like(longest_1T, torch.iinfo(torch.int64).max)
        for leaf in rows.table.leaves:
            length = leaf.trunk_length + leaf.stop - leaf.start
            for start, stop, _ in leaf.runs:
                longest_1T[:, start:stop] = longest_1T[:, start:stop].clamp(min=length)
                shortest_1T[:, start:stop] = shortest_1T[:, start:stop].clamp(max=length)
        return cls(shortest_1T, longest_1T)

    def to(self, device: torch.device) -> RowLengths:
        """Return the same lengths on a device."""
        return RowLengths(self.shortest_BT.to(device), self.longest_BT.to(device))

    def cut(self, cut: Callable[[Tensor], Tensor]) -> RowLengths:
        """Return the lengths of one rank's tokens."""
        return RowLengths(cut(self.shortest_BT), cut(self.longest_BT))


class LengthRotary:
    """Forward of a rotary embedding: frequencies by the lengths of the call's rows, not of earlier calls.

    It takes the place of the module's own until :meth:`remove`.

    Args:
        module: Rotary embedding. Its forward takes ``x``, ``position_ids`` and, in some models, a layer type.
        lengths: Returns the lengths of the call's rows, given ``position_ids``; None is the call's longest position.
    """

    def __init__(self, module: nn.Module, lengths: Callable[[Tensor], RowLengths | None]) -> None:
        self.module, self.lengths = module, lengths
        self._before = module.__dict__.get("forward")
        self.plain: Any = self._before.plain if isinstance(self._before, LengthRotary) else module.forward
        module.forward = self

    @classmethod
    def install(cls, model: nn.Module, lengths: Callable[[Tensor], RowLengths | None]) -> list[LengthRotary]:
        """Install one in every rotary embedding of a model whose frequencies depend on the longest position."""
        found = []
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            if any(kind in KINDS for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
                found.append(cls(module, lengths))
        return found

    def remove(self) -> None:
        """Restore the forward that the module had."""
        del self.module.forward
        if self._before is not None:
            self.module.forward = self._before

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return what the rotary embedding does, tensors ``[B, T, ...]``."""
        plain = self.plain if layer_type is None else partial(self.plain, layer_type=layer_type)
        kind, limit = _kind_and_limit(self.module, layer_type)
        if kind not in KINDS or position_ids.dim() != 2 or position_ids.is_meta:
            return plain(x, position_ids)
        if kind == "dynamic":
            plain(x[:, :1], torch.zeros_like(position_ids[:, :1]))  # a short call makes it forget the longest so far
        lengths = self.lengths(position_ids)
        if lengths is None or lengths.longest_BT.shape[-1] != position_ids.shape[-1]:
            return plain(x, position_ids)
        longest_BT, shortest_BT = lengths.longest_BT.clamp(min=limit), lengths.shortest_BT.clamp(min=limit)
        if kind == "longrope":  # all rows above the limit have the same
            longest_BT, shortest_BT = (
                torch.where(each_BT > limit, longest_BT.amax(), limit) for each_BT in (longest_BT, shortest_BT)
            )
        if not torch.equal(longest_BT, shortest_BT):
            raise UnsupportedModelError(
                f"rotary embeddings of type {kind!r} change with the length of a row, and rows of {limit:,} tokens or "
                "fewer share their beginning with longer ones",
                fix="set share_prefix: never",
            )
        out: Any = None
        for length in longest_BT.unique().tolist():  # ascending, for ``dynamic`` only ever grows
            # The longest position is what the embedding reads its length from: it is passed behind the tokens.
            longer = nn.functional.pad(position_ids, (0, 1), value=int(length) - 1)
            rotated = _each(lambda y: y[:, :-1], plain(x, longer.clamp(max=int(length) - 1)))
            out = rotated if out is None else _chosen(longest_BT == length, rotated, out)
        return out


def longest_unscaled(config: Any) -> int | None:
    """Return the longest row up to which frequencies do not depend on the length; None if they never do."""
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = bool(parameters) and all(isinstance(value, dict) for value in parameters.values())
    limits = [_limit(text, kind) for kind in (parameters.values() if nested else [parameters]) if _kind(kind) in KINDS]
    return min(limits, default=None)


@contextmanager
def as_alone(model: nn.Module, mask_BT: Tensor | None = None) -> Iterator[None]:
    """Context: each row of a model that is not streamed is rotated by the frequencies that it has alone.

    ``mask_BT`` has ones at the tokens of each row; without it packed rows are found by their positions.
    """

    def lengths(position_ids: Tensor) -> RowLengths | None:
        if mask_BT is None:
            rows = PackedRows.of(position_ids)
            return None if rows is None else RowLengths.of(rows)
        each_BT = mask_BT.long().sum(-1, keepdim=True).expand_as(mask_BT)
        return RowLengths(each_BT, each_BT)

    rotations = LengthRotary.install(model, lengths)
    try:
        yield
    finally:
        for rotation in rotations:
            rotation.remove()


def _kind_and_limit(module: Any, layer_type: str | None) -> tuple[str, int]:
    """Return the type of a rotation and the longest row up to which its frequencies do not change."""
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return _kind(parameters), _limit(module.config, parameters)


def _kind(parameters: Any) -> str:
    return str(parameters.get("rope_type", "default"))


def _limit(config: Any, parameters: Any) -> int:
    original = parameters.get("original_max_position_embeddings") if _kind(parameters) == "longrope" else None
    return int(original or config.max_position_embeddings)


def _each(change: Callable[[Tensor], Tensor], out: Any) -> Any:
    return change(out) if isinstance(out, Tensor) else tuple(change(y) for y in out)


def _chosen(where_BT: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, Tensor):
        return torch.where(where_BT.reshape(*where_BT.shape, *[1] * (new.dim() - 2)), new, old)
    return tuple(_chosen(where_BT, *pair) for pair in zip(new, old, strict=True))
