"""Run a rollout on several ranks: each rank completes and scores a part of the prompts, and all ranks get all results.

What follows (advantages, completions left out, rollouts drawn anew) is then decided alike on every rank, and a step's
micro-batches are divided among the ranks again. Random draws differ between ranks, as those of different prompts
should.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from streamtune import data, train
from streamtune.errors import ArgumentError
from streamtune.recipe.settings import RolloutSettings
from streamtune.tasks import rollout
from streamtune.tasks.grpo.groups import ScoreCompletions
from streamtune.tasks.grpo.objective import PolicyBatch
from streamtune.tasks.rewards import RewardScores
from streamtune.tasks.steps import accumulation

T = TypeVar("T")
Settings = TypeVar("Settings", bound=RolloutSettings)


def of_all_ranks(recipe: Settings, world: train.World) -> Settings:
    """Return the recipe with the micro-batches of all ranks together, as one rank would need them for the same steps.

    Raises:
        ArgumentError: Completions that are written at once do not make whole steps of all ranks.
    """
    if world.size == 1 and recipe.train_batch_size is None:
        return recipe
    steps, more = accumulation(recipe, world) * world.data_size, {}
    if recipe.steps_per_generation is not None:
        more["steps_per_generation"] = recipe.steps_per_generation * world.data_size
    whole = recipe.model_copy(update={"gradient_accumulation_steps": steps, "train_batch_size": None, **more})
    written, a_step = whole.completions_per_generation, whole.completions_per_step
    if written % whole.num_generations or written % a_step:
        raise ArgumentError(
            f"{written} completions written at once do not make whole optimizer steps of {a_step} on {world.data_size} "
            f"ranks, or not whole groups of {whole.num_generations}",
            where="generation_batch_size" if recipe.generation_batch_size is not None else "num_generations",
            mend="an optimizer step takes per_device_train_batch_size x gradient_accumulation_steps x ranks",
        )
    return whole


def _dealt(world: train.World, count: int, work: Callable[[list[int]], list[T]]) -> list[T]:
    """Return the results of ``work`` for every number below ``count``, each from one rank; each rank computes as many.

    A rank that has one less does the first once more: where weights are shared it has to take part.
    """
    size = world.data_size
    mine = list(range(world.data_rank, count, size))
    mine += [0] * (-(-count // size) - len(mine))
    found = world.gather(world.together(lambda: work(mine)))
    return [found[number % size][number // size] for number in range(count)]


class SharedWriter:
    """A :class:`streamtune.tasks.rollout.Writer` in which each rank completes a part of the prompts."""

    def __init__(self, writer: rollout.Writer, world: train.World) -> None:
        self.writer, self.world = writer, world

    def write(
        self, prompts: Sequence[list[int]], count: int | Sequence[int], sampling: rollout.Sampling
    ) -> list[list[rollout.Completion]]:
        if self.world.size == 1:
            return self.writer.write(prompts, count, sampling)

        def complete(mine: list[int]) -> list[list[tuple[list[int], bool]] | None]:
            try:
                counts = count if isinstance(count, int) else [count[i] for i in mine]
                written = self.writer.write([prompts[i] for i in mine], counts, sampling)
            except rollout.WritingStopped:  # no failure: it is to reach every rank as what it is
                return [None] * len(mine)
            return [[(each.token_ids, each.truncated) for each in completions] for completions in written]

        found = _dealt(self.world, len(prompts), complete)
        written = [
            [rollout.Completion(token_ids, truncated) for token_ids, truncated in completions]
            for completions in found
            if completions is not None
        ]
        if len(written) < len(found):
            raise rollout.WritingStopped
        return written


class SharedRewards:
    """Scores completions, each on one rank: a reward that is random is computed once and is the same on all ranks."""

    def __init__(self, score: ScoreCompletions, world: train.World) -> None:
        self.score, self.world = score, world

    def __call__(self, prompts: Sequence[data.Prompt], completions: Sequence[list[int]]) -> RewardScores:
        if self.world.size == 1:
            return self.score(prompts, completions)

        def score(mine: list[int]) -> list[tuple[float | None, dict[str, float | None]]]:
            scores = self.score([prompts[i] for i in mine], [completions[i] for i in mine])
            return [
                (total, {name: values[place] for name, values in scores.by_function.items()})
                for place, total in enumerate(scores.total)
            ]

        found = _dealt(self.world, len(completions), score)
        names = found[0][1] if found else {}
        return RewardScores(
            total=[total for total, _ in found],
            by_function={name: [scores[name] for _, scores in found] for name in names},
        )


class SharedLogprobs:
    """Computes the log-probs of micro-batches, each on one rank."""

    def __init__(self, world: train.World) -> None:
        self.world = world

    def __call__(
        self, logprobs: Callable[[PolicyBatch], list[float]], count: int, batch: Callable[[int], PolicyBatch]
    ) -> list[list[float]]:
        """Return ``logprobs(batch(number))`` of every number below ``count``."""
        return _dealt(self.world, count, lambda mine: [logprobs(batch(number)) for number in mine])
