"""What a run writes down as it goes: ``metrics.jsonl`` and ``events.jsonl``, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamtune.errors import CheckpointError
from streamtune.secrets import redact_values
from streamtune.train.staging import write_durably, write_error

__all__ = ["append_event", "append_record", "cut_after_step", "cut_events", "read_records", "record_failure"]

OF_STEPS = ("non_finite", "out_of_memory", "spike", "skip")
"""Events that are part of a step, and happen again where it is taken again. Others are history, and stay."""


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line. Floats are written with all their digits, so two runs can be compared exactly.

    Raises:
        CheckpointError: It cannot be written.
    """
    line = json.dumps(record) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise write_error(error, path, needed=len(line), safe="checkpoints saved before are intact") from error


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
    _replace(path, kept)


def cut_events(path: Path, step: int) -> None:
    """Drop the events of steps after ``step``, which happen again, and a line torn by a crash."""
    if path.is_file():
        records = read_records(path)
        _replace(path, [r for r in records if r.get("event") not in OF_STEPS or r.get("step", 0) <= step])


def _replace(path: Path, records: list[dict[str, Any]]) -> None:
    try:
        write_durably(path, "".join(json.dumps(record) + "\n" for record in records))
    except OSError as error:
        safe = "checkpoints saved before are intact"
        raise write_error(error, path, needed=path.stat().st_size, safe=safe) from error


def _is_evaluation(record: dict[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in record)


@contextmanager
def record_failure(path: Path) -> Iterator[None]:
    """Add an event where the block fails, and let the error go on."""
    try:
        yield
    except Exception as error:
        with suppress(CheckpointError):  # where the disk is what failed, it is the first failure that is told
            append_event(path, "failure", error=type(error).__name__, what=str(error))
        raise
