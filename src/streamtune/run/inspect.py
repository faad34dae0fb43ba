"""Prepare the rows of a recipe as a run does, and measure them; no model is made."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from streamtune.data import BatchFacts
from streamtune.data.fit import Prepared
from streamtune.data.inspect_rows import RowInspector
from streamtune.data.length_measures import LengthBin, LengthChoice, choose_lengths, histogram
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import make_tokenizer
from streamtune.run.device import prepare_libraries
from streamtune.run.recipe_lines import blame_recipe, make_sources
from streamtune.run.start import Doing
from streamtune.tasks import task_of
from streamtune.tasks.grpo.task import GrpoData
from streamtune.tasks.task import Notify

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inspection:
    """The rows of a recipe as token ids, with everything that is counted of them."""

    loaded: LoadedRecipe
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared[Any, Any]
    rows: RowInspector
    limit: int
    """tokens: the recipe's ``max_length``, or ``max_prompt_length`` of prompts"""
    limit_name: str
    histogram: list[LengthBin]
    choices: list[LengthChoice]
    batches: BatchFacts | None
    """None of trees and prompts, whose batches depend on the model and on what it writes"""

    def to_json(self) -> dict[str, Any]:
        recipe = self.loaded.recipe
        return {
            **self.prepared.report.to_json(),
            "recipe": str(self.loaded.path),
            "objective": recipe.objective,
            "overlength": recipe.overlength,
            self.limit_name: self.limit,
            "vocabulary": len(self.tokenizer),
            "histogram": [asdict(each) for each in self.histogram],
            "lengths": [asdict(each) for each in self.choices],
            "batches": None if self.batches is None else asdict(self.batches),
        }


def inspect_recipe(
    loaded: LoadedRecipe, notify: Notify = lambda message: None, doing: Doing = nullcontext
) -> Inspection:
    """Read, render and fit the rows of a recipe."""
    recipe, task = loaded.recipe, task_of(loaded.recipe)
    with blame_recipe(loaded):
        prepare_libraries(torch.device("cpu"))
        sources = make_sources(loaded)
        with doing("making the tokenizer"):
            tokenizer = make_tokenizer(recipe, sources, None, notify)
        prepared: Prepared[Any, Any] = task.prepare(sources, tokenizer, notify)  # type: ignore[assignment]
    trees = task.scores and not isinstance(prepared, GrpoData)
    limit_name, limit = task.row_limit
    kinds = tuple(prepared.report.completion_lengths) if trees else ()
    unpaired = "desirable" in kinds or "undesirable" in kinds
    with doing("measuring the rows"):
        return Inspection(
            loaded=loaded,
            tokenizer=tokenizer,
            prepared=prepared,
            rows=RowInspector(
                prepared, tokenizer, ("desirable", "undesirable") if unpaired else ("chosen", "rejected")
            ),
            limit=limit,
            limit_name=limit_name,
            histogram=histogram(prepared.measured.lengths, limit),
            choices=choose_lengths(
                prepared.measured,
                limit,
                task.data_options(),
                batch_size=None if task.scores else recipe.per_device_train_batch_size,
                shuffle=recipe.shuffle,
                cuts_trees=trees,
            ),
            batches=task.batch_facts(prepared),
        )
