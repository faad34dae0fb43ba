"""Convert the datasets of ms-swift's recipes, and find their question and answer columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion
from .field_rules import UnconvertedError
from .recipe_files import parse_json_text
from .rows_and_templates import (
    DATA_FILES,
    READ_OF_MESSAGES,
    first_local_row,
    report_media,
    report_tools_of_named_template,
    report_unread_fields,
    write_columns,
    write_datasets,
    write_eval_sets,
    write_weights,
)

STANDARD = {
    **{"query": "instruction", "response": "output"},
    **{name: name for name in ("messages", "system", "history", "tools", "instruction", "input", "output")},
}
"""{ms-swift's column name: StreamTune's column name}."""

QUESTIONS = ("query", "prompt", "input", "instruction", "question", "problem")
ANSWERS = (
    *("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution"),
    *("text", "completion", "content"),
)
SYSTEMS = ("system", "system_prompt")
CONVERSATION_COLUMNS = ("messages", "conversation", "conversations")
PAIRS = (
    "ms-swift's pairs are messages and rejected_response; for StreamTune, write prompt, chosen and rejected",
    "ms-swift's rows are messages and a label; for StreamTune, write prompt, completion and label",
)
"""Reasons why preference pairs, and single answers with a label, are not converted."""


def convert_datasets(conversion: Conversion, use_hf: Any) -> None:
    columns = _column_names(conversion)
    specs, note = _make_entries(conversion, "dataset", use_hf, columns)
    write_datasets(conversion, specs, "dataset", note=note)
    report_media(conversion, specs, "dataset")
    specs, note = _make_entries(conversion, "val_dataset", use_hf, columns)
    write_eval_sets(conversion, specs, "val_dataset", note=note)
    if shares := conversion.get("interleave_prob"):
        write_weights(conversion, shares, "interleave_prob")
    conversion.mark_unneeded("interleave_prob", why="no value")


def _column_names(conversion: Conversion) -> dict[str, str]:
    """Return {StreamTune's column name: column name in the file} from ms-swift's ``columns``."""
    if "columns" not in conversion.file.fields:
        return {}
    try:
        given = parse_json_text(conversion.pop_field("columns"))
    except UnconvertedError as error:
        conversion.report_lost("columns", why=str(error))
        return {}
    if not given:
        conversion.report_unneeded("columns", why="no value")
        return {}
    unknown = [name for name in given.values() if name not in STANDARD] if isinstance(given, dict) else [given]
    if unknown:
        conversion.report_lost("columns", why=f"'{unknown[0]}' has no equivalent: write columns in each dataset entry")
        return {}
    conversion.report_unneeded("columns", why="see datasets")
    ours = STANDARD if conversion.objective == "sft" else {**STANDARD, "query": "prompt", "response": "completion"}
    return {ours[name]: column for column, name in given.items()}


def _make_entries(
    conversion: Conversion, field: str, use_hf: Any, columns: dict[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Return StreamTune's entries for the datasets in ``field``, and a comment for the new recipe."""
    names = conversion.get(field)
    if not names:
        conversion.mark_unneeded(field, why="no value")
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
            noted["StreamTune loads from the Hugging Face hub, not from ModelScope"] = None
        spec: dict[str, Any] = {"path": path}
        if count.isdigit():
            spec |= {"max_rows": int(count), "shuffle": True}
        if path.rpartition("/")[2] == "self-cognition":
            write_columns(spec, {"instruction": "query", "output": "response"}, "alpaca")
            unknown.append(path)
        elif conversion.objective == "sft" and conversion.file.command != "pt":
            row, report_lost = (
                first_local_row(conversion, path),
                conversion.make_lost_reporter(field, prefix=f"{path}: "),
            )
            convert_columns(spec, row, columns, report_lost)
            if row is not None and row.get("tools"):
                report_tools_of_named_template(conversion, report_lost)
            if row is None and not columns:
                away[path] = None
        elif columns:
            spec["columns"] = dict(columns)
        if conversion.objective == "dpo":
            conversion.report_lost(field, why=f"{path}: {PAIRS[conversion.ours.get('loss_type') == 'kto']}")
        found += [{**spec, "name": part} for part in parts] or [spec]
    if field == "dataset":
        _report_model_name_and_author(conversion, unknown)
    if away:
        why = "the rows cannot be read; ms-swift reads prompt and completion as a chat, StreamTune as text: see columns"
        conversion.report_lost_setting(f"{field}: {', '.join(away)}", why, changes_training=False)
    return found, "; ".join(noted)


def _report_model_name_and_author(conversion: Conversion, named_datasets: list[str]) -> None:
    """Report the model's name and author, which ms-swift inserts into the dataset ``swift/self-cognition``."""
    if named_datasets:
        why = "ms-swift inserts the model's name and author into its rows; StreamTune keeps {{NAME}} and {{AUTHOR}}"
        conversion.report_lost("dataset", why=f"{named_datasets[0]}: {why}: write a file with the names")
    for name in ("model_name", "model_author"):
        value = conversion.pop_field(name)
        if name in conversion.file.fields and named_datasets and value:
            conversion.report_lost(name, why=f"ms-swift inserts it into rows of {named_datasets[0]}")
        elif name in conversion.file.fields:
            conversion.report_unneeded(name, why="used only with swift/self-cognition" if value else "no value")


def convert_columns(
    spec: dict[str, Any], row: Mapping[str, Any] | None, columns: Mapping[str, str], report_lost: Callable[[str], None]
) -> None:
    """Set ``type`` and ``columns`` of a dataset entry, as ms-swift's ``AutoPreprocessor`` reads the file.

    ms-swift joins instruction and input of an alpaca row by one newline.

    Args:
        row: First row; None if unknown.
        columns: {StreamTune's column name: column name in the file}, from the recipe.
        report_lost: Function that takes a reason and reports a difference.
    """
    if row is None:
        if columns:
            asks = {"instruction", "output"} & columns.keys()
            write_columns(spec, dict(columns), "alpaca" if asks else "auto")
        if spec.get("type", "auto") in ("auto", "alpaca"):
            spec["input_separator"] = "\n"
        return
    named = {theirs: ours for ours, theirs in columns.items()}
    if {*CONVERSATION_COLUMNS} & row.keys() or "messages" in named.values():
        _convert_messages(spec, row, columns, report_lost)
        return
    found = {"system": columns.get("system") or _find_single_column(row, SYSTEMS)}
    if "tools" in row or "tools" in columns:
        found["tools"] = columns.get("tools", "tools")
    if {"instruction", "input"} <= row.keys() and not {"instruction", "input"} & columns.keys():
        found |= {"instruction": "instruction", "input": "input"}
        spec["input_separator"] = "\n"
    else:
        found["instruction"] = columns.get("instruction") or _find_single_column(row, QUESTIONS)
    found["output"] = columns.get("output") or _find_single_column(row, ANSWERS)
    if not found["instruction"] or not found["output"]:
        if "text" not in row:
            report_lost("question and answer columns are missing or ambiguous: write columns in each dataset entry")
        return
    for name in ("input", "history"):  # StreamTune reads these columns by name
        if name in row and name not in found.values() and name not in columns:
            found[name] = name
            if name == "input":
                report_lost("only StreamTune reads the column 'input': rename it in the file")
    write_columns(spec, {**found, **({"history": columns["history"]} if "history" in columns else {})}, "alpaca")


def _find_single_column(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the only column that is named in ``names``; if there are several, the column ``names[0]``, or None."""
    found = [column for column in row if column.lower() in names]
    if len(found) == 1:
        return found[0]
    return names[0] if names[0] in row else None


def _convert_messages(
    spec: dict[str, Any], row: Mapping[str, Any], columns: Mapping[str, str], report_lost: Callable[[str], None]
) -> None:
    """Set ``type`` and ``columns`` for a dataset of messages with the fields ``role`` or ``from``."""
    column = columns.get("messages") or next(name for name in CONVERSATION_COLUMNS if name in row)
    turns = row.get(column)
    report_unread_fields(row, column, READ_OF_MESSAGES, ("loss", "tool_calls"), report_lost)
    first = turns[0] if isinstance(turns, list) and turns else {}
    others = {"system": columns.get("system") or _find_single_column(row, SYSTEMS), "tools": columns.get("tools")}
    renamed = {ours: theirs for ours, theirs in others.items() if theirs and theirs != ours}
    if isinstance(first, dict) and "from" in first:
        if column not in CONVERSATION_COLUMNS[1:]:
            renamed["conversations"] = column
    elif column not in ("messages", "conversations"):
        renamed["messages"] = column
    if renamed:
        spec["columns"] = renamed
    if "conversations" in renamed:
        spec["type"] = "sharegpt"
    elif "messages" in renamed:
        spec["type"] = "messages"
