"""Supervised fine-tuning: the mean loss of the next tokens of rows, packed or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from streamtune import data, train
from streamtune.engine import StreamHandle, check_packing
from streamtune.recipe.schema import Recipe
from streamtune.tasks.random_batches import RandomTokens
from streamtune.tasks.task import Notify, RandomStep, Task, TrialStep, chat_options, held_back, row_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Batches", "Sft"]


class Sft(Task[Recipe]):
    """The task of ``objective: sft``."""

    @property
    def step_unit(self) -> str:
        """See :class:`Task`."""
        return "packed sequence" if self.recipe.packing else "row"

    def prepare(
        self,
        sources: Sequence[data.Source],
        tokenizer: PreTrainedTokenizerBase,
        notify: Notify,
        *,
        val_size: float | None = None,
    ) -> data.PreparedData:
        """See :meth:`Task.prepare`."""
        recipe = self.recipe
        with held_back(notify) as notify_later:
            return data.prepare(
                sources,
                tokenizer,
                max_length=recipe.max_length,
                overlength=recipe.overlength,
                truncate_side=recipe.truncate_side,
                split_at=recipe.split_at,
                split_overlap=recipe.split_overlap,
                train_on=recipe.train_on,
                val_size=recipe.val_size if val_size is None else val_size,
                packing=recipe.packing,
                seed=recipe.seed,
                on_bad_row=recipe.on_bad_row,
                max_bad_rows=recipe.max_bad_rows,
                chat=chat_options(recipe),
                cache=row_cache(recipe),
                notify=notify_later,
            )

    def planned_length(self, longest: int) -> int:
        """See :meth:`Task.planned_length`: a pack may be as long as the recipe lets it be."""
        return self.recipe.max_length if self.recipe.packing else longest

    def check_model(self, handle: StreamHandle) -> None:
        """See :meth:`Task.check_model`."""
        if self.recipe.packing:
            check_packing(handle)

    def batches(self, prepared: data.PreparedData, tokenizer: PreTrainedTokenizerBase, *, share: bool) -> Batches:
        """See :meth:`Task.batches`."""
        return Batches(prepared, tokenizer)

    def objective(self, scorer: Any, reference: train.Reference | None, device: torch.device) -> train.Objective:
        """See :meth:`Task.objective`."""
        return train.SupervisedObjective(scorer)

    def random_step(self, trial: TrialStep) -> RandomStep:
        """See :meth:`Task.random_step`."""
        draw = RandomTokens(self.recipe, trial.model)
        batches = [draw.rows(trial.batch_size, trial.length).to(trial.device) for _ in self._micro_batches()]
        return self.objective(trial.handle, None, trial.device), lambda: batches


@dataclass(frozen=True)
class Batches:
    """Makes padded micro-batches from examples."""

    prepared: data.PreparedData
    tokenizer: PreTrainedTokenizerBase

    def collate(self, units: Sequence[Sequence[data.Example]]) -> train.MicroBatch:
        """Make a batch with one sequence for each unit: an example, or the examples of a pack."""
        origins = tuple(example.origin for unit in units for example in unit)
        pad = self.tokenizer.pad_token_id
        if self.prepared.packs is None:
            batch = data.collate([example for unit in units for example in unit], pad_token_id=pad)
            return train.MicroBatch(**batch, origins=origins)
        return train.MicroBatch(**data.collate_packed(units, pad_token_id=pad), origins=origins)

    @property
    def num_train(self) -> int:
        """Sequences to train on: examples, or packs of them."""
        return len(self.prepared.train if self.prepared.packs is None else self.prepared.packs)

    @property
    def mixture(self) -> data.Mixture | None:
        """See :class:`streamtune.tasks.steps.Trainable`."""
        return self.prepared.mixture

    def training(self, units: Sequence[int]) -> train.MicroBatch:
        """Return the batch of some training sequences."""
        return self.collate([self._unit(self.prepared.train, self.prepared.packs, unit) for unit in units])

    def length(self, unit: int) -> int:
        """Return the number of tokens of a training sequence."""
        return sum(len(example.input_ids) for example in self._unit(self.prepared.train, self.prepared.packs, unit))

    def held_out(self, batch_size: int, part: data.EvalSet | None = None) -> Iterator[train.MicroBatch]:
        """Iterate over batches of the held-out sequences, or of one set of them, in their own order."""
        examples, packs = self.prepared.validation, self.prepared.validation_packs
        rows = range(len(examples)) if part is None else range(part.start, part.stop)
        units = rows if packs is None else packs.of_rows(rows.start, rows.stop)
        for start in range(0, len(units), batch_size):
            yield self.collate([self._unit(examples, packs, unit) for unit in units[start : start + batch_size]])

    @staticmethod
    def _unit(examples: Sequence[data.Example], packs: data.Packs | None, unit: int) -> list[data.Example]:
        return [examples[row] for row in ([unit] if packs is None else packs[unit])]
