"""Records of a run directory, read leniently: a run may be young, truncated by a crash, or of an older version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune.base.privacy import redact_values, visible
from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe.yaml import read_yaml

MARKS = ("run.json", "metrics.jsonl")
"""A run directory has at least one of these files."""
MOST_BYTES = 1 << 30
"""Larger record files are not read."""
MOST_DOCUMENT, MOST_LINE = 1 << 26, 1 << 26
"""Limits in bytes."""
MOST_TEXT, MOST_KEY, MOST_VALUES, MOST_DEPTH = 1 << 20, 200, 10_000, 16
"""Limits of what is shown: characters of a text and of a key, values of a list or mapping, nesting."""
LAST_STEP = 1e12
LARGEST = 1e100
"""Larger numbers (later steps), and inverses of larger numbers, are shown as text and not drawn."""


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, without secrets."""

    path: Path
    name: str
    recipe: Mapping[str, Any]
    """The resolved recipe; empty if missing."""
    versions: Mapping[str, str]
    steps: Sequence[Mapping[str, Any]]
    """Training steps of ``metrics.jsonl``."""
    evaluations: Sequence[Mapping[str, Any]]
    """Evaluations of ``metrics.jsonl``."""
    events: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    """Lines of ``samples.jsonl``: ``step``, ``prompt``, ``completion``."""
    plan: Mapping[str, Any]
    """Document of ``streamtune plan --json`` for the chosen schedule; empty if the planner did not run."""
    data: Mapping[str, Any]
    """Counts of rows and tokens; empty in runs of older versions."""
    torn: tuple[str, ...]
    """Files with unreadable lines, and how many lines."""

    def series(self, key: str, *, held_out: bool = False) -> list[tuple[float, float]]:
        """Return (step, value) of a metric, finite values only."""
        records = self.evaluations if held_out else self.steps
        found = ((_step(record), _number(record.get(key))) for record in records)
        return [(step, value) for step, value in found if step is not None and value is not None]

    def seconds(self) -> list[tuple[float, float]]:
        """Return (step, seconds of the step)."""
        found = []
        for record in self.steps:
            step, tokens, rate = _step(record), _number(record.get("tokens")), _number(record.get("tokens_per_s"))
            if step is not None and tokens and rate:
                found.append((step, tokens / rate))
        return found


def read_run(path: Path) -> RunRecords:
    try:
        there = [path / mark for mark in MARKS if (path / mark).is_file()]
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}", where="RUN") from error
    if not there:
        inner = [found.parent for mark in MARKS for found in sorted(path.glob(f"*/{mark}"))] if path.is_dir() else []
        what = "is not the directory of a run" if path.is_dir() else "is no directory"
        raise ArgumentError(
            f"{path} {what}",
            where="RUN",
            fix=f"name a run in it, such as {inner[0]}"
            if inner
            else "name the output_dir of a recipe that was trained",
        )
    torn: list[str] = []
    metrics = list(_lines(path / "metrics.jsonl", torn))
    identity = _document(path / "run.json", torn)
    return RunRecords(
        path=path,
        name=path.resolve().name,
        recipe=redact_values(_recipe(path / "recipe.yaml", torn) or _mapping(identity.get("recipe"))),
        versions={key: str(value) for key, value in _mapping(identity.get("versions")).items()},
        steps=[record for record in metrics if "loss" in record or "lr" in record],
        evaluations=[record for record in metrics if any(key.startswith("eval_") for key in record)],
        events=[redact_values(event) for event in _lines(path / "events.jsonl", torn)],
        samples=[redact_values(sample) for sample in _lines(path / "samples.jsonl", torn)],
        plan=_document(path / "plan.json", torn),
        data=_document(path / "data.json", torn),
        torn=tuple(torn),
    )


def _lines(path: Path, torn: list[str]) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each line; other lines are counted in ``torn``."""
    wrong = 0
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return
        with path.open("rb") as file:
            while line := file.readline(MOST_LINE):
                try:
                    record = _tame(json.loads(line.decode("utf-8")))
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict):
                    yield record
                elif line.strip():
                    wrong += 1
    except OSError as error:
        torn.append(f"{path.name}: {error.strerror}")
    if wrong:
        torn.append(f"{path.name}: {wrong:,} line{'s' if wrong > 1 else ''} that cannot be read")


def _document(path: Path, torn: list[str]) -> Mapping[str, Any]:
    try:
        return _mapping(_tame(json.loads(_text(path)))) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        torn.append(f"{path.name}: cannot be read")
        return {}


def _recipe(path: Path, torn: list[str]) -> Mapping[str, Any]:
    """Read the recipe with the YAML reader of recipes, which allows neither anchors nor tags."""
    try:
        values, _, mistakes = read_yaml(_text(path), path.name) if path.is_file() else ({}, None, [])
    except (OSError, ValueError, RecursionError, RecipeError):
        torn.append(f"{path.name}: cannot be read")
        return {}
    if mistakes:
        torn.append(f"{path.name}: {mistakes[0].what}")
    return _mapping(_tame(values))


def _text(path: Path) -> str:
    if path.stat().st_size > MOST_DOCUMENT:
        raise ValueError(f"{path.name} is too large")
    return path.read_text(encoding="utf-8")


def _tame(value: Any, depth: int = 0) -> Any:
    """Cut JSON values to the limits above; numbers beyond :data:`LARGEST` become text."""
    if isinstance(value, str):
        rest = f" ... ({len(value):,} characters)" if len(value) > MOST_TEXT else ""
        return visible(value[:MOST_TEXT]) + rest
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if value == 0 or 1 / LARGEST < abs(value) < LARGEST else str(value)
    if depth == MOST_DEPTH:
        return "..."
    if isinstance(value, dict):
        some = list(value.items())[:MOST_VALUES]
        return {visible(str(key)[:MOST_KEY]): _tame(inner, depth + 1) for key, inner in some}
    return [_tame(inner, depth + 1) for inner in value[:MOST_VALUES]]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _step(record: Mapping[str, Any]) -> float | None:
    step = _number(record.get("step"))
    return step if step is not None and abs(step) < LAST_STEP else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < float("inf") else None
