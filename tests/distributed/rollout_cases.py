"""Errors and stops of one rank while completions are written and scored, and what all ranks then do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, Qwen3Config

from streamtune import stream, train
from streamtune.errors import StreamTuneError
from streamtune.recipe import Recipe
from streamtune.run.ranks import make_backend
from streamtune.schedule import Schedule
from streamtune.tasks import rollout
from streamtune.tasks.grpo.groups import DistributedRewards, DistributedWriter
from streamtune.tasks.rewards import RewardScores
from tests.sft_kit import QWEN3


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
        self, prompts: Sequence[list[int]], count: int, sampling: rollout.Sampling, images: Any = None
    ) -> list[list[rollout.Completion]]:
        if self.stopped:
            raise rollout.GenerationStopped
        return [[rollout.Completion(prompt, truncated=False)] * count for prompt in prompts]


def divided(engine: str, world: train.World) -> list[str]:
    """Return how each rank ends whose weights are divided, if the last one is asked to stop in the first of batches."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3, vocab_size=64))
    recipe = Recipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        deepspeed=engine if engine != "fsdp" else None,
        fsdp=engine == "fsdp",
    )
    handle = stream(model, schedule=Schedule(chunk_size=8, head_chunk_size=8))
    backend = make_backend(recipe, model, handle.layers, world)
    writer = rollout.TransformersGenerator(
        model,
        end_token_ids=[],
        pad_token_id=0,
        prefill_chunk_size=8,
        max_rows=1,
        should_stop=lambda: world.rank == world.size - 1,
        max_over_ranks=world.max_over_ranks,
    )
    try:
        written = DistributedWriter(writer, world).write([[n, n + 1] for n in range(4)], 1, rollout.Sampling(2))
        outcome = f"{len(written)} written"
    except rollout.GenerationStopped:
        outcome = "GenerationStopped"
    found = world.gather_all_ranks(outcome)
    backend.close()
    return found


def run(case: str) -> Any:
    """Return how each rank ends: name and text of its error, or its result."""
    if case in ("fsdp", "zero3"):
        return divided(case, train.World(distributed.get_rank(), distributed.get_world_size()))
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
