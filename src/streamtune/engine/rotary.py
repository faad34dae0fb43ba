"""Rotary embeddings whose frequencies depend on the longest position: ``dynamic`` NTK scaling and ``longrope``.

LongRoPE (Ding et al., arXiv 2402.13753) uses other factors for rows longer than the pretraining length. Dynamic NTK
scaling uses another base for each length. ``transformers`` reads the length from the positions of a call. This is wrong
in three cases, in which this module passes another length:

    packed rows, shared prefixes      each row gets the frequencies of its own length, as if it were alone
    ranks that share a sequence       every rank gets the frequencies of the whole sequence's length
    a call after a longer call        gets its own length's frequencies (``dynamic`` keeps the longest call's)

A batch of padded rows gets the frequencies of its longest row, as without streaming.

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

LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class RowLengths:
    """Length ``[B, T]`` int64 of the row of each token. If rows share a token: of its shortest and its longest row."""

    shortest_BT: Tensor  # noqa: N815
    longest_BT: Tensor  # noqa: N815

    @classmethod
    def from_rows(cls, rows: PackedRows) -> RowLengths:
        """Return the lengths for packed rows, or for rows that share a prefix."""
        if isinstance(rows, Branches):
            return cls._from_branches(rows)
        positions_BT = rows.positions_BT
        row_BT = rows.is_row_start.long().cumsum(-1) - 1
        lengths = torch.zeros_like(positions_BT).scatter_reduce(-1, row_BT, positions_BT + 1, "amax")
        each_BT = lengths.gather(-1, row_BT)
        return cls(each_BT, each_BT)

    @classmethod
    def from_batch(cls, positions: Tensor) -> RowLengths:
        """Return the length of the batch's longest row for every token, given positions ``[B, T]``."""
        if positions.dim() != 2:
            raise UnsupportedModelError(
                "rotary embeddings that depend on the longest position need position_ids [B, T], found "
                f"{list(positions.shape)}",
                fix="set sequence_parallel_size: 1",
            )
        each_BT = (positions.amax() + 1).expand_as(positions)
        return cls(each_BT, each_BT)

    @classmethod
    def _from_branches(cls, rows: Branches) -> RowLengths:
        longest_1T = torch.zeros_like(rows.positions_BT)
        shortest_1T = torch.full_like(longest_1T, torch.iinfo(torch.int64).max)
        for leaf in rows.table.last_parts:
            length = leaf.trunk_length + leaf.stop - leaf.start
            for start, stop, _ in leaf.row_ranges:
                longest_1T[:, start:stop] = longest_1T[:, start:stop].clamp(min=length)
                shortest_1T[:, start:stop] = shortest_1T[:, start:stop].clamp(max=length)
        return cls(shortest_1T, longest_1T)

    def to(self, device: torch.device) -> RowLengths:
        """Return the lengths on ``device``."""
        return RowLengths(self.shortest_BT.to(device), self.longest_BT.to(device))

    def select_tokens(self, select: Callable[[Tensor], Tensor]) -> RowLengths:
        """Return the lengths of a selection of tokens; ``select`` selects them from a tensor ``[B, T]``."""
        return RowLengths(select(self.shortest_BT), select(self.longest_BT))


class LengthRotary:
    """Replaces the forward of a rotary embedding, so that its frequencies depend only on the row lengths of the call.

    Args:
        module: Rotary embedding. Its forward takes ``x``, ``position_ids`` and, in some models, a layer type.
        lengths: Function from ``position_ids`` to row lengths. If it returns None, the call's longest position is used.
    """

    def __init__(self, module: nn.Module, lengths: Callable[[Tensor], RowLengths | None]) -> None:
        self.module, self.lengths = module, lengths
        self._before = module.__dict__.get("forward")
        self.plain: Any = self._before.plain if isinstance(self._before, LengthRotary) else module.forward
        module.forward = self

    @classmethod
    def install_in_model(cls, model: nn.Module, lengths: Callable[[Tensor], RowLengths | None]) -> list[LengthRotary]:
        """Replace the forward of rotary embeddings that depend on the longest position; return the replacements."""
        installed = []
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            if any(kind in LENGTH_DEPENDENT_TYPES for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
                installed.append(cls(module, lengths))
        return installed

    def remove(self) -> None:
        """Restore the forward that the module had before."""
        del self.module.forward
        if self._before is not None:
            self.module.forward = self._before

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cosine and sine ``[B, T, ...]`` in the form in which the module returns them."""
        plain = self.plain if layer_type is None else partial(self.plain, layer_type=layer_type)
        kind, limit = _type_and_limit(self.module, layer_type)
        if kind not in LENGTH_DEPENDENT_TYPES or position_ids.dim() != 2 or position_ids.is_meta:
            return plain(x, position_ids)
        if kind == "dynamic":
            plain(x[:, :1], torch.zeros_like(position_ids[:, :1]))  # a short call resets its longest length so far
        lengths = self.lengths(position_ids)
        if lengths is None or lengths.longest_BT.shape[-1] != position_ids.shape[-1]:
            return plain(x, position_ids)
        longest_BT, shortest_BT = lengths.longest_BT.clamp(min=limit), lengths.shortest_BT.clamp(min=limit)
        if kind == "longrope":  # all rows above the limit have the same frequencies
            longest_BT, shortest_BT = (
                torch.where(each_BT > limit, longest_BT.amax(), limit) for each_BT in (longest_BT, shortest_BT)
            )
        if not torch.equal(longest_BT, shortest_BT):
            raise UnsupportedModelError(
                f"rotary embeddings of type {kind!r} depend on the length of a row, and rows of at most {limit:,} "
                "tokens share a prefix with longer rows",
                fix="set share_prefix: never",
            )
        out: Any = None
        for length in longest_BT.unique().tolist():  # ascending, because the length of ``dynamic`` only grows
            # The embedding reads the length from the longest position, which is appended behind the tokens.
            longer = nn.functional.pad(position_ids, (0, 1), value=int(length) - 1)
            rotated = _map_output(lambda y: y[:, :-1], plain(x, longer.clamp(max=int(length) - 1)))
            out = rotated if out is None else _select_output(longest_BT == length, rotated, out)
        return out


def longest_unscaled_length(config: Any) -> int | None:
    """Return the row length above which rotary frequencies change; None if they never change."""
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = bool(parameters) and all(isinstance(value, dict) for value in parameters.values())
    limits = [
        _longest_constant_length(text, kind)
        for kind in (parameters.values() if nested else [parameters])
        if _rope_type(kind) in LENGTH_DEPENDENT_TYPES
    ]
    return min(limits, default=None)


@contextmanager
def rotate_rows_as_if_alone(model: nn.Module, mask_BT: Tensor | None = None) -> Iterator[None]:
    """Let an unstreamed model rotate each row as if the row were alone in the call, in the ``with`` block.

    ``mask_BT`` is a padding mask, with one row per sequence. Without a mask, positions that restart begin packed rows.
    """

    def lengths(position_ids: Tensor) -> RowLengths | None:
        if mask_BT is None:
            rows = PackedRows.from_positions(position_ids)
            return None if rows is None else RowLengths.from_rows(rows)
        each_BT = mask_BT.long().sum(-1, keepdim=True).expand_as(mask_BT)
        return RowLengths(each_BT, each_BT)

    rotations = LengthRotary.install_in_model(model, lengths)
    try:
        yield
    finally:
        for rotation in rotations:
            rotation.remove()


def _type_and_limit(module: Any, layer_type: str | None) -> tuple[str, int]:
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return _rope_type(parameters), _longest_constant_length(module.config, parameters)


def _rope_type(parameters: Any) -> str:
    return str(parameters.get("rope_type", "default"))


def _longest_constant_length(config: Any, parameters: Any) -> int:
    original = parameters.get("original_max_position_embeddings") if _rope_type(parameters) == "longrope" else None
    return int(original or config.max_position_embeddings)


def _map_output(change: Callable[[Tensor], Tensor], out: Any) -> Any:
    return change(out) if isinstance(out, Tensor) else tuple(change(y) for y in out)


def _select_output(where_BT: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, Tensor):
        return torch.where(where_BT.reshape(*where_BT.shape, *[1] * (new.dim() - 2)), new, old)
    return tuple(_select_output(where_BT, *pair) for pair in zip(new, old, strict=True))
