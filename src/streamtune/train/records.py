"""The records that a run writes: ``metrics.jsonl`` and ``events.jsonl``, one JSON object a line.

A long run has hundreds of thousands of lines. A start needs the last ones: they are read from the end, and a file is
cut where the first line to drop begins.
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
from streamtune.train.staging import append_to, cut_file, rename_file, replace_file, write_error

OF_STEPS = ("non_finite", "out_of_memory", "spike", "skip")
"""Events that are part of a step, and happen again when it is repeated. Others are history, and stay."""


CHECKED_BYTES = 4 << 20
"""Bytes at the end of a file of records whose lines are checked at a start."""
ROTATE_BYTES = 64 << 20
"""Size from which a file of texts is moved aside, and a new one begins."""
ROTATED = 3
"""Files moved aside that are kept; the oldest goes."""


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line. Floats are written with all their digits, so two runs can be compared exactly."""
    append_records(path, [record])


def append_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Add several lines at once: all of them, or after a crash the first ones."""
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
    """Read all lines; none if the file does not exist. A last line torn by a crash is left out.

    Raises:
        ArgumentError: The file cannot be read, or a line is not what a run writes, with ``file:line``: somebody changed
            the file, and its unreadable lines would be lost when it is written anew.
    """
    return [record for _, record in _read_from(path, 0)]


@dataclass(frozen=True)
class _Line:
    """A line of a file, as an error names it."""

    path: Path
    start: int
    """Offset of its first byte."""
    text: bytes
    is_last: bool
    """True if it is the last line, which a crash may have torn."""

    def record(self) -> dict[str, Any] | None:
        """Return the record; None for a last line that a crash has torn."""
        try:
            record = json.loads(self.text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            # Each line is written with its end at once. A crash may leave part of the last, or zeros in its place.
            if self.is_last and (b"\0" in self.text or not self.text.endswith(b"\n")):
                return None
            reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "is not JSON"
            raise self.strange(reason) from error
        if not isinstance(record, dict):
            raise self.strange("is no JSON object")
        return record

    def strange(self, reason: str) -> ArgumentError:
        """Return the error about the line."""
        with self.path.open("rb") as file:
            number, left = 1, self.start
            while left and (block := file.read(min(left, BLOCK))):
                number, left = number + block.count(b"\n"), left - len(block)
        return _strange(self.path, number, reason)


BLOCK = 1 << 16
"""Bytes read at once from the end of a file."""


def _read_from(path: Path, start: int) -> Iterator[tuple[_Line, dict[str, Any]]]:
    """Yield lines and their records from byte ``start`` on, where a line begins; nothing if there is no file."""
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
        raise _strange(path, 0, f"cannot be read: {error.strerror or error}") from error


def _lines_backwards(path: Path) -> Iterator[_Line]:
    """Yield the lines of a file from the last to the first; nothing if there is no file."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            start, rest, is_last = file.seek(0, os.SEEK_END), b"", True
            while start:
                size = min(BLOCK, start)
                start = file.seek(start - size)
                rest = file.read(size) + rest
                # Of the first line in ``rest`` the beginning may be before it.
                *whole, rest = _split(rest, start == 0)
                end = start + len(rest) + sum(map(len, whole))
                for text in whole:
                    end -= len(text)
                    yield _Line(path, end, text, is_last)
                    is_last = False
    except OSError as error:
        raise _strange(path, 0, f"cannot be read: {error.strerror or error}") from error


def _split(text: bytes, from_start: bool) -> list[bytes]:
    """Return the lines of a text from the last to the first; with ``from_start`` nothing stands before the first."""
    *lines, last = text.split(b"\n")
    found = [line + b"\n" for line in lines] + [last] * bool(last)
    return [*reversed(found), b""] if from_start else found[::-1]


def records_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield records from the last to the first, reading only as much of the file as the caller takes."""
    for line in _lines_backwards(path):
        if (record := line.record()) is not None:
            yield record


def check_records(metrics: Sequence[Path], events: Path) -> None:
    """Check that the records of a run can be continued, before anything of it is changed; of a long file the end.

    Each line of ``metrics`` belongs to a step.

    Raises:
        ArgumentError: As :func:`read_records`, or a line has no step.
    """
    for path in metrics:
        for line, record in _last(path):
            if not _is_step(record.get("step")):
                raise line.strange("has no 'step' that is a whole number")
    for line, record in _last(events):
        if record.get("event") in OF_STEPS and not _is_step(record.get("step", 0)):
            raise line.strange("has a 'step' that is no whole number")


def _last(path: Path) -> Iterator[tuple[_Line, dict[str, Any]]]:
    start = 0
    if path.exists() and (size := path.stat().st_size) > CHECKED_BYTES:
        with path.open("rb") as file:
            file.seek(size - CHECKED_BYTES)
            file.readline()
            start = file.tell()
    yield from _read_from(path, start)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _strange(path: Path, number: int, reason: str) -> ArgumentError:
    line = f"line {number} of {path.name} " if number else f"{path.name} "
    return ArgumentError(
        f"{line}{reason}, so the run cannot be gone on with",
        where=f"{path}:{number}" if number else str(path),
        fix="fix the line, or move the file away: the run then goes on and writes a new one",
    )


def cut_after_step(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Drop the lines of steps after ``step``, which are taken again, and unless ``evaluated`` its evaluation."""
    if not path.is_file():
        return

    region: list[tuple[bytes, bool]] = []
    cut = path.stat().st_size
    for line in _lines_backwards(path):
        record = line.record()
        if record is not None and not _is_step(record.get("step")):
            raise line.strange("has no 'step' that is a whole number")
        if record is not None and record["step"] < step:
            break
        is_kept = record is not None and record["step"] == step and (evaluated or not _is_evaluation(record))
        region.append((line.text, is_kept))
        cut = line.start
    while region and region[-1][1]:
        cut += len(region.pop()[0])
    _cut(path, cut, b"".join(text for text, is_kept in reversed(region) if is_kept))


def cut_events(path: Path, step: int) -> None:
    """Drop the events of steps after ``step``, which happen again, and a line torn by a crash."""
    if path.is_file():
        records = read_records(path)
        kept = [r for r in records if r.get("event") not in OF_STEPS or r.get("step", 0) <= step]
        _replace(path, "".join(json.dumps(record) + "\n" for record in kept).encode("utf-8"))


def _cut(path: Path, size: int, more: bytes) -> None:
    """Cut a file to ``size`` bytes and add ``more``; with ``more``, replace it at once by a new file."""
    if path.stat().st_size == size and not more:
        return
    if more:
        with path.open("rb") as file:
            _replace(path, file.read(size) + more)
        return
    try:
        cut_file(path, size)
    except OSError as error:
        raise write_error(error, path, needed=0, safe="checkpoints saved before are intact") from error


def _replace(path: Path, content: bytes) -> None:
    try:
        replace_file(path, content)
    except OSError as error:
        safe = "checkpoints saved before are intact"
        raise write_error(error, path, needed=path.stat().st_size, safe=safe) from error


def rotated(path: Path) -> list[Path]:
    """Return the names of a file of texts and of the files moved aside, the newest first, whether they exist or not."""
    return [path, *(path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, ROTATED + 1))]


def rotate(path: Path) -> None:
    """Move a file of texts aside if it is long: ``name.jsonl`` becomes ``name.1.jsonl``, and the oldest goes."""
    if not path.is_file() or path.stat().st_size < ROTATE_BYTES:
        return
    names = rotated(path)
    try:
        for old, new in reversed(list(pairwise(names))):
            if old.is_file():
                rename_file(old, new.name)
    except OSError as error:
        raise write_error(error, path, needed=0, safe="checkpoints saved before are intact") from error


def cut_rotated(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step`` in a file of texts, and in the files that were moved aside."""
    for file in rotated(path):
        if not file.is_file():
            return
        cut_after_step(file, step)
        if file.stat().st_size:
            return


def _is_evaluation(record: dict[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in record)


@contextmanager
def record_failure(path: Path) -> Iterator[None]:
    """Add an event if the block fails, and raise the error again."""
    try:
        yield
    except Exception as error:
        with suppress(CheckpointError):  # where the disk is what failed, it is the first failure that is reported
            append_event(path, "failure", error=type(error).__name__, what=str(error))
        raise
