"""The records in a run directory, read leniently: a run may be young, torn by a crash, or of an older version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from streamtune.errors import ArgumentError
from streamtune.secrets import redact_values

__all__ = ["RunRecords", "read_run"]

MARKS = ("run.json", "metrics.jsonl")
"""Files of which a run directory has at least one."""
MOST_BYTES = 1 << 30
"""A larger file of records is not one that a run has written."""


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, without secrets."""

    path: Path
    name: str
    """What tells the run apart from others on the page."""
    recipe: Mapping[str, Any]
    """The resolved recipe; empty where there is none."""
    versions: Mapping[str, str]
    steps: Sequence[Mapping[str, Any]]
    """Lines of ``metrics.jsonl`` that are of training steps."""
    evaluations: Sequence[Mapping[str, Any]]
    """Lines of ``metrics.jsonl`` that are of evaluations."""
    events: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    """Lines of ``samples.jsonl``: ``step``, ``prompt``, ``completion``."""
    plan: Mapping[str, Any]
    """The document of ``streamtune plan --json`` for the schedule that was chosen; empty where none was made."""
    data: Mapping[str, Any]
    """Counts of rows and tokens; empty in runs of older versions."""
    torn: tuple[str, ...]
    """Files of which lines could not be read, with their number."""

    def series(self, key: str, *, held_out: bool = False) -> list[tuple[float, float]]:
        """Return ``(step, value)`` of a metric where it is a finite number."""
        records = self.evaluations if held_out else self.steps
        found = ((_number(record.get("step")), _number(record.get(key))) for record in records)
        return [(step, value) for step, value in found if step is not None and value is not None]

    def seconds(self) -> list[tuple[float, float]]:
        """Return ``(step, seconds)``: the time each step took."""
        found = []
        for record in self.steps:
            step, tokens, rate = (_number(record.get(key)) for key in ("step", "tokens", "tokens_per_s"))
            if step is not None and tokens and rate:
                found.append((step, tokens / rate))
        return found


def read_run(path: Path) -> RunRecords:
    """Read the records of the run in ``path``.

    Raises:
        ArgumentError: There is no run in ``path``, or it cannot be read.
    """
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
            mend=f"name a run in it, such as {inner[0]}"
            if inner
            else "name the output_dir of a recipe that was trained",
        )
    torn: list[str] = []
    metrics = list(_lines(path / "metrics.jsonl", torn))
    identity = _document(path / "run.json", torn)
    return RunRecords(
        path=path,
        name=path.resolve().name,
        recipe=redact_values(_recipe(path / "recipe.yaml", torn) or identity.get("recipe") or {}),
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
    """Yield the JSON objects of a file, one a line; lines that are none are counted in ``torn``."""
    wrong = 0
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return
        with path.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line.decode("utf-8"))
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
        return _mapping(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        torn.append(f"{path.name}: cannot be read")
        return {}


def _recipe(path: Path, torn: list[str]) -> Mapping[str, Any]:
    try:
        return _mapping(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        torn.append(f"{path.name}: cannot be read")
        return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < float("inf") else None
