"""Make the record of a step with one more period of layers from that of a step that ran.

Layers of a zone are alike but for those of the first and the last period (``simulate.extrapolate``), and a step goes
through them one after another, forward and backward. So the step with a period more does what the shorter one does, and
the period in the middle twice. Its cells are repeated, with all bytes higher by what passing through the period adds to
them, and so are the bytes of all cells that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import add

from streamtune.plan.simulate.memory import KINDS
from streamtune.plan.simulate.trace import COLUMNS, Cell, CellPlace

STAYS = [name in (*KINDS, "host", "disk") for name in COLUMNS]
"""For each column of a moment, True if its bytes are still there when the operator is done."""

Bytes = tuple[int, ...]
Run = list[tuple[CellPlace, Cell]]


def with_a_period_more(cells: Mapping[CellPlace, Cell], middle: range) -> dict[CellPlace, Cell] | None:
    """Return the cells of the step in which the period ``middle`` of layers comes twice.

    Args:
        cells: The cells of a step, in the order in which they began.
        middle: The layers of a period that has layers before and behind it.

    Returns:
        The cells in their order, with layers renumbered; None where the step does not pass through the layers one after
        another, so that the longer one has to be run.
    """
    runs: list[Run] = [list(run) for _, run in groupby(cells.items(), key=lambda item: item[0].layer in middle)]
    found: dict[CellPlace, Cell] = {}
    shift: Bytes = (0,) * len(COLUMNS)
    for index, run in enumerate(runs):
        if run[0][0].layer not in middle:
            found |= _shifted(run, shift, middle.stop, len(middle))
            continue
        before = _first_layer(item for other in reversed(runs[:index]) for item in reversed(other))
        behind = _first_layer(item for other in runs[index + 1 :] for item in other)
        if before is None or behind is None or (before < middle.start) == (behind < middle.start):
            return None
        upward = before < behind
        found |= _shifted(run, shift, middle.start, 0 if upward else len(middle))
        begin, end = run[0][1].moments[0], runs[index + 1][0][1].moments[0]
        passed = (now - then if stays else 0 for now, then, stays in zip(end, begin, STAYS, strict=True))
        shift = tuple(map(add, shift, passed))
        found |= _shifted(run, shift, middle.start, len(middle) if upward else 0)
    return found


def _first_layer(cells: Iterable[tuple[CellPlace, Cell]]) -> int | None:
    return next((place.layer for place, _ in cells if place.layer is not None), None)


def _shifted(run: Run, shift: Bytes, first: int, more: int) -> Iterator[tuple[CellPlace, Cell]]:
    """Yield cells with all bytes higher by ``shift``, and the numbers of layers from ``first`` on by ``more``."""
    for place, cell in run:
        number = place.layer
        moved = replace(place, layer=number + more) if number is not None and number >= first else place
        moments = [tuple(map(add, moment, shift)) for moment in cell.moments] if any(shift) else cell.moments
        yield moved, replace(cell, moments=moments)
