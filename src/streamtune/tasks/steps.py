"""Micro-batches of each optimizer step, divided among the ranks.

With ``select_rows`` each step draws many rows and trains on a few rows that represent them:

    next_step()   the sampler draws ``select_from`` times as many rows as the step trains on
                  each rank computes random projections of the gradients of its rows   (``train.sketch``)
                  rank 0 chooses rows from these projections, for all ranks            (``data.batches.choose_medoids``)
                  the chosen rows are divided among the ranks, as in any other step

The choice depends only on rows, weights and optimizer state, so a resumed run makes the same choice again. It is
recorded in ``selected.jsonl``, not in checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import nn

from streamtune import data, models, train
from streamtune.base.adapters import base_of
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.batching import BucketSpec
from streamtune.recipe.keys.learning_rate import FINAL_RATES
from streamtune.recipe.settings import BatchSettings
from streamtune.train.backend import TorchBackend
from streamtune.train.records import append_record, delete_records_after_step
from streamtune.train.sketch import RowSketch
from streamtune.train.step import explain_out_of_memory

LAYERS_WITHOUT_SCORES = ("linear_attention", "mamba", "conv", "moe", "mlp")
"""Types of layers without attention scores, whose cost is linear in the number of tokens."""


@dataclass(frozen=True)
class RowCost:
    """Predicted number of floating-point operations of a row, with a linear and a quadratic term in its length.

    Only the forward of a row with T tokens is counted. The backward multiplies both terms by about the same factor:

        2 P T               matrix products with P weights of layers and head
        2 sum(H D) T^2      causal attention, with H attention heads of D channels in each layer
        4 sum(H D) W T      attention within a sliding window of W tokens
    """

    per_token: float = 1.0
    """Number of operations per token."""
    per_square: float = 0.0
    """Number of operations per squared length of a row."""

    def __call__(self, tokens: int, squares: int) -> float:
        """Return the cost of rows with ``tokens`` tokens in total, whose squared lengths sum to ``squares``."""
        return self.per_token * tokens + self.per_square * squares

    @classmethod
    def from_model(cls, model: Any) -> RowCost:
        base = base_of(model)
        config = base.config.get_text_config(decoder=True)
        embedding: Any = base.get_input_embeddings()
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        weights = sum(_weights_per_token(name, parameter, config) for name, parameter in model.named_parameters())
        per_token = 2.0 * (weights - (0 if is_tied else models.full_parameter_size(embedding.weight)))
        heads = getattr(config, "num_attention_heads", None)
        heads = heads if isinstance(heads, int) else 0
        head_dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // max(1, heads))
        types = getattr(config, "layer_types", None) or ["full_attention"] * getattr(config, "num_hidden_layers", 0)
        window, per_square = getattr(config, "sliding_window", None), 0.0
        for layer_type in types:
            if layer_type in LAYERS_WITHOUT_SCORES:
                continue
            if "sliding" in layer_type and window:
                per_token += 4.0 * heads * head_dim * window
            else:
                per_square += 2.0 * heads * head_dim
        return cls(max(per_token, 1.0), per_square)


def _weights_per_token(name: str, parameter: nn.Parameter, config: Any) -> float:
    """Return how many weights of a parameter one token uses; of expert weights, only the fraction of chosen experts."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = chosen / experts if ".experts." in name and experts and chosen else 1.0
    return share * models.full_parameter_size(parameter)


def divide_among_ranks(batches: Iterable[train.MicroBatch], world: train.World) -> Iterator[train.MicroBatch]:
    """Yield this rank's batches. If another rank has one more, also yield a filler that does not count in the loss."""
    iterator = iter(batches)
    while group := list(islice(iterator, world.data_size)):
        filler = replace(group[0], filler=True)
        yield group[world.data_rank] if world.data_rank < len(group) else filler


class Units(Protocol):
    """Protocol of objects that have a number of training units (rows, pairs or completions)."""

    @property
    def num_training_units(self) -> int: ...


class BatchMaker(Units, Protocol):
    """Protocol of objects that make micro-batches from indices of training units."""

    @property
    def mixture(self) -> data.Mixture | None:
        """Visits per epoch to the units of each dataset, if datasets have weights; None: one visit to each unit."""
        ...

    @property
    def is_padded(self) -> bool:
        """True if the units of a batch are padded to the longest of them."""
        ...

    @property
    def buckets(self) -> npt.NDArray[np.int64] | None:
        """Length in tokens of each unit's bucket, ``[units]``; None if units are not grouped by length."""
        ...

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each unit, ``[units]``."""
        ...

    def squared_lengths(self) -> npt.NDArray[np.int64]:
        """Return the sum of the squared row lengths of each unit, ``[units]``."""
        ...

    def units_per_sequence(self, unit: int) -> int:
        """Return how many units of the same length as ``unit`` are concatenated into one sequence of a batch."""
        ...

    def training_batch(self, units: Sequence[int]) -> train.MicroBatch: ...


class Steps:
    """Makes the micro-batches of each optimizer step from training units (rows, pairs or completions).

    During a step, ``dataloader_num_workers`` threads prepare the next steps. A checkpoint has the position after the
    last step that was returned, not after the last step that was prepared.

    Args:
        batches: Object that makes a micro-batch of the requested units.
        world: All ranks of the run. The units of a step depend on the number of ranks only if the recipe counts the
            micro-batches of one rank (``batching: rows`` without ``train_batch_size``).
        cost: Function that predicts the cost of a unit, so that ranks get units of similar total cost.
    """

    def __init__(
        self, batches: BatchMaker, recipe: BatchSettings, world: train.World = train.WORLD, cost: RowCost = RowCost()
    ) -> None:
        self.batches, self.world, self.cost = batches, world, cost
        self.batch_size = recipe.per_device_train_batch_size
        self.step_size = self.batch_size * count_micro_batches(recipe, world) * world.data_size
        self.sampler = make_sampler(batches, recipe)
        self.workers = recipe.dataloader_num_workers
        self._lengths, self._squares = batches.lengths(), batches.squared_lengths()
        self._pool = ThreadPoolExecutor(self.workers, "batches") if self.workers else None
        self._prepared_steps: deque[tuple[Future[list[train.MicroBatch]], dict[str, Any]]] = deque()
        self._position = self.sampler.state_dict()

    def next_step(self) -> list[train.MicroBatch]:
        """Return this rank's micro-batches of the next step. A step never contains units of two epochs."""
        if self._pool is None:
            step = self._make_batches(self._draw_units())
            self._position = self.sampler.state_dict()
            return step
        while len(self._prepared_steps) <= self.workers:
            drawn = self._draw_units()
            self._prepared_steps.append((self._pool.submit(self._make_batches, drawn), self.sampler.state_dict()))
        prepared, self._position = self._prepared_steps.popleft()
        return prepared.result()

    def _draw_units(self) -> list[int]:
        if isinstance(self.sampler, data.StepSampler):
            return self.sampler.next_step()
        while not (step := next(self.sampler.batches(self.step_size), [])):
            pass  # The epoch is over, and this call has moved the sampler to the next one.
        return step

    def _make_batches(self, units: Sequence[int]) -> list[train.MicroBatch]:
        shares = data.assign_to_ranks(
            units,
            self._cost_of,
            ranks=self.world.data_size,
            batch_size=self.batch_size * self.batches.units_per_sequence(units[0]),
            padded=self.batches.is_padded,
        )
        mine = shares[self.world.data_rank]
        # A rank without rows computes the step's shortest row as a filler: it would wait for the other ranks anyway.
        shortest = min(units, key=self._cost_of) if not all(mine) else 0
        return [
            self.batches.training_batch(batch)
            if batch
            else replace(self.batches.training_batch([shortest]), filler=True)
            for batch in mine
        ]

    def _cost_of(self, unit: int) -> float:
        return self.cost(int(self._lengths[unit]), int(self._squares[unit]))

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prepared_steps.clear()
        self.sampler.load_state_dict(state)
        self._position = self.sampler.state_dict()


def make_sampler(batches: BatchMaker, recipe: BatchSettings) -> data.ResumableSampler | data.StepSampler:
    """Return a sampler of training units, or of whole optimizer steps if ``tokens_per_batch`` is set."""
    if batches.buckets is None or recipe.tokens_per_batch is None:
        rows = data.ResumableSampler(
            batches.num_training_units, seed=recipe.seed, shuffle=recipe.shuffle, mixture=batches.mixture
        )
        budget = recipe.tokens_per_batch
        return rows if budget is None else data.make_token_budget_sampler(rows, batches.lengths(), budget)
    spec = recipe.buckets or BucketSpec()
    return data.make_bucket_sampler(
        batches.buckets, recipe.tokens_per_batch, curriculum=spec.curriculum, cycles=spec.cycles, seed=recipe.seed
    )


def first_epoch_steps(batches: BatchMaker, recipe: BatchSettings) -> data.EpochSteps:
    sampler = make_sampler(batches, recipe)
    if isinstance(sampler, data.StepSampler):
        return sampler.epoch_steps(0)
    rows = recipe.train_batch_size or recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    order = sampler.epoch_order(0)
    stops = np.arange(rows, len(order) + rows, rows).clip(max=len(order))
    return data.EpochSteps(order, stops)


@dataclass(frozen=True)
class StepPlan:
    """Numbers of optimizer steps of a run, of its first epoch, and of its learning-rate warm-up."""

    total_steps: int
    steps_per_epoch: int | None
    """Steps of the first epoch; None for streamed rows, whose number is unknown."""
    warmup_steps: int
    supervised_steps: int = 0
    """Supervised steps before the first rollout; ``total_steps`` includes them."""

    @property
    def unfinished_warmup_warning(self) -> str | None:
        """Warning if the run ends before the learning rate reaches its peak, else None."""
        steps = self.total_steps - self.supervised_steps
        if self.warmup_steps < max(1, steps):
            return None
        return (
            f"warm-up takes {self.warmup_steps:,} steps, but the run has {steps:,}: the learning rate ends at "
            f"{steps / (self.warmup_steps + 1):.0%} of learning_rate; write fewer warmup_steps, or warmup_ratio: 0.03"
        )


def peak_learning_rate(recipe: BatchSettings, world: train.World) -> float:
    """Return the recipe's learning rate; with ``lr_scaling_base`` it is scaled by the size of an optimizer step."""
    if recipe.lr_scaling_base is None:
        return recipe.learning_rate
    size = recipe.tokens_per_batch
    if size is None:
        size = count_micro_batches(recipe, world) * recipe.per_device_train_batch_size * world.data_size
    share = size / recipe.lr_scaling_base
    return recipe.learning_rate * (math.sqrt(share) if recipe.lr_scaling == "sqrt" else share)


def check_final_learning_rate(recipe: BatchSettings, world: train.World) -> None:
    """Check that the schedule does not rise above its peak, which ``lr_scaling`` may have lowered.

    Raises:
        ArgumentError: The final learning rate is above the peak.
    """
    peak = peak_learning_rate(recipe, world)
    for option in FINAL_RATES:
        final = recipe.lr_scheduler_kwargs.get(option, 0)
        if final > peak:
            raise ArgumentError(
                f"the schedule would rise to {option} {final:g}: lr_scaling makes of learning_rate "
                f"{recipe.learning_rate:g} a peak of {peak:.4g}, which is lower",
                where="lr_scheduler_kwargs",
                fix=f"write {option} below {peak:.4g}, a higher learning_rate, or lr_scaling: none",
            )


def count_micro_batches(recipe: BatchSettings, world: train.World) -> int:
    """Return how many micro-batches one rank computes in an optimizer step.

    With ``tokens_per_batch`` the number is computed for rows of ``max_length`` tokens. It is then at least two (one if
    buckets are packed), because shorter rows make more micro-batches. From two micro-batches on, gradients of the first
    occupy memory during the second.

    Raises:
        ArgumentError: ``train_batch_size`` is not a multiple of the rows that all ranks compute at a time.
    """
    if recipe.tokens_per_batch is not None:
        rows_at_once = recipe.per_device_train_batch_size * recipe.max_length * world.data_size
        minimum = 1 if recipe.batching == "buckets" and recipe.packing else 2
        return max(minimum, -(-recipe.tokens_per_batch // rows_at_once))
    if recipe.train_batch_size is None:
        return recipe.gradient_accumulation_steps
    rows_at_once = recipe.per_device_train_batch_size * world.data_size
    if recipe.train_batch_size % rows_at_once:
        ranks = f"{world.data_size} ranks" if world.data_size > 1 else "one rank"
        raise ArgumentError(
            f"train_batch_size must be a multiple of {rows_at_once}, found {recipe.train_batch_size}: {ranks} with "
            f"per_device_train_batch_size {recipe.per_device_train_batch_size} compute {rows_at_once} rows at a time",
            where="train_batch_size",
            fix=f"write a multiple of {rows_at_once}, a smaller per_device_train_batch_size, or use another number of "
            "ranks",
        )
    return recipe.train_batch_size // rows_at_once


SKETCH_SIZE = 512
"""Number of values of a projected gradient. Distances between a few hundred rows are preserved to about 10%."""


class SelectedSteps(Steps):
    """Makes optimizer steps that train on a few rows, chosen to represent many drawn rows (``select_rows``).

    Args:
        batches: Object that makes micro-batches: of single rows to compare them, and of the chosen rows.
        recipe: Settings of :class:`Steps`. For each step, the rows of ``select_from`` steps are drawn.
        sketch: Function that returns a random projection (sketch) of a row's gradient.
        source_bounds: Index of the first row of each source, then the number of all rows, ``[sources + 1]``.
        source_sizes: Number of rows of each source that an epoch visits, ``[sources]``.
        origin_of_row: Function that returns ``file:row`` for the index of a row.
        record_path: JSON-lines file that records the choices.
    """

    def __init__(
        self,
        batches: BatchMaker,
        recipe: BatchSettings,
        world: train.World,
        cost: RowCost,
        *,
        sketch: RowSketch,
        source_bounds: Sequence[int],
        source_sizes: Sequence[int],
        origin_of_row: Callable[[int], str],
        record_path: Path,
        steps_taken: int = 0,
    ) -> None:
        super().__init__(batches, recipe, world, cost)
        self.draws_per_row = recipe.select_from
        self.step_size *= self.draws_per_row
        self.sketch, self.source_bounds = sketch, source_bounds
        self.small_sources = data.find_small_sources(source_sizes)
        self.origin_of_row, self.record_path, self.steps_taken = origin_of_row, record_path, steps_taken
        self.out_of_memory_fix = "write a smaller max_length, or delete select_rows"
        self.show_activity: Callable[[str], None] = lambda text: None
        """Function called with a short description of the current computation."""
        self.is_stopped: Callable[[], bool] = lambda: False
        """Function that returns True if a stop was requested. The next step's rows are then arbitrary, and not
        trained on."""

    def before_first_step(self, backend: train.Backend, progress: train.Progress, stop: train.StopRequest) -> None:
        """Store the run's optimizer, progress display and stop request; delete records of steps that are repeated."""
        assert isinstance(backend, TorchBackend), "select_rows needs a backend with optimizer moments of whole weights"
        self.sketch.optimizer, self.show_activity = backend.optimizer, progress.show_activity
        self.is_stopped = lambda: stop.requested
        if self.world.is_main:
            delete_records_after_step(self.record_path, self.steps_taken)

    def next_step(self) -> list[train.MicroBatch]:
        """Return this rank's micro-batches of chosen rows. At the end of an epoch, fewer rows are drawn and chosen."""
        drawn = self._draw_units()
        count = -(-len(drawn) // self.draws_per_row)
        sketches = self._sketch_rows(drawn)
        if sketches is None:
            return self._make_batches(drawn[:count])
        sources = (np.searchsorted(self.source_bounds, drawn, side="right") - 1).tolist()
        positions, kept, gap, chance = self.world.run_on_rank_0(
            lambda: _choice_to_tuple(data.choose_rows_to_train(sketches, sources, count, self.small_sources))
        )
        chosen = [drawn[position] for position in positions]
        self.steps_taken += 1
        if self.world.is_main:
            rows = [self.origin_of_row(row) for row in chosen]
            record = {
                "step": self.steps_taken,
                "of": len(drawn),
                "kept": kept,
                "gap": gap,
                "chance": chance,
                "rows": rows,
            }
            append_record(self.record_path, record)
        step = self._make_batches(chosen)
        self._position = self.sampler.state_dict()
        return step

    def _sketch_rows(self, drawn: Sequence[int]) -> np.ndarray | None:
        """Return gradient projections of the rows, ``[rows, k]``, equal on all ranks; None after a stop request."""
        positions = range(len(drawn))
        shares = data.assign_to_ranks(
            positions, lambda position: self._cost_of(drawn[position]), ranks=self.world.data_size, batch_size=1
        )
        sketches: dict[int, list[float]] = {}
        for number, share in enumerate(shares[self.world.data_rank]):
            if self.world.any_rank(self.is_stopped()):
                return None
            self.show_activity(f"choosing rows {number + 1}/{len(shares[0])}")
            for position in share:
                batch = self.batches.training_batch([drawn[position]])
                with explain_out_of_memory("choosing rows", [batch], self.out_of_memory_fix):
                    sketches[position] = self.sketch(batch).tolist()
        found = [
            (position, point)
            for items in self.world.gather_data_ranks(list(sketches.items()))
            for position, point in items
        ]
        return np.array([point for _, point in sorted(found, key=lambda each: each[0])], dtype=np.float64)


def _choice_to_tuple(choice: data.ChosenRows) -> tuple[list[int], int, float, float]:
    return list(choice.places), choice.kept, choice.gap, choice.chance
