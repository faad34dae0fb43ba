"""The assignment of an optimizer step's rows to ranks, so that no rank waits long for another.

Ranks go through their micro-batches in lockstep: where weights are shared they wait for each other in every layer, so
a micro-step takes as long as its slowest batch; where each rank has all weights they wait at the end of the step. Rows
of a like cost are therefore computed at the same time, and a rank that has had more gets the cheaper batch next. A step
trains on the same rows for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Batches = list[list[int]]


def assign_rows(
    rows: Sequence[int], cost: Callable[[int], float], *, ranks: int, batch_size: int, padded: bool = True
) -> list[list[list[int]]]:
    """Assign the rows of one optimizer step to ranks and micro-batches.

    Args:
        rows: Numbers of the rows, in the order of the sampler; at least one.
        cost: Returns the predicted time of a row, given its number; in any unit.
        ranks: How many ranks there are.
        batch_size: Rows of a micro-batch at most.
        padded: True if the rows of a batch are padded to the longest, so that each takes as long as that one.

    Returns:
        For each rank its micro-batches, as many as the others have; each row is in exactly one. A batch is empty where
        there are fewer rows than batches. One rank keeps the order of the rows.
    """
    if ranks == 1:
        return [[list(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]]
    costs = {row: cost(row) for row in rows}
    micro_steps = -(-len(rows) // (ranks * batch_size))
    slowest_first = sorted(rows, key=lambda row: (-costs[row], row))

    def seconds(batch: Sequence[int]) -> float:
        if not batch:
            return 0.0
        return len(batch) * costs[batch[0]] if padded else sum(costs[row] for row in batch)

    dealt = [
        [_deal(group, costs, sizes, padded=padded) for group, sizes in _groups(slowest_first, sizes, ranks)]
        for sizes in _sizes(len(rows), ranks, micro_steps, batch_size)
    ]
    steps = min(dealt, key=lambda steps: sum(max(map(seconds, at_once)) for at_once in steps))
    shares: list[Batches] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for at_once in steps:
        least_first = sorted(range(ranks), key=lambda rank: loads[rank])
        for rank, batch in zip(least_first, sorted(at_once, key=seconds, reverse=True), strict=True):
            shares[rank].append(batch)
            loads[rank] += seconds(batch)
    return shares


def _sizes(count: int, ranks: int, micro_steps: int, batch_size: int) -> list[list[int]]:
    """Return ways to cut the rows, the slowest first, into batches, as the sizes of these.

    Rows that a step lacks to be full are lacking in its slowest batches: a little in each of them, or all in the first.
    """
    batches = ranks * micro_steps
    smaller, more = divmod(count, batches)
    if smaller == 0:
        return [[1] * more + [0] * (batches - more)]
    even = [smaller] * (batches - more) + [smaller + 1] * more
    first, left = [1] * batches, count - batches
    for index in reversed(range(batches)):
        added = min(batch_size - 1, left)
        first[index] += added
        left -= added
    return [even, first]


def _groups(rows: Sequence[int], sizes: Sequence[int], ranks: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the rows that are computed at the same time, with the sizes of their batches."""
    groups, start = [], 0
    for index in range(0, len(sizes), ranks):
        together = sizes[index : index + ranks]
        groups.append((rows[start : start + sum(together)], together))
        start += sum(together)
    return groups


def _deal(rows: Sequence[int], costs: dict[int, float], sizes: Sequence[int], *, padded: bool) -> Batches:
    """Return the batches of rows that are computed at the same time.

    Padded rows stay sorted, so that a batch has little padding. Others go one by one, the slowest first, to the batch
    that has the least so far.
    """
    batches: Batches = [[] for _ in sizes]
    if padded:
        start = 0
        for batch, size in zip(batches, sizes, strict=True):
            batch += rows[start : start + size]
            start += size
        return batches
    loads = [0.0] * len(sizes)
    for row in rows:
        open_ = (index for index, batch in enumerate(batches) if len(batch) < sizes[index])
        index = min(open_, key=lambda index: loads[index])
        batches[index].append(row)
        loads[index] += costs[row]
    return batches
