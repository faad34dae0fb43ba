"""Weighted sums of reward functions: each completion gets one number, or an error names the faulty function.

Results of reward functions are checked, because wrong results would spoil the gradient without notice. A NaN makes all
advantages of its group NaN. A missing score shifts the scores of all later completions.
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
from streamtune.tasks.rewards.spec import RewardFunction, load_reward, restore_globals

COMPLETION_IDS = "completion_ids"
"""Name of the column with the completions' token ids, which functions get in addition to the columns of the rows."""
FIX = "fix the function; it may return None for a completion to which it does not apply"


@dataclass(frozen=True)
class RewardScores:
    total: list[float | None]
    """weighted sum of each completion's scores; None if all functions returned None"""
    by_function: dict[str, list[float | None]]
    """name of a function -> its scores without weights, which may be None"""


def load_rewards(
    specs: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    allow_code: bool = False,
    directory: Path | None = None,
) -> Rewards:
    """Return the reward functions that the entries of ``reward_funcs`` name.

    Args:
        specs: Entries: ``module:function``, ``path/to/file.py:function`` or a name of :data:`BUILTINS`. Options may
            follow in parentheses: ``regex_match(pattern="^[0-9]+$")``.
        weights: Weight of each function; None: all are 1.
        allow_code: True if rewards may run code that a model wrote (``unit_tests``).
        directory: Folder of modules, to which file paths are relative; None: the working directory.

    Raises:
        ArgumentError: An entry or the weights are wrong, or a reward would run code without permission.
    """
    if not specs:
        raise ArgumentError("reward_funcs is empty", where="reward_funcs", fix="name at least one reward function")
    functions = [load_reward(spec, allow_code=allow_code, directory=directory or Path.cwd()) for spec in specs]
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if len(weights) != len(functions):
        raise ArgumentError(
            f"reward_weights must have one weight for each of {len(functions)} functions, found {len(weights)} weights",
            where="reward_weights",
            fix="give one weight for each function, in the same order",
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise ArgumentError(f"reward_weights must be finite, found {weight}", where="reward_weights")
    return Rewards(dict(zip(_unique_names(functions), functions, strict=True)), tuple(weights))


def _unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return each function's name in the log; the second function of the same name is called ``name_2``."""
    names: list[str] = []
    for function in functions:
        same = sum(earlier.name == function.name for earlier in functions[: len(names)])
        names.append(f"{function.name}_{same + 1}" if same else function.name)
    return names


@dataclass(frozen=True)
class Rewards:
    """Reward functions and their weights; a call returns the scores of completions."""

    functions: dict[str, RewardFunction]
    """name in the log -> function"""
    weights: tuple[float, ...]

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise ``ArgumentError`` if the rows lack a column that a function reads."""
        in_rows = ", ".join(column for column in columns if column != COMPLETION_IDS) or "no other columns"
        for name, function in self.functions.items():
            for column in sorted(function.needed_columns - set(columns)):
                raise ArgumentError(
                    f"the reward function '{name}' reads the column '{column}', which the rows do not have",
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
        """Return the scores of N completions by every function. Without functions, no completion has a reward.

        Args:
            prompts: Prompt of each completion: text or a list of messages.
            completions: Completions: text, or a list of messages ``{"role", "content"}``.
            columns: Other columns of the rows, each with one value per completion.
            origins: ``file:line`` of each completion's row, for errors.

        Raises:
            ArgumentError: A function reads a column that does not exist.
            RunError: A function raised, or did not return a finite number or None for each completion.
        """
        for name, values in {"prompts": prompts, **columns}.items():
            assert len(values) == len(completions), f"{len(completions)} completions, {len(values)} {name}"
        self.check_columns(list(columns))
        batch = _Batch(prompts, completions, columns, origins)
        by_function = {name: _compute_scores(name, function, batch) for name, function in self.functions.items()}
        if not by_function:
            return RewardScores([None] * len(completions), {})
        total = [_weighted_sum(scores, self.weights) for scores in zip(*by_function.values(), strict=True)]
        return RewardScores(total, by_function)


def _weighted_sum(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    weighted = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
    return math.fsum(weighted) if weighted else None


@dataclass(frozen=True)
class _Batch:
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]
    origins: Sequence[str] | None

    def single_completion(self, number: int) -> _Batch:
        part = slice(number, number + 1)
        columns = {name: values[part] for name, values in self.columns.items()}
        return _Batch(self.prompts[part], self.completions[part], columns, self.origins and self.origins[part])

    def completion_name(self, number: int) -> str:
        """Return a completion's name in errors: ``file:line`` of its row or, if unknown, ``completion 3 of 8``."""
        return self.origins[number] if self.origins else f"completion {number + 1} of {len(self.completions)}"


def _compute_scores(name: str, function: RewardFunction, batch: _Batch) -> list[float | None]:
    count = len(batch.completions)
    try:
        returned = _call_on_copies(function, batch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a function must not end a run as if it were complete
        where = _find_failing_completion(function, batch)
        if function.built_in and isinstance(error, ValueError):
            raise RunError(
                f"the reward '{name}' cannot be computed: {error}",
                where=where,
                fix="fix the row; if it has nothing to compare with, set the value to null",
            ) from error
        raise RunError(
            f"the reward function '{name}' raised {_describe_error(error)}",
            where=", ".join(part for part in (_error_line(error, function), where) if part),
            fix=FIX,
        ) from error
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        raise RunError(
            f"the reward function '{name}' returned {_shorten(values)}, not a list",
            where=function.where,
            fix="return a list with one number for each completion",
        )
    if len(values) != count:
        raise RunError(
            f"the reward function '{name}' returned {len(values)} scores for {count} completions",
            where=function.where,
            fix="return one number for each completion, or None for a completion to which it does not apply",
        )
    return [_to_valid_score(name, function, batch, number, value) for number, value in enumerate(values)]


def _to_valid_score(name: str, function: RewardFunction, batch: _Batch, number: int, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a tensor of one number
    with suppress(OverflowError):  # a whole number that is too large for a float
        if isinstance(value, Real) and math.isfinite(score := float(value)):
            return score
    raise RunError(
        f"a score of the reward function '{name}' must be a finite number or None, found {_shorten(value)}",
        where=", ".join(part for part in (function.where, batch.completion_name(number)) if part),
        fix=FIX,
    )


def _find_failing_completion(function: RewardFunction, batch: _Batch) -> str:
    """Return the name of the first completion on which the function fails if it gets only this one; empty if none."""
    if len(batch.completions) == 1:
        return batch.completion_name(0)
    for number in range(len(batch.completions)):
        single = batch.single_completion(number)
        try:
            _call_on_copies(function, single)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return batch.completion_name(number)
    return ""


def _call_on_copies(function: RewardFunction, batch: _Batch) -> Any:
    """Call a reward function on copies of its arguments, so that changes to them affect nothing else."""
    prompts, completions, columns = copy.deepcopy((batch.prompts, batch.completions, dict(batch.columns)))
    with restore_globals():
        return function.call(prompts, completions, columns)


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _error_line(error: BaseException, function: RewardFunction) -> str:
    """Return ``file:line`` of an error in the reward function's file, else of the function; empty if built in."""
    file = function.where.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else function.where


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
