"""The columns of ms-swift's rows: its names of questions and answers, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .datasets import READ_OF_MESSAGES, lose_fields, rename_columns

STANDARD = {
    **{"query": "instruction", "response": "output"},
    **{name: name for name in ("messages", "system", "history", "tools", "instruction", "input", "output")},
}
"""Names of columns that ``columns`` gives there -> ours."""

QUESTIONS = ("query", "prompt", "input", "instruction", "question", "problem")
ANSWERS = (
    *("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution"),
    *("text", "completion", "content"),
)
SYSTEMS = ("system", "system_prompt")
TALKS = ("messages", "conversation", "conversations")


def take_columns(
    spec: dict[str, Any], row: Mapping[str, Any] | None, columns: Mapping[str, str], lose: Callable[[str], None]
) -> None:
    """Write the type and the columns of an entry as ms-swift's ``AutoPreprocessor`` reads them.

    Args:
        spec: The entry; a row of alpaca gets one newline between its instruction and its input.
        row: The first row; None where it is not here.
        columns: Columns that the recipe names: our name and the name in the files.
        lose: Reports what is lost.
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
    """Return the column that has one of the names; of several there, only the first name counts."""
    found = [column for column in row if column.lower() in names]
    if len(found) == 1:
        return found[0]
    return names[0] if names[0] in row else None


def _take_talk(
    spec: dict[str, Any], row: Mapping[str, Any], columns: Mapping[str, str], lose: Callable[[str], None]
) -> None:
    """Write the columns of rows of messages, which have turns with 'role' or with 'from'."""
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


def is_self_cognition(path: str) -> bool:
    """Return True if a dataset is the one that ms-swift puts a model's name into."""
    return path.rpartition("/")[2] == "self-cognition"


def take_self_cognition(spec: dict[str, Any]) -> None:
    """Write the columns of ``swift/self-cognition``."""
    rename_columns(spec, {"instruction": "query", "output": "response"}, "alpaca")
