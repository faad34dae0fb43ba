"""Recipe keys of the learning rate: its schedule, and the options of each schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from streamtune.errors import did_you_mean
from streamtune.recipe.rules import GIVEN, KEEP_ONE, Clash, Count, Custom, Fraction, Refusal, Rules, Spec, Steps, Text

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
"""Smallest and largest number that an option accepts, or the words that it accepts."""

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
"""Schedule -> its options and their ranges. Options of schedules that also exist in transformers have the same names
there."""

NEEDED = {"power": ("batch_size", "tokens_per_step")}
ONE_OF = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps", "decay_ratio")}
FINAL_RATES = ("min_lr", "lr_end")
"""Options that are a learning rate, which the schedule reaches at its end."""
KEY = "lr_scheduler_kwargs"


class LearningRateKeys(Spec):
    """Recipe keys of the learning rate and its schedule."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate, which is reached at the end of the warm-up."""

    lr_scheduler_type: ScheduleName = "cosine"
    """Schedule of the learning rate after the warm-up. `cosine` and `linear` fall to 0. `constant` and
    `constant_with_warmup` stay at the peak. `cosine_with_min_lr`, `cosine_with_restarts`, `polynomial` and
    `inverse_sqrt` are the schedules of transformers. `warmup_stable_decay` stays at the peak and decays at the end.
    `power` (arXiv 2408.13359) is a power of the number of tokens trained so far, at most the peak, and decays linearly
    to 0 at the end."""

    lr_scheduler_kwargs: Annotated[dict[Text, Any], Field(default_factory=dict)]
    """Options of the schedule in `lr_scheduler_type`; schedules of transformers have the same option names there.
    `cosine_with_min_lr`: `{min_lr_rate: 0.1}`. `cosine_with_restarts`: `{num_cycles: 3}`. `polynomial`: `{power: 2.0,
    lr_end: 1.0e-7}`. `inverse_sqrt`: `{timescale: 1000}`. `warmup_stable_decay`: `{decay_ratio: 0.1, decay_type:
    1-sqrt}` (decay_ratio is a fraction of the steps), or `num_decay_steps`. `power`: `{batch_size: 64, tokens_per_step:
    262144}`, the rows and tokens of an optimizer step."""

    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Rule that adapts `learning_rate` to the batch size of an optimizer step. `linear` multiplies it by batch size /
    `lr_scaling_base`, `sqrt` by the square root of this ratio. `none` leaves it unchanged."""

    lr_scaling_base: Count | None = None
    """With `lr_scaling`: batch size of an optimizer step for which `learning_rate` was chosen, over all ranks. The unit
    is tokens if `tokens_per_batch` is set, otherwise rows (packed sequences with `packing`)."""

    warmup_ratio: Fraction = 0.0
    """Fraction of all steps in which the learning rate rises to its peak, at the start of the run. 0: no warm-up. Set
    either this key or `warmup_steps`."""

    warmup_steps: Steps = 0
    """Number of steps in which the learning rate rises to its peak, at the start of the run. 0: no warm-up. Set either
    this key or `warmup_ratio`."""


def _option_value_error(value: Any, allowed: Range) -> str | None:
    if isinstance(allowed[0], str):
        return None if value in allowed else f"must be one of {', '.join(map(str, allowed))}; found {value!r}"
    least, most = float(allowed[0]), float(allowed[1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"must be a number; found {value!r}"
    return None if least <= value <= most else f"must be from {least:g} to {most:g}; found {value!r}"


def _refuse_wrong_scheduler_options(recipe: Any) -> Iterator[Refusal]:
    name, given = recipe.lr_scheduler_type, recipe.lr_scheduler_kwargs
    known = OPTIONS[name]
    for option, value in given.items():
        if option not in known:
            takes = f"options: {', '.join(known)}" if known else "delete the line; this schedule has no options"
            fix = did_you_mean(option, known) or takes
            yield Refusal(KEY, f"the schedule '{name}' has no option '{option}'", fix)
        elif (wrong := _option_value_error(value, known[option])) is not None:
            fix = did_you_mean(str(value), [word for word in known[option] if isinstance(word, str)])
            yield Refusal(KEY, f"'{option}' of the schedule '{name}' {wrong}", fix)
    both = [option for option in ONE_OF.get(name, ()) if option in given]
    if len(both) > 1:
        yield Refusal(KEY, f"'{both[0]}' and '{both[1]}' exclude each other", KEEP_ONE)
    if name == "cosine_with_min_lr" and not both:
        yield Refusal(
            "lr_scheduler_type",
            "the schedule 'cosine_with_min_lr' needs 'min_lr' or 'min_lr_rate'",
            "add lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        )
    for option in NEEDED.get(name, ()):
        if option not in given:
            yield Refusal(
                "lr_scheduler_type",
                f"the schedule '{name}' needs '{option}'",
                "add lr_scheduler_kwargs: {batch_size: ROWS_OF_A_STEP, tokens_per_step: TOKENS_OF_A_STEP}",
            )
    is_scaled = recipe.lr_scaling_base is not None  # then the peak depends on the number of ranks
    if not is_scaled and max(given.get(option, 0) for option in FINAL_RATES) > recipe.learning_rate:
        yield Refusal(KEY, "the final rate of the schedule is above 'learning_rate'", "lower min_lr or lr_end")


NEED_EACH_OTHER = "'lr_scaling' and 'lr_scaling_base' need each other: the base is the batch size for 'learning_rate'"
WRITE_BOTH = "write both, such as lr_scaling: sqrt and lr_scaling_base: 32, or delete both"

LEARNING_RATE_RULES: Rules = (
    Custom(_refuse_wrong_scheduler_options),
    Clash({"lr_scaling_base": GIVEN, "lr_scaling": "none"}, NEED_EACH_OTHER, WRITE_BOTH),
    Clash({"lr_scaling": GIVEN, "lr_scaling_base": None}, NEED_EACH_OTHER, WRITE_BOTH),
)

WARMUP_RULES: Rules = (
    Clash(
        {"warmup_steps": GIVEN, "warmup_ratio": GIVEN}, "'warmup_ratio' and 'warmup_steps' exclude each other", KEEP_ONE
    ),
)
