"""Optimizer steps on a few rows of many: a large batch is drawn, and rows that stand for it are trained on.

    next_step()   N times the rows of a step are drawn, in the order of the sampler
                  each rank computes the sketch of the gradient of its share of them   (``train.sketch``)
                  rank 0 chooses among all, for all ranks                              (``data.batches.medoids``)
                  the chosen rows are a step like any other, shared between the ranks

The choice is a function of the rows, the weights and the optimizer's state, and is not kept: a resumed run draws the
step again and chooses the same rows. ``selected.jsonl`` has the choice of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from streamtune import data, train
from streamtune.recipe.settings import BatchSettings
from streamtune.tasks.steps import RowCost, Steps, Trainable
from streamtune.train.backend import TorchBackend
from streamtune.train.records import append_record, cut_after_step
from streamtune.train.sketch import RowSketch
from streamtune.train.step import explain_out_of_memory

SKETCH = 512
"""Numbers of a sketch: distances of a few hundred rows are kept within about a tenth."""


class SelectedSteps(Steps):
    """The :class:`streamtune.train.StepStream` of a run that chooses the rows of its steps; see the module.

    Args:
        batches: Makes batches of single rows, and of the chosen ones.
        recipe: As :class:`Steps` reads it; ``select_from`` is how many times the rows of a step are drawn.
        cost: The predicted time of a row.
        sketch: Computes the sketch of a row.
        bounds: [sources + 1] the first row of each source, and the number of all.
        sizes: [sources] rows of each that an epoch visits.
        origin: Returns the name of a row, ``file:row``.
        path: The file of choices.
        taken: Steps that were taken before.
    """

    def __init__(
        self,
        batches: Trainable,
        recipe: BatchSettings,
        world: train.World,
        cost: RowCost,
        *,
        sketch: RowSketch,
        bounds: Sequence[int],
        sizes: Sequence[int],
        origin: Callable[[int], str],
        path: Path,
        taken: int = 0,
    ) -> None:
        super().__init__(batches, recipe, world, cost)
        self.times = recipe.select_from
        self.step_size *= self.times
        self.sketch, self.bounds, self.small = sketch, bounds, data.small_sources(sizes)
        self.origin, self.path, self.taken = origin, path, taken
        self.mend = "write a smaller max_length, or delete select_rows"
        self.activity: Callable[[str], None] = lambda text: None
        """Called with what is being done."""
        self.stopped: Callable[[], bool] = lambda: False
        """Returns True if the run is to stop; then the step is any of the rows, and is not taken."""

    def begin(self, backend: train.Backend, progress: train.Progress, stop: train.StopRequest) -> None:
        """Take what a choice needs of the run. Choices after the step that it goes on from are made again."""
        assert isinstance(backend, TorchBackend), "no other has the moments of a whole weight"
        self.sketch.optimizer, self.activity = backend.optimizer, progress.activity
        self.stopped = lambda: stop.requested
        if self.world.is_main:
            cut_after_step(self.path, self.taken)

    def next_step(self) -> list[train.MicroBatch]:
        """Return a step of chosen rows; the last of an epoch is chosen from fewer rows."""
        drawn = self._draw()
        count = -(-len(drawn) // self.times)
        points = self._sketches(drawn)
        if points is None:
            return self._make(drawn[:count])
        sources = (np.searchsorted(self.bounds, drawn, side="right") - 1).tolist()
        places, kept, gap, chance = self.world.main(
            lambda: _plain(data.choose_rows(points, sources, count, self.small))
        )
        chosen = [drawn[place] for place in places]
        self.taken += 1
        if self.world.is_main:
            rows = [self.origin(row) for row in chosen]
            record = {"step": self.taken, "of": len(drawn), "kept": kept, "gap": gap, "chance": chance, "rows": rows}
            append_record(self.path, record)
        step = self._make(chosen)
        self._position = self.sampler.state_dict()
        return step

    def _sketches(self, drawn: Sequence[int]) -> np.ndarray | None:
        """Return the sketches of all rows, ``[rows, k]``, the same on every rank; None where the run is to stop."""
        places = range(len(drawn))
        shares = data.assign_rows(
            places, lambda place: self._cost_of(drawn[place]), ranks=self.world.data_size, batch_size=1
        )
        mine: dict[int, list[float]] = {}
        for number, own in enumerate(shares[self.world.data_rank]):
            if self.world.any(self.stopped()):
                return None
            self.activity(f"choosing rows {number + 1}/{len(shares[0])}")
            for place in own:
                batch = self.batches.training([drawn[place]])
                with explain_out_of_memory("choosing rows", [batch], self.mend):
                    mine[place] = self.sketch(batch).tolist()
        found = [(place, point) for share in self.world.gather(list(mine.items())) for place, point in share]
        return np.array([point for _, point in sorted(found, key=lambda each: each[0])], dtype=np.float64)


def _plain(choice: data.Choice) -> tuple[list[int], int, float, float]:
    return list(choice.places), choice.kept, choice.gap, choice.chance
