"""Cut rows that are too long: the tokens that a cut keeps, and the pieces that a row is split into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamtune.data.options import SPLIT_AT, RowPolicy

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Kept:
    """Tokens ``start`` to ``stop`` (exclusive) of a row, the first ``context`` of which are not trained on."""

    start: int
    stop: int
    context: int = 0


def cut_row(trained: Mask, policy: RowPolicy, *, head: int, has_answer: bool) -> list[Kept]:
    """Return the parts of a row that a cut keeps: one, or its beginning and its end.

    The first token of a part is not trained on: what comes before it is missing.

    - ``right`` keeps the beginning of the row, ``left`` its end, ``middle`` both: half the length for each, and more
      for the end if the last answer fits then.
    - ``auto`` is ``right`` for a document. Of other rows it is ``left`` where the last answer fits, with a token before
      it. Else it keeps the beginning of that answer, and before it as much as half the length can hold.

    ``left``, ``middle`` and ``auto`` keep the head as well, where it takes at most half the length and something that
    is trained stays.

    Args:
        trained: [T] True where a token is trained on; T is over the length.
        policy: The length, and the side.
        head: Tokens of the head.
        has_answer: True if a prompt comes before what is trained.
    """
    size, most, side = len(trained), policy.max_length, policy.truncate_side
    if side == "right" or (side == "auto" and not has_answer):
        return [Kept(0, most, 1)]
    answer, _ = last_answer(trained)
    needed = size - answer + 1
    if side == "auto" and needed > most:
        start = answer - min(answer, most // 2)
        return _with_head(trained, head if start > 0 else 0, Kept(start, start + most, 1), most)
    if side == "middle":
        end = max(most - most // 2, needed if has_answer and needed <= most - head else 0)
        first = most - end
        return [Kept(0, first, 1), Kept(size - end, size, 1)] if first else [Kept(size - end, size, 1)]
    return _with_head(trained, head, Kept(size - most, size, 1), most)


def _with_head(trained: Mask, head: int, kept: Kept, most: int) -> list[Kept]:
    """Return a part with the head before it, for which it makes room; the part alone where there is none."""
    shorter = Kept(kept.start + head, kept.stop, 1)
    if not head or head > most // 2 or not trained[shorter.start + 1 : shorter.stop].any():
        return [kept]
    return [Kept(0, head, 1), shorter]


def last_answer(trained: Mask) -> tuple[int, int]:
    """Return start and stop of the last tokens in a row that are trained on; the size twice if there are none."""
    places = np.flatnonzero(trained)
    if not len(places):
        return len(trained), len(trained)
    stop = int(places[-1]) + 1
    before = np.flatnonzero(~trained[:stop])
    return (int(before[-1]) + 1 if len(before) else 0), stop


def least_kept(trained: Mask, policy: RowPolicy, *, has_answer: bool) -> int:
    """Return the greatest length at which a cut leaves nothing that is trained on: the row is then left out."""
    size, side = len(trained), policy.truncate_side
    if side == "auto" and has_answer:
        return 1
    first = int(trained.argmax()) if trained.any() else size
    if side in ("auto", "right"):
        return first
    start, stop = last_answer(trained)
    if side == "left":
        return size - stop + 1
    halves = min(2 * first + 1, 2 * (size - stop) + 2)
    return min(size - start, halves) if has_answer else halves


def split_row(trained: Mask, policy: RowPolicy, breaks: npt.NDArray[np.uint8] | None) -> list[Kept]:
    """Return the pieces of a row: their tokens without the context are the row.

    A piece ends at the last of the strongest borders that it may have: a new exchange of a chat if something before it
    is trained, else a paragraph or a line in the second half of the piece, else a token.

    Args:
        trained: [T] True where a token is trained on.
        policy: The length, the strongest border and the overlap.
        breaks: [T] border before each token, as an index of :data:`SPLIT_AT`; None cuts at tokens.
    """
    size, start, pieces = len(trained), 0, []
    while start < size:
        context = min(policy.split_overlap, start)
        room = policy.max_length - context
        stop = size if size - start <= room else start + room
        if stop < size and breaks is not None:
            stop = _border(trained, breaks, start, stop, max(context, 1), SPLIT_AT.index(policy.split_at))
        # Nothing comes before the first token of a row, and of a piece without context.
        pieces.append(Kept(start - context, stop, max(context, 1)))
        start = stop
    return pieces


def _border(trained: Mask, breaks: npt.NDArray[np.uint8], start: int, stop: int, context: int, strongest: int) -> int:
    """Return the end of a piece that starts at ``start`` and ends at ``stop`` at most."""
    inside = breaks[start + 1 : stop + 1]
    for kind in range(strongest, 0, -1):
        places = np.flatnonzero(inside >= kind)
        if not len(places):
            continue
        place = start + 1 + int(places[-1])
        if SPLIT_AT[kind] == "turn":
            if trained[start:place].any():
                return place
        elif place - start >= (stop - start) / 2:
            return place
    return stop
