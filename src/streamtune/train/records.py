"""What a run writes down as it goes: ``metrics.jsonl`` and ``events.jsonl``, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamtune.secrets import redact_values

__all__ = ["append_event", "append_record", "cut_after_step", "read_records", "record_failure"]


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line. Floats are written with all their digits, so two runs can be compared exactly."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def append_event(path: Path, event: str, **details: Any) -> None:
    """Add one line that says what happened, and when (UTC)."""
    told = redact_values(details)  # an error's text may quote anything
    append_record(path, {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **told})


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read all lines; none where there is no file. A last line torn by a crash is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def cut_after_step(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Drop the lines of steps after ``step``: a resumed run takes those steps again and writes them anew.

    Where ``evaluated`` is False the evaluation at ``step`` itself is made again too, and its line goes as well.
    """
    if not path.is_file():
        return
    kept = [
        record
        for record in read_records(path)
        if record["step"] < step or (record["step"] == step and (evaluated or not _is_evaluation(record)))
    ]
    staged = path.with_name(f".tmp-{path.name}")
    staged.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    staged.replace(path)


def _is_evaluation(record: dict[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in record)


@contextmanager
def record_failure(path: Path) -> Iterator[None]:
    """Add an event where the block fails, and let the error go on."""
    try:
        yield
    except Exception as error:
        append_event(path, "failure", error=type(error).__name__, what=str(error))
        raise
