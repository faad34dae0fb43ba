"""The choice of held-out rows: whole groups, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamtune.errors import DataError

__all__ = ["choose_held_out"]


def choose_held_out(digests: Sequence[bytes], val_size: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the held-out rows, [kept rows]. Rows with the same digest stay together.

    Args:
        digests: For every kept row a hash of what must not be in both parts: its tokens, or its prompt.
        val_size: Rows to hold out: a fraction below 1, or a count.
        seed: Seed of the draw.

    Raises:
        DataError: Nothing would be left to train on.
    """
    held_out = np.zeros(len(digests), dtype=np.bool_)
    if val_size <= 0:
        return held_out
    wanted = max(1, round(val_size * len(digests))) if val_size < 1 else int(val_size)
    groups: dict[bytes, list[int]] = {}
    for row, digest in enumerate(digests):
        groups.setdefault(digest, []).append(row)
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    count = 0
    for digest in order:
        if count >= wanted:
            break
        held_out[groups[digest]] = True
        count += len(groups[digest])
    if held_out.all():
        raise DataError(
            f"val_size = {val_size:g} holds out all of the {len(digests):,} rows ({len(groups):,} different ones)",
            where="val_size",
            mend="hold out fewer rows, or add data",
        )
    return held_out
