"""Datasets of ms-swift's recipes, and the columns of their questions and answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion
from .field_rules import UnconvertedError
from .peer_files import json_value
from .peer_rows import (
    DATA_FILES,
    READ_OF_MESSAGES,
    lose_fields,
    put_datasets,
    put_eval_sets,
    put_weights,
    rename_columns,
    report_media,
    seen_columns,
)

STANDARD = {
    **{"query": "instruction", "response": "output"},
    **{name: name for name in ("messages", "system", "history", "tools", "instruction", "input", "output")},
}
"""Column name of ms-swift -> ours."""

QUESTIONS = ("query", "prompt", "input", "instruction", "question", "problem")
ANSWERS = (
    *("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution"),
    *("text", "completion", "content"),
)
SYSTEMS = ("system", "system_prompt")
TALKS = ("messages", "conversation", "conversations")
PAIRS = (
    "a pair is messages and rejected_response there; here write prompt, chosen and rejected",
    "a row is messages and a label there; here write prompt, completion and label",
)
"""Losses of pairs, and of single answers with a label."""


def take_datasets(conversion: Conversion, use_hf: Any) -> None:
    columns = _columns(conversion)
    specs, note = _specs(conversion, "dataset", use_hf, columns)
    put_datasets(conversion, specs, "dataset", note=note)
    report_media(conversion, specs, "dataset")
    specs, note = _specs(conversion, "val_dataset", use_hf, columns)
    put_eval_sets(conversion, specs, "val_dataset", note=note)
    if shares := conversion.get("interleave_prob"):
        put_weights(conversion, shares, "interleave_prob")
    conversion.dismiss("interleave_prob", why="no value")


def _columns(conversion: Conversion) -> dict[str, str]:
    """Return our column name -> name in the files; ``columns`` of ms-swift is the other way round."""
    if "columns" not in conversion.file.fields:
        return {}
    try:
        given = json_value(conversion.take("columns"))
    except UnconvertedError as error:
        conversion.lose("columns", why=str(error))
        return {}
    if not given:
        conversion.unneeded("columns", why="no value")
        return {}
    unknown = [name for name in given.values() if name not in STANDARD] if isinstance(given, dict) else [given]
    if unknown:
        conversion.lose("columns", why=f"'{unknown[0]}' has no name here: write columns in each dataset")
        return {}
    conversion.unneeded("columns", why="see datasets")
    ours = STANDARD if conversion.objective == "sft" else {**STANDARD, "query": "prompt", "response": "completion"}
    return {ours[name]: column for column, name in given.items()}


def _specs(
    conversion: Conversion, field: str, use_hf: Any, columns: dict[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Return our entries for the datasets that a field names, and a note about them."""
    names = conversion.get(field)
    if not names:
        conversion.dismiss(field, why="no value")
    found: list[dict[str, Any]] = []
    noted: dict[str, None] = {}
    unknown: list[str] = []
    away: dict[str, None] = {}
    for name in names if isinstance(names, list) else [names] if names else []:
        text = str(name)
        hub = re.match(r"(HF|MS)::", text)
        path, _, count = (text[4:] if hub else text).partition("#")
        parts: list[str] = []
        if not path.endswith(DATA_FILES) and ":" in path and not re.match(r"[A-Za-z]:[\\/]", path):
            path, _, parts_text = path.partition(":")
            parts = parts_text.split("/")
        local = path.endswith(DATA_FILES) or Path(path).expanduser().exists()
        on_hub = use_hf if hub is None else hub[1] == "HF"
        if not local and not on_hub:
            noted["from ModelScope there, here from the hub"] = None
        spec: dict[str, Any] = {"path": path}
        if count.isdigit():
            spec |= {"max_rows": int(count), "shuffle": True}
        if path.rpartition("/")[2] == "self-cognition":
            rename_columns(spec, {"instruction": "query", "output": "response"}, "alpaca")
            unknown.append(path)
        elif conversion.objective == "sft" and conversion.file.command != "pt":
            row, lose = seen_columns(conversion, path), conversion.losing(field, prefix=f"{path}: ")
            take_columns(spec, row, columns, lose)
            if row is not None and row.get("tools") and conversion.ours.get("chat_template") == "chatml":
                lose("chatml describes tools in other words than ms-swift: write chat_template: FILE.jinja")
            if row is None and not columns:
                away[path] = None
        elif columns:
            spec["columns"] = dict(columns)
        if conversion.objective == "dpo":
            conversion.lose(field, why=f"{path}: {PAIRS[conversion.ours.get('loss_type') == 'kto']}")
        found += [{**spec, "name": part} for part in parts] or [spec]
    if field == "dataset":
        _take_names(conversion, unknown)
    if away:
        why = "its rows are not here: columns prompt and completion are a chat there, and plain text here; see columns"
        conversion.missing(f"{field}: {', '.join(away)}", why, trains=False)
    return found, "; ".join(noted)


def _take_names(conversion: Conversion, read_by: list[str]) -> None:
    """Report the model's name and author, which ms-swift puts into the rows of ``swift/self-cognition``."""
    if read_by:
        why = "a model's name and author are put into its rows there, and are {{NAME}} and {{AUTHOR}} here"
        conversion.lose("dataset", why=f"{read_by[0]}: {why}: write a file with the names")
    for name in ("model_name", "model_author"):
        value = conversion.take(name)
        if name in conversion.file.fields and read_by and value:
            conversion.lose(name, why=f"put into the rows of {read_by[0]}: see dataset")
        elif name in conversion.file.fields:
            conversion.unneeded(name, why="read with swift/self-cognition only" if value else "no value")


def take_columns(
    spec: dict[str, Any], row: Mapping[str, Any] | None, columns: Mapping[str, str], lose: Callable[[str], None]
) -> None:
    """Write the type and the columns of an entry as ms-swift's ``AutoPreprocessor`` reads them.

    Args:
        spec: Entry; ms-swift puts one newline between the instruction and the input of an alpaca row.
        row: First row; None if unknown.
        columns: Our column name -> name in the files, as the recipe has them.
        lose: Function that reports a loss.
    """
    if row is None:
        if columns:
            asks = {"instruction", "output"} & columns.keys()
            rename_columns(spec, dict(columns), "alpaca" if asks else "auto")
        if spec.get("type", "auto") in ("auto", "alpaca"):
            spec["input_separator"] = "\n"
        return
    named = {theirs: ours for ours, theirs in columns.items()}
    if {*TALKS} & row.keys() or "messages" in named.values():
        _take_talk(spec, row, columns, lose)
        return
    found = {"system": columns.get("system") or _only(row, SYSTEMS)}
    if "tools" in row or "tools" in columns:
        found["tools"] = columns.get("tools", "tools")
    if {"instruction", "input"} <= row.keys() and not {"instruction", "input"} & columns.keys():
        found |= {"instruction": "instruction", "input": "input"}
        spec["input_separator"] = "\n"
    else:
        found["instruction"] = columns.get("instruction") or _only(row, QUESTIONS)
    found["output"] = columns.get("output") or _only(row, ANSWERS)
    if not found["instruction"] or not found["output"]:
        if "text" not in row:
            lose("no column is a question, or none an answer, or several are: write columns in each dataset")
        return
    for name in ("input", "history"):  # read here by their names
        if name in row and name not in found.values() and name not in columns:
            found[name] = name
            if name == "input":
                lose("the column 'input' is not read there, and is here: rename it in the file")
    rename_columns(spec, {**found, **({"history": columns["history"]} if "history" in columns else {})}, "alpaca")


def _only(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the only column with one of the names; if there are several, the column with the first name."""
    found = [column for column in row if column.lower() in names]
    if len(found) == 1:
        return found[0]
    return names[0] if names[0] in row else None


def _take_talk(
    spec: dict[str, Any], row: Mapping[str, Any], columns: Mapping[str, str], lose: Callable[[str], None]
) -> None:
    """Write the columns of rows of messages, whose turns have 'role' or 'from'."""
    column = columns.get("messages") or next(name for name in TALKS if name in row)
    turns = row.get(column)
    lose_fields(row, column, READ_OF_MESSAGES, ("loss", "tool_calls"), lose)
    first = turns[0] if isinstance(turns, list) and turns else {}
    others = {"system": columns.get("system") or _only(row, SYSTEMS), "tools": columns.get("tools")}
    renamed = {ours: theirs for ours, theirs in others.items() if theirs and theirs != ours}
    if isinstance(first, dict) and "from" in first:
        if column not in TALKS[1:]:
            renamed["conversations"] = column
    elif column not in ("messages", "conversations"):
        renamed["messages"] = column
    if renamed:
        spec["columns"] = renamed
    if "conversations" in renamed:
        spec["type"] = "sharegpt"
    elif "messages" in renamed:
        spec["type"] = "messages"
