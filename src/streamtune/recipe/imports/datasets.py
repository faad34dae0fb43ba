"""Entries of ``datasets``, as the trainers' importers write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .conversion import Conversion

__all__ = ["put_datasets", "rows_of_split"]

DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")


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
        conversion.lines.setdefault(("datasets", index), conversion.line(*path))


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
