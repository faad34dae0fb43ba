"""The records that a run writes: ``metrics.jsonl`` and ``events.jsonl``, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamtune.errors import ArgumentError, CheckpointError
from streamtune.secrets import redact_values
from streamtune.train.staging import append_to, write_durably, write_error

__all__ = [
    "append_event",
    "append_record",
    "append_records",
    "check_records",
    "cut_after_step",
    "cut_events",
    "read_records",
    "record_failure",
]

OF_STEPS = ("non_finite", "out_of_memory", "spike", "skip")
"""Events that are part of a step, and happen again where it is taken again. Others are history, and stay."""


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line. Floats are written with all their digits, so two runs can be compared exactly.

    Raises:
        CheckpointError: It cannot be written.
    """
    append_records(path, [record])


def append_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Add several lines at once: all of them, or after a crash the first ones.

    Raises:
        CheckpointError: They cannot be written.
    """
    lines = "".join(json.dumps(record) + "\n" for record in records)
    try:
        append_to(path, lines.encode("utf-8"))
    except OSError as error:
        raise write_error(error, path, needed=len(lines), safe="checkpoints saved before are intact") from error


def append_event(path: Path, event: str, **details: Any) -> None:
    """Add one line with an event, its details and its time (UTC)."""
    redacted = redact_values(details)  # an error's text may quote anything
    append_record(path, {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **redacted})


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read all lines; none where there is no file. A last line torn by a crash is left out.

    Raises:
        ArgumentError: It cannot be read, or a line is not what a run writes, with ``file:line``: someone else changed
            the file, and what cannot be read would be lost where the file is written anew.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise _strange(path, 0, f"cannot be read: {error.strerror or error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            # Each line is written with its end at once. A crash may leave part of the last, or zeros in its place.
            if number == len(lines) or (number == len(lines) - 1 and b"\0" in line and not lines[-1]):
                break
            reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "is not JSON"
            raise _strange(path, number, reason) from error
        if not isinstance(record, dict):
            raise _strange(path, number, "is no JSON object")
        records.append(record)
    return records


def check_records(metrics: Sequence[Path], events: Path) -> None:
    """Check that the records of a run can be continued, before anything of it is changed.

    Args:
        metrics: Files in which each line is of a step.
        events: The file of what happened.

    Raises:
        ArgumentError: As :func:`read_records`, or a line has no step.
    """
    for path in metrics:
        for number, record in enumerate(read_records(path), start=1):
            if not _is_step(record.get("step")):
                raise _strange(path, number, "has no 'step' that is a whole number")
    for number, record in enumerate(read_records(events), start=1):
        if record.get("event") in OF_STEPS and not _is_step(record.get("step", 0)):
            raise _strange(events, number, "has a 'step' that is no whole number")


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _strange(path: Path, number: int, reason: str) -> ArgumentError:
    line = f"line {number} of {path.name} " if number else f"{path.name} "
    return ArgumentError(
        f"{line}{reason}, so the run cannot be gone on with",
        where=f"{path}:{number}" if number else str(path),
        mend="mend the line, or move the file away: the run then goes on and writes a new one",
    )


def cut_after_step(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Drop the lines of steps after ``step``: a resumed run takes those steps again and writes them anew.

    Where ``evaluated`` is False the evaluation at ``step`` itself is made again too, and its line goes as well.
    """
    if not path.is_file():
        return
    records = read_records(path)
    without = next((number for number, record in enumerate(records, start=1) if not _is_step(record.get("step"))), None)
    if without is not None:
        raise _strange(path, without, "has no 'step' that is a whole number")
    kept = [
        record
        for record in records
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
    """Add an event where the block fails, and raise the error again."""
    try:
        yield
    except Exception as error:
        with suppress(CheckpointError):  # where the disk is what failed, it is the first failure that is reported
            append_event(path, "failure", error=type(error).__name__, what=str(error))
        raise
