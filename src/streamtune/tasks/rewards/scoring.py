"""Several reward functions with weights: every completion gets one number, or an error names the function at fault.

Nothing a reward function does may reach the gradient unchecked: a NaN among rewards makes all advantages of its group
NaN, a score too few pairs every later completion with its neighbour's.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from streamtune.errors import ArgumentError, RunError, did_you_mean
from streamtune.tasks.rewards.spec import RewardFunction, load_reward, shielded

COMPLETION_IDS = "completion_ids"
"""The column of token ids, which functions get besides the rows' own."""
FIX = "fix the function; where it has nothing to say of a completion, let it return None"


@dataclass(frozen=True)
class RewardScores:
    """The scores of N completions."""

    total: list[float | None]
    """weighted sum by completion; None where no function applied"""
    by_function: dict[str, list[float | None]]
    """name of a function -> its scores before weights; None where it did not apply"""


def load_rewards(
    specs: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    allow_code: bool = False,
    directory: Path | None = None,
) -> Rewards:
    """Load reward functions by name.

    Args:
        specs: ``module:function``, ``path/to/file.py:function`` or a name of :data:`BUILTINS` for each, with options in
            parentheses, if any: ``regex_match(pattern="^[0-9]+$")``.
        weights: One weight a function; None: all 1.
        allow_code: Whether rewards may run code that a model wrote (``unit_tests``).
        directory: Folder of relative paths and of modules; None is the current one.

    Raises:
        ArgumentError: A spec or the weights are wrong, or a reward would run code and may not.
    """
    if not specs:
        raise ArgumentError("there is no reward function", where="reward_funcs", fix="name at least one")
    functions = [load_reward(spec, allow_code=allow_code, directory=directory or Path.cwd()) for spec in specs]
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if len(weights) != len(functions):
        raise ArgumentError(
            f"there are {len(functions)} reward functions and {len(weights)} weights",
            where="reward_weights",
            fix="give one weight for each function, in the same order",
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise ArgumentError(f"a weight is {weight}", where="reward_weights", fix="give finite numbers")
    return Rewards(dict(zip(_unique_names(functions), functions, strict=True)), tuple(weights))


def _unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return the functions' names for the log; a second function of the same name is ``name_2``."""
    names: list[str] = []
    for function in functions:
        same = sum(earlier.name == function.name for earlier in functions[: len(names)])
        names.append(f"{function.name}_{same + 1}" if same else function.name)
    return names


@dataclass(frozen=True)
class Rewards:
    """Reward functions with their weights, ready to be called."""

    functions: dict[str, RewardFunction]
    """by the name they have in the log"""
    weights: tuple[float, ...]

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check before a run that the rows have the columns that the functions read."""
        in_rows = ", ".join(column for column in columns if column != COMPLETION_IDS) or "no other columns"
        for name, function in self.functions.items():
            for column in sorted(function.needs - set(columns)):
                raise ArgumentError(
                    f"the reward function '{name}' reads the column '{column}', and the rows have none",
                    where=function.where or "reward_funcs",
                    fix=did_you_mean(column, columns) or f"the rows have: {in_rows}",
                )

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        *,
        origins: Sequence[str] | None = None,
    ) -> RewardScores:
        """Score N completions with every function; without one, none has a reward.

        Args:
            prompts: One a completion, text or a list of messages.
            completions: Text, or a list of messages ``{"role", "content"}``.
            columns: The other columns of the rows, one value a completion each.
            origins: ``file:line`` of each completion's row, for errors.

        Raises:
            ArgumentError: A function reads a column that there is not.
            RunError: A function raised, or did not return one finite number or None for each completion.
        """
        for name, values in {"prompts": prompts, **columns}.items():
            assert len(values) == len(completions), f"{len(completions)} completions, {len(values)} {name}"
        self.check_columns(list(columns))
        batch = _Batch(prompts, completions, columns, origins)
        by_function = {name: _scores(name, function, batch) for name, function in self.functions.items()}
        if not by_function:
            return RewardScores([None] * len(completions), {})
        total = [_weighted(scores, self.weights) for scores in zip(*by_function.values(), strict=True)]
        return RewardScores(total, by_function)


def _weighted(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
    return math.fsum(known) if known else None


@dataclass(frozen=True)
class _Batch:
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]
    origins: Sequence[str] | None

    def row(self, number: int) -> _Batch:
        own = slice(number, number + 1)
        columns = {name: values[own] for name, values in self.columns.items()}
        return _Batch(self.prompts[own], self.completions[own], columns, self.origins and self.origins[own])

    def where(self, number: int) -> str:
        """Return the name of a completion in errors: its row if that is known, else its number."""
        return self.origins[number] if self.origins else f"completion {number + 1} of {len(self.completions)}"


def _scores(name: str, function: RewardFunction, batch: _Batch) -> list[float | None]:
    count = len(batch.completions)
    try:
        returned = _call(function, batch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a function ends no run, and least of all as if it were done
        where = _culprit(function, batch)
        if function.built_in and isinstance(error, ValueError):
            raise RunError(
                f"the reward '{name}' cannot be computed: {error}",
                where=where,
                fix="fix the row; where there is nothing to compare with, leave its value out (null)",
            ) from error
        raise RunError(
            f"the reward function '{name}' raised {_named(error)}",
            where=", ".join(part for part in (_line_of(error, function), where) if part),
            fix=FIX,
        ) from error
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        raise RunError(
            f"the reward function '{name}' returned {_shown(values)}, not a list",
            where=function.where,
            fix="return a list with one number for each completion",
        )
    if len(values) != count:
        raise RunError(
            f"the reward function '{name}' returned {len(values)} scores for {count} completions",
            where=function.where,
            fix="return one number for each completion, None where it has nothing to say",
        )
    return [_number(name, function, batch, number, value) for number, value in enumerate(values)]


def _number(name: str, function: RewardFunction, batch: _Batch, number: int, value: Any) -> float | None:
    """Return one score as a float; None stays None."""
    if value is None:
        return None
    if not isinstance(value, Real) and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a tensor of one number
    with suppress(OverflowError):  # of a whole number that no float holds
        if isinstance(value, Real) and math.isfinite(number_given := float(value)):
            return number_given
    raise RunError(
        f"the reward function '{name}' gave the score {_shown(value)}",
        where=", ".join(part for part in (function.where, batch.where(number)) if part),
        fix=FIX,
    )


def _culprit(function: RewardFunction, batch: _Batch) -> str:
    """Return the first completion that makes the function raise when alone; empty where only the batch fails."""
    if len(batch.completions) == 1:
        return batch.where(0)
    for number in range(len(batch.completions)):
        alone = batch.row(number)
        try:
            _call(function, alone)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return batch.where(number)
    return ""


def _call(function: RewardFunction, batch: _Batch) -> Any:
    """Call a function with copies of its arguments: its changes must not reach the training and the next function."""
    prompts, completions, columns = copy.deepcopy((batch.prompts, batch.completions, dict(batch.columns)))
    with shielded():
        return function.call(prompts, completions, columns)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _line_of(error: BaseException, function: RewardFunction) -> str:
    """Return the innermost line of the user's file in the traceback, else the function's; empty for a built-in one."""
    file = function.where.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else function.where


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
