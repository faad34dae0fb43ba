"""Evaluate a run or a model on the rows of a recipe: build it, score its rows without gradients, sum up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from streamtune import data, models, train
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError
from streamtune.labels import IGNORE_INDEX
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import make_sources
from streamtune.run.device import blame_recipe, choose_device, prepare_libraries, stream_model
from streamtune.run.model import make_reference_model
from streamtune.run.plan import plan_model
from streamtune.tasks import task_of

__all__ = ["SPLITS", "LossSum", "evaluate_model"]

SPLITS = ("held-out", "train", "all")
"""Values of ``--split``."""


@dataclass
class LossSum:
    """The sum of the losses of some tokens, and of their squares."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, losses: torch.Tensor) -> None:
        """Add the losses of some tokens, ``[K]``."""
        wide = losses.double()
        self.tokens += wide.numel()
        self.total += float(wide.sum())
        self.squares += float(wide.square().sum())

    def to_json(self) -> dict[str, Any]:
        """Return the mean in nats, its standard error (tokens taken as independent), perplexity and the count."""
        if not self.tokens:
            return {"tokens": 0, "loss": None, "standard_error": None, "perplexity": None}
        mean = self.total / self.tokens
        spread = max(0.0, self.squares / self.tokens - mean * mean)
        error = math.sqrt(spread / (self.tokens - 1)) if self.tokens > 1 else None
        perplexity = math.exp(mean) if mean < 700 else None
        return {"tokens": self.tokens, "loss": mean, "standard_error": error, "perplexity": perplexity}


@dataclass
class _Sums:
    rows: dict[str, int] = field(default_factory=dict)
    sets: dict[str, LossSum] = field(default_factory=dict)
    buckets: dict[int, LossSum] = field(default_factory=dict)
    whole: LossSum = field(default_factory=LossSum)


def evaluate_model(
    loaded: LoadedRecipe,
    folder: Path,
    *,
    split: str = "held-out",
    max_rows: int | None = None,
    notify: Callable[[str], None] = lambda message: None,
    doing: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    rows_done: Callable[[int, int], None] = lambda done, rows: None,
) -> dict[str, Any]:
    """Return the document of ``streamtune eval``: loss by named set and by position in the row.

    Args:
        loaded: The recipe whose rows are scored.
        folder: The model or the adapters, in Hugging Face format, with a tokenizer.
        split: One of :data:`SPLITS`.
        max_rows: Rows scored at most, of each split.
        notify: Called with messages for the user, a sentence at a time.
        doing: Returns a context that shows a message while something takes long.
        rows_done: Called after each batch with the rows that are done and all rows.

    Raises:
        ArgumentError: The objective's loss is not one on next tokens, or the split has no rows.
        UserError: With the line of the recipe that is to blame.
    """
    recipe = loaded.recipe
    task = task_of(recipe)
    if task.scores:
        raise ArgumentError(
            f"eval scores the next tokens of rows; the recipe's objective is {recipe.objective}",
            where="objective",
            mend="give a recipe with objective: sft as second argument",
        )
    with blame_recipe(loaded):
        device = choose_device(recipe.device)
        prepare_libraries(device)
        sources = make_sources(loaded)
        with doing("reading the tokenizer"):
            tokenizer = models.load_tokenizer(str(folder), trust_remote_code=recipe.trust_remote_code)
        prepared = task.prepare(sources, tokenizer, notify)
        chosen = _choose(prepared, split, max_rows)
        with doing("loading the model"):
            model = _load(loaded, folder, tokenizer, device)
        longest = task.longest(prepared)
        if (note := models.check_positions(model, longest)) is not None:
            notify(note)
        schedule = None
        if recipe.engine.schedule == "auto":
            with doing("planning"):  # for training such rows: an evaluation holds less
                schedule = plan_model(recipe, model, task.planned_length(longest), device).schedule
        with stream_model(recipe, model, schedule) as handle:
            with doing("checking that this model streams exactly"):
                handle.check()
            sums = {
                name: _score(handle, model, rows, loaded, tokenizer, device, rows_done) for name, rows in chosen.items()
            }
            chunk_size = handle.schedule.chunk_size
    return {
        "model": str(folder),
        "recipe": str(loaded.path),
        "objective": recipe.objective,
        "device": str(device),
        "bf16": recipe.bf16,
        "chunk_size": chunk_size,
        "splits": {name: _document(found) for name, found in sums.items()},
    }


def _choose(prepared: Any, split: str, max_rows: int | None) -> dict[str, Sequence[data.Example]]:
    if split not in SPLITS:
        raise ArgumentError(f"--split does not know {split!r}", mend=f"choose from {', '.join(SPLITS)}")
    found = {"held-out": prepared.validation, "train": prepared.train}
    chosen = {name: rows[:max_rows] for name, rows in found.items() if split in (name, "all") and len(rows)}
    if not chosen:
        raise ArgumentError(
            f"the recipe has no {split} rows",
            where="val_size" if split == "held-out" else "datasets",
            mend="write val_size in the recipe, or give --split train",
        )
    return chosen


def _load(loaded: LoadedRecipe, folder: Path, tokenizer: Any, device: torch.device) -> Any:
    """Load a whole model, or adapters on the recipe's base."""
    recipe = loaded.recipe
    if recipe.finetuning_type != "full" and (folder / "adapter_config.json").is_file():
        return models.load_lora(make_reference_model(recipe, tokenizer, device), folder)
    return make_reference_model(recipe, tokenizer, device, name=str(folder))


@torch.no_grad()
def _score(
    handle: StreamHandle,
    model: Any,
    rows: Sequence[data.Example],
    loaded: LoadedRecipe,
    tokenizer: Any,
    device: torch.device,
    rows_done: Callable[[int, int], None],
) -> _Sums:
    """Score rows one beside another, padded on the right: packed rows do not see each other either."""
    recipe, sums = loaded.recipe, _Sums()
    size = recipe.per_device_eval_batch_size
    with train.evaluating(model), handle.routers.silenced(), train.autocast(device, recipe.bf16):
        for start in range(0, len(rows), size):
            batch = _collate(rows[start : start + size], tokenizer).to(device)
            losses_BT = -handle.logprobs(targets=batch.shift_labels, model=model, **batch.arguments).logprobs
            for place, origin in enumerate(batch.origins):
                trained = batch.shift_labels[place].ne(IGNORE_INDEX).nonzero()[:, 0]
                _add(sums, _set_of(origin), losses_BT[place][trained].cpu(), trained.cpu())
            rows_done(min(start + size, len(rows)), len(rows))
    return sums


def _collate(rows: Sequence[data.Example], tokenizer: Any) -> train.MicroBatch:
    batch = data.collate(rows, pad_token_id=tokenizer.pad_token_id)
    return train.MicroBatch(**batch, origins=tuple(row.origin for row in rows))


def _set_of(origin: str) -> str:
    """Return the file or dataset of a row's origin, ``file:row``; the built-in library is one dataset of many files."""
    if origin.startswith("stdlib:"):
        return "python-stdlib"
    return origin.rpartition(":")[0] or origin


def _add(sums: _Sums, name: str, losses_K: torch.Tensor, positions_K: torch.Tensor) -> None:
    sums.rows[name] = sums.rows.get(name, 0) + 1
    sums.sets.setdefault(name, LossSum()).add(losses_K)
    sums.whole.add(losses_K)
    for bucket, first, last in _buckets(int(positions_K.max()) + 1 if len(positions_K) else 0):
        inside = (positions_K >= first) & (positions_K < last)
        if bool(inside.any()):
            sums.buckets.setdefault(bucket, LossSum()).add(losses_K[inside])


def _buckets(length: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over ``(number, first, end)`` of the buckets of positions: 0 to 15, then by powers of two."""
    first, last, number = 0, 16, 0
    while first < length:
        yield number, first, last
        first, last, number = last, 2 * last, number + 1


def _document(sums: _Sums) -> dict[str, Any]:
    bounds = list(_buckets(1 << 62))
    return {
        "rows": sum(sums.rows.values()),
        **sums.whole.to_json(),
        "sets": [{"name": name, "rows": sums.rows[name], **found.to_json()} for name, found in sums.sets.items()],
        "positions": [
            {"from": bounds[number][1], "to": bounds[number][2], **found.to_json()}
            for number, found in sorted(sums.buckets.items())
        ],
    }
