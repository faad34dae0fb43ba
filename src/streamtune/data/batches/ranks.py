"""The assignment of an optimizer step's rows to ranks, so that no rank waits long for another.

Ranks go through their micro-batches in lockstep: where weights are shared they wait for each other in every layer, so
a micro-step takes as long as its longest batch. Batches are therefore made of rows of like length, and the batches
that are computed at the same time are of like length too. A step trains on the same rows for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["assign_rows"]


def assign_rows(
    rows: Sequence[int], length: Callable[[int], int], *, ranks: int, batch_size: int
) -> list[list[list[int]]]:
    """Assign the rows of one optimizer step to ranks and micro-batches.

    Args:
        rows: Numbers of the rows, in the order of the sampler; at least one.
        length: Returns the tokens of a row, given its number.
        ranks: How many ranks there are.
        batch_size: Rows of a micro-batch at most.

    Returns:
        For each rank its micro-batches, as many as the others have; each row is in exactly one. A batch is empty where
        there are fewer rows than batches. One rank keeps the order of the rows.
    """
    if ranks == 1:
        return [[list(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]]
    micro_steps = -(-len(rows) // (ranks * batch_size))
    longest_first = sorted(rows, key=lambda row: (-length(row), row))
    num_batches = micro_steps * ranks
    # As even as can be: the first batches have the row more, so that the last ones are the empty ones.
    smaller, more = divmod(len(rows), num_batches)
    batches, start = [], 0
    for index in range(num_batches):
        size = smaller + (index < more)
        batches.append(longest_first[start : start + size])
        start += size
    at_once = [batches[start : start + ranks] for start in range(0, num_batches, ranks)]
    # To and fro: the rank with the longest batch of one micro-step has the shortest of the next.
    turned = [batch[::-1] if index % 2 else batch for index, batch in enumerate(at_once)]
    return [[step[rank] for step in turned] for rank in range(ranks)]
