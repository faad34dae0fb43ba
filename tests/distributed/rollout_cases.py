"""Errors and stops of one rank while completions are written and scored, and what all ranks then do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import distributed

from streamtune import train
from streamtune.errors import StreamTuneError
from streamtune.tasks import rollout
from streamtune.tasks.grpo.groups import DistributedRewards, DistributedWriter
from streamtune.tasks.rewards import RewardScores


class _BrokenError(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("no")
        self.lock = threading.Lock()


class _Writer:
    """Writes each prompt's own ids; may request a stop."""

    def __init__(self, stopped: bool) -> None:
        self.stopped = stopped

    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: rollout.Sampling
    ) -> list[list[rollout.Completion]]:
        if self.stopped:
            raise rollout.GenerationStopped
        return [[rollout.Completion(prompt, truncated=False)] * count for prompt in prompts]


def run(case: str) -> Any:
    """Return how each rank ends: name and text of its error, or its result."""
    world = train.World(distributed.get_rank(), distributed.get_world_size())
    last = world.rank == world.size - 1

    def judge(prompts: Sequence[Any], completions: Sequence[list[int]]) -> RewardScores:
        if case == "judge" and last:
            raise _BrokenError
        return RewardScores(total=[float(ids[0]) for ids in completions], by_function={})

    prompts = [[number] for number in range(2 * world.size + 1)]
    try:
        writer = DistributedWriter(_Writer(case == "stop" and last), world)
        written = writer.write(prompts, 1, rollout.Sampling(1))
        ids = [completions[0].token_ids for completions in written]
        outcome: Any = DistributedRewards(judge, world)([None] * len(ids), ids).total  # type: ignore[list-item]
    except (rollout.GenerationStopped, StreamTuneError, _BrokenError) as error:
        outcome = f"{type(error).__name__}: {error}"
    return world.gather_all_ranks(outcome)
