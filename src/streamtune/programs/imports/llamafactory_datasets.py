"""The datasets of LLaMA-Factory's recipes: names that ``dataset_info.json`` explains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .conversion import Conversion
from .datasets import (
    READ_OF_MESSAGES,
    lose_fields,
    lose_unnamed,
    put_datasets,
    put_eval_sets,
    put_weights,
    rename_columns,
    report_media,
    rows_of_split,
    seen_columns,
)

ALPACA = {
    **{"prompt": "instruction", "query": "input", "response": "output"},
    **{name: name for name in ("system", "history", "tools")},
}
UNSAID = ("prompt", "query", "response")
"""Columns of alpaca rows that are read where an entry names none."""
SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
PREFERENCE = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
SHAREGPT_TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}


Row = dict[str, Any] | None
"""The first row of a dataset; None where it is not here."""

MEDIA = ("images", "videos", "audios")
"""Columns of what is not text."""


def take_datasets(conversion: Conversion, *, texts: bool) -> None:
    """Convert ``dataset`` and ``eval_dataset``, by the ``dataset_info.json`` of ``dataset_dir``, and their mixture.

    Args:
        conversion: The recipe on its way to ours.
        texts: True for ``stage: pt``, which trains the column of the prompt and nothing else.
    """
    folder, most = (conversion.file.fields.get(name) for name in ("dataset_dir", "max_samples"))
    conversion.dismiss("dataset_dir", "max_samples", why="see datasets")
    put_datasets(conversion, _specs(conversion, "dataset", folder, most, texts=texts), "dataset")
    put_eval_sets(conversion, _specs(conversion, "eval_dataset", folder, most, texts=texts), "eval_dataset")
    shares = conversion.get("interleave_probs")
    mixes = str(conversion.get("mix_strategy", "concat")).startswith("interleave")
    if mixes:
        name = "interleave_probs" if shares else "mix_strategy"
        conversion.take(name)
        put_weights(conversion, shares or [1.0] * len(conversion.ours.get("datasets", [])), name)
    why = "weights of the datasets say it" if mixes else "off, as here"
    conversion.dismiss("mix_strategy", "interleave_probs", why=why)


def _specs(conversion: Conversion, field: str, folder: Any, most: Any, *, texts: bool) -> list[dict[str, Any]]:
    """Return our entries for the datasets that a field names."""
    names = conversion.get(field)
    if names is None:
        conversion.dismiss(field, why="no value")
        return []
    conversion.take(field)
    names = names.split(",") if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        conversion.lose(field, why="names were expected")
        return []
    names = [name.strip() for name in names]
    info, found_in = _dataset_info(conversion, str(folder or "data"))
    specs = []
    for name in names:
        entry = info.get(name) if info is not None else None
        if not isinstance(entry, dict):
            spec = {"path": name}
            if folder != "ONLINE":
                missing = "there is none" if info is None else f"it has no '{name}'"
                why = f"'{name}' is read from {found_in}, and {missing}: write the path of its file"
                conversion.lose(field, why=why)
        else:
            spec = _dataset(conversion, field, name, entry, Path(found_in).parent, texts=texts)
        if isinstance(most, int) and most:
            spec["max_rows"] = min(most, spec.get("max_rows", most))
        specs.append(spec)
    return specs


def _dataset_info(conversion: Conversion, folder: str) -> tuple[dict[str, Any] | None, str]:
    """Return ``dataset_info.json``, of the folder as it is named, then seen from the recipe; and its path."""
    beside = conversion.file.path.resolve().parent
    for base in (Path(), beside, *beside.parents[:4]):
        path = base / folder / "dataset_info.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")), str(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise conversion.refuse("dataset", what=f"{path} cannot be read: {error}") from None
    return None, str(Path(folder) / "dataset_info.json")


def _dataset(
    conversion: Conversion, field: str, name: str, entry: dict[str, Any], folder: Path, *, texts: bool
) -> dict[str, Any]:
    """Return our entry for one of ``dataset_info.json``; what it does not say is reported."""
    lose = conversion.losing(field, prefix=f"'{name}' in dataset_info.json: ")
    spec: dict[str, Any] = {}
    if "file_name" in entry:
        spec["path"] = str(folder / entry["file_name"])
    elif "hf_hub_url" in entry:
        spec["path"] = entry["hf_hub_url"]
    else:
        spec["path"] = str(entry.get("ms_hub_url") or entry.get("script_url") or entry.get("cloud_file_name") or name)
        lose("neither a file nor a dataset of the Hugging Face hub")
    if "hf_hub_url" in entry and "split" in entry:
        rows_of_split(spec, entry["split"], lose)
    if entry.get("subset"):
        spec["name"] = entry["subset"]
    if entry.get("num_samples"):
        spec |= {"max_rows": entry["num_samples"], "shuffle": True}
    if entry.get("revision") or entry.get("folder"):
        lose("a revision or a folder of a dataset on the hub")
    columns = entry.get("columns") or {}
    said = [f"'{columns[key]}'" for key in MEDIA if columns.get(key)]
    if said:
        lose(f"the column {' and '.join(said)}: only the text is trained on")
    else:
        report_media(conversion, [spec], field)
    if columns.get("tools") and conversion.ours.get("chat_template") == "chatml":
        lose("chatml describes tools in other words than LLaMA-Factory: write chat_template: FILE.jinja")
    if texts:
        _take_text(spec, entry, lose)
    else:
        _take_columns(spec, entry, lose, seen_columns(conversion, spec["path"]))
    return spec


def _take_text(spec: dict[str, Any], entry: dict[str, Any], lose: Any) -> None:
    """Write the column of the text of ``stage: pt``, which is that of the prompt."""
    columns = entry.get("columns") or {}
    if entry.get("formatting", "alpaca") != "alpaca":
        lose("stage: pt trains the first message of a row alone: write the texts in a column")
    if columns.get("query") or not columns:
        lose("stage: pt trains prompt and query together: write the texts in one column")
    rename_columns(spec, {"text": columns.get("prompt", ALPACA["prompt"])}, "text")


def _take_columns(spec: dict[str, Any], entry: dict[str, Any], lose: Any, row: Row) -> None:
    """Write the type of the rows, where their columns have the names that are read here."""
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    sharegpt = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    style = {**SHAREGPT_TAGS, **{key: tag for key, tag in tags.items() if key in SHAREGPT_TAGS}}
    if entry.get("formatting") == "openai":
        lose("formatting: openai adds 'detailed thinking off' to the system message there: write it in the rows")
    if sharegpt and style not in (OPENAI_TAGS, SHAREGPT_TAGS):
        lose("turns have 'role' and 'content' here, or 'from' and 'value'")
    if entry.get("ranking"):
        _take_pairs(spec, columns, lose, row, sharegpt=sharegpt)
        return
    if "kto_tag" in columns:
        theirs = {"completion": columns.get("response"), "label": columns["kto_tag"]}
        rename_columns(spec, {"prompt": columns.get("messages") or columns.get("prompt"), **theirs}, "unpaired")
        if sharegpt:
            lose("the last message is the answer there; here it is the column completion: write prompt and completion")
        _lose_texts(columns, lose, row, sharegpt=sharegpt)
        return
    if sharegpt:
        column = columns.get("messages", "conversations")
        others = {ours: columns.get(ours) for ours in ("system", "tools")}
        if style == OPENAI_TAGS:
            rename_columns(spec, {"messages": column if column != "conversations" else None, **others}, "messages")
        elif style == SHAREGPT_TAGS:
            rename_columns(spec, {"conversations": column, **others}, "sharegpt")
        lose_unnamed(row, ("system", "tools"), columns.values(), lose)
        lose_fields(row, column, READ_OF_MESSAGES, ("tool_calls",) if entry.get("formatting") == "openai" else (), lose)
        return
    if columns and "response" not in columns and set(columns) == {"prompt"}:
        rename_columns(spec, {"text": columns["prompt"]}, "text")
        return
    named = columns or {key: ALPACA[key] for key in UNSAID}
    if not {"prompt", "response"} <= named.keys():
        lose("rows have a question and an answer: write columns: {instruction: ..., output: ...}")
    rename_columns(spec, {ALPACA[key]: column for key, column in named.items() if key in ALPACA}, "alpaca")
    if "query" in named:
        spec["input_separator"] = "\n"
    lose_unnamed(row, ("input", "system", "history", "tools"), named.values(), lose)


def _take_pairs(spec: dict[str, Any], columns: dict[str, Any], lose: Any, row: Row, *, sharegpt: bool) -> None:
    """Write the columns of preferences."""
    if not sharegpt and "prompt" not in columns:
        lose("rows of preferences have the columns prompt, chosen and rejected here: write columns")
    prompt = columns.get("messages", "conversations") if sharegpt else columns.get("prompt")
    theirs = {"prompt": prompt, "chosen": columns.get("chosen"), "rejected": columns.get("rejected")}
    others = {ours: columns.get(ours) for ours in ("system", "tools")}
    rename_columns(spec, {**theirs, **others}, "preference")
    _lose_texts(columns, lose, row, sharegpt=sharegpt)
    lose_unnamed(row, ("system", "tools"), columns.values(), lose)


def _lose_texts(columns: dict[str, Any], lose: Any, row: Row, *, sharegpt: bool) -> None:
    """Report prompts and answers that are texts: the other trainer makes messages of them."""
    read = {"query", "history"} & columns.keys()
    if read and not sharegpt:
        lose(f"the column '{columns[min(read)]}' is a part of the prompt there, and is not read here: write messages")
    prompt = columns.get("prompt", "prompt")
    if not sharegpt and (row is None or not isinstance(row.get(prompt), list)):
        lose("texts are messages of a chat there; here they have no chat template: write the prompt as messages")
