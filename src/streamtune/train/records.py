"""Read and write ``metrics.jsonl`` and ``events.jsonl`` of a run, with one JSON object (record) per line.

Files of long runs have hundreds of thousands of lines, so they are read from the end, and truncated in place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from streamtune.base.privacy import redact_values
from streamtune.errors import ArgumentError, CheckpointError
from streamtune.train.staging import append_to_file, failed_write_error, rename_file, replace_file, truncate_file

STEP_EVENTS = ("non_finite", "out_of_memory", "spike", "skip")
"""Events of a step, which are deleted when the step is repeated. Other events are kept."""
CHECKED_BYTES = 4 << 20
"""Number of bytes at the end of a records file that are checked before a run resumes."""
ROTATE_BYTES = 64 << 20
"""File size from which a text file is rotated."""
INTACT = "earlier checkpoints are intact"
MAX_ROTATED_FILES = 3
"""Number of rotated files that are kept."""


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append a record as one line of JSON. Floats are written with all digits.

    Raises:
        CheckpointError: The file cannot be written.
    """
    append_records(path, [record])


def append_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append several records in one write; after a crash, the file may have only some of them.

    Raises:
        CheckpointError: The file cannot be written.
    """
    lines = "".join(json.dumps(record) + "\n" for record in records)
    try:
        append_to_file(path, lines.encode("utf-8"))
    except OSError as error:
        raise failed_write_error(error, path, needed_bytes=len(lines), intact=INTACT) from error


def append_event(path: Path, event: str, **details: Any) -> None:
    """Append an event to ``events.jsonl``: one line with its name, details and UTC time."""
    redacted = redact_values(details)  # the text of an error may contain secrets
    append_record(path, {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **redacted})


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return all records of a file; empty if it does not exist. A last line truncated by a crash is ignored.

    Raises:
        ArgumentError: The file cannot be read, or a line is not a JSON object; the error names ``file:line``.
    """
    return [record for _, record in _read_records_from(path, 0)]


@dataclass(frozen=True)
class _Line:
    """A line of a records file, with its position for errors."""

    path: Path
    start: int
    """Offset of the line in the file, in bytes."""
    text: bytes
    is_last: bool
    """True for the last line, which a crash may have truncated."""

    def record(self) -> dict[str, Any] | None:
        """Return the record; None for a last line truncated by a crash."""
        try:
            record = json.loads(self.text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            # A line and its newline are written together. A crash may leave a part of the last line, or zeros.
            if self.is_last and (b"\0" in self.text or not self.text.endswith(b"\n")):
                return None
            reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "is not JSON"
            raise self.invalid_error(reason) from error
        if not isinstance(record, dict):
            raise self.invalid_error("is not a JSON object")
        return record

    def invalid_error(self, reason: str) -> ArgumentError:
        with self.path.open("rb") as file:
            number, left = 1, self.start
            while left and (block := file.read(min(left, BLOCK_BYTES))):
                number, left = number + block.count(b"\n"), left - len(block)
        return _invalid_records_error(self.path, number, reason)


BLOCK_BYTES = 1 << 16
"""Number of bytes read at a time from the end of a file."""


def _read_records_from(path: Path, start: int) -> Iterator[tuple[_Line, dict[str, Any]]]:
    """Yield lines with their records from the byte offset ``start``, where a line begins."""
    if not path.exists():
        return
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(start)
            for text in file:
                line = _Line(path, start, text, start + len(text) >= size)
                start += len(text)
                record = line.record()
                if record is not None:
                    yield line, record
    except OSError as error:
        raise _invalid_records_error(path, 0, f"cannot be read: {error.strerror or error}") from error


def _read_lines_backwards(path: Path) -> Iterator[_Line]:
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            start, rest, is_last = file.seek(0, os.SEEK_END), b"", True
            while start:
                size = min(BLOCK_BYTES, start)
                start = file.seek(start - size)
                rest = file.read(size) + rest
                # The first line in ``rest`` may begin in an earlier block.
                *whole, rest = _split_lines_reversed(rest, start == 0)
                end = start + len(rest) + sum(map(len, whole))
                for text in whole:
                    end -= len(text)
                    yield _Line(path, end, text, is_last)
                    is_last = False
    except OSError as error:
        raise _invalid_records_error(path, 0, f"cannot be read: {error.strerror or error}") from error


def _split_lines_reversed(text: bytes, is_start_complete: bool) -> list[bytes]:
    """Return the lines of a text from last to first; the first line is included only if ``is_start_complete``."""
    *lines, last = text.split(b"\n")
    complete = [line + b"\n" for line in lines] + [last] * bool(last)
    return [*reversed(complete), b""] if is_start_complete else complete[::-1]


def read_records_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file from last to first; the file is read in blocks, as far as needed."""
    for line in _read_lines_backwards(path):
        if (record := line.record()) is not None:
            yield record


def check_records(step_files: Sequence[Path], events: Path) -> None:
    """Check the record files of a run before it resumes; of a long file, only the last :data:`CHECKED_BYTES` bytes.

    Args:
        step_files: Paths of files in which each line must have a step.
        events: Path of ``events.jsonl``.

    Raises:
        ArgumentError: A file cannot be read, a line is not a JSON object, or a line has no step.
    """
    for path in step_files:
        for line, record in _read_last_records(path):
            if not _is_valid_step(record.get("step")):
                raise line.invalid_error("has no integer 'step'")
    for line, record in _read_last_records(events):
        if record.get("event") in STEP_EVENTS and not _is_valid_step(record.get("step", 0)):
            raise line.invalid_error("has no integer 'step'")


def _read_last_records(path: Path) -> Iterator[tuple[_Line, dict[str, Any]]]:
    start = 0
    if path.exists() and (size := path.stat().st_size) > CHECKED_BYTES:
        with path.open("rb") as file:
            file.seek(size - CHECKED_BYTES)
            file.readline()
            start = file.tell()
    yield from _read_records_from(path, start)


def _is_valid_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid_records_error(path: Path, number: int, reason: str) -> ArgumentError:
    line = f"line {number} of {path.name} " if number else f"{path.name} "
    return ArgumentError(
        f"{line}{reason}, so the run cannot resume",
        where=f"{path}:{number}" if number else str(path),
        fix="fix the line, or move the file away; the run then resumes with a new file",
    )


def delete_records_after_step(path: Path, step: int, *, keep_evaluation: bool = True) -> None:
    """Delete the lines of steps after ``step``, which a resumed run repeats.

    Args:
        path: Records file; nothing happens if it does not exist.
        step: Last step whose lines are kept.
        keep_evaluation: False to also delete the evaluation of ``step``.
    """
    if not path.is_file():
        return

    tail_lines: list[tuple[bytes, bool]] = []
    end = path.stat().st_size
    for line in _read_lines_backwards(path):
        record = line.record()
        if record is not None and not _is_valid_step(record.get("step")):
            raise line.invalid_error("has no integer 'step'")
        if record is not None and record["step"] < step:
            break
        is_kept = record is not None and record["step"] == step and (keep_evaluation or not _is_evaluation(record))
        tail_lines.append((line.text, is_kept))
        end = line.start
    while tail_lines and tail_lines[-1][1]:
        end += len(tail_lines.pop()[0])
    _truncate_and_append(path, end, b"".join(text for text, is_kept in reversed(tail_lines) if is_kept))


def delete_events_after_step(path: Path, step: int) -> None:
    """Delete the events after ``step``, and a last line truncated by a crash."""
    if path.is_file():
        records = read_records(path)
        kept = [r for r in records if r.get("event") not in STEP_EVENTS or r.get("step", 0) <= step]
        _replace_records(path, "".join(json.dumps(record) + "\n" for record in kept).encode("utf-8"))


def _truncate_and_append(path: Path, size: int, tail: bytes) -> None:
    """Truncate a file to ``size`` bytes and append ``tail``; if ``tail`` is not empty, replace the file atomically."""
    if path.stat().st_size == size and not tail:
        return
    if tail:
        with path.open("rb") as file:
            _replace_records(path, file.read(size) + tail)
        return
    try:
        truncate_file(path, size)
    except OSError as error:
        raise failed_write_error(error, path, needed_bytes=0, intact=INTACT) from error


def _replace_records(path: Path, content: bytes) -> None:
    try:
        replace_file(path, content)
    except OSError as error:
        raise failed_write_error(error, path, needed_bytes=path.stat().st_size, intact=INTACT) from error


def rotated_paths(path: Path) -> list[Path]:
    """Return the paths of a JSON-lines file and its rotated files, newest first; they need not exist."""
    return [path, *(path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, MAX_ROTATED_FILES + 1))]


def rotate_file(path: Path) -> None:
    """Rotate a long JSON-lines file: ``name.jsonl`` becomes ``name.1.jsonl``, and the oldest rotated file is
    deleted."""
    if not path.is_file() or path.stat().st_size < ROTATE_BYTES:
        return
    names = rotated_paths(path)
    try:
        for old, new in reversed(list(pairwise(names))):
            if old.is_file():
                rename_file(old, new.name)
    except OSError as error:
        raise failed_write_error(error, path, needed_bytes=0, intact=INTACT) from error


def delete_rotated_records_after_step(path: Path, step: int) -> None:
    """Delete the lines of steps after ``step`` in a JSON-lines file and its rotated files."""
    for file in rotated_paths(path):
        if not file.is_file():
            return
        delete_records_after_step(file, step)
        if file.stat().st_size:
            return


def _is_evaluation(record: dict[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in record)


@contextmanager
def record_failure(path: Path) -> Iterator[None]:
    """Context manager that writes an event ``failure`` if an error is raised inside."""
    try:
        yield
    except Exception as error:
        with suppress(CheckpointError):  # if the disk is full, the first error is reported
            append_event(path, "failure", error=type(error).__name__, what=str(error))
        raise
