"""Read the log files of a training run.

A file may be missing, truncated by a crash, or written by an older version; unreadable parts are reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune.base.privacy import escape_invisible, redact_values
from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe.yaml import read_yaml

RECORD_FILES = ("run.json", "metrics.jsonl")
"""File names of which a run directory has at least one."""
MOST_BYTES = 1 << 30
"""Size in bytes above which a log file is not read."""
MOST_DOCUMENT, MOST_LINE = 1 << 26, 1 << 26
"""Maximum sizes of a JSON or YAML file and of a line of a log file, in bytes."""
MOST_TEXT, MOST_KEY, MOST_VALUES, MOST_DEPTH = 1 << 20, 200, 10_000, 16
"""Maximum characters of a text and of a key, elements of a list or mapping, and nesting depth that are shown."""
STEP_LIMIT = 1e12
"""Step number from which records are not drawn."""
LARGEST_DRAWN = 1e100
"""Largest number that is drawn. Larger numbers, and numbers below its inverse, are shown as text."""


@dataclass(frozen=True)
class RunRecords:
    """Contents of the log files of a training run; secrets in recipe, events and samples are redacted."""

    path: Path
    name: str
    recipe: Mapping[str, Any]
    """Recipe with its defaults filled in; empty if it is missing."""
    versions: Mapping[str, str]
    steps: Sequence[Mapping[str, Any]]
    """Lines of ``metrics.jsonl`` about training steps."""
    evaluations: Sequence[Mapping[str, Any]]
    """Lines of ``metrics.jsonl`` about evaluations."""
    events: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    """Lines of ``samples.jsonl``, with ``step``, ``prompt`` and ``completion``."""
    plan: Mapping[str, Any]
    """Output of ``streamtune plan --json`` for the schedule of the run; empty if no plan was made."""
    data: Mapping[str, Any]
    """Counts of rows and tokens, from ``data.json``; empty in runs of older versions."""
    unreadable: tuple[str, ...]
    """``name: reason`` for each file that could not be read completely."""

    def metric_points(self, key: str, *, held_out: bool = False) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a metric, without NaN and infinite values.

        Args:
            key: Key of the metric in ``metrics.jsonl``.
            held_out: True to read the lines about evaluations instead of training steps.
        """
        records = self.evaluations if held_out else self.steps
        found = ((_step_number(record), _number_to_draw(record.get(key))) for record in records)
        return [(step, value) for step, value in found if step is not None and value is not None]

    def step_times(self) -> list[tuple[float, float]]:
        """Return (step, seconds) pairs; the seconds are the step's tokens divided by its tokens per second."""
        found = []
        for record in self.steps:
            step, tokens, rate = (
                _step_number(record),
                _number_to_draw(record.get("tokens")),
                _number_to_draw(record.get("tokens_per_s")),
            )
            if step is not None and tokens and rate:
                found.append((step, tokens / rate))
        return found


def read_run(path: Path) -> RunRecords:
    """Return the contents of a run's log files; unreadable parts are listed in ``unreadable``.

    Raises:
        ArgumentError: The path is not a run directory, or cannot be read.
    """
    try:
        there = [path / mark for mark in RECORD_FILES if (path / mark).is_file()]
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}", where="RUN") from error
    if not there:
        inner = (
            [found.parent for mark in RECORD_FILES for found in sorted(path.glob(f"*/{mark}"))] if path.is_dir() else []
        )
        what = "is not a run directory" if path.is_dir() else "is not a folder"
        raise ArgumentError(
            f"{path} {what}",
            where="RUN",
            fix=f"give a run directory inside this folder, such as {inner[0]}"
            if inner
            else "give the output_dir of a recipe that was trained, such as runs/NAME",
        )
    unreadable: list[str] = []
    metrics = list(_read_lines(path / "metrics.jsonl", unreadable))
    identity = _read_document(path / "run.json", unreadable)
    return RunRecords(
        path=path,
        name=path.resolve().name,
        recipe=redact_values(_read_recipe(path / "recipe.yaml", unreadable) or _as_mapping(identity.get("recipe"))),
        versions={key: str(value) for key, value in _as_mapping(identity.get("versions")).items()},
        steps=[record for record in metrics if "loss" in record or "lr" in record],
        evaluations=[record for record in metrics if any(key.startswith("eval_") for key in record)],
        events=[redact_values(event) for event in _read_lines(path / "events.jsonl", unreadable)],
        samples=[redact_values(sample) for sample in _read_lines(path / "samples.jsonl", unreadable)],
        plan=_read_document(path / "plan.json", unreadable),
        data=_read_document(path / "data.json", unreadable),
        unreadable=tuple(unreadable),
    )


def _read_lines(path: Path, unreadable: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line, and add the number of unreadable lines to ``unreadable``."""
    wrong = 0
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return
        with path.open("rb") as file:
            while line := file.readline(MOST_LINE):
                try:
                    record = _limit_values(json.loads(line.decode("utf-8")))
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict):
                    yield record
                elif line.strip():
                    wrong += 1
    except OSError as error:
        unreadable.append(f"{path.name}: {error.strerror}")
    if wrong:
        unreadable.append(f"{path.name}: {wrong:,} unreadable line{'s' if wrong > 1 else ''}")


def _read_document(path: Path, unreadable: list[str]) -> Mapping[str, Any]:
    try:
        return _as_mapping(_limit_values(json.loads(_read_text(path)))) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        unreadable.append(f"{path.name}: unreadable")
        return {}


def _read_recipe(path: Path, unreadable: list[str]) -> Mapping[str, Any]:
    try:
        values, _, mistakes = read_yaml(_read_text(path), path.name) if path.is_file() else ({}, None, [])
    except (OSError, ValueError, RecursionError, RecipeError):
        unreadable.append(f"{path.name}: unreadable")
        return {}
    if mistakes:
        unreadable.append(f"{path.name}: {mistakes[0].what}")
    return _as_mapping(_limit_values(values))


def _read_text(path: Path) -> str:
    if path.stat().st_size > MOST_DOCUMENT:
        raise ValueError(f"{path.name} is too large")
    return path.read_text(encoding="utf-8")


def _limit_values(value: Any, depth: int = 0) -> Any:
    """Return JSON values with limited depth and lengths; numbers beyond :data:`LARGEST_DRAWN` become text."""
    if isinstance(value, str):
        rest = f" ... ({len(value):,} characters)" if len(value) > MOST_TEXT else ""
        return escape_invisible(value[:MOST_TEXT]) + rest
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if value == 0 or 1 / LARGEST_DRAWN < abs(value) < LARGEST_DRAWN else str(value)
    if depth == MOST_DEPTH:
        return "..."
    if isinstance(value, dict):
        some = list(value.items())[:MOST_VALUES]
        return {escape_invisible(str(key)[:MOST_KEY]): _limit_values(inner, depth + 1) for key, inner in some}
    return [_limit_values(inner, depth + 1) for inner in value[:MOST_VALUES]]


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _step_number(record: Mapping[str, Any]) -> float | None:
    step = _number_to_draw(record.get("step"))
    return step if step is not None and abs(step) < STEP_LIMIT else None


def _number_to_draw(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < float("inf") else None
