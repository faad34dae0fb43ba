"""Entries of ``datasets`` and ``eval_datasets``, their weights and columns, as the trainers' importers write them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion

DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that hold what is not text."""
MOST_READ = 2**20
"""Bytes of a file that are read to see the columns of its first row."""


def seen_columns(conversion: Conversion, path: str) -> dict[str, Any] | None:
    """Return the first row of a local file, as it is named, then seen from their file; None where it is not there.

    Only the columns of a Parquet file are read, each with the value None.
    """
    for base in (Path(), conversion.file.path.resolve().parent):
        file = base / Path(path).expanduser()
        if file.suffix not in DATA_FILES or not file.is_file():
            continue
        try:
            return _first_row(file)
        except (OSError, ValueError, StopIteration):
            return None  # the run says what is wrong with the file
    return None


def _first_row(file: Path) -> dict[str, Any] | None:
    if file.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        return dict.fromkeys(parquet.read_schema(file).names)
    with file.open(encoding="utf-8", newline="") as text:
        if file.suffix == ".csv":
            return dict(next(csv.DictReader(text)))
        if file.suffix == ".txt":
            return {"text": ""}
        read = text.read(MOST_READ).lstrip()
    row, _ = json.JSONDecoder().raw_decode(read.removeprefix("[").lstrip())
    return row if isinstance(row, dict) else None


def lose_unnamed(
    row: Mapping[str, Any] | None, ours: Iterable[str], named: Iterable[Any], lose: Callable[[str], None]
) -> None:
    """Report columns of the first row that are read here by their usual names, and not by the other trainer.

    Args:
        row: The first row; None where it is not here.
        ours: Names of columns that are read where a row has them.
        named: Columns that the other trainer reads.
        lose: Reports a loss.
    """
    read = set(named)
    for column in ours:
        if row is not None and row.get(column) not in (None, "", [], "[]") and column not in read:
            lose(f"the column '{column}' is not read there, and is here: rename it in the file")


FLAGS = ("train", "training", "loss", "weight")
"""Fields of a message that say here whether it is trained."""

READ_OF_MESSAGES = (*FLAGS, "reasoning_content", "reasoning", "thinking", "tool_calls")
"""Fields of a message that are read here, besides its role and its content."""


def lose_fields(
    row: Mapping[str, Any] | None, column: str, fields: Iterable[str], read: Iterable[str], lose: Callable[[str], None]
) -> None:
    """Report fields of the first row's messages that are read here, and not by the other trainer.

    Args:
        row: The first row; None where it is not here.
        column: The column of its messages.
        fields: Fields that are read here.
        read: Fields that the other trainer reads.
        lose: Reports a loss.
    """
    turns = row.get(column) if row is not None else None
    known = set(read)
    for name in fields:
        if name not in known and isinstance(turns, list) and any(_has(turn, name) for turn in turns):
            lose(f"'{name}' of a message is not read there, and is here: take it out of the rows")


def _has(turn: Any, name: str) -> bool:
    return isinstance(turn, dict) and turn.get(name) not in (None, "", [])


def report_media(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int) -> None:
    """Report columns of images, sounds and videos, which rows of text do not show."""
    for spec in specs:
        row = seen_columns(conversion, str(spec["path"])) or {}
        for column in [name for name in MEDIA if name in row and row[name] not in ("", [])]:
            conversion.lose(*path, why=f"the column '{column}' of {spec['path']}: only its text is trained on")


def put_datasets(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int, note: str = "") -> None:
    """Write entries of ours, behind those that are there; the line of each is that of the field."""
    entries = [*conversion.ours.get("datasets", []), *specs]
    if not specs:
        return
    for spec in specs:
        if str(spec["path"]).endswith(DATA_FILES) and spec.get("split") == "train":
            del spec["split"]  # of a file: it has none
    conversion.put("datasets", entries, *path, note=note)
    for index in range(len(entries)):
        conversion.lines.setdefault(("datasets", index), conversion.file.marks.line(path))


def rows_of_split(spec: dict[str, Any], split: Any, lose: Callable[[str], None]) -> None:
    """Write a split, of which transformers' form ``train[:1000]`` takes the first rows."""
    found = re.fullmatch(r"([^\[\]]+)(?:\[:(\d+)\])?", str(split))
    if found is None:
        lose("a part of a split, of which max_rows takes the first rows only")
        spec["split"] = re.split(r"[\[+]", str(split))[0]
        return
    spec["split"] = found[1]
    if found[2]:
        spec["max_rows"] = int(found[2])


def put_weights(conversion: Conversion, value: Any, *path: str | int, note: str = "") -> None:
    """Write the weights of the datasets that are there: a list of numbers, or a text with commas."""
    entries = conversion.ours.get("datasets", [])
    try:
        parts = value.split(",") if isinstance(value, str) else list(value)
        weights = [float(part) for part in parts]
    except (TypeError, ValueError):
        conversion.lose(*path, why="a list of numbers was expected")
        return
    if len(weights) != len(entries):
        conversion.lose(*path, why=f"{len(weights)} numbers for {len(entries)} datasets: write weight in each")
        return
    weighted = [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    conversion.put("datasets", weighted, *path, note=note or "shares of an epoch, which is as long as all rows")


def put_eval_sets(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int, note: str = "") -> None:
    """Write eval sets, each under a name made of its path."""
    named: dict[str, list[dict[str, Any]]] = {}
    for spec in specs:
        place = str(spec["path"])
        if place.endswith(DATA_FILES):
            spec.pop("split", None)  # of a file: it has none
            place = place.rpartition(".")[0]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", re.split(r"[/\\\\]", place)[-1]).strip("-")
        name = name if name[:1].isalpha() and name not in ("held_out", "nll") else f"set-{name}"
        while name in named:
            name += "-2"
        named[name] = [spec]
    if named:
        conversion.put("eval_datasets", {**conversion.ours.get("eval_datasets", {}), **named}, *path, note=note)


def rename_columns(spec: dict[str, Any], columns: dict[str, Any], type_: str) -> None:
    """Write the names of columns that are not ours, given as our name and theirs, and the type of the rows."""
    renamed = {ours: theirs for ours, theirs in columns.items() if isinstance(theirs, str) and theirs != ours}
    if renamed:
        spec["columns"] = renamed
    spec["type"] = type_
