"""The micro-batches of one optimizer step after another, shared between the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from streamtune import data, train
from streamtune.errors import ArgumentError
from streamtune.recipe.schema import Recipe

__all__ = ["StepPlan", "Steps", "Trainable", "accumulation", "share_out"]


def share_out(batches: Iterable[train.MicroBatch], world: train.World) -> Iterator[train.MicroBatch]:
    """Iterate over this rank's part of some batches. Each rank gets as many, with a filler where there are too few."""
    together = iter(batches)
    while at_once := list(islice(together, world.data_size)):
        filler = replace(at_once[0], filler=True)
        yield at_once[world.data_rank] if world.data_rank < len(at_once) else filler


class Trainable(Protocol):
    """Something that makes micro-batches of numbered training units."""

    @property
    def num_train(self) -> int:
        """Number of units."""
        ...

    @property
    def mixture(self) -> data.Mixture | None:
        """Visits of an epoch to the units of each source; None visits each unit once."""
        ...

    def length(self, unit: int) -> int:
        """Return the number of tokens of a unit."""
        ...

    def training(self, units: Sequence[int]) -> train.MicroBatch:
        """Return the batch of some units."""
        ...


class Steps:
    """The training units, shuffled or in their own order, as the micro-batches of one optimizer step after the other.

    With ``dataloader_num_workers`` so many threads prepare the next steps while one is trained on. The position of the
    stream is that of the last step returned, not of the last step prepared.

    Args:
        batches: Makes them.
        recipe: Gives the size and number of micro-batches, the seed, and the number of threads.
        world: The ranks that share a step. The units of a step depend on their number only where the recipe counts the
            micro-batches of one rank (no ``train_batch_size``).
    """

    def __init__(
        self,
        batches: Trainable,
        recipe: Recipe,
        world: train.World = train.World(),  # noqa: B008 (frozen)
    ) -> None:
        self.batches, self.world = batches, world
        self.batch_size = recipe.per_device_train_batch_size
        self.micro_batches = accumulation(recipe, world) * world.data_size
        self.sampler = data.ResumableSampler(
            batches.num_train, seed=recipe.seed, shuffle=recipe.shuffle, mixture=batches.mixture
        )
        self.workers = recipe.dataloader_num_workers
        self._pool = ThreadPoolExecutor(self.workers, "batches") if self.workers else None
        self._coming: deque[tuple[Future[list[train.MicroBatch]], dict[str, Any]]] = deque()
        self._position = self.sampler.state_dict()

    def next_step(self) -> list[train.MicroBatch]:
        """See :class:`streamtune.train.StepStream`. No step reaches over the end of an epoch."""
        if self._pool is None:
            step = self._make(self._draw())
            self._position = self.sampler.state_dict()
            return step
        while len(self._coming) <= self.workers:
            drawn = self._draw()
            self._coming.append((self._pool.submit(self._make, drawn), self.sampler.state_dict()))
        prepared, self._position = self._coming.popleft()
        return prepared.result()

    def _draw(self) -> list[list[int]]:
        while not (step := list(islice(self.sampler.batches(self.batch_size), self.micro_batches))):
            pass  # The epoch was over; asking has moved the sampler on to the next one.
        return step

    def _make(self, step: Sequence[Sequence[int]]) -> list[train.MicroBatch]:
        """Return this rank's micro-batches of a step."""
        units = [unit for batch in step for unit in batch]
        shares = data.assign_rows(units, self.batches.length, ranks=self.world.data_size, batch_size=self.batch_size)
        mine = shares[self.world.data_rank]
        # A rank without a row of its own computes the shortest of the others': it waits for them in any case.
        shortest = min(units, key=self.batches.length) if not all(mine) else 0
        return [
            self.batches.training(batch) if batch else replace(self.batches.training([shortest]), filler=True)
            for batch in mine
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler after the last step that was returned."""
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of another stream over the same units."""
        self._coming.clear()
        self.sampler.load_state_dict(state)
        self._position = self.sampler.state_dict()


@dataclass(frozen=True)
class StepPlan:
    """The number of optimizer steps, and of those over which the learning rate rises."""

    total_steps: int
    steps_per_epoch: int
    warmup_steps: int
    supervised_steps: int = 0
    """Supervised steps before the first rollout, among the ``total_steps``."""


def accumulation(recipe: Recipe, world: train.World) -> int:
    """Return the number of micro-batches of a rank in one optimizer step.

    Raises:
        ArgumentError: The rows of a step are no multiple of those of all ranks' micro-batches.
    """
    if recipe.train_batch_size is None:
        return recipe.gradient_accumulation_steps
    at_once = recipe.per_device_train_batch_size * world.data_size
    if recipe.train_batch_size % at_once:
        ranks = f"{world.data_size} ranks" if world.data_size > 1 else "one rank"
        raise ArgumentError(
            f"train_batch_size is {recipe.train_batch_size}, and {ranks} with per_device_train_batch_size "
            f"{recipe.per_device_train_batch_size} compute {at_once} rows at a time, which does not divide it",
            where="train_batch_size",
            mend=f"write a multiple of {at_once}, a smaller per_device_train_batch_size, or start other ranks",
        )
    return recipe.train_batch_size // at_once
