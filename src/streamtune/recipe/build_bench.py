"""A recipe to a benchmark of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamtune import __version__, plan
from streamtune.errors import ArgumentError
from streamtune.plan.longest import Budget
from streamtune.recipe.build import choose_device, make_schedule, quiet_libraries
from streamtune.recipe.build_lengths import lengths_report
from streamtune.recipe.build_model import make_model_alone
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe

__all__ = ["TableOptions", "bench_recipe", "table_recipe"]

DECIDES = {
    "model_name_or_path",
    "model",
    "dtype",
    "bf16",
    "finetuning_type",
    "quantization",
    "lora_r",
    "lora_target",
    "lora_dropout",
    "per_device_train_batch_size",
    "engine",
    "seed",
}
"""Keys of a recipe that the figures of a table hang on."""


def bench_recipe(
    loaded: LoadedRecipe,
    *,
    lengths: Sequence[int],
    modes: Sequence[plan.Mode],
    repeats: int,
    packed_rows: int = 0,
    notify: Callable[[str], None] = lambda message: None,
) -> plan.BenchReport:
    """Measure the recipe's model with its schedule, precision, adapters and batch size on random tokens.

    Raises:
        ArgumentError: A length, a mode or the number of repeats makes no sense.
    """
    _check(lengths, modes, repeats)
    if packed_rows and not 2 <= packed_rows <= min(lengths) // 2:
        raise ArgumentError(
            f"--packed-rows cuts every length into rows of two tokens or more; found {packed_rows}",
            mend="write --packed-rows 16 --lengths 16384",
        )
    job = _job(loaded.recipe)
    return plan.run_bench(
        job.make_model,
        lengths=lengths,
        modes=modes,
        schedule=make_schedule(loaded.recipe.engine),
        batch_size=job.batch_size,
        packed_rows=packed_rows,
        repeats=repeats,
        autocast=job.autocast,
        notify=notify,
    )


@dataclass(frozen=True)
class TableOptions:
    """What the command line asks of a table.

    Attributes:
        lengths: Tokens of a row.
        modes: What to compare.
        repeats: Timed steps of each row.
        folder: Where its files go.
        command: The command line.
        method: Whether a longest sequence is found by ``measure`` or ``simulate``.
        sizes: Bytes on device, host and disk that a longest sequence may take; None where nothing is said.
    """

    lengths: Sequence[int]
    modes: Sequence[plan.Mode]
    repeats: int
    folder: Path
    command: str
    method: str = "simulate"
    sizes: Sequence[int | None] = (None, None, None)


def table_recipe(
    loaded: LoadedRecipe,
    table: plan.TableName,
    options: TableOptions,
    *,
    notify: Callable[[str], None] = lambda message: None,
) -> plan.TableReport:
    """Measure a table on the recipe's model, or go on with it.

    Raises:
        ArgumentError: A length, a mode, a size or the number of repeats makes no sense.
    """
    recipe, job = loaded.recipe, _job(loaded.recipe)
    schedule = make_schedule(recipe.engine)
    asked = {
        "streamtune": __version__,
        "recipe": {key: value for key, value in recipe.model_dump(mode="json").items() if key in DECIDES},
        "schedule_in_words": schedule.describe(),
    }
    _check(options.lengths or [2], options.modes, options.repeats)
    if options.method not in ("measure", "simulate"):
        raise ArgumentError(f"--method is measure or simulate, not {options.method!r}")
    if table == "max-length":
        return lengths_report(
            recipe,
            job,
            Budget(*options.sizes),
            options.method,
            modes=options.modes,
            folder=options.folder,
            command=options.command,
            asked=asked,
            notify=notify,
        )
    return plan.run_table(
        table,
        job,
        lengths=options.lengths,
        modes=options.modes,
        schedule=schedule,
        repeats=options.repeats,
        folder=options.folder,
        command=options.command,
        asked={**asked, "repeats": options.repeats},
        notify=notify,
    )


def _check(lengths: Sequence[int], modes: Sequence[plan.Mode], repeats: int) -> None:
    if not lengths or any(length < 2 for length in lengths):
        raise ArgumentError("--lengths takes numbers of tokens from 2 up", mend="write --lengths 2048,8192")
    if unknown := [mode for mode in modes if mode not in plan.ALL_MODES]:
        raise ArgumentError(f"--modes does not know {unknown[0]!r}", mend=f"choose from {', '.join(plan.ALL_MODES)}")
    if repeats < 1:
        raise ArgumentError("--repeats takes a number from 1 up")


def _job(recipe: Recipe) -> plan.Job:
    make_model = partial(_make_model, recipe, str(choose_device(recipe.device)))
    return plan.Job(make_model, recipe.per_device_train_batch_size, recipe.bf16)


def _make_model(recipe: Recipe, device: str) -> Any:
    """The recipe's model, in a process of its own."""
    quiet_libraries(torch.device(device))
    return make_model_alone(recipe, torch.device(device))
