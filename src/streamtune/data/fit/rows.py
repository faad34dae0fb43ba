"""Fit rows of next tokens to the length: keep, cut or leave out each."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamtune.data.fit.length_fit import LengthFit, have
from streamtune.data.records import Example, IntArray, TableWriter
from streamtune.data.rendering.render import Rendered
from streamtune.data.report import DataReport
from streamtune.errors import DataError
from streamtune.labels import IGNORE_INDEX

__all__ = ["RowFit"]


class RowFit(LengthFit[Example, DataReport]):
    """Fits rows of next tokens; rows with the same tokens and labels are held out together.

    Args:
        writer: Gets the examples.
        overlength: One of :data:`OVERLENGTH`.
        max_length: Tokens an example has at most.
    """

    record = Example
    report_type = DataReport

    def __init__(self, writer: TableWriter, overlength: str, max_length: int) -> None:
        super().__init__(writer, overlength, limit=f"max_length is {max_length:,}", over=f"{max_length:,} tokens")
        self.max_length = max_length

    def add(self, rendered: Rendered, origin: str) -> None:
        """Fit one row to the length, and write the examples made of it."""
        row = _Piece(_int_array(rendered.input_ids), _int_array(rendered.labels))
        size = len(row.input_ids)
        self.measure(size, origin, first_trained=row.first_trained)
        if size <= self.max_length:
            self._keep([row], origin, size)
            return
        self.counts["too_long"] += 1
        if self.overlength == "truncate":
            self._keep(_supervised([row.cut(0, self.max_length)]), origin, size, "truncated")
        elif self.overlength == "split":
            pieces = [row.cut(start, self.max_length) for start in range(0, size, self.max_length)]
            kept = _supervised(pieces)
            self.counts["pieces_dropped"] += len(pieces) - len(kept) if kept else 0
            self._keep(kept, origin, size, "split")
        else:
            self._keep([], origin, size)

    def _keep(self, pieces: Sequence[_Piece], origin: str, size: int, how: str = "kept whole") -> None:
        """Write the examples made of one row of ``size`` tokens; without any, count the row as dropped."""
        lost = size - sum(len(piece.input_ids) for piece in pieces)
        self.counts["tokens_lost"] += lost
        if not pieces:
            self.counts["dropped"] += 1
            return
        self.counts[how] += 1
        row_digest = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            ids, labels = piece.input_ids, piece.labels
            piece_digest = hashlib.blake2b(ids.data, digest_size=16)
            piece_digest.update(labels.data)
            digest = piece_digest.digest()
            row_digest.update(digest)
            trained = int((labels != IGNORE_INDEX).sum())
            self.counts["tokens"] += len(ids)
            self.counts["supervised_tokens"] += trained
            self.write(Example(ids, labels, origin), digest, trained=trained, lost=lost if how == "truncated" else 0)
        self.groups.append(row_digest.digest())

    def too_long(self) -> DataError:
        """See :class:`LengthFit`."""
        size, origin = self.longest
        return DataError(
            f"{have(self.counts['too_long'], 'row')} more than max_length = {self.max_length:,} tokens; the longest "
            f"has {size:,}",
            where=origin,
            mend=f"set max_length to {size} or more, or say what to do with them: overlength: truncate, drop or split",
        )

    def own_counts(self) -> dict[str, Any]:
        """See :class:`LengthFit`."""
        return {name: self.counts[name] for name in ("split", "pieces_dropped")}


def _int_array(tokens: Sequence[int]) -> IntArray:
    """Return token ids as an array, without a copy where they are in one."""
    return np.frombuffer(tokens, dtype=np.int32) if isinstance(tokens, array) else np.array(tokens, dtype=np.int32)


@dataclass(frozen=True)
class _Piece:
    """A row, or a part of it, as it is stored."""

    input_ids: IntArray
    labels: IntArray

    @property
    def first_trained(self) -> int:
        """The place of the first token that is trained on; the length where there is none."""
        trained = self.labels != IGNORE_INDEX
        return int(trained.argmax()) if trained.any() else len(trained)

    def cut(self, start: int, size: int) -> _Piece:
        """Return ``size`` tokens from ``start``; the first is not trained on, as no token comes before it."""
        labels = self.labels[start : start + size].copy()
        labels[0] = IGNORE_INDEX
        return _Piece(self.input_ids[start : start + size], labels)


def _supervised(pieces: Sequence[_Piece]) -> list[_Piece]:
    return [piece for piece in pieces if piece.first_trained < len(piece.labels)]
