"""The names of learning-rate schedules and what each can be told, and the rules about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from streamtune.errors import did_you_mean
from streamtune.recipe.spec import mistake

ScheduleName = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "power",
]

Range = tuple[float, float] | tuple[str, ...]
"""Least and largest value of a number, or the words that are known."""

RATE, PART, CYCLES, STEPS = (0.0, 1.0), (0.0, 1.0), (0.0, 1e6), (0.0, 1e12)

OPTIONS: Mapping[str, Mapping[str, Range]] = {
    "cosine": {"num_cycles": CYCLES},
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_min_lr": {"min_lr": RATE, "min_lr_rate": PART, "num_cycles": CYCLES},
    "cosine_with_restarts": {"num_cycles": CYCLES},
    "polynomial": {"lr_end": RATE, "power": (0.0, 1e3)},
    "inverse_sqrt": {"timescale": (1.0, 1e12)},
    "warmup_stable_decay": {
        "num_decay_steps": STEPS,
        "decay_ratio": PART,
        "decay_type": ("linear", "cosine", "1-sqrt"),
        "min_lr_ratio": PART,
        "num_cycles": CYCLES,
    },
    "power": {
        "a": (0.0, 1e9),
        "b": (-10.0, 10.0),
        "batch_size": (1.0, 1e12),
        "tokens_per_step": (1.0, 1e15),
        "decay_ratio": PART,
    },
}
"""Schedule -> its options and their ranges; the names are those of transformers where it has them."""

NEEDED = {"power": ("batch_size", "tokens_per_step")}
ONE_OF = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps", "decay_ratio")}
KEY = "lr_scheduler_kwargs"


def learning_rate_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the settings of the learning rate."""
    name, given = recipe.lr_scheduler_type, recipe.lr_scheduler_kwargs
    known = OPTIONS[name]
    for option, value in given.items():
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none; delete the line"
            mend = did_you_mean(option, known) or takes
            yield mistake(f"the schedule '{name}' has no option '{option}'", key=KEY, mend=mend)
        elif (wrong := _wrong(value, known[option])) is not None:
            yield mistake(f"'{option}' of the schedule '{name}' {wrong}", key=KEY)
    both = [option for option in ONE_OF.get(name, ()) if option in given]
    if len(both) > 1:
        yield mistake(f"'{both[0]}' and '{both[1]}' say the same", key=KEY, mend="keep one of them")
    if name == "cosine_with_min_lr" and not both:
        yield mistake(
            "the schedule 'cosine_with_min_lr' is not told where it ends",
            key="lr_scheduler_type",
            mend="add lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        )
    for option in NEEDED.get(name, ()):
        if option not in given:
            yield mistake(
                f"the schedule '{name}' needs '{option}'",
                key="lr_scheduler_type",
                mend="add lr_scheduler_kwargs: {batch_size: ROWS_OF_A_STEP, tokens_per_step: TOKENS_OF_A_STEP}",
            )
    if given.get("min_lr", 0) > recipe.learning_rate or given.get("lr_end", 0) > recipe.learning_rate:
        yield mistake("the schedule ends above 'learning_rate'", key=KEY, mend="lower it")
    if (recipe.lr_scaling == "none") != (recipe.lr_scaling_base is None):
        yield mistake(
            "'lr_scaling' compares a step with 'lr_scaling_base', the rows that 'learning_rate' was chosen for",
            key="lr_scaling" if recipe.lr_scaling_base is None else "lr_scaling_base",
            mend="write both, such as lr_scaling: sqrt and lr_scaling_base: 32, or none",
        )
    yield from _early_stopping(recipe)


def _early_stopping(recipe: Any) -> Iterator[PydanticCustomError]:
    if recipe.early_stopping_patience == 0:
        if recipe.early_stopping_threshold > 0:
            yield mistake(
                "'early_stopping_threshold' is read with 'early_stopping_patience'",
                key="early_stopping_threshold",
                mend="add early_stopping_patience: 3, or delete the line",
            )
        return
    metric = recipe.metric_for_best_model
    if metric is None or not metric.startswith("eval_"):
        yield mistake(
            "'early_stopping_patience' counts evaluations without a better 'metric_for_best_model', which is "
            f"{'not given' if metric is None else repr(metric)}",
            key="early_stopping_patience",
            mend="add metric_for_best_model: eval_loss",
        )
    elif recipe.eval_steps == 0:
        yield mistake(
            "'early_stopping_patience' counts evaluations, and there is one at the end alone",
            key="early_stopping_patience",
            mend="add eval_steps: 100",
        )


def _wrong(value: Any, known: Range) -> str | None:
    """Return what is wrong with the value of an option, None if nothing is."""
    if isinstance(known[0], str):
        return None if value in known else f"is one of {', '.join(map(str, known))}, not {value!r}"
    least, most = float(known[0]), float(known[1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"is a number, not {value!r}"
    return None if least <= value <= most else f"is a number from {least:g} to {most:g}, not {value!r}"
